"""
`waves`: does throughput fall where one sample too many begins a new wave?

The founding example: convolutions of 128 channels on Go boards of 19 x 19.  Remi Coulom took the batch sizes at which
every SM gets the same number of tiles, `int(n * (1 << 14) * SM / (H * W * C))`: 28, 56, 85, ... on a V100's 80 SMs.
On a CPU it is samples that are dealt out, to threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware.waves import busiest_sm_blocks, coulom_batch_size
from cubatch.memory.plan import plan
from cubatch.network.graph import as_network
from cubatch.report.tables.common import joined
from cubatch.report.tables.study import signed
from cubatch.studies.asked import Asked, shared
from cubatch.studies.comparison import TOLERANCE, Comparison, compare, is_wide
from cubatch.tuning.crests import crests, slowest
from cubatch.tuning.results import Measurement
from cubatch.units import format_percent
from cubatch.workload import Workload

TITLE = "Does one sample too many cost a wave?"
DEFAULT_MODEL = "go-net"
MODES = ("inference",)
SWEEPS, QUICK_SWEEPS = 7, 3
MULTIPLE = 8
POWER, MULTIPLES, COULOM = "power of two", f"multiple of {MULTIPLE}", "Coulom"
CREST, PAST = "crest", "past crest"
_CRESTS = 2
_AROUND, _QUICK_AROUND = 8, 3
_MOST = 1024
_LEAST = 4  # the smallest crest with sizes on both sides
_USUAL_SECONDS, _QUICK_SECONDS = 600.0, 30.0

QUESTION = (
    "A GPU deals the blocks of a layer out to its SMs, and a step lasts as long as the busiest SM. So a batch at which "
    "all SMs have the same number of blocks, a crest, should be fast, and one sample more should cost a block of time "
    "for hardly any work. Remi Coulom chose batch sizes for Go networks by this rule. Does it hold, and by how much?"
)
_ON_A_CPU = (
    "A CPU has no SMs, and no waves of blocks: here it is samples that are dealt out to threads, and the busiest "
    "thread for which the others wait. It is the same rule with other numbers, and a crest at each multiple of the "
    "threads; what it says of blocks on SMs is not measured here. cubatch occupancy KERNEL --device NAME --model MODEL "
    "--sweep batch-size works those out for any GPU."
)


@attrs.frozen(kw_only=True)
class Dealt:
    """
    How the work of a batch is dealt out.

    Attributes:
        what: That is dealt out: "blocks of conv1", "samples".
        to: To whom: "SM", "thread".
        count: Of these.
        busiest: What the busiest has, by batch size.
        crests: Two batch sizes after which the busiest has more, ascending; one, where there is no second.
        coulom: Batch sizes of Coulom's rule, by their n.
    """

    what: str
    to: str
    count: int
    busiest: Callable[[int], int]
    crests: tuple[int, ...]
    coulom: Mapping[int, int]

    def rate(self, batch_size: int) -> float:
        """Give the samples for each piece of the busiest: what throughput is proportional to, by the rule."""
        return batch_size / self.busiest(batch_size)


def dealt_out(work: Workload, limit: int) -> Dealt:
    """
    Say how a batch is dealt out on a device, and where its crests are.

    Args:
        work: What is run.
        limit: The largest batch to look at.

    Raises:
        InvalidArgument: If nothing is dealt out, or there is no crest below the limit.

    Example:
        >>> work = Workload.of("go-net", "v100-sxm2-16gb", mode="inference", dtype="float32", library="im2col")
        >>> found = dealt_out(work, 1000)
        >>> found.what, found.crests, [found.busiest(n) for n in (28, 29, 56, 57)]
        ('blocks of conv1', (28, 56), [1, 2, 2, 3])
        >>> found.coulom[3]
        85
    """
    return _to_threads(work, limit) if work.device.kind == "cpu" else _to_sms(work, limit)


def _to_sms(work: Workload, limit: int) -> Dealt:
    num_sms = work.device.num_sms
    if num_sms is None:
        raise InvalidArgument("device", str(work.device), "a GPU whose SMs are known")
    passes = slowest(work, limit)[:1]
    found = [one.batch_size for one in crests(passes, num_sms, limit) if one.kind == "crest"]
    tops = tuple(sorted(n for n in found if _LEAST <= n < limit))[:_CRESTS]
    if not tops:
        wanted = f"a network with a crest from {_LEAST} to {limit - 1}, where its slowest layer fills all SMs alike"
        raise InvalidArgument("model", work.name, wanted, "Smaller inputs, or a larger --max-batch-size, may have one.")
    ((name, blocks),) = passes
    return Dealt(
        what=f"blocks of {name}", to="SM", count=num_sms, busiest=lambda n: busiest_sm_blocks(blocks(n), num_sms),
        crests=tops, coulom=_of_coulom(work, num_sms, limit),
    )  # fmt: skip


def _of_coulom(work: Workload, num_sms: int, limit: int) -> dict[int, int]:
    """Give Coulom's sizes of the convolution with most FLOP, by their n."""
    convolutions = [node.layer for node in as_network(work.spec).nodes if node.layer.convolution]
    if not convolutions:
        return {}
    h, w, c = max(convolutions, key=lambda layer: layer.flops("inference")).input_shape
    sizes = ((n, coulom_batch_size(n, h=h, w=w, c=c, num_sms=num_sms)) for n in itertools.count(1))
    return {n: size for n, size in itertools.takewhile(lambda found: found[1] <= limit, sizes) if size}


