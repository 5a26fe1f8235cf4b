"""Studies that measure batch sizes equally often and compare them: `powers-of-two`, `small-batch-floor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.errors import InvalidArgument, NothingMeasured
from cubatch.search.events import Event
from cubatch.studies.size_comparison import TOLERANCE, SizeComparison, answer_slower, compare, doubts
from cubatch.studies.study_request import Findings, Study, StudyRequest, tuning_facts
from cubatch.tuning.results import TuningResult
from cubatch.units import format_percent, format_seconds, join_words


@attrs.frozen(kw_only=True)
class Sweep:
    """Batch sizes that were measured equally often, and comparisons of pairs of them."""

    result: TuningResult  # the measurements
    comparisons: Sequence[SizeComparison]  # comparisons of a size with a reference size that have enough trials
    missing: Sequence[tuple[int, int]]  # (size, reference size) of those without enough trials
    rounds: int  # trials of each size, at most

    def findings(
        self, answer: str, points: Sequence[str], *, method: Sequence[str] = (), notes: Sequence[str] = (),
        **details: Any,
    ) -> Findings:  # fmt: skip
        """
        Return the findings of a study with its answer, further sentences (`points`), and numbers of the comparisons.

        `method` and `notes` are paragraphs for the page, `details` further numbers in JSON form by name.
        """
        measured = {
            "tolerance": TOLERANCE,
            "rounds": self.rounds,
            "comparisons": [c.to_mapping() for c in self.comparisons],
            "missing": [list(pair) for pair in self.missing],
        }
        return Findings(
            facts=tuning_facts(self.result),
            answer=answer,
            points=[*points, *doubts(self.comparisons, self.missing)],
            method=[*_method(self.rounds), *method],
            notes=notes,
            details=measured | details | {"result": self.result.to_mapping()},
        )


def sweep(
    request: StudyRequest,
    budget: float,  # seconds of measuring
    sizes: Iterable[int],
    *,
    rounds: tuple[int, int],  # trials of each size, at most: of the full and of the quick study
    # sizes to compare: the size, its reference, and the rule by which they are compared
    pairs: Iterable[tuple[int, int, str]] = (),
) -> Sweep:
    """Measure batch sizes equally often; return the result, and comparisons of the throughput of `pairs`."""
    count = rounds[request.quick]

    def watch(event: Event) -> None:
        request.show(event.done, event.total, event.message, "s")

    result = request.tune(
        budget=budget, batch_sizes=sorted(sizes), sweeps=count, tolerance=TOLERANCE, progress=watch
    )  # fmt: skip
    measured = {m.batch_size: m for m in result.measurements}
    compared = {pair: compare(measured[pair[0]], measured[pair[1]], rule=pair[2]) for pair in pairs}
    return Sweep(
        result=result,
        comparisons=[c for c in compared.values() if c is not None],
        missing=[(size, reference) for (size, reference, _), c in compared.items() if c is None],
        rounds=count,
    )


def _method(rounds: int) -> list[str]:
    return [
        (
            f"Every size has one trial in each of up to {rounds} rounds, in random order, so that drift affects "
            "all sizes alike. A trial warms up and takes a few timings; its median counts."
        ),
        (
            "Two sizes are compared by the ratio of their samples per second, with a 90 % confidence interval by the "
            "method of Hodges and Lehmann, which assumes no distribution of the noise. One is called faster or slower "
            f"if the interval excludes 0 % and the difference exceeds {format_percent(TOLERANCE)}."
        ),
    ]


# --- powers-of-two ------------------------------------------------------------------------------------------------

PUBLISHED = {127: "same", 129: "same", 100: "slower", 156: "faster", 255: "same", 257: "same", 511: "same", 513: "same"}
"""Verdicts of the published comparison, relative to the nearest power of two."""
_PUBLISHED_MODEL = "mobilenet-v3-large"
_PUBLISHED_POWERS, _FEWEST = (128, 256, 512), 3
_PUBLISHED_OTHERS = {128: (100, 156)}  # published besides the neighbors
_PUBLISHED_NOTE = (
    "One published comparison trained this network on a V100 in float16 with images of 224 x 224: 127 and 129 took as "
    "long as 128 within about 1 %, 511 and 513 as long as 512 within 0.3 %; 100 was clearly slower, 156 faster. Each "
    "size ran once, one after the other. The table lists its verdicts; device, engine and data type may differ."
)


def powers_and_neighbors(limit: int) -> dict[int, tuple[int, ...]]:
    """
    Return, by power of two, the batch sizes that are compared with this power.

    The powers are those from 128 to `limit` - 1; if these are fewer than three, the three largest from 4 on.
    A limit below 5 raises InvalidArgument.

    Example:
        >>> powers_and_neighbors(513)
        {128: (100, 127, 129, 156), 256: (255, 257), 512: (511, 513)}
        >>> powers_and_neighbors(33)
        {8: (7, 9), 16: (15, 17), 32: (31, 33)}
    """
    powers = [2**k for k in range(2, limit.bit_length()) if 2**k + 1 <= limit]
    if not powers:
        remedy = "Raise it, or give more memory if that is the limit."
        raise InvalidArgument("max_batch_size", limit, "at least 5", remedy)
    chosen = [power for power in powers if power >= _PUBLISHED_POWERS[0]]
    chosen = chosen if len(chosen) >= _FEWEST else powers[-_FEWEST:]
    return {
        power: tuple(sorted((power - 1, power + 1, *(n for n in _PUBLISHED_OTHERS.get(power, ()) if n <= limit))))
        for power in chosen
    }


def _run_powers(request: StudyRequest, budget: float) -> Findings:
    groups = powers_and_neighbors(request.largest(_PUBLISHED_POWERS[-1] + 1))
    published = PUBLISHED if (request.model.lower(), request.mode) == (_PUBLISHED_MODEL, "training") else {}
    pairs = [(n, power, "") for power, others in groups.items() for n in others]
    swept = sweep(request, budget, {*groups, *(n for n, _, _ in pairs)}, rounds=(11, 5), pairs=pairs)
    comparisons = swept.comparisons
    differing = [
        str(c.batch_size)
        for c in comparisons
        if c.verdict != "unclear" and published.get(c.batch_size, c.verdict) != c.verdict
    ]
    return swept.findings(
        answer_slower([c for c in comparisons if abs(c.batch_size - c.reference) == 1]),
        [f"Unlike what was published: {join_words(differing)}."] if differing else [],
        notes=[_PUBLISHED_NOTE] if published else [],
        comparisons=[c.to_mapping() | {"published": published.get(c.batch_size)} for c in comparisons],
    )


powers_of_two = Study(
    title="Is a power of two faster?",
    question=(
        "Many people train with batches of 32, 64, 128: powers of two reportedly suit memory pages, alignment and "
        "the hardware's units. If that were so, the neighbors of a power of two, such as 127 and 129, would be clearly "
        "slower per sample. Are they?"
    ),
    model=_PUBLISHED_MODEL,
    modes=("training",),
    budgets=(600.0, 30.0),
    run=_run_powers,
)

# --- small-batch-floor --------------------------------------------------------------------------------------------

FREE = 0.1
"""A step that takes at most this share longer than a step of one sample counts as equally long."""
_DISTURBED = 2.0  # times a step of a larger size: no claim rests on such times
_FLOOR_LIMITS = (1024, 64)


def floor_of(seconds: Mapping[int, float]) -> dict[str, int | None]:
    """
    Return the three batch sizes that bound the ranges of constant step time and of nearly best throughput.

    NothingMeasured is raised without size 1.

    Returns:
        "floor", the largest size up to which every step takes at most 1.1 times as long as a step of one sample; None
        if a step of one sample is itself slower than a larger one, or any step takes more than twice as long as a
        larger one. "half", the smallest size with at least half of the best samples per second (Hockney's n1/2: Hockney
        and Jesshope, Parallel Computers, 1981). "enough", the smallest size within 5 % of the best.

    Example:
        >>> floor_of({n: 1.0 + n / 100 for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)})
        {'floor': 8, 'half': 128, 'enough': 2048}
    """
    if 1 not in seconds:
        raise NothingMeasured("no step of a single sample was measured", "Raise budget.")
    sizes, rates = sorted(seconds), {n: n / step for n, step in seconds.items()}
    best = max(rates.values())
    slow = [n for n in sizes if seconds[n] > (1 + FREE) * seconds[1]]
    least = _least_from(seconds)
    is_floor = all(seconds[n] <= (1 + FREE if n == 1 else _DISTURBED) * seconds[least[n]] for n in sizes)
    return {
        "floor": max(n for n in sizes if n < min(slow, default=sizes[-1] + 1)) if is_floor else None,
        "half": min(n for n in sizes if rates[n] >= best / 2),
        "enough": min(n for n in sizes if rates[n] >= 0.95 * best),
    }


def _least_from(seconds: Mapping[int, float]) -> dict[int, int]:
    """Return, by batch size, the size with the shortest step among itself and the larger ones."""
    return {n: min((m for m in seconds if m >= n), key=lambda m: (seconds[m], m)) for n in seconds}


def answer_floor(floor: int | None, seconds: Mapping[int, float]) -> str:
    """
    Return a sentence on `floor`, the largest batch size whose step takes as long as the step of a single sample.

    `floor` is None if a larger step was faster, and `seconds` are those of a step by batch size: see `floor_of`.
    """
    if floor is None:
        least = _least_from(seconds)
        n = max(seconds, key=lambda n: seconds[n] / seconds[least[n]])
        return (
            f"Unknown: a step of {n} took {format_seconds(seconds[n])}, longer than a step of {least[n]} "
            f"({format_seconds(seconds[least[n]])}). Measure again on an idle machine, or another algorithm runs there."
        )
    if floor > 1:
        return f"Below batch {floor}: a step of one sample takes as long, within {format_percent(FREE)}."
    if 2 * floor in seconds:
        return "There is no such batch: a step of two samples takes clearly longer than a step of one."
    return "Unknown: batch 2 was not measured. A larger --budget or --max-batch-size may allow it."


def _run_floor(request: StudyRequest, budget: float) -> Findings:
    limit = request.largest(_FLOOR_LIMITS[request.quick])
    swept = sweep(request, budget, [2**k for k in range(limit.bit_length())], rounds=(7, 3))
    seconds = {m.batch_size: m.latency_seconds for m in swept.result.measurements if m.latency_seconds is not None}
    sizes = floor_of(seconds)
    points = [
        f"A step of one sample takes {format_seconds(seconds[1])}.",
        f"Batch {sizes['half']} is the smallest measured with half of the best samples/s or more (Hockney's n1/2).",
        f"Of the measured sizes, batch {sizes['enough']} is the smallest within 5 % of the best."
        + (" It is the largest measured: --max-batch-size." if sizes["enough"] == max(seconds) else ""),
    ]
    method = ["Only powers of two are measured: the floor may lie up to twice as high."]
    return swept.findings(answer_floor(sizes["floor"], seconds), points, method=method, **dict[str, Any](sizes))


small_batch_floor = Study(
    title="Below which batch is nothing gained?",
    question=(
        "A step of a few samples does not fill a machine of many cores: calls, launches and waiting take a fixed "
        "time. Up to some size a step takes as long as a step of one sample, so a smaller batch saves nothing. Which "
        "size is that, and from which size on does a larger batch gain nothing any more?"
    ),
    model="mnist-cnn",
    modes=("inference",),
    budgets=(300.0, 20.0),
    run=_run_floor,
)
