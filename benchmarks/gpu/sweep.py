"""
One layer pass at every batch size from 1 to 256, on cubatch and its rivals: data for rules and predictors.

The buffers are those of the largest batch.  Smaller batches take parts of them in turn, so that data comes from memory
and not from the L2.  Sizes go from coarse to fine: if time ends early, they cover the whole range.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.items import rival_entrants
from cubatch.bench.cases import Case, of_layer
from cubatch.bench.contest import OURS, Contest, Entrant
from cubatch.bench.implementations import Tracer, Way
from cubatch.bench.measure import rotating
from cubatch.bench.rivals import RIVALS, Missing, rivals
from cubatch.bench.target import Target, fill
from cubatch.engine import backend
from cubatch.errors import DeviceFailed
from cubatch.hardware import waves
from cubatch.measure.stopping import median

SECONDS_PER_SIZE = 0.008
MAX_PARTS = 16

COLUMNS = (
    "gpu", "num_sms", "layer", "operation", "pass", "precision", "batch", "h", "w", "c", "k", "r", "s", "stride",
    "pad", "groups", "gflop", "ours_ms", "ours_ms_min", "ours_ms_max", "ours_timings", "ours_kernel", "ours_blocks",
    "ours_busiest_sm_blocks", "ours_fill",
    *(name + ending for name in RIVALS for ending in ("", "_ms", "_ms_min", "_ms_max", "_timings")), "sm_clock_mhz",
)  # fmt: skip
"""Columns of the CSV: times are medians in milliseconds, a multiply-add is two FLOP, `vendor` is the library."""


def coarse_to_fine(largest: int) -> Iterator[int]:
    """
    Order 1 to `largest` so that every beginning covers the range evenly.

    Example:
        >>> list(coarse_to_fine(8))
        [8, 4, 2, 6, 1, 3, 5, 7]
    """
    done: set[int] = set()
    step = 2 ** math.ceil(math.log2(largest))
    while step:
        for size in range(step, largest + 1, step):
            if size not in done:
                done.add(size)
                yield size
        step //= 2


def sweep(whole: Case, target: Target, contest: Contest, *, until: float) -> dict[str, Any]:
    """
    Time one layer pass at every batch size.

    Args:
        whole: The pass of a layer at the largest batch.
        target: Where it runs.
        contest: Times it.
        until: Monotonic time at which it stops.

    Returns:
        dict: "rows" are ascending by batch and have the keys of COLUMNS. "missing" are the sizes without time or with a
            refused kernel. "vendor_algorithm", and that of other rivals, was chosen without timing.
    """
    layer, pass_ = whole.layer, whole.pass_
    if layer is None or pass_ is None:
        raise ValueError("only passes of layers are swept")
    arrays = fill(target.module, whole, seed=0)
    rows, missing = [], []
    for size in coarse_to_fine(whole.batch_size):
        if time.monotonic() > until:
            missing.append(size)
            continue
        try:
            rows.append(_row(of_layer(layer, pass_, size, whole.dtype), arrays, target, contest))
        except DeviceFailed as error:
            if error.is_fatal:
                raise
            missing.append(size)
    return {
        "rows": sorted(rows, key=lambda row: row["batch"]),
        "missing": sorted(missing),
    } | {
        f"{each.name}_algorithm": each.reason
        if isinstance(each, Missing)
        else "the library's own choice, nothing timed"
        for each in rivals(whole, target.module, benchmark=False)
    }


def _row(case: Case, arrays: Mapping[str, Any], target: Target, contest: Contest) -> dict[str, Any]:
    parts = _parts(case, arrays)
    way = Way(case, target.device)
    native = way.operations(Tracer(target.launcher))
    steps = [backend.prepare(case.call, native, part) for part in parts]
    with target.trying(way.main):
        steps[0]()
        target.synchronize()
    entrants = [Entrant(OURS, OURS, rotating(steps))]
    main = max(way.launches, key=lambda launch: launch.blocks)
    entrants += rival_entrants(case, parts, target, benchmark=False)[0]
    contest.run(entrants, SECONDS_PER_SIZE)
    entrants = [entrant for entrant in entrants if entrant.status != "error"]
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= _facts(case, target) | _times(OURS, entrants[0])
    row |= {"ours_kernel": main.kernel.name, "ours_blocks": main.blocks}
    if target.device.num_sms:
        row["ours_busiest_sm_blocks"] = waves.busiest_sm_blocks(main.blocks, target.device.num_sms)
        row["ours_fill"] = waves.fill(main.blocks, target.device.num_sms)
    # The fastest of a side comes last and stays.
    for entrant in sorted(entrants[1:], key=lambda entrant: -(entrant.seconds or math.inf)):
        row |= {entrant.side: entrant.name} | _times(entrant.side, entrant)
    clocks = [t.sm_clock_mhz for entrant in entrants for t in entrant.timings if t.sm_clock_mhz is not None]
    row["sm_clock_mhz"] = median(clocks) if clocks else None
    return row


def _parts(case: Case, arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cut the arrays of the largest batch into parts of this size; arrays without a batch are shared."""
    batched = [name for name, operand in case.operands.items() if operand.is_batched]
    rows = case.operands[batched[0]].shape[0]
    count = min(MAX_PARTS, len(arrays[batched[0]]) // rows)
    lengths = {name: case.operands[name].shape[0] for name in batched}
    return [
        {
            name: array[index * lengths[name] : (index + 1) * lengths[name]] if name in lengths else array
            for name, array in arrays.items()
        }
        for index in range(count)
    ]


def _times(side: str, entrant: Entrant) -> dict[str, Any]:
    seconds = [1e3 * timing.seconds for timing in entrant.used]
    return {
        f"{side}_ms": median(seconds),
        f"{side}_ms_min": min(seconds),
        f"{side}_ms_max": max(seconds),
        f"{side}_timings": len(seconds),
    }


def _facts(case: Case, target: Target) -> dict[str, Any]:
    layer = case.layer
    if layer is None or case.pass_ is None:
        raise ValueError("only passes of layers are swept")
    h, w, c = layer.input_shape
    facts = layer.to_mapping()
    return {
        "gpu": target.device.name, "num_sms": target.device.num_sms, "layer": layer.type, "operation": case.operation,
        "pass": case.pass_.value, "precision": case.dtype, "batch": case.batch_size, "h": h, "w": w, "c": c,
        "k": facts["k"], "r": facts.get("r", 1), "s": facts.get("s", 1), "stride": facts.get("stride", 1),
        "pad": facts.get("pad", 0), "groups": facts.get("groups", 1), "gflop": case.flops / 1e9,
    }  # fmt: skip
