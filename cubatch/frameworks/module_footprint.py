"""The memory of a step of a PyTorch module, part by part, from a trace without data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from cubatch.frameworks.torch_memory import Walk
from cubatch.hardware import context_overhead
from cubatch.hardware.facts import Device
from cubatch.memory import caching_allocator
from cubatch.shown import Shown


@attrs.frozen(kw_only=True)
class ModuleFootprint(Shown):
    """
    The memory of a step of a PyTorch module by part, in bytes: tensors at their peak, and overhead of a GPU.

    The parts add up to the total. Tensors that share memory, such as tied weights, count once. Workspaces that an
    operation takes for itself are not included, such as those of convolutions in cuDNN.

    Attributes:
        name: The class of the module.
        mode: "inference" or "training".
        batch_size: Samples of the batch.
        weights: Parameters and buffers.
        inputs: The batch.
        gradients: Gradients of the parameters, and buckets of DistributedDataParallel; 0 in inference.
        optimizer: The state of the optimizer.
        activations: All other tensors: outputs, values saved for the backward pass, their gradients, temporary results.
        workspace: Workspace of cuBLAS in PyTorch's default setting; 0 without a GPU, as `allocator` and `overhead`.
        allocator: Bytes that PyTorch's caching allocator reserves in addition: rounding, and free blocks of its
            segments. The GPU's memory is the limit at which it returns free segments.
        expandable_segments: Whether the simulated segments are expandable, by the environment of this process; None
            without a GPU.
        overhead: The CUDA context, and code of libraries.
        overhead_source: Where the figure of `overhead` comes from; empty without a GPU.
        total: The sum of the parts above.
        by_submodule: The bytes of `activations` by the submodule that made them, most first. The name is the one of
            `named_modules`; it is empty for the module itself, the loss and the optimizer.
        recurrent: Names of LSTM, GRU and RNN layers, whose libraries keep results of all time steps. Memory that oneDNN
            allocates inside an LSTM is included on a CPU; on a GPU, only the part kept for the backward pass. In
            training oneDNN does not write all of it, so that the memory of a process on a CPU may grow by less. The
            memory that cuDNN keeps is not known.
        data_dependent: Names of operators whose results depend on data. The trace assumes results, such as 1 for a
            number, so that a step may take more or less.
    """

    name: str
    mode: str
    batch_size: int
    weights: int
    inputs: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    allocator: int
    expandable_segments: bool | None
    overhead: int
    overhead_source: str
    total: int
    by_submodule: Mapping[str, int] = attrs.field(hash=False)
    recurrent: tuple[str, ...]
    data_dependent: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, mode: str, batch_size: int, walk: Walk, gpu: Device | None, *, recurrent: tuple[str, ...]
    ) -> ModuleFootprint:
        """Return the footprint of a traced step, with the overhead of `gpu`; None: of its tensors alone."""
        by_submodule = dict(sorted(walk.activations.items(), key=lambda item: -item[1]))
        workspace, overhead = (cublas_workspace_bytes(gpu), context_overhead.overhead_bytes(gpu)) if gpu else (0, 0)
        total = total_bytes(walk.lives, gpu)
        return cls(
            name=name, mode=mode, batch_size=batch_size, **walk.parts, activations=sum(by_submodule.values()),
            workspace=workspace, allocator=total - walk.peak_bytes - workspace - overhead,
            expandable_segments=None if gpu is None else caching_allocator.is_expandable(), overhead=overhead,
            overhead_source="" if gpu is None else context_overhead.source(gpu), total=total,
            by_submodule=by_submodule, recurrent=recurrent, data_dependent=tuple(sorted(walk.guessed)),
        )  # fmt: skip

    def to_mapping(self) -> dict[str, Any]:
        """Return the attributes by name as a plain mapping for JSON, where tuples are lists."""
        return attrs.asdict(self) | {"recurrent": list(self.recurrent), "data_dependent": list(self.data_dependent)}


def total_bytes(lives: Iterable[tuple[int, float, float]], gpu: Device | None) -> int:
    """
    Return the bytes that storages take at their peak, on a GPU with the overhead of allocator, cuBLAS and context.

    Args:
        lives: Bytes, time of allocation and time of release of each storage; no two times are equal but infinity.
        gpu: The GPU; None for a CPU.

    Example:
        >>> total_bytes([(10, 1, 2), (30, 3, 6), (5, 4, 5)], None)
        35
    """
    if gpu is None:
        changes = ((time, size) for taken, begin, end in lives for time, size in ((begin, taken), (end, -taken)))
        return max(itertools.accumulate(size for _, size in sorted(changes)), default=0)
    overhead = context_overhead.overhead_bytes(gpu)
    capacity = math.inf if gpu.memory_bytes is None else max(0, gpu.memory_bytes - overhead)
    stored = [(cublas_workspace_bytes(gpu), 0, math.inf), *lives]
    return overhead + caching_allocator.reserved_bytes(
        stored, capacity, is_expandable=caching_allocator.is_expandable()
    )


def cublas_workspace_bytes(gpu: Device) -> int:
    """
    Return the workspace bytes that PyTorch gives to cuBLAS: 32 MiB from Hopper on, else 2 x 4 MiB + 8 x 16 KiB.

    These are the defaults without CUBLAS_WORKSPACE_CONFIG (`aten/src/ATen/cuda/CublasHandlePool.cpp` of PyTorch 2.0 to
    2.6). The trace does not show whether a module calls cuBLAS; nearly all do, as every linear layer does.

    Example:
        >>> cublas_workspace_bytes(Device(name="a GPU", compute_capability=(8, 0)))
        8519680
    """
    is_large = (gpu.compute_capability or (0, 0)) >= (9, 0)
    return 32 * 2**20 if is_large else 2 * 4 * 2**20 + 8 * 16 * 2**10
