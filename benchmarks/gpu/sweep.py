"""
One layer pass at every batch size from 1 to 256, ours and its rivals: the data that rules and predictors are held to.

The buffers are those of the largest batch; smaller ones take parts of them in turn, so that data comes from
memory and not from the L2.  Sizes go from coarse to fine: cut off early, what there is covers the whole range.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cubatch.bench.cases import Case, of_layer
from cubatch.bench.contest import Contest, Entrant
from cubatch.bench.guard import Guarded, begun
from cubatch.bench.implementations import Tracer, Way
from cubatch.bench.records import OURS
from cubatch.bench.rivals import RIVALS, Missing, Rival, rivals
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
"""Of the CSV; times are medians of a step in milliseconds, a multiply-add is two FLOP; `vendor` is its library."""


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
        whole: A layer's pass at the largest batch.
        target: Where.
        contest: What times it.
        until: When to stop, by `time.monotonic()`.

    Returns:
        dict: "rows", ascending by batch, with the keys of COLUMNS; "missing", the sizes that did not fit the time or
        whose kernel was refused;
        "vendor_algorithm" and that of every other rival, since timing cuDNN's algorithms at every size would take far
        longer than the sweep.
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
            rows.append(_one(of_layer(layer, pass_, size, whole.dtype), arrays, target, contest))
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


def _one(case: Case, arrays: Mapping[str, Any], target: Target, contest: Contest) -> dict[str, Any]:
    parts = _parts(case, arrays)
    way = Way(case, target.device)
    native = way.operations(Tracer(target.launcher))
    steps = [backend.prepare(case.call, native, part) for part in parts]
    with target.trying(way.main):
        steps[0]()
        target.synchronize()
    ours = Entrant(OURS, OURS, _turns(steps))
    main = max(way.launches, key=lambda launch: launch.blocks)
    theirs: list[tuple[Entrant, Guarded]] = []
    for each in rivals(case, target.module, benchmark=False):
        if isinstance(each, Rival):
            step = begun(lambda each=each: _turns([each.bind(part) for part in parts]), target)
            if isinstance(step, Guarded):
                theirs.append((Entrant(each.library, each.name, step), step))
    contest.run([ours, *(entrant for entrant, _ in theirs)], SECONDS_PER_SIZE)
    entrants = [ours, *(entrant for entrant, step in theirs if not step.failure)]
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= _facts(case, target) | _times(OURS, entrants[0])
    row |= {"ours_kernel": main.kernel.name, "ours_blocks": main.blocks}
    if target.device.num_sms:
        row["ours_busiest_sm_blocks"] = waves.busiest_sm_blocks(main.blocks, target.device.num_sms)
        row["ours_fill"] = waves.fill(main.blocks, target.device.num_sms)
    for entrant in sorted(entrants[1:], key=lambda one: -(one.seconds or math.inf)):  # of a side the fastest stays
        row |= {entrant.side: entrant.name} | _times(entrant.side, entrant)
    clocks = [t.sm_clock_mhz for entrant in entrants for t in entrant.timings if t.sm_clock_mhz is not None]
    row["sm_clock_mhz"] = median(clocks) if clocks else None
    return row


def _parts(case: Case, arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cut the arrays of the largest batch into parts of this one's size; what has no batch is shared."""
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


def _turns(steps: list[Callable[[], object]]) -> Callable[[], None]:
    cycle = itertools.cycle(steps)

    def step() -> None:
        next(cycle)()

    return step


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
