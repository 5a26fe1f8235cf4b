"""
Compile CUDA sources to machine code, with a cache whose key includes the text of all headers.

Nothing here needs a GPU.
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
    # IEEE arithmetic: no flush to zero, correctly rounded division and root; multiply-add may fuse.
    "-fmad=true",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_SECTION = re.compile(r"(?:Compiling entry function '(?P<entry>\w+)'|Function properties for (?P<function>\w+))")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")
_THREADS = re.compile(r"\.entry\s+(\w+)\([^)]*\)[^{]*?\.maxntid\s+(\d+)")
_WARNING = re.compile(r"(?:[:;] |^ptxas )(warning\b.*)", re.MULTILINE)
_DEPRECATED = "Architectures prior to"
# Warnings that change a kernel's performance: registers not released, serialized wgmma, ignored blocks per SM.
_TROUBLE = re.compile(r"^.*(?:\(C75(?:08|1\d|2\d)\)|minnctapersm will be ignored).*$", re.MULTILINE)


class Compiler(Protocol):
    """Compiles a source: NVRTC, or a stand-in that produces the same machine code."""

    @property
    def version(self) -> str:
        """Build of NVRTC, such as "12.9.86"."""

    def compile(self, source: str, name: str, options: Sequence[str]) -> Program:
        """Compile a source text, and return machine code, log and error; `name` is used in messages."""


def compile_kernel(kernel: Kernel, arch: str, *, root: Path | None = None, folder: Path | None = None) -> Cubin:
    """
    Compile a kernel for an architecture ("sm_70"), or load it from the cache; return its machine code and resources.

    `root` and `folder` are those of sources and cached cubins; None: cubatch's own, and in the user's cache.
    InvalidArgument is raised for another architecture, CompileError for source that is missing, wrong or lacks the
    entry.
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
            f'no extern "C" entry {kernel.entry} in {kernel.source}, which has: {entries}',
        )
    return cubin


def compile_unit(
    kernel: Kernel, arch: str, *, root: Path | None = None, folder: Path | None = None, code: bool = True,
    compiler: Compiler | None = None,
) -> Cubin:  # fmt: skip
    """
    Compile a kernel's source with its macros, or load the result from the cache, for all entries of the source.

    Args:
        kernel: The kernel; the source need not contain its entry.
        arch, root, folder: As for `compile_kernel`.
        code: Whether the machine code is needed, or only its resources.
        compiler: The compiler; None: the NVRTC that knows the architecture.

    Raises:
        CompileError: If the source is missing or does not compile. Other errors are those of `nvrtc.for_arch`.
    """
    root, folder = root or kernels_path(), folder or cubins.default_folder()
    compiler = compiler or nvrtc.for_arch(arch_number(arch))
    given = options(kernel, arch)
    texts = _texts(root, kernel.source)
    if kernel.source not in texts:
        raise CompileError(kernel.name, arch, given, f"there is no {root / kernel.source}")
    key = _key(compiler.version, given, kernel.source, texts)
    cached = cubins.load(folder, key, code=code)
    if cached is not None:
        return cached
    # NVRTC looks for a header in the folder of the file that includes it, then in the root.
    program = compiler.compile(texts[kernel.source], str(root / kernel.source), (*given, f"-I{root}"))
    trouble = "\n".join(match[0] for match in _TROUBLE.finditer(program.log))
    if program.error or trouble:
        message = "\n".join(text for text in (program.error, program.log) if text)
        raise CompileError(kernel.name, arch, given, trouble or message)
    resources = read_resources(program.log, program.ptx)
    version, log = compiler.version, program.log
    return cubins.save(folder, key, program.cubin, nvrtc=version, resources=resources, log=log, code=code)


def options(kernel: Kernel, arch: str) -> tuple[str, ...]:
    """Return the compiler options of a kernel for an architecture, without -I for its headers."""
    # wgmma and setmaxnreg exist only for the target sm_90a, whose code runs on sm_90 only.
    known = architectures.numbered(arch_number(arch)) if kernel.family == "hopper" else None
    target = known.target if known and known.target else arch
    return (f"-arch={target}", *FLAGS, *(f"-D{name}={value}" for name, value in kernel.defines))


def read_resources(log: str, ptx: str) -> dict[str, Resources]:
    """
    Return the resources of each entry of a program from the assembler's log with `-v`.

    Spills of functions that are not inlined count for every entry, since the log does not name their callers. `ptx`
    contains the launch bounds.
    """
    threads = {match[1]: int(match[2]) for match in _THREADS.finditer(ptx)}
    entries: list[str] = []
    spills: dict[str, int] = {}
    used: dict[str, tuple[int, str]] = {}
    function = ""
    for line in log.splitlines():
        if section := _SECTION.search(line):
            if section["entry"]:
                entries.append(section["entry"])
            function = section["entry"] or section["function"]
        elif match := _SPILLS.search(line):
            spills[function] = int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            used[entries[-1]] = int(match[1]), match[2]
    called_spills = sum(count for name, count in spills.items() if name not in entries)
    return {
        entry: Resources(
            registers=used[entry][0],
            spill_bytes=spills[entry] + called_spills,
            shared_bytes=int(shared[1]) if (shared := _SHARED.search(used[entry][1])) else 0,
            threads=threads.get(entry),
        )
        for entry in entries
    }


def warnings_of(log: str) -> tuple[str, ...]:
    """
    Return the warnings of compiler and assembler, except those about old architectures.

    Example:
        >>> warnings_of("k.cu(5): warning #177-D: variable was never referenced")
        ('warning #177-D: variable was never referenced',)
    """
    return tuple(warning for warning in _WARNING.findall(log) if _DEPRECATED not in warning)


def _texts(root: Path, source: str) -> dict[str, str]:
    """Return the texts of a source and of all headers that it includes, by path below the root; omit missing files."""
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
