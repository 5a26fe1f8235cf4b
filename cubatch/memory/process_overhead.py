"""
Memory of a process in addition to the plan, so that its total can be predicted before it starts.

On a GPU this is the CUDA context with code and libraries, see `hardware.context_overhead`.  On a CPU it was measured:

- The engine records the calls of a step with their array views, at 350 bytes each. `_CALLS` has the calls per block,
  `_CALLS_OF_TAP` those per tap of a window.
- OpenBLAS packs operands on every thread.  It takes a product (m, k) x (k, n) in pieces of k of at most 448.  A piece
  packs n columns, or 448 columns and all m rows if n is larger (Goto and van de Geijn, 2008,
  doi:10.1145/1356052.1356053; sizes of the AVX-512 kernels).
- Code is loaded on first use, and the heap rounds sizes up.
"""

from __future__ import annotations

import attrs

from cubatch.memory import workspace
from cubatch.memory.blocks import Ends, Flat, Need, Norm, Pool, Products, RowNorm
from cubatch.memory.conv_blocks import Depthwise, Tiles
from cubatch.memory.plan import Plan, plan
from cubatch.memory.schedule_records import FLOAT32_BYTES, PASSES_OF, Op
from cubatch.network.layer import Layer
from cubatch.network.passes import Gemm, Pass
from cubatch.workload import Workload

MOST_RECORDED_CALLS = 4096
"""Longer recordings of an operation are discarded: their blocks are large, so Python's share of the time is small."""

_CALL_BYTES = 350
_CALLS_OF_TILE = {"forward": 4.8, "backward": 7.0}
_CALLS = {Norm: 12.0, RowNorm: 15.0, Flat: 2.0, Ends: 5.0, Products: 4.0}
_CALLS_OF_WINDOW, _CALLS_OF_TAP, _CALLS_OF_BLOCK, _CALLS_OF_OPERATION = 4.0, 2.4, 13.0, 8.0
_CODE_BYTES = 11 * 2**19
_SIDE, _MOST_ROWS = 448, 16_000


def device_bytes(work: Workload, batch_size: int, reserve_bytes: int) -> int:
    """
    Return the device memory of a process at the peak of a step, in bytes: the plan and the process overhead.

    On a GPU this is what NVML reports for the process, with its context.  On a CPU it is the growth of the resident set
    since before the network was built.

    Args:
        reserve_bytes: GPU memory of the process outside its arrays: `MemoryLimit.overhead_bytes`; 0 on a CPU.
    """
    whole = plan(work, batch_size)
    if work.device.kind != "cpu":
        return whole.total + reserve_bytes
    steps = [
        _calls_and_packed_bytes(op, op.node.layer, whole, work)
        for op in whole.schedule.ops
        if op.node is not None and op.kind in PASSES_OF
    ]
    recorded = sum(calls for calls, _ in steps if calls <= MOST_RECORDED_CALLS) * whole.members * whole.copies
    # A product that BLAS divides among its threads is packed for the next piece while the last one is multiplied.
    panels = whole.members if whole.members > 1 else 2 * (work.device.threads or 1)
    packed = max((num_bytes for _, num_bytes in steps), default=0)
    return whole.total + round(recorded * _CALL_BYTES) + panels * packed + _CODE_BYTES


def _calls_and_packed_bytes(op: Op, layer: Layer, whole: Plan, work: Workload) -> tuple[float, int]:
    needs, items = workspace.im2col_needs(op, whole.schedule, FLOAT32_BYTES)
    scratch = 0 if op.workspace is None else whole.sizes[op.workspace]
    if op.kind == "backward" and "dx0" not in op.writes:  # of the network's input
        needs = needs[:1]
    counts = [(need, need.num_blocks(whole.shard * items, max(scratch, need.least))) for need in needs]
    calls = _CALLS_OF_OPERATION + sum(count * _calls(need, op.kind) for need, count in counts)
    # A linear layer has scratch memory for all its outputs and is one product.
    blocks = max((count for need, count in counts if not isinstance(need, Flat)), default=1)
    rows = whole.shard if whole.members > 1 else -(-whole.shard // (work.device.threads or 1))
    packed = [
        _packed_bytes(product if pass_ is Pass.WGRAD else attrs.evolve(product, m=-(-product.m // blocks)))
        for pass_ in PASSES_OF[op.kind]
        for product in layer.gemms(pass_, rows)
    ]
    return calls, max(packed, default=0)


def _calls(need: Need, kind: str) -> float:
    if isinstance(need, Depthwise):
        return _CALLS_OF_WINDOW + _CALLS_OF_TAP * need.taps
    if isinstance(need, Pool):
        return _CALLS_OF_WINDOW + _CALLS_OF_TAP * need.vertical.taps * need.horizontal.taps
    if isinstance(need, Tiles):
        return _CALLS_OF_TILE[kind]
    return _CALLS.get(type(need), _CALLS_OF_BLOCK)


def _packed_bytes(product: Gemm) -> int:
    m, n, k = product.m, product.n, product.k
    depth = k if k <= _SIDE else -(-k // 2) if k < 2 * _SIDE else _SIDE
    return FLOAT32_BYTES * depth * (n if n <= _SIDE else _SIDE + min(m, _MOST_ROWS))
