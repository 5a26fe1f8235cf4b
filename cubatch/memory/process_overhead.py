"""
What a process takes beside the plan, so that what it takes in all can be said beforehand.

On a GPU that is the CUDA context with code and libraries: see `hardware.reserve`.  On a CPU, by what was measured:

- the calls of a step, which the engine records block by block with their views of arrays: 350 bytes a call, and so many
  calls for a block as `_CALLS` says, or for each tap of a window;
- what OpenBLAS packs operands into, on every thread: of a product (m, k) x (k, n) in pieces of k up to 448 deep the
  n columns, or, where those are more than 448, so many of them and all m rows (Goto and van de Geijn, 2008,
  doi:10.1145/1356052.1356053; the sizes are those of its AVX-512 kernels);
- code that is loaded when it is first needed, and what the heap rounds up.
"""

from __future__ import annotations

import attrs

from cubatch.memory import workspace
from cubatch.memory.blocks import Ends, Flat, Need, Norm, Pool, Products, RowNorm
from cubatch.memory.conv_blocks import Depthwise, Tiles
from cubatch.memory.plan import Plan, plan
from cubatch.memory.schedule_records import FLOAT32_BYTES, Op
from cubatch.network.passes import Gemm, Pass
from cubatch.workload import Workload

MOST_RECORDED_CALLS = 4096
"""Longer recordings of an operation are not kept: their blocks are large, and Python's share of the time is small."""

_CALL_BYTES = 350
_CALLS_OF_TILE = {"forward": 4.8, "backward": 7.0}
_CALLS = {Norm: 12.0, RowNorm: 15.0, Flat: 2.0, Ends: 5.0, Products: 4.0}
_CALLS_OF_WINDOW, _CALLS_OF_TAP, _CALLS_OF_BLOCK, _CALLS_OF_OPERATION = 4.0, 2.4, 13.0, 8.0
_CODE_BYTES = 11 * 2**19
_SIDE, _MOST_ROWS = 448, 16_000
_PASSES = {"forward": (Pass.FPROP,), "backward": (Pass.WGRAD, Pass.DGRAD)}


def device_bytes(work: Workload, batch_size: int, reserve_bytes: int) -> int:
    """
    Say what a process takes of the device at the peak of a step: the plan, and what is beside it.

    On a GPU it is what NVML says of the process, the context included; on a CPU what the resident set grows by from
    before there is a network.

    Args:
        work: What is run.
        batch_size: Samples per step.
        reserve_bytes: What a process takes of a GPU beside its arrays: `MemoryLimit.reserve_bytes`; 0 on a CPU.

    Example:
        >>> work = Workload.of("mlp", "cpu", mode="training", dtype="float32")
        >>> 0 < device_bytes(work, 64, 0) - plan(work, 64).total < 2**24 * work.device.threads
        True
    """
    whole = plan(work, batch_size)
    if work.device.kind != "cpu":
        return whole.total + reserve_bytes
    steps = [_step(op, whole, work) for op in whole.schedule.ops if op.node is not None and op.kind in _PASSES]
    recorded = sum(step.calls for step in steps if step.calls <= MOST_RECORDED_CALLS) * whole.members * whole.copies
    # A product that BLAS divides among its threads is packed for the next piece while the last one is multiplied.
    panels = whole.members if whole.members > 1 else 2 * (work.device.threads or 1)
    packed = max((step.packed_bytes for step in steps), default=0)
    return whole.total + round(recorded * _CALL_BYTES) + panels * packed + _CODE_BYTES


@attrs.frozen
class _Step:
    """Calls that an operation records, and bytes that its products' operands are packed into on each thread."""

    calls: float
    packed_bytes: int


def _step(op: Op, whole: Plan, work: Workload) -> _Step:
    layer = op.node.layer if op.node is not None else None
    needs, items = workspace.im2col_needs(op, whole.schedule, FLOAT32_BYTES)
    room = 0 if op.workspace is None else whole.sizes[op.workspace]
    if op.kind == "backward" and "dx0" not in op.writes:  # of the network's input
        needs = needs[:1]
    counts = [(need, need.num_blocks(whole.shard * items, max(room, need.least))) for need in needs]
    calls = _CALLS_OF_OPERATION + sum(count * _calls(need, op.kind) for need, count in counts)
    # A linear layer has scratch memory for all its outputs, and is one product.
    blocks = max((count for need, count in counts if not isinstance(need, Flat)), default=1)
    rows = whole.shard if whole.members > 1 else -(-whole.shard // (work.device.threads or 1))
    packed = [
        _packed_bytes(product if pass_ is Pass.WGRAD else attrs.evolve(product, m=-(-product.m // blocks)))
        for pass_ in _PASSES[op.kind]
        for product in (layer.gemms(pass_, rows) if layer is not None else ())
    ]
    return _Step(calls, max(packed, default=0))


def _calls(need: Need, kind: str) -> float:
    """Count the calls that the engine makes for a block."""
    if isinstance(need, Depthwise):
        return _CALLS_OF_WINDOW + _CALLS_OF_TAP * need.taps
    if isinstance(need, Pool):
        return _CALLS_OF_WINDOW + _CALLS_OF_TAP * need.vertical.taps * need.horizontal.taps
    if isinstance(need, Tiles):
        return _CALLS_OF_TILE[kind]
    return _CALLS.get(type(need), _CALLS_OF_BLOCK)


def _packed_bytes(product: Gemm) -> int:
    """Give what a thread packs of a product: even pieces of k, where two do."""
    m, n, k = product.m, product.n, product.k
    depth = k if k <= _SIDE else -(-k // 2) if k < 2 * _SIDE else _SIDE
    return FLOAT32_BYTES * depth * (n if n <= _SIDE else _SIDE + min(m, _MOST_ROWS))
