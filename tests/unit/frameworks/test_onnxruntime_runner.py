"""What is drawn for ONNX Runtime, and how its want of memory is known, without it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cubatch.errors import DeviceNotAvailable, OutOfMemory, is_out_of_memory
from cubatch.frameworks import onnxruntime_runner
from cubatch.frameworks.onnx_graph import Input
from cubatch.frameworks.onnxruntime_runner import OnnxRuntimeRunner, drawn
from cubatch.hardware import host
from cubatch.hardware.facts import Device


def of(dtype, *, values=None, batch_axis=0):
    value = Input(name="x", dtype=dtype, shape=(50, 4), batch_axis=batch_axis, values=values)
    return drawn(value, 8, np.random.default_rng(0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_floats_are_normal(dtype):
    """Of 1600 draws the mean is within 5 standard errors of 0, their deviation of 1: 5 / sqrt(1600), 5 / sqrt(3200)."""
    x = of(dtype)
    assert (x.dtype, x.shape) == (np.dtype(dtype), (8, 50, 4))
    assert abs(x.astype(np.float64).mean()) < 5 / 1600**0.5
    assert abs(x.astype(np.float64).std() - 1) < 5 / 3200**0.5


@pytest.mark.parametrize(
    ("dtype", "values", "bounds"),
    [("int64", 7, (0, 6)), ("int32", None, (0, 1)), ("uint8", None, (0, 255)), ("int8", None, (-128, 127)),
     ("bool", None, (0, 1)), ("uint8", 3, (0, 2))],
)  # fmt: skip
def test_whole_numbers_are_drawn_within_what_they_may_be(dtype, values, bounds):
    """Never a constant; an index stays within its table.  Each of 1600 draws misses an end of 256 values by 255/256."""
    x = of(dtype, values=values)
    assert x.dtype == np.dtype(dtype)
    low, high = int(x.min()), int(x.max())
    assert bounds[0] <= low < high <= bounds[1]
    assert high - low >= 0.9 * (bounds[1] - bounds[0])


def test_an_input_without_the_batch_keeps_its_shape():
    """Whatever the batch size."""
    assert of("float32", batch_axis=None).shape == (50, 4)
    assert of("float32", batch_axis=1).shape[0] == 50


class Bound:
    """A binding of nothing."""

    def bind_ortvalue_input(self, name, value): ...

    def synchronize_outputs(self): ...


class Session:
    """Loads, and raises in a step."""

    def __init__(self, words, providers):
        self.words, self.providers = words, providers

    def get_providers(self):
        return self.providers

    def io_binding(self):
        return Bound()

    def run_with_iobinding(self, binding):
        raise RuntimeError(self.words)


class Options:
    """Takes any option."""

    def add_session_config_entry(self, name, value): ...


class Runtime:
    """`onnxruntime` as far as a runner asks it."""

    __version__ = "0"
    SessionOptions = Options

    def __init__(self, words="", there=("CPUExecutionProvider",), loaded=("CPUExecutionProvider",)):
        self.words, self.there, self.loaded, self.asked = words, there, loaded, None

    def get_available_providers(self):
        return list(self.there)

    def preload_dlls(self): ...

    def InferenceSession(self, model, options, providers):
        self.asked = options, providers
        return Session(self.words, list(self.loaded))


class Graph:
    """A file without inputs and outputs."""

    inputs = outputs = files = ()
    rewritten, dtype = None, "float32"

    def __init__(self, path, dims): ...


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Makes a runner on a runtime."""
    monkeypatch.setattr(onnxruntime_runner, "OnnxGraph", Graph)

    def make(runtime, kind="cpu"):
        monkeypatch.setattr(onnxruntime_runner, "_onnxruntime", lambda: runtime)
        return OnnxRuntimeRunner(
            tmp_path / "m.onnx", kind, 1, threads=6, memory_limit=1000, seed=0, meter=None, clock=None
        )

    return make


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 3019898880", True),
        ("std::bad_alloc", True),
        ("Available memory of 8 is smaller than requested bytes of 16", True),
        ("CUDA failure 2: out of memory ; GPU=0", True),
        ("CUDA failure 201: invalid device context", False),
        ("Non-zero status code returned while running Gemm node", False),
    ],
)
def test_its_want_of_memory_is_out_of_memory(made, words, is_memory):
    """Also a worker tells it; other errors come as they are."""
    with pytest.raises(OutOfMemory if is_memory else RuntimeError) as raised:
        made(Runtime(words)).results({})
    assert is_out_of_memory(raised.value) == is_memory


def test_all_threads_of_the_device_take_part(made):
    """On the CPU an operator uses as many as it has; a GPU's session is bounded, and of that GPU."""
    runtime = Runtime("stop")
    with pytest.raises(RuntimeError, match="stop"):
        made(runtime).results({})
    options, providers = runtime.asked
    assert (options.intra_op_num_threads, providers) == (6, ["CPUExecutionProvider"])
    cuda = ("CUDAExecutionProvider",)
    runtime = Runtime("stop", cuda, cuda)
    with pytest.raises(RuntimeError, match="stop"):
        made(runtime, "cuda").results({})
    ((name, settings),) = runtime.asked[1]
    assert (name, settings["device_id"], settings["gpu_mem_limit"]) == (cuda[0], "1", "1000")


@pytest.mark.parametrize("there", [("CPUExecutionProvider",), ("CUDAExecutionProvider", "CPUExecutionProvider")])
def test_it_does_not_fall_back_on_the_cpu(made, there):
    """Neither where the wheel has no CUDA nor where its libraries cannot be loaded."""
    with pytest.raises(DeviceNotAvailable, match="onnxruntime-gpu"):
        made(Runtime("", there), "cuda").results({})


def test_what_is_free_is_read_of_the_device_that_runs(made, monkeypatch):
    """Steps that take far longer are held against that: 10 bytes of a GPU by NVML, 77 of main memory."""
    monkeypatch.setattr(onnxruntime_runner.clocks, "monitor_of", lambda _: SimpleNamespace(free_bytes=lambda: 10))
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 77)
    free = {}
    for kind in ("cpu", "cuda"):
        found = Device(name="here", kind=kind)
        monkeypatch.setattr(onnxruntime_runner.probe, "resolve", lambda _, found=found: found)
        made(Runtime(there=onnxruntime_runner.PROVIDERS.values()))
        made_here = onnxruntime_runner.runner(path="m.onnx", device=kind, threads=None, memory_limit=1000, seed=0)
        free[kind] = made_here.clock.free_bytes()
    assert free == {"cpu": 77, "cuda": 10}
