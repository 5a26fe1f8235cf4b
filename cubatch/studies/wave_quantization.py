"""
`waves`: throughput around the batch sizes at which a new wave of work begins.

The founding example: convolutions of 128 channels on Go boards of 19 x 19.  Remi Coulom used the batch sizes at which
every SM has the same number of tiles, `int(n * (1 << 14) * SM / (H * W * C))`: 28, 56, 85, ... on a V100's 80 SMs.
On a CPU, samples are distributed over threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware.waves import busiest_sm_blocks, coulom_batch_size
from cubatch.memory.plan import plan
from cubatch.network.graph import as_network
from cubatch.report.tables.study import signed
from cubatch.studies.size_comparison import answer_slower, list_verdicts
from cubatch.studies.study_request import Findings, Study, StudyRequest
from cubatch.studies.sweep import Sweep, sweep
from cubatch.tuning.wave_peaks import slowest, wave_peaks
from cubatch.workload import Workload

MULTIPLE = 8
FULL_WAVE, PAST_FULL_WAVE = "full wave", "past full wave"
COULOM, POWER, MULTIPLES = "Coulom", "power of two", f"multiple of {MULTIPLE}"
_NUM_FULL_WAVES = 2
_SMALLEST = 4  # the smallest with sizes on both sides
_AROUND = (8, 3)  # sizes measured on each side of a full wave: full and quick
_LIMIT = 1024
_CPU_NOTE = (
    "A CPU has no SMs and no waves of blocks: here samples are distributed over threads, and the others wait for the "
    "busiest thread. The rule is the same, with a full wave at each multiple of the threads; nothing is "
    "measured about blocks on SMs. cubatch occupancy KERNEL --device NAME --model MODEL --sweep batch-size computes "
    "those for any GPU."
)


@attrs.frozen(kw_only=True)
class Distribution:
    """The distribution of a batch's blocks or samples over the SMs or threads of a device."""

    items: str  # name of the pieces of work: "blocks of conv1", "samples"
    unit: str  # "SM" or "thread"
    count: int  # number of units
    busiest: Callable[[int], int]  # pieces of work of the busiest unit, by batch size
    full_waves: tuple[int, ...]  # one or two batch sizes after which the busiest unit has more work, ascending
    coulom: Mapping[int, int]  # batch sizes of Coulom's rule, by their n: the tiles per SM

    def rate(self, batch_size: int) -> float:
        """Return batch size / pieces of work of the busiest unit, which the rule expects throughput to follow."""
        return batch_size / self.busiest(batch_size)


def distribute(work: Workload, limit: int) -> Distribution:
    """Return the distribution of a workload's batches over the device, with the full waves below batch size `limit`."""
    return _over_threads(work, limit) if work.device.kind == "cpu" else _over_sms(work, limit)


def _over_sms(work: Workload, limit: int) -> Distribution:
    num_sms = work.device.num_sms
    if num_sms is None:
        raise InvalidArgument("device", str(work.device), "a GPU whose SMs are known")
    passes = slowest(work, limit)[:1]
    tops = [proposal.batch_size for proposal in wave_peaks(passes, num_sms, limit) if proposal.kind == "crest"]
    tops = sorted(n for n in tops if _SMALLEST <= n < limit)[:_NUM_FULL_WAVES]
    if not tops:
        allowed = f"a network whose slowest layer fills all SMs equally at a batch size from 4 to {limit - 1}"
        raise InvalidArgument("model", work.name, allowed, "Use smaller inputs or a larger --max-batch-size.")
    ((name, blocks),) = passes
    return Distribution(
        items=f"blocks of {name}",
        unit="SM",
        count=num_sms,
        busiest=lambda n: busiest_sm_blocks(blocks(n), num_sms),
        full_waves=tuple(tops),
        coulom=_coulom_sizes(work, num_sms, limit),
    )


def _coulom_sizes(work: Workload, num_sms: int, limit: int) -> dict[int, int]:
    """
    Return Coulom's batch sizes up to `limit`, for the convolution with most FLOP; empty without a convolution.

    The key is n, the number of whole tiles that each of the `num_sms` SMs has at that size.
    """
    convolutions = [node.layer for node in as_network(work.spec).nodes if node.layer.convolution]
    if not convolutions:
        return {}
    h, w, c = max(convolutions, key=lambda layer: layer.flops("inference")).input_shape
    sizes = ((n, coulom_batch_size(n, h=h, w=w, c=c, num_sms=num_sms)) for n in itertools.count(1))
    return {n: size for n, size in itertools.takewhile(lambda item: item[1] <= limit, sizes) if size}


def _over_threads(work: Workload, limit: int) -> Distribution:
    threads = work.device.threads or 1
    levels = (2**k for k in range(1, limit.bit_length()))
    tops = [n for level in levels if _SMALLEST <= (n := level * threads) < limit and plan(work, n).members == threads]
    if threads == 1:
        raise InvalidArgument("device", str(work.device), "a GPU, or a CPU with several threads for this process")
    if not tops:
        allowed = f"a network whose samples {threads} threads share at a batch size below {limit}"
        remedy = "One thread runs short steps alone: use larger inputs or a larger --max-batch-size."
        raise InvalidArgument("model", work.name, allowed, remedy)
    return Distribution(
        items="samples",
        unit="thread",
        count=threads,
        busiest=lambda n: plan(work, n).shard,
        full_waves=tuple(tops[:_NUM_FULL_WAVES]),
        coulom={},
    )


