"""
Building what real CuPy needs to run here: its wheel, two of its modules over a shared runtime, and simulated libraries.

CuPy reaches the driver API through libcuda.so.1, and the runtime API through two modules that hold a static libcudart.
Those two are built again from CuPy's own sources, unchanged, and linked to the simulated driver, which has both APIs;
all its other modules are the wheel's.  Everything is pinned, since the two must fit the rest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import attrs

from tests.cpusim import building as cpusim

HERE = Path(__file__).parent
SOURCES = HERE / "src"
PYPI_SIMPLE = "pypi-simple==1.8.0"


@attrs.frozen
class Toolkit:
    """
    One release of CuPy for one of CUDA, with the packages that are simulated and those that are real.

    Attributes:
        major: Of CUDA: 12 or 13.
        cupy: Version of CuPy.
        sdist_sha256: Of cupy-VERSION.tar.gz in the package index.
        imports: Requirement of the one package that it imports beside NumPy.
        cython: What translates its modules.
        headers: Requirements of the packages with cuda.h, cuda_runtime_api.h and crt/.
        include: Where they lie in those.
    """

    major: int
    cupy: str
    sdist_sha256: str
    imports: str
    cython: str
    headers: tuple[str, ...]
    include: tuple[str, ...]


_CUPY_14 = (
    "14.2.0", "cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c", "cuda-pathfinder==1.3.4",
    "Cython==3.2.4",
)  # fmt: skip
_CUPY_13 = (
    "13.6.0", "3cba30ae3dd32b5d5c6536e710cb98015227cd4ba83c46b3f1825a7ae55b6667", "fastrlock==0.8.3", "Cython==3.0.12",
)  # fmt: skip
_CUDA_12 = (
    ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86"),
    ("nvidia/cuda_runtime/include", "nvidia/cuda_nvcc/include"),
)
TOOLKITS = {
    "cuda12": Toolkit(12, *_CUPY_14, *_CUDA_12),
    "cuda12-cupy13": Toolkit(12, *_CUPY_13, *_CUDA_12),
    "cuda13": Toolkit(
        13, *_CUPY_14, ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"), ("nvidia/cu13/include",)
    ),
}
"""By the names of --toolkit; the first is what everything else is tested with."""

_RUNTIME = "cupy_backends/cuda/api/runtime"
_GENERATOR = "cupy/random/_generator_api"


class SetUpError(Exception):
    """What is needed could not be had or built, with what was said."""


def reason_to_skip() -> str:
    """Say why the simulation cannot run here; empty where it can."""
    if reason := cpusim.reason_to_skip():
        return reason.replace("cpusim", "cudasim")
    return "" if find_spec("pip") else "cudasim needs pip, to fetch CuPy's wheel"


def built(name: str = "cuda12") -> Path:
    """
    Give the folder of a simulation, set up if need be.

    Args:
        name: One of TOOLKITS.

    Raises:
        SetUpError: If a package cannot be had, or something does not compile.
    """
    toolkit = TOOLKITS[name]
    packages, libraries = _packages(toolkit), [
        *sorted(SOURCES.rglob("*")), cpusim.HERE / "runtime.h", Path(__file__),
    ]  # fmt: skip
    own = _digest(packages.name, *(path.read_bytes() for path in libraries if path.is_file()))
    home = packages.parent / f"libraries-{name}-{sysconfig.get_config_var('SOABI')}-{own}"
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=packages.parent) as work:
            made = Path(work) / "home"
            _build(toolkit, packages, made)
            _put(made, home)
    return home


def _packages(toolkit: Toolkit) -> Path:
    """Fetch what is not ours: CuPy's wheel and sources, headers; translate its two modules to C++."""
    wanted = (attrs.astuple(toolkit), sysconfig.get_config_var("SOABI"), Path(__file__).read_bytes())
    root = cpusim.cache_directory().parent / "cudasim"
    root.mkdir(parents=True, exist_ok=True)
    home = root / f"packages-{toolkit.major}-{toolkit.cupy}-{_digest(*wanted)}"
    if home.exists():
        return home
    with tempfile.TemporaryDirectory(dir=root) as work:
        made = Path(work) / "packages"
        _install(made / "site", f"cupy-cuda{toolkit.major}x=={toolkit.cupy}", toolkit.imports, dependencies=False)
        _install(made / "headers", *toolkit.headers, dependencies=False)
        _install(Path(work) / "tools", toolkit.cython, PYPI_SIMPLE)
        sources = made / "sources"
        _fetch_sources(toolkit, Path(work) / "tools", sources)
        for module in (_RUNTIME, _GENERATOR):
            _translate(toolkit, Path(work) / "tools", sources, module)
        _put(made, home)
    return home


