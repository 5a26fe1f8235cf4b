"""The runner of an ONNX file in ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cubatch.errors import CubatchError, DeviceNotAvailable, MissingDependency, OutOfMemory
from cubatch.frameworks.bounded_runner import BoundedRunner
from cubatch.frameworks.memory_meter import HostMeter, Meter, ProcessMeter
from cubatch.frameworks.onnx_graph import Input, OnnxGraph
from cubatch.frameworks.torch_memory import Peaks
from cubatch.hardware import probe
from cubatch.measure import clocks
from cubatch.measure.runner import MemoryLook

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_SILENT = 4  # only what ends the process: everything else is raised, too
_UPDATE = "Update ONNX Runtime, or export the file for an older opset and IR version."
_COMPARED = (1, 2)  # batch sizes whose results are compared in shape
# Its exceptions have no status: these are its arenas', the C++ library's and CUDA's words for it.
_OUT_OF_MEMORY = (
    "Failed to allocate memory", "bad_alloc", "bad allocation", "is smaller than requested bytes",
    "out of memory", "STATUS_ALLOC_FAILED", "CUDA failure 2:",
)  # fmt: skip


class OnnxRuntimeRunner(BoundedRunner):
    """
    Runs steps of an ONNX file in ONNX Runtime; random inputs and results are on the device.

    Each batch size has its own session: an arena never shrinks, and would show the memory of a larger size.

    Args:
        path: The file.
        kind: "cpu" or "cuda".
        index: Number of the GPU.
        threads: Threads per operator on the CPU; None is the number of cores.
        memory_limit: Bytes that the model, a batch and its step may take together.
        seed: Seed of the random inputs.
        meter: Measures the memory of a step.
        clock: Times steps, and reads the free memory of the device.
        dims: Extents of open axes other than the batch, by name.

    Raises:
        InvalidSpec: If the file cannot be run at any batch size.
        DeviceNotAvailable: If the installed ONNX Runtime lacks CUDA or cannot load it.
        MissingDependency: If ONNX Runtime or onnx is not installed.
    """

    def __init__(
        self, path: Path, kind: str, index: int, *, threads: int | None, memory_limit: int, seed: int, meter: Meter,
        clock: clocks.HostClock, dims: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._ort = _onnxruntime()
        self._provider = PROVIDERS[kind]
        if kind == "cuda":
            self._ort.preload_dlls()  # CUDA and cuDNN as pip installs them
        if self._provider not in self._ort.get_available_providers():
            raise self._without_cuda()
        self._graph, self._dims = OnnxGraph(path, dims), dims or {}
        own_bytes = len(self._graph.rewritten or b"")
        super().__init__(clock, meter, memory_limit, self._graph.dtype, own_bytes)
        self._path, self._kind, self._index, self._threads, self._seed = path, kind, index, threads, seed
        self._is_loaded = False

    def look(self, *, seconds: float, top: int | None, trace_seconds: float) -> MemoryLook:
        """
        Return what `BoundedRunner.look` predicts; before, run 1 and 2 samples, if they fit, to check that both run.

        `top` is the largest batch size of interest; None: no maximum.

        Raises:
            InvalidSpec: If the file cannot be run, or no output grows with the batch.
        """
        plan = self._planned(top)
        if plan is None or plan.at(max(_COMPARED)) <= self._memory_limit:
            self._compare()
        return super().look(seconds=seconds, top=top, trace_seconds=trace_seconds)

    def results(self, inputs: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Return the outputs of a step as NumPy arrays; `inputs` has an array for each input by name."""
        return self._outputs(self._session(), inputs)

    def _outputs(self, session: Any, inputs: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        binding, step = self._bound(session, inputs)
        step()
        outputs: list[np.ndarray[Any, Any]] = binding.copy_outputs_to_cpu()
        return outputs

    def walk(self, num_bytes: int, top: int | None, seconds: float) -> Peaks:  # noqa: ARG002 - a line, and no time
        """Return the peak bytes of steps by batch size, from shapes in the file; any limits, also None, are ignored."""
        return self._graph.peaks()

    def _make(self, batch_size: int) -> tuple[Callable[[], None], int]:
        if not self._is_loaded:  # the very first step loads code and allocates workspaces that stay
            self._bound(self._session(), self._drawn(1))[1]()
            self._is_loaded = True
        self.meter.start()
        _, step = self._bound(self._session(), self._drawn(batch_size))
        return step, 0

    def _drop(self) -> None:
        """Free nothing: only the session of the step held memory, and both are deleted already."""

    def _session(self) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = _SILENT
        if self._kind == "cpu" and self._threads:
            options.intra_op_num_threads = self._threads
        provider: Any = self._provider
        if self._kind == "cuda":
            # The arena grows by the requested bytes, so that it holds what a step needs, and at most the limit.
            settings = {"arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": str(self._memory_limit)}
            provider = (self._provider, {"device_id": str(self._index), **settings})
        model: Any = str(self._path)
        if self._graph.rewritten is not None:
            model = self._graph.rewritten
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(self._path.parent)
            )
        session = self._translate_errors(
            lambda: self._ort.InferenceSession(model, options, providers=[provider]), "loading"
        )
        if session.get_providers()[0] != self._provider:  # it falls back on the CPU, and only prints why
            raise self._without_cuda()
        return session

    def _bound(self, session: Any, inputs: dict[str, np.ndarray[Any, Any]]) -> tuple[Any, Callable[[], None]]:
        binding = session.io_binding()
        values: dict[str, Any] = {}  # which a binding of older releases only points to

        def bind() -> None:
            for name, array in inputs.items():
                values[name] = self._ort.OrtValue.ortvalue_from_numpy(array, self._kind, self._index)
                binding.bind_ortvalue_input(name, values[name])
            for name in self._graph.outputs:
                binding.bind_output(name, self._kind, self._index)

        def step(_held: object = values) -> None:
            self._translate_errors(lambda: session.run_with_iobinding(binding), "a step")
            binding.synchronize_outputs()

        self._translate_errors(bind, "inputs")
        return binding, step

    def _drawn(self, batch_size: int) -> dict[str, np.ndarray[Any, Any]]:
        generator = np.random.default_rng(self._seed)
        return {each.name: drawn(each, batch_size, generator) for each in self._graph.inputs}

    def _compare(self) -> None:
        """Raise InvalidSpec if 1 and 2 samples cannot be run, or no output grows with them."""
        shapes = []
        for n in _COMPARED:
            what = "load"
            try:
                session, what = self._session(), f"run on {n} sample{'s' * (n > 1)}"
                shapes.append([output.shape for output in self._outputs(session, self._drawn(n))])
            except CubatchError:
                raise
            except Exception as error:
                if node := self._graph.fixing_node():
                    raise self._graph.fixed_by(node) from error
                dynamic = f"Export it with these axes dynamic, also inside: {', '.join(['batch', *self._dims])}."
                remedy = _UPDATE if what == "load" else dynamic
                raise self._graph.refused(f"one that ONNX Runtime can {what} ({error})", remedy) from error
        if not any(math.prod(few) < math.prod(many) for few, many in zip(*shapes, strict=True)):
            unknown = f"an unknown node: results have the shapes {shapes[0]} and {shapes[1]} for 1 and 2 samples"
            raise self._graph.fixed_by(self._graph.fixing_node() or unknown)

    def _translate_errors(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except Exception as error:
            if any(words in str(error) for words in _OUT_OF_MEMORY):
                raise OutOfMemory(f"{what} of {self._path.name} in ONNX Runtime") from error
            raise

    def _without_cuda(self) -> DeviceNotAvailable:
        reason = f"ONNX Runtime {self._ort.__version__} has no {self._provider}, or could not load it"
        return DeviceNotAvailable(
            "cuda", reason, "Install onnxruntime-gpu instead of onnxruntime, or pass device='cpu'."
        )


def drawn(value: Input, batch_size: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """
    Return a random input: normal floats, uniform bytes, indices in their range, other integers 0 or 1.

    An input whose value is given holds it everywhere. Others are not constant: the power of a GPU, and so its clock,
    depends on the data.
    """
    dtype, shape = np.dtype(value.dtype), value.extents(batch_size)
    if value.value is not None:
        return np.full(shape, value.value, dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape, dtype=np.float32).astype(dtype, copy=False)
    if dtype.kind in "iu" and dtype.itemsize == 1 and value.values is None:
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    return generator.integers(0, value.values or 2, shape).astype(dtype)


def runner(
    *, path: str, device: str, threads: int | None, memory_limit: int, seed: int, dims: Mapping[str, int] | None = None
) -> OnnxRuntimeRunner:
    """
    Return the runner of an ONNX file on a `Device.address`; called in a worker process.

    `threads` None: as many as cores. `dims` are extents of open axes by name; None: no axis is fixed.
    """
    resolved = probe.resolve(device)
    monitor = clocks.monitor_of(resolved.uuid)
    meter = HostMeter() if resolved.kind == "cpu" else ProcessMeter(monitor)
    clock = clocks.HostClock() if resolved.kind == "cpu" else clocks.GpuHostClock(monitor)
    return OnnxRuntimeRunner(
        Path(path), resolved.kind, resolved.index, threads=threads, memory_limit=memory_limit, seed=seed, meter=meter,
        clock=clock, dims=dims,
    )  # fmt: skip


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency("ONNX Runtime", 'library="onnxruntime"', "onnxruntime") from error
    return onnxruntime
