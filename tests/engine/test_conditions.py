"""What a measurement depends on is described without loading it, and changes when it changes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import attrs
import numpy as np
import pytest

import cubatch
from cubatch.engine import conditions as module
from cubatch.engine.conditions import conditions, environment
from cubatch.errors import DeviceNotAvailable
from cubatch.hardware import nvml, probe
from cubatch.hardware.facts import Device

CPU = probe.device("cpu")
GPU = Device(name="a GPU", kind="cuda", uuid="GPU-1", memory_bytes=2**34, power_limit_watts=250.0)


def test_the_environment_of_a_cpu_names_what_counts_there():
    """Versions as the packages give them, OpenBLAS by name, nothing of CUDA."""
    facts = environment(CPU)
    assert facts["cubatch"] == cubatch.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["numpy"] == metadata.version("numpy")
    assert facts["blas"] != "unknown"
    assert (facts["cupy"], facts["nvrtc"], facts["driver"]) == (None, None, None)
    assert len(facts["engine_sha256"]) == len(facts["kernels_sha256"]) == 64
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("order", [1, -1])
def test_the_blas_is_numpys_whatever_else_is_loaded(monkeypatch, order):
    """SciPy brings an OpenBLAS of another version, and libraries are listed in no fixed order."""
    numpys = {"user_api": "blas", "internal_api": "openblas", "version": "1.0", "architecture": "Haswell"}
    folder = Path(np.__file__).resolve().parent.with_name("numpy.libs")
    others = {"filepath": str(folder.with_name("scipy.libs") / "b.so"), "version": "2.0"}
    openmp = {"user_api": "openmp", "filepath": "/lib/libgomp.so.1", "version": None}
    for place in (folder, folder.with_name("numpy"), Path("/usr/lib")):
        loaded = [numpys | {"filepath": str(place / "a.so")}, numpys | others, openmp][::order]
        monkeypatch.setattr(module.threadpoolctl, "threadpool_info", lambda loaded=loaded: loaded)
        assert environment(CPU)["blas"] == "openblas 1.0 Haswell"


def test_a_gpu_adds_driver_and_libraries(monkeypatch):
    """The driver comes from NVML and is unknown without it; versions are read, not imported."""
    versions = {"cupy-cuda12x": "14.0.1", "nvidia-cuda-nvrtc-cu12": "12.9.86", "numpy": "2.4.0"}

    def version(name):
        try:
            return versions[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)

    class Nvml:
        def __init__(self, uuid):
            assert uuid == "GPU-1"

        def driver_version(self):
            return "580.1"

    monkeypatch.setattr(nvml, "Monitor", Nvml)
    facts = environment(GPU)
    assert facts["cupy"] == "cupy-cuda12x 14.0.1"
    assert facts["nvrtc"] == "nvidia-cuda-nvrtc-cu12 12.9.86"
    assert facts["driver"] == "580.1"

    def missing(uuid):
        raise DeviceNotAvailable(uuid, "no NVML")

    monkeypatch.setattr(nvml, "Monitor", missing)
    assert environment(GPU)["driver"] is None
    assert environment(attrs.evolve(GPU, uuid=None))["driver"] is None


def test_conditions_add_the_settings_of_the_device():
    """Threads, memory size and power limit must be the same for a kept timing to apply."""
    facts = conditions(attrs.evolve(CPU, threads=3, memory_bytes=123))
    assert (facts["threads"], facts["memory_bytes"], facts["power_limit_watts"]) == (3, 123, None)
    assert conditions(GPU)["power_limit_watts"] == 250.0
    assert environment(CPU).items() <= conditions(CPU).items()


def test_the_threads_of_blas_are_a_condition(monkeypatch):
    """A batch of one is as quick as OMP_NUM_THREADS lets BLAS be; a kept timing with another number does not apply."""
    place = str(Path(np.__file__).resolve().parent / "a.so")
    for number in (1, 8):
        loaded = [{"user_api": "blas", "filepath": place, "num_threads": number}]
        monkeypatch.setattr(module.threadpoolctl, "threadpool_info", lambda loaded=loaded: loaded)
        assert conditions(CPU)["blas_threads"] == number
        assert conditions(GPU)["blas_threads"] is None


@pytest.mark.parametrize(
    "changed", ["engine/conv.py", "memory/plan.py", "kernels/toolchain/nvrtc.py", "kernels/choice.py"]
)
def test_the_engines_hash_follows_its_source(tmp_path, monkeypatch, changed):
    """Another byte in any file that decides what a step does gives another hash; a report's does not."""
    package = tmp_path / "cubatch"
    for name in (changed, "report/html.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("one")
    monkeypatch.setattr(module, "_PACKAGE", package)

    def found():
        module._sha256.cache_clear()
        return environment(CPU)["engine_sha256"]

    before = found()
    (package / "report" / "html.py").write_text("two")
    assert found() == before
    (package / changed).write_text("two")
    assert found() != before
    module._sha256.cache_clear()


def test_every_named_source_is_there():
    """No pattern of the hash is left without a file, as after a move."""
    package = Path(cubatch.__file__).parent
    for pattern in module._ENGINE:
        assert list(package.glob(pattern)), pattern


def test_nothing_is_loaded_to_find_it_out():
    """Describing a GPU's environment imports neither CuPy nor PyTorch nor NVML's binding before it is asked."""
    code = (
        "import sys, cubatch.engine.conditions as e; from cubatch.hardware.facts import Device; "
        "e.conditions(Device(name='g', kind='cuda')); "
        "print([m for m in ('cupy', 'torch', 'pynvml', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
