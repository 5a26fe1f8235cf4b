"""
NVRTC, NVIDIA's run-time compiler, through ctypes: needs no GPU, no driver and no CuPy.

It comes with a PyPI wheel, a CUDA toolkit or the system; the first one that knows the architecture is used.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import Lock

import attrs

from cubatch.errors import DeviceFailed, InvalidArgument, MissingDependency, install_command
from cubatch.hardware import architectures

_WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
_FILE = re.compile(r"libnvrtc\.so[.\d]*")  # not libnvrtc-builtins.so, nor libnvrtc.alt.so
_SYSTEM = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so")
_RELEASE = re.compile(r"^// Cuda compilation tools, .*\bV([\d.]+)", re.MULTILINE)
_SUCCESS = 0
_LOADING = Lock()


@attrs.frozen
class Program:
    """Result of compiling one source."""

    error: str  # the error of NVRTC or ptxas; empty without one
    log: str  # log of compiler and assembler
    ptx: str = ""  # the PTX; empty after an error
    cubin: bytes = b""  # the machine code; empty after an error or without `-arch=sm_...`


class Nvrtc:
    """
    A loaded NVRTC library.  Threads may compile at the same time: calls release the GIL.

    Args:
        path: The shared library, or a name for the system's loader.

    Attributes:
        version: Build of the library, "12.9.86".
        archs: Compute capabilities times ten that it compiles for, ascending.

    Raises:
        OSError: If the library cannot be loaded.
        AttributeError: If the library is older than CUDA 11.2.
    """

    def __init__(self, path: str) -> None:
        # Some builds load their built-in functions by name only, which succeeds if they are loaded already.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if Path(path).is_absolute() else ():
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.archs = tuple(sorted(archs))
        # nvrtcVersion() returns "12.9" only, but code differs between builds; the PTX names the build.
        signed = _RELEASE.search(self.compile("", "version.cu", ()).ptx)
        self.version = signed[1] if signed else self._short_version()

    def compile(self, source: str, name: str, options: Sequence[str]) -> Program:
        """Compile one source, and return machine code, log and error."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._text("ProgramLog", program)
            if status != _SUCCESS:
                return Program(self._error(status), log)
            return Program("", log, self._text("PTX", program), self._bytes("CUBIN", program))
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        return self._bytes(what, program).rstrip(b"\0").decode(errors="replace")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        if size.value:
            self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _short_version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != _SUCCESS:
            raise DeviceFailed(function, self._error(status))

    def _error(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return str(describe(status).decode())


def for_arch(arch: int) -> Nvrtc:
    """
    Return an installed NVRTC that compiles for an architecture, such as 70; that of CUDA 12 if there are several.

    MissingDependency is raised if there is none, InvalidArgument if none knows the architecture.
    """
    known: dict[str, tuple[int, ...]] = {}
    for path in candidates():
        with _LOADING:
            library = _load(path)
        if library is not None:
            if arch in library.archs:
                return library
            known[library.version] = library.archs
    if not known:
        raise MissingDependency("NVRTC (nvidia-cuda-nvrtc-cu12)", "compiling CUDA kernels", "kernels")
    raise _unknown(arch, known)


@cache
def candidates() -> tuple[str, ...]:
    """Return possible paths of NVRTC: its PyPI wheels, the toolkit at CUDA_PATH or CUDA_HOME, names for the loader."""
    paths = wheel_files(_WHEELS, _FILE)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        for folder in ("lib64", "lib") if os.environ.get(variable) else ():
            paths += [str(path) for path in sorted((Path(os.environ[variable]) / folder).glob("libnvrtc.so*"))]
    return (*paths, *_SYSTEM)


def wheel_files(wheels: Sequence[str], name: re.Pattern[str]) -> list[str]:
    """Return the paths of files in wheels whose base name matches, in the order of `wheels`; none of missing wheels."""
    paths: list[str] = []
    for wheel in wheels:
        try:
            files = metadata.distribution(wheel).files or []
        except metadata.PackageNotFoundError:
            continue
        paths += [str(file.locate()) for file in files if name.fullmatch(file.name)]
    return paths


@cache
def _load(path: str) -> Nvrtc | None:
    try:
        return Nvrtc(path)
    except (OSError, AttributeError):  # no library, or one from before CUDA 11.2, which lists no architectures
        return None


def _unknown(arch: int, known: Mapping[str, Sequence[int]]) -> InvalidArgument:
    lists = (f"NVRTC {version} knows {', '.join(f'sm_{arch}' for arch in archs)}" for version, archs in known.items())
    last = architectures.every().cuda
    ended = [each.number for each in architectures.known().values() if each.last_cuda == last]
    if arch < ended[0]:
        remedy = f"cubatch's kernels need {architectures.surveyed()[0]} or newer."
    elif arch <= ended[-1]:
        range_ = f"sm_{ended[0]} to sm_{ended[-1]}"
        remedy = f"CUDA {last} is the last that compiles for {range_}. {install_command('kernels')}"
    else:
        remedy = "A newer GPU needs a newer NVRTC: pip install -U nvidia-cuda-nvrtc."
    return InvalidArgument(
        "arch", f"sm_{arch}", f"one that an installed NVRTC compiles for ({'; '.join(lists)})", remedy
    )