def _put(made: Path, home: Path) -> None:
    """Move a finished folder to its place, unless another process was first."""
    try:
        made.rename(home)
    except OSError:
        if not home.exists():
            raise


def _install(folder: Path, *requirements: str, dependencies: bool = True) -> None:
    flags = [] if dependencies else ["--no-deps"]
    _run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-warn-conflicts",
        *flags,
        "--target",
        folder,
        *requirements,
    )


_FETCH = """
import sys
from pypi_simple import PyPISimple
name, to = sys.argv[1:]
with PyPISimple() as index:
    found = [file for file in index.get_project_page("cupy").packages if file.filename == name]
    index.download_package(found[0], to)
"""


def _fetch_sources(toolkit: Toolkit, tools: Path, folder: Path) -> None:
    """Fetch CuPy's source package: pip would run its setup, which wants CUDA."""
    archive = tools / "cupy.tar.gz"
    _run(sys.executable, "-c", _FETCH, f"cupy-{toolkit.cupy}.tar.gz", archive, PYTHONPATH=tools)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != toolkit.sdist_sha256:
        raise SetUpError(f"{archive.name} of CuPy {toolkit.cupy} is not the one that is pinned")
    with tarfile.open(archive) as packed:
        # Python 3.11.3 and older have no filters, nor that argument; 3.14 has this one anyhow.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(tools / "unpacked")  # noqa: S202 - its sum is checked
    (tools / "unpacked" / f"cupy-{toolkit.cupy}").rename(folder)


def _translate(toolkit: Toolkit, tools: Path, sources: Path, module: str) -> None:
    facts = f"CUPY_CUDA_VERSION={toolkit.major}000,CUPY_HIP_VERSION=0,CUPY_USE_CUDA_PYTHON=False"
    command = (sys.executable, "-m", "cython", "-3", "--cplus", "-w", sources, "-E", facts, f"{module}.pyx")
    _run(*command, "-o", sources / _translated(module), PYTHONPATH=tools)


def _translated(module: str) -> str:
    """Say where the C++ of a module lies: away from the header beside it that ours stands for."""
    return Path(module).name + ".cpp" if module == _GENERATOR else f"{module}.cpp"


