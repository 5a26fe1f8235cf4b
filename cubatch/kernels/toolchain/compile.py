"""
CUDA sources to machine code: one key for everything that goes in, one record for everything that comes out.

The key holds the text of every header, so that no stale cubin is ever used: other caches hash the source
alone.  Nothing here needs a GPU.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cubatch.errors import CompileError, InvalidArgument
from cubatch.hardware import architectures
from cubatch.kernels.toolchain import cubins, nvrtc
from cubatch.kernels.toolchain.cubins import Cubin, Resources
from cubatch.kernels.toolchain.nvrtc import Program
from cubatch.kernels.variant import Kernel, arch_number, kernels_path

FLAGS = (
    "-std=c++17",
    "-lineinfo",  # source lines for profilers; the code is the same
    "--ptxas-options=-v",  # registers, spills and shared memory in the log
    # Arithmetic as written: no flush to zero, division and root rounded correctly; products and sums may fuse.
    "-fmad=true",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_SECTION = re.compile(r"(?:Compiling entry function '(?P<entry>\w+)'|Function properties for (?P<function>\w+))")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_THREADS = re.compile(r"\.entry\s+(\w+)\([^)]*\)[^{]*?\.maxntid\s+(\d+)")
_WARNING = re.compile(r"(?:[:;] |^ptxas )(warning\b.*)", re.MULTILINE)
_DEPRECATED = "Architectures prior to"
# What makes a kernel other than it was written: registers not given up, products one after the other (wgmma),
# the wanted blocks per SM dropped.
_TROUBLE = re.compile(r"^.*(?:\(C75(?:08|1\d|2\d)\)|minnctapersm will be ignored).*$", re.MULTILINE)


class Compiler(Protocol):
    """What compiles a source: NVRTC, or a stand-in that gives the same machine code."""

    @property
    def version(self) -> str:
        """Build of NVRTC, such as "12.9.86"."""

    def compile(self, source: str, name: str, options: Sequence[str]) -> Program:
        """Compile a source text that is shown by this name in messages."""


def compile_kernel(kernel: Kernel, arch: str, *, root: Path | None = None, folder: Path | None = None) -> Cubin:
    """
    Compile a kernel, or find it compiled before.

    Args:
        kernel: Which.
        arch: "sm_70".
        root: Folder of the sources; None: cubatch's own.
        folder: Where cubins are kept; None: in the user's cache.

    Returns:
        Cubin: The machine code's file, and `resources` by entry; the kernel's own entry is among them.

    Raises:
        CompileError: If it does not compile, or its entry is not in what was compiled.
        InvalidArgument: If the kernel is not meant for the architecture, or NVRTC does not know it.
        MissingDependency: If there is no NVRTC.
    """
    if not kernel.runs_on(arch_number(arch)):
        raise InvalidArgument("arch", arch, f"one that {kernel.name} is meant for, {kernel.where}")
    cubin = compile_unit(kernel, arch, root=root, folder=folder)
    if kernel.entry not in cubin.resources:
        entries = ", ".join(cubin.resources) or "none"
        raise CompileError(
            kernel.name,
            arch,
            options(kernel, arch),
            f'no extern "C" entry {kernel.entry} in {kernel.source}: {entries}',
        )
    return cubin


def compile_unit(
    kernel: Kernel, arch: str, *, root: Path | None = None, folder: Path | None = None, code: bool = True,
    compiler: Compiler | None = None,
) -> Cubin:  # fmt: skip
    """
    Compile a kernel's source with its macros, whichever entries come of it; else as `compile_kernel`.

    Args:
        kernel, arch, root, folder: As there.
        code: Whether the machine code is wanted and kept, or only what is known of it.
        compiler: What compiles it; None: the NVRTC that knows the architecture.
    """
    root, folder = root or kernels_path(), folder or cubins.default_folder()
    compiler = compiler or nvrtc.for_arch(arch_number(arch))
    given = options(kernel, arch)
    texts = _texts(root, kernel.source)
    if kernel.source not in texts:
        raise CompileError(kernel.name, arch, given, f"there is no {root / kernel.source}")
    key = _key(compiler.version, given, kernel.source, texts)
    kept = cubins.load(folder, key, code=code)
    if kept is not None:
        return kept
    # NVRTC looks for a header in the folder of the file that includes it, then in the root.
    program = compiler.compile(texts[kernel.source], str(root / kernel.source), (*given, f"-I{root}"))
    trouble = "\n".join(match[0] for match in _TROUBLE.finditer(program.log))
    if program.error or trouble:
        said = "\n".join(text for text in (program.error, program.log) if text)
        raise CompileError(kernel.name, arch, given, trouble or said)
    found = read_resources(program.log, program.ptx)
    version, log = compiler.version, program.log
    return cubins.save(folder, key, program.cubin, nvrtc=version, resources=found, log=log, code=code)


def options(kernel: Kernel, arch: str) -> tuple[str, ...]:
    """Give the options that a kernel is compiled with, but for the folder of its headers."""
    # wgmma and setmaxnreg are in no other target than sm_90a, whose code runs on no other GPU.
    known = architectures.numbered(arch_number(arch)) if kernel.family == "hopper" else None
    target = known.target if known and known.target else arch
    return (f"-arch={target}", *FLAGS, *(f"-D{name}={value}" for name, value in kernel.defines))


def read_resources(log: str, ptx: str) -> dict[str, Resources]:
    """
    Read what each entry of a program needs from what the assembler says with `-v`.

    Args:
        log: NVRTC's log.
        ptx: The program's intermediate text, which holds the launch bounds.

    Returns:
        dict: By entry.  What functions that are not inlined spill counts for every entry, since the log
        does not say which of them calls.
    """
    threads = {match[1]: int(match[2]) for match in _THREADS.finditer(ptx)}
    entries: list[str] = []
    frames: dict[str, tuple[int, int]] = {}
    used: dict[str, tuple[int, str]] = {}
    function = ""
    for line in log.splitlines():
        if section := _SECTION.search(line):
            if section["entry"]:
                entries.append(section["entry"])
            function = section["entry"] or section["function"]
        elif found := _SPILLS.search(line):
            frames[function] = int(found[1]), int(found[2]) + int(found[3])
        elif found := _USED.search(line):
            used[entries[-1]] = int(found[1]), found[2]
    called_spills = sum(spills for name, (_, spills) in frames.items() if name not in entries)
    return {
        entry: Resources(
            registers=used[entry][0],
            spill_bytes=frames[entry][1] + called_spills,
            stack_bytes=_count("bytes cumulative stack size", used[entry][1]),
            shared_bytes=_count("bytes smem", used[entry][1]),
            barriers=_count("barriers", used[entry][1]),
            threads=threads.get(entry),
        )
        for entry in entries
    }


def warnings_of(log: str) -> tuple[str, ...]:
    """
    List what compiler and assembler warn of, but for the age of an architecture.

    Example:
        >>> warnings_of("k.cu(5): warning #177-D: variable was never referenced")
        ('warning #177-D: variable was never referenced',)
    """
    return tuple(warning for warning in _WARNING.findall(log) if _DEPRECATED not in warning)


def _count(what: str, text: str) -> int:
    found = re.search(rf"(\d+) {what}", text)
    return int(found[1]) if found else 0


def _texts(root: Path, source: str) -> dict[str, str]:
    """Read a source and every header that it can reach, by path below the root; what is not there is left out."""
    texts: dict[str, str] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop()
        path = root / name
        if name in texts or not path.is_file():
            continue
        texts[name] = path.read_text(encoding="utf-8")
        for included in _INCLUDE.findall(texts[name]):
            waiting += [posixpath.normpath(posixpath.join(posixpath.dirname(name), included)), included]
    return texts


def _key(version: str, given: tuple[str, ...], source: str, texts: Mapping[str, str]) -> str:
    facts = [version, given, source, sorted(texts.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