def _to_threads(work: Workload, limit: int) -> Dealt:
    threads = work.device.threads or 1
    levels = (2**k for k in range(1, limit.bit_length()))
    tops = [n for level in levels if _LEAST <= (n := level * threads) < limit and plan(work, n).members == threads]
    if threads == 1 or not tops:
        wanted = f"one whose samples several threads share, at some batch below {limit}"
        remedy = f"This CPU has {threads} threads; of short steps they would wait for each other, so one does them."
        raise InvalidArgument("model", work.name, wanted, remedy)
    return Dealt(
        what="samples", to="thread", count=threads, busiest=lambda n: plan(work, n).shard,
        crests=tuple(tops[:_CRESTS]), coulom={},
    )  # fmt: skip


def study(asked: Asked) -> dict[str, Any]:
    """
    Measure every batch around two crests, and say whether they are.

    Raises:
        InvalidArgument: If nothing is dealt out, or there is no crest that fits.
        CubatchError: Whatever `autotune` raises.
    """
    limit = asked.largest(_MOST)
    dealt = dealt_out(asked.work, limit)
    around = _QUICK_AROUND if asked.quick else _AROUND
    windows = [window(crest, around, limit) for crest in dealt.crests]
    sizes = sorted({n for those in windows for n in those})
    sweeps = QUICK_SWEEPS if asked.quick else SWEEPS
    result = asked.swept(sizes, sweeps, budget=asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS), tolerance=TOLERANCE)
    by_size = {m.batch_size: m for m in result.measurements}
    tops = [_crest(by_size, dealt, those, crest) for those, crest in zip(windows, dealt.crests, strict=True)]
    rows = [_row(by_size[n], dealt, by_size[dealt.crests[0]]) for n in sizes]
    return {
        **shared(result),
        "title": TITLE,
        "question": [QUESTION, *([_ON_A_CPU] if dealt.to == "thread" else [])],
        "method": _method(dealt, sweeps),
        "answer": answer(tops),
        "points": points(tops, marked(by_size, dealt)),
        "tolerance": TOLERANCE,
        "sweeps": sweeps,
        "dealt": {"what": dealt.what, "to": dealt.to, "count": dealt.count},
        "crests": tops,
        "sizes": rows,
        "result": result.to_mapping(),
    }