def window(full: int, around: int, limit: int) -> range:
    """
    Return the batch sizes around `full`: min(around, full // 2) on either side, but none above `limit`.

    Example:
        >>> window(28, 8, 1000), window(4, 8, 1000)
        (range(20, 37), range(2, 7))
    """
    reach = min(around, full // 2)
    return range(full - reach, min(full + reach, limit) + 1)


def marks(batch_size: int, distribution: Distribution) -> list[str]:
    """Return the names of the rules that suggest a batch size, such as "full wave" or "power of two"; may be empty."""
    rules = [PAST_FULL_WAVE] if batch_size - 1 in distribution.full_waves else []
    rules += [FULL_WAVE] if batch_size in distribution.full_waves else []
    rules += [f"{COULOM} n={n}" for n, size in distribution.coulom.items() if size == batch_size]
    if not batch_size & (batch_size - 1):
        rules.append(POWER)
    elif batch_size % MULTIPLE == 0:
        rules.append(MULTIPLES)
    return rules


def _pairs(sizes: Sequence[int], distribution: Distribution) -> list[tuple[int, int, str]]:
    """Return (size, full wave, rule) to compare: sizes one past a full wave, and others with the nearest full wave."""
    pairs = [(full + 1, full, PAST_FULL_WAVE) for full in distribution.full_waves]
    for size in sizes:
        full = min(distribution.full_waves, key=lambda top: abs(top - size))
        rules = {mark.partition(" n=")[0] for mark in marks(size, distribution)} - {FULL_WAVE, PAST_FULL_WAVE}
        pairs += [(size, full, rule) for rule in sorted(rules) if size != full]
    return pairs


def conclude(distribution: Distribution, sizes: Sequence[int], swept: Sweep) -> Findings:
    """
    Return the findings on whether batch sizes one past the full waves are slower, and how common rules compare.

    `sizes` are the measured batch sizes, `swept` their measurements and comparisons.
    """
    measured = {m.batch_size: m for m in swept.result.measurements}
    unit, items = distribution.unit, distribution.items
    tops, points = [], []
    for full in distribution.full_waves:
        rule_ratio = distribution.rate(full + 1) / distribution.rate(full)
        seconds = [measured[n].predicted_seconds for n in (full, full + 1)]
        predicted_ratio = (full + 1) * seconds[0] / (full * seconds[1]) if seconds[0] and seconds[1] else None
        busiest = [distribution.busiest(n) for n in (full, full + 1)]
        tops.append(
            {"batch_size": full, "busiest": busiest, "rule_ratio": rule_ratio, "predicted_ratio": predicted_ratio}
        )
        predicted = "" if predicted_ratio is None else f", the time model predicts {signed(predicted_ratio - 1)}"
        points.append(f"{full + 1} vs {full}: the rule expects {signed(rule_ratio - 1)} samples/s{predicted}.")
    for rule in (COULOM, POWER, MULTIPLES):
        of_rule = [c for c in swept.comparisons if c.rule == rule]
        if of_rule:
            points.append(f"{rule[0].upper()}{rule[1:]} vs nearest full wave: {list_verdicts(of_rule)}.")
    first = distribution.full_waves[0]
    scale = (measured[first].samples_per_second or 0) / distribution.rate(first)
    rows = [
        {
            "batch_size": n,
            "busiest": distribution.busiest(n),
            "samples_per_second": measured[n].samples_per_second,
            "interval": measured[n].throughput_interval,
            "predicted": n / step if (step := measured[n].predicted_seconds) else None,
            "rule": scale * distribution.rate(n) or None,
            "marks": marks(n, distribution),
        }
        for n in sizes
    ]
    method = [
        (
            f"The {items} are distributed over {distribution.count} {unit}s. A full wave is the largest batch before "
            f"the busiest {unit} gets more. Every batch around the full waves is measured. The rule in the figure: "
            f"samples/s proportional to the batch over the {items} of the busiest {unit}, drawn through the first full "
            "wave."
        )
    ]
    if distribution.coulom:
        method.append("Coulom's sizes are int(n x 16384 x SMs / (h x w x c)) of the convolution with most FLOP.")
    return swept.findings(
        answer_slower([c for c in swept.comparisons if c.rule == PAST_FULL_WAVE]),
        points,
        method=method,
        notes=[_CPU_NOTE] if unit == "thread" else [],
        distribution={name: getattr(distribution, name) for name in ("items", "unit", "count")},
        full_waves=tops,
        sizes=rows,
    )


def _run(request: StudyRequest, budget: float) -> Findings:
    limit = request.largest(_LIMIT)
    distribution = distribute(request.work, limit)
    sizes = sorted({n for top in distribution.full_waves for n in window(top, _AROUND[request.quick], limit)})
    return conclude(
        distribution, sizes, sweep(request, budget, sizes, rounds=(7, 3), pairs=_pairs(sizes, distribution))
    )


waves = Study(
    title="Does one sample too many cost a wave?",
    question=(
        "A GPU distributes the blocks of a layer over its SMs, and a step lasts as long as the busiest SM. A batch at "
        "which all SMs have the same number of blocks, a full wave, should be fast. One sample more should cost the "
        "time of a block for hardly any work. Remi Coulom chose batch sizes for Go networks by this rule. Is the "
        "size just past a full wave slower, and by how much?"
    ),
    model="go-net",
    modes=("inference",),
    budgets=(600.0, 30.0),
    run=_run,
)