def _build(toolkit: Toolkit, packages: Path, home: Path) -> None:
    """Compile the simulated libraries, then the two modules; CuPy's other files are linked, not copied."""
    for folder in ("lib", "jit", "units"):
        (home / folder).mkdir(parents=True)
    shutil.copytree(packages / "site", home / "site", symlinks=True, copy_function=os.link)
    include = [f"-I{packages / 'headers' / folder}" for folder in toolkit.include]
    objects = {
        module: home / "site" / f"{module}.{sysconfig.get_config_var('SOABI')}.so" for module in (_RUNTIME, _GENERATOR)
    }
    blas = next((home / "site/cupy_backends/cuda/libs").glob("cublas.*.so"))
    major = toolkit.major
    (home / "cublas.map").write_text(f"libcublas.so.{major} {{ global: cublas*; local: *; }};\n")
    driver = [
        SOURCES / f"{name}.cpp"
        for name in ("devices", "faults", "graphs", "kernels", "memory", "streams", "tensor_maps")
    ]
    own, python = home / "lib", f"-I{sysconfig.get_paths()['include']}"
    sources = packages / "sources"
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = {
            module: pool.submit(
                _compile, home / f"{Path(module).name}.o", "-c", "-fpermissive", _translated(module), "-I.",
                "-Icupy_backends", "-Icupy/_core/include", f"-I{SOURCES / 'cupy_headers'}", *include, python,
                first=SOURCES, folder=sources,
            )
            for module in objects
        }  # fmt: skip
        _compile(own / "libcuda.so.1", *driver, *include, "-ldl", soname=True, folder=sources)
        _compile(
            own / f"libnvrtc.so.{major}",
            SOURCES / "nvrtc.cpp",
            f"-DCUDASIM_TOOLKIT={major}",
            f'-DCUDASIM_INCLUDE=" {" ".join(include)}"',
            soname=True,
            folder=sources,
        )
        cuda = [f"-L{own}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]
        _compile(own / "libnvidia-ml.so.1", SOURCES / "nvml.cpp", *cuda, soname=True, folder=sources)
        absent = home / "absent.cpp"
        absent.write_text(_refusals(blas, "cublas", SOURCES / "cublas.cpp"))
        _compile(
            own / f"libcublas.so.{major}", SOURCES / "cublas.cpp", absent, *cuda,
            f"-Wl,--version-script={home / 'cublas.map'}", soname=True, folder=sources,
        )  # fmt: skip
        absent.write_text(_refusals(next(blas.parent.glob("nccl.*.so")), "nccl", SOURCES / "nccl.cpp"))
        _compile(own / "libnccl.so.2", SOURCES / "nccl.cpp", absent, *cuda, soname=True, folder=sources)
        absent.write_text('extern "C" int cublasLtVersion() { return 120900; }\n')
        _compile(own / f"libcublasLt.so.{major}", absent, soname=True, folder=sources)
        for module, place in objects.items():
            compiled[module].result()
            absent.write_text(_refusals(home / f"{Path(module).name}.o", "cuda", *driver))
            place.unlink()
            _compile(
                place,
                home / f"{Path(module).name}.o",
                absent,
                f"-L{own}",
                "-l:libcuda.so.1",
                f"-Wl,-rpath,{own}",
                folder=sources,
            )


def _refusals(asks: Path, prefix: str, *sources: Path) -> str:
    """Write functions that say "not supported", for those that a library names and the sources do not have."""
    text = "".join(path.read_text() for path in sources)
    names = {
        line.split()[-1].split("@")[0] for line in _run("nm", "--undefined-only", *_dynamic(asks), asks).splitlines()
    }
    # CUBLAS_STATUS_NOT_SUPPORTED, ncclInvalidUsage, cudaErrorNotSupported
    status = {"cublas": 15, "nccl": 5}.get(prefix, 801)
    return "".join(
        f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return {status}; }}\n'
        for name in sorted(names)
        if name.startswith(prefix) and not name.startswith("cudasim") and f" {name}(" not in text
    )


def _dynamic(path: Path) -> list[str]:
    return ["-D"] if path.suffix != ".o" else []


def _compile(to: Path, *arguments: object, soname: bool = False, first: Path | None = None, folder: Path) -> None:
    flags = ["-O1", "-g1", "-fPIC", "-std=c++17", "-w", "-fvisibility=hidden"]
    flags += [f"-Wl,-soname,{to.name}"] if soname else []
    flags += [] if "-c" in arguments else ["-shared"]
    flags += [f"-I{first}"] if first else []
    _run("g++", *flags, *arguments, "-o", to, cwd=folder)


def _run(*command: object, cwd: Path | None = None, **environment: object) -> str:
    given = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetUpError(f"{' '.join(map(str, command))}\n{(done.stderr + done.stdout)[-4000:]}")
    return done.stdout


def _digest(*parts: object) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part if isinstance(part, bytes) else repr(part).encode())
    return state.hexdigest()[:16]
