"""
Compiling kernels for the CPU: one shared object per compile unit, in a cache that processes share.

A unit is a source with its defines, architecture and build. It holds every kernel of the registry that has the same
source and defines, each with the launcher that CPUSIM_ENTRY derives from its parameters.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import platformdirs

from cubatch.kernels import variant as registry
from cubatch.kernels.variant import Kernel

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STALE_SECONDS = 24 * 3600

# -ffp-contract=off: numbers do not depend on whether this CPU has FMA; fmaf() in a kernel is fused all the same.
# -fno-strict-aliasing: as CUDA's compilers have it. -g1: lines, for the sanitizers; a debugger wants -g -O0.
# -fno-gnu-unique: objects with the same kernel for other types must not share what describes its parameters.
# -Werror without the two warnings that depend on how far a version of GCC sees, and in the plain build alone.
COMMON = ("-std=c++17", "-g1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique")
BUILDS = {
    "plain": (
        "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-Wno-array-bounds", "-Wno-unknown-pragmas",
    ),
    "address": ("-O1", "-w", "-fsanitize=address", "-fsanitize-sections=cbshared", "-fsanitize-recover=address"),
    "thread": ("-O1", "-w", "-fsanitize=thread"),
}  # fmt: skip
RUNTIME = {
    "plain": ("-O2", "-Wall", "-Wextra", "-Werror"),
    "address": ("-O2", "-DCPUSIM_ADDRESS", "-fno-tree-loop-distribute-patterns"),
    "thread": ("-O2", "-DCPUSIM_THREAD", "-fno-tree-loop-distribute-patterns"),
}

Unit = tuple[Path, tuple[tuple[str, str], ...]]


class BuildError(Exception):
    """A kernel that g++ refuses, with what it said."""


def reason_to_skip() -> str:
    """Say why kernels cannot be compiled here; empty where they can, and in CI, which must not pass for lack of g++."""
    if "CI" in os.environ:
        return ""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "cpusim needs Linux on x86-64"
    return "" if shutil.which("g++") else "cpusim needs g++"


def unit_of(kernel: Kernel) -> Unit:
    """Give what kernels that are compiled together have in common."""
    return registry.kernels_path() / kernel.source, kernel.defines


@cache
def shared_object(kernel: Kernel, arch: int, build: str) -> Path:
    """
    Compile a kernel's unit, unless the cache has it; a process sees a source as it was at its first use.

    Raises:
        BuildError: With the compiler's message.
    """
    source, defines = unit_of(kernel)
    alike = (k for k in registry.kernels() if (k.source, k.defines) == (kernel.source, kernel.defines))
    entries = sorted({kernel.entry} | {k.entry for k in alike})
    text = "\n".join(
        [
            "#include <runtime.h>",
            "namespace {  // templates get internal linkage, so that all their shared arrays fit in one section",
            f'#include "{source}"',
            "constexpr uint32_t cpusim_blocks = cpusim_cluster;  // its own, else that of runtime.h",
            "}",
            'extern "C" unsigned char __start_cbshared[] __attribute__((weak, visibility("hidden")));',
            'extern "C" unsigned char __stop_cbshared[] __attribute__((weak, visibility("hidden")));',
            'extern "C" unsigned char* const cpusim_shared[2] = {__start_cbshared, __stop_cbshared};',
            'extern "C" const CpusimEntry cpusim_entries[] = {',
            *(f'  {{"{entry}", cpusim::Entry<&{entry}>::call, cpusim::Entry<&{entry}>::parameters, '
              f"cpusim::Entry<&{entry}>::num_parameters, cpusim_blocks}}," for entry in entries),
            "  {}};",
            "",
        ]
    )  # fmt: skip
    runtime = _runtime(build)
    flags = (
        *COMMON, *BUILDS[build], *_processor(), f"-DCB_ARCH={arch}", *(f"-D{name}={value}" for name, value in defines),
        f"-I{HERE}", f"-I{registry.kernels_path()}", f"-ffile-prefix-map={ROOT}/=",
    )  # fmt: skip
    variant = _digest(*anywhere(str(source)), defines)[:8]
    stem = f"{source.stem}-{variant}-{arch}-{build}"
    digest = _digest(*anywhere(text, *flags), _compiler(), runtime.name, *_contents(source))
    return _compile(stem, digest, text, (*flags, "-Wl,-rpath,$ORIGIN", f"-L{runtime.parent}", f"-l:{runtime.name}"))


def anywhere(*texts: str) -> list[str]:
    """
    Give texts without where this checkout lies, which no object depends on: all checkouts share a cache.

    Example:
        >>> anywhere(f"-I{HERE}", "-O2")
        ['-I/tests/cpusim', '-O2']
    """
    return [text.replace(str(ROOT), "") for text in texts]


def precompile(kernels: Iterable[Kernel], arch: int, build: str = "plain", processes: int = 2) -> None:
    """Compile the units of kernels, so many at a time; those that an architecture lacks are left out."""
    first = {unit_of(kernel): kernel for kernel in kernels if kernel.runs_on(arch)}
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda kernel: shared_object(kernel, arch, build), first.values()))


def cache_directory() -> Path:
    """Give the folder of compiled units, made if need be: $CUBATCH_CPUSIM_CACHE or in the user's cache."""
    given = os.environ.get("CUBATCH_CPUSIM_CACHE")
    path = Path(given) if given else platformdirs.user_cache_path("cubatch") / "cpusim"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _runtime(build: str) -> Path:
    source = HERE / "runtime.cpp"
    flags = (*COMMON, *RUNTIME[build], f"-I{HERE}", f"-ffile-prefix-map={ROOT}/=")
    digest = _digest(*anywhere(*flags), _compiler(), *_contents(source))
    return _compile(f"libcpusim-{build}", digest, f'#include "{source}"\n', flags)