def window(crest: int, around: int, limit: int) -> range:
    """
    Give the sizes around a crest: so many on either side, and at most half of it.

    Example:
        >>> window(28, 8, 1000), window(4, 8, 1000)
        (range(20, 37), range(2, 7))
    """
    reach = min(around, crest // 2)
    return range(crest - reach, min(crest + reach, limit) + 1)


def _crest(by_size: Mapping[int, Measurement], dealt: Dealt, those: Sequence[int], crest: int) -> dict[str, Any]:
    """Say of a crest whether it beats the size just past it, and what is fastest around it."""
    past = crest + 1
    found = compare(by_size[crest], by_size[past])
    rates = {n: rate for n in those if (rate := by_size[n].samples_per_second) is not None}
    expected = [by_size[n].predicted_seconds for n in (crest, past)]
    top = max(rates, key=lambda n: rates[n], default=None)
    return {
        "batch_size": crest,
        "past": past,
        "busiest": [dealt.busiest(crest), dealt.busiest(past)],
        "rule_ratio": dealt.rate(crest) / dealt.rate(past),
        "predicted_ratio": crest * expected[1] / (past * expected[0]) if expected[0] and expected[1] else None,
        "comparison": None if found is None else _plain(found),
        "fastest": top,
        "fastest_beside": _beside(by_size, top, crest),
    }


def _beside(by_size: Mapping[int, Measurement], size: int | None, crest: int) -> dict[str, Any] | None:
    found = None if size is None else compare(by_size[size], by_size[crest])
    return None if found is None else _plain(found)


def _plain(found: Comparison) -> dict[str, Any]:
    return attrs.asdict(found) | {"interval": list(found.interval), "visits": list(found.visits)}


def _row(m: Measurement, dealt: Dealt, first: Measurement) -> dict[str, Any]:
    """Give a size's rates, as measured, as predicted, and by the rule from the rate of the first crest."""
    by_rule = None
    if first.samples_per_second is not None:
        by_rule = first.samples_per_second * dealt.rate(m.batch_size) / dealt.rate(first.batch_size)
    return {
        "batch_size": m.batch_size,
        "busiest": dealt.busiest(m.batch_size),
        "samples_per_second": m.samples_per_second,
        "interval": m.throughput_interval,
        "predicted": m.batch_size / m.predicted_seconds if m.predicted_seconds else None,
        "rule": by_rule,
        "marks": marks(m.batch_size, dealt),
    }


def marks(batch_size: int, dealt: Dealt) -> list[str]:
    """Name what a batch size is: a crest, a power of two, a multiple of 8, one of Coulom's."""
    found = [f"{COULOM} n={n}" for n, size in dealt.coulom.items() if size == batch_size]
    if batch_size in dealt.crests:
        found.insert(0, CREST)
    if batch_size - 1 in dealt.crests:
        found.insert(0, PAST)
    if not batch_size & (batch_size - 1):
        found.append(POWER)
    elif batch_size % MULTIPLE == 0:
        found.append(MULTIPLES)
    return found


def marked(by_size: Mapping[int, Measurement], dealt: Dealt) -> dict[str, list[dict[str, Any]]]:
    """Compare sizes of common rules with the nearest crest, by rule: powers of two, multiples of 8, Coulom's."""
    found: dict[str, list[dict[str, Any]]] = {}
    for size, measured in by_size.items():
        crest = min(dealt.crests, key=lambda top: abs(top - size))
        for mark in marks(size, dealt):
            rule = mark.partition(" n=")[0]
            one = None if rule in {CREST, PAST} else compare(measured, by_size[crest])
            if one is not None:
                found.setdefault(rule, []).append(_plain(one) | {"is_crest": size == crest})
    return found


def answer(tops: Sequence[Mapping[str, Any]]) -> str:
    """
    Say whether crests are faster than what lies just past them.

    Example:
        >>> holds = {"verdict": "faster", "ratio": 1.4, "interval": [1.35, 1.45]}
        >>> tops = [{"batch_size": 28, "past": 29, "comparison": holds, "rule_ratio": 1.93, "predicted_ratio": None}]
        >>> answer(tops)
        'Yes: batch 28 has 40.0 % more samples/s than 29 (90 % interval +35.0 % to +45.0 %).'
    """
    known = [top for top in tops if top["comparison"]]
    if not known:
        return "Not known: the budget held too few visits. With a larger --budget the study goes on."
    verdicts = {_verdict(top) for top in known}
    words = {"faster": "Yes", "open": "Not known well"}
    word = words.get(verdicts.pop(), "No") if len(verdicts) == 1 else "It depends"
    return f"{word}: {'; '.join(_compared(top) for top in known)}."


def _verdict(top: Mapping[str, Any]) -> str:
    """Give the verdict, or "open" where both no difference and that of the rule are within the interval."""
    found = top["comparison"]
    is_open = found["verdict"] == "same" and is_wide(found["interval"]) and found["interval"][1] >= top["rule_ratio"]
    return "open" if is_open else str(found["verdict"])


def _compared(top: Mapping[str, Any]) -> str:
    found = top["comparison"]
    low, high = (signed(end - 1) for end in found["interval"])
    sure = f"(90 % interval {low} to {high})"
    if _verdict(top) == "open":
        return (
            f"batch {top['batch_size']} cannot be told from {top['past']} {sure}, nor is what the rule says ruled out"
        )
    if found["verdict"] == "same":
        return f"batch {top['batch_size']} is as fast as {top['past']} {sure}"
    by = format_percent(abs(found["ratio"] - 1)) + (" more" if found["verdict"] == "faster" else " less")
    return f"batch {top['batch_size']} has {by} samples/s than {top['past']} {sure}"


def points(tops: Sequence[Mapping[str, Any]], common: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Say what the rule and the model expect, what is fastest around each crest, and how common rules fare."""
    lines = []
    for top in tops:
        more = format_percent(top["rule_ratio"] - 1)
        text = f"By the rule alone batch {top['batch_size']} would have {more} more than {top['past']}"
        if top["predicted_ratio"] is not None:
            text += f", by the model of time {format_percent(top['predicted_ratio'] - 1)}"
        lines.append(f"{text}.")
        best = top["fastest_beside"]
        if best and best["verdict"] == "faster":
            gain = format_percent(best["ratio"] - 1)
            lines.append(f"Around {top['batch_size']} the fastest is {top['fastest']}, {gain} above the crest.")
        elif best:
            lines.append(f"Around {top['batch_size']} no size is faster than the crest by more than noise.")
    for rule, those in common.items():
        told = joined([f"{one['batch_size']} {_fares(one)}" for one in those])
        lines.append(f"{_HEADS[rule]}, beside the nearest crest: {told}.")
    return lines


def _fares(one: Mapping[str, Any]) -> str:
    if one["is_crest"]:
        return "is the crest"
    if one["verdict"] != "same":
        return f"is {one['verdict']} by {format_percent(abs(one['ratio'] - 1))}"
    return "cannot be told from it" if is_wide(one["interval"]) else "is as fast"


_HEADS = {COULOM: "Coulom's sizes", POWER: "Powers of two", MULTIPLES: f"Other multiples of {MULTIPLE}"}


def _method(dealt: Dealt, sweeps: int) -> list[str]:
    lines = [
        (
            f"{dealt.what[0].upper()}{dealt.what[1:]} are dealt out to {dealt.count} {dealt.to}s; a crest is the "
            f"largest batch at which the busiest {dealt.to} has no more than before. Every batch around two crests is "
            f"visited once in each of up to {sweeps} sweeps, in an order that is shuffled anew, so that heat and drift "
            "meet all sizes alike."
        ),
        (
            "The medians of the visits to a crest and to the size just past it are compared, with a 90 % interval by "
            f"the method of Hodges and Lehmann; less than {format_percent(TOLERANCE)} apart they are called as fast."
        ),
        (
            f"The rule in the figure: samples/s in proportion to the batch over the {dealt.what} of the busiest "
            f"{dealt.to}, drawn through the first crest."
        ),
    ]
    if dealt.coulom:
        lines.append("Coulom's sizes are int(n x 16384 x SMs / (h x w x c)) of the convolution with most FLOP.")
    elif dealt.to == "thread":
        lines.append("Coulom's rule counts SMs: there is none of its sizes on a CPU.")
    return lines