def _compile(stem: str, digest: str, text: str, flags: Sequence[str]) -> Path:
    """Compile C++ text into the cache, once for all processes that want it, beside its place, then renamed."""
    folder = cache_directory()
    place = folder / f"{stem}-{digest[:16]}.so"
    if place.exists():
        return place
    with _alone(folder / f"{place.name}.lock"), tempfile.TemporaryDirectory(dir=folder) as work:
        if place.exists():
            return place
        unit, made = Path(work) / f"{stem}.cpp", Path(work) / place.name
        unit.write_text(text)
        command = ["g++", str(unit), *flags, f"-Wl,-soname,{place.name}", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain_environment())
        if done.returncode:
            raise BuildError(f"{' '.join(command)}\n{done.stderr}")
        made.rename(place)
    for old in folder.glob(f"{stem}-{'?' * 16}.so"):
        if old != place and old.stat().st_mtime < time.time() - STALE_SECONDS:
            old.unlink(missing_ok=True)
    return place


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds this file; whoever is killed no longer does."""
    import fcntl  # not there on Windows, where nothing is compiled

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)


def _contents(source: Path) -> list[bytes]:
    """Give the contents of a source and of all that it includes, in a fixed order."""
    folders = (source.parent, registry.kernels_path(), HERE)
    found: dict[Path, bytes] = {}
    left = [source, HERE / "runtime.h", HERE / "cpusim.h"]
    while left:
        path = left.pop()
        if path not in found:
            found[path] = path.read_bytes()
            names = re.findall(rb'^\s*#\s*include\s*"([^"]+)"', found[path], re.MULTILINE)
            left += [p for p in (folder / name.decode() for name in names for folder in folders) if p.is_file()]
    return [found[path] for path in sorted(found)]


@cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


@cache
def _processor() -> tuple[str, ...]:
    flags = set(re.findall(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    return ("-march=x86-64-v3",) if {"avx2", "bmi2", "f16c", "fma", "movbe", "abm"} <= flags else ()


def plain_environment() -> dict[str, str]:
    """Give the environment without the sanitizer that this process may run under: it would slow the compiler."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def _digest(*parts: object) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
