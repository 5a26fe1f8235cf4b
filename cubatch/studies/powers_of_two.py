"""
`powers-of-two`: is a batch of 128 faster than one of 127 or 129?

The published case: MobileNetV3 on CIFAR-10 resized to 224 x 224, float16, one V100, 10 epochs a size, each run once and
back to back.  Batch 127, 128 and 129 took the same time within about 1 %, 511, 512 and 513 within 0.3 %, 100 was
clearly slower, 156 faster; on four GPUs 255, 256 and 257 were alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.errors import InvalidArgument
from cubatch.report.tables.common import joined
from cubatch.studies.asked import Asked, shared
from cubatch.studies.comparison import TOLERANCE, WIDE, Comparison, compare, is_wide
from cubatch.units import format_percent

TITLE = "Is a power of two faster?"
DEFAULT_MODEL = "mobilenet-v3-large"
MODES = ("training",)
SWEEPS, QUICK_SWEEPS = 11, 5
_USUAL_SECONDS, _QUICK_SECONDS = 600.0, 30.0
_PUBLISHED_POWERS, _FEWEST = (128, 256, 512), 3
_OTHERS = {128: (100, 156)}  # what was published beside the neighbours
_SMALLEST = 4
PUBLISHED = {127: "same", 129: "same", 100: "slower", 156: "faster", 255: "same", 257: "same", 511: "same", 513: "same"}

QUESTION = (
    "Many people train with batches of 32, 64, 128: powers of two are said to suit memory pages, alignment and the "
    "hardware's units. If that were so, a batch of 128 would take clearly less time for each sample than one of 127 or "
    "129."
)


def sizes_of(limit: int) -> dict[int, tuple[int, ...]]:
    """
    Choose powers of two, and the sizes that each is compared with.

    These are 128, 256, 512 and what follows, as far as the limit goes, but at least the three largest below it.

    Raises:
        InvalidArgument: If there is no power of two of at least 4 with both neighbours.

    Example:
        >>> sizes_of(513)
        {128: (100, 127, 129, 156), 256: (255, 257), 512: (511, 513)}
        >>> sizes_of(33)
        {8: (7, 9), 16: (15, 17), 32: (31, 33)}
    """
    powers = [2**k for k in range(2, limit.bit_length()) if 2**k + 1 <= limit]
    if not powers:
        raise InvalidArgument(
            "max_batch_size", limit, f"at least {_SMALLEST + 1}", "Nothing larger fits, or is allowed."
        )
    chosen = [power for power in powers if power >= _PUBLISHED_POWERS[0]]
    chosen = chosen if len(chosen) >= _FEWEST else powers[-_FEWEST:]
    return {
        power: tuple(sorted((power - 1, power + 1, *(n for n in _OTHERS.get(power, ()) if n <= limit))))
        for power in chosen
    }


def study(asked: Asked) -> dict[str, Any]:
    """
    Measure powers of two and their neighbours, and compare them.

    Raises:
        InvalidArgument: If no power of two of at least 4 fits with its neighbours.
        CubatchError: Whatever `autotune` raises.
    """
    groups = sizes_of(asked.largest(_PUBLISHED_POWERS[-1] + 1))
    sizes = sorted({*groups, *(n for others in groups.values() for n in others)})
    sweeps = QUICK_SWEEPS if asked.quick else SWEEPS
    result = asked.swept(sizes, sweeps, budget=asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS), tolerance=TOLERANCE)
    by_size = {m.batch_size: m for m in result.measurements}
    found = {(n, power): compare(by_size[n], by_size[power]) for power, others in groups.items() for n in others}
    is_published = asked.model.lower() == DEFAULT_MODEL and asked.mode == "training"
    comparisons = [
        _plain(one) | {"published": PUBLISHED.get(one.batch_size) if is_published else None}
        for one in found.values()
        if one is not None
    ]
    unknown = [list(pair) for pair, one in found.items() if one is None]
    return {
        **shared(result),
        "title": TITLE,
        "question": [QUESTION, *([_PUBLISHED] if is_published else [])],
        "method": _method(sweeps),
        "answer": answer(comparisons),
        "points": points(comparisons, unknown),
        "tolerance": TOLERANCE,
        "sweeps": sweeps,
        "comparisons": comparisons,
        "unknown": unknown,
        "result": result.to_mapping(),
    }


def _plain(one: Comparison) -> dict[str, Any]:
    return {
        "batch_size": one.batch_size, "power": one.beside, "ratio": one.ratio, "interval": one.interval,
        "visits": one.visits, "verdict": one.verdict,
    }  # fmt: skip


_PUBLISHED = (
    "One published comparison trained this network on a V100 in float16 with images of 224 x 224: 127 and 129 took as "
    "long as 128 within about 1 %, 511 and 513 as long as 512 within 0.3 %; 100 was clearly slower, 156 faster. Each "
    "size ran once, one after the other. Its verdicts stand beside ours; device, engine and type may differ."
)


def _method(sweeps: int) -> list[str]:
    return [
        (
            f"Every size is visited once in each of up to {sweeps} sweeps, in an order that is shuffled anew, so that "
            "heat and drift meet all sizes alike. A visit warms up and takes a handful of timings."
        ),
        (
            "The medians of the visits to two sizes are compared: shown are the ratio of their samples per second and "
            "a 90 % interval for it, by the method of Hodges and Lehmann, which assumes no kind of noise."
        ),
        (
            "A size is called faster or slower if the interval does not hold 0 % and the ratio is further from it than "
            f"{format_percent(TOLERANCE)}; else they are called the same."
        ),
        "Of ten such intervals one may miss the truth by chance.",
    ]


def answer(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """
    Say what the neighbours of the powers of two tell.

    Example:
        >>> seven = {"batch_size": 7, "power": 8, "verdict": "same", "interval": (0.99, 1.01)}
        >>> answer([seven])
        'No: 7 are as fast as the powers of two beside them.'
        >>> answer([seven, {"batch_size": 9, "power": 8, "verdict": "slower"}])
        'It depends: of the neighbours of powers of two 7 is as fast; 9 is slower.'
    """
    near = [c for c in comparisons if abs(c["batch_size"] - c["power"]) == 1]
    named = {
        verdict: [str(c["batch_size"]) for c in near if c["verdict"] == verdict]
        for verdict in ("same", "faster", "slower")
    }
    if not near:
        return "Not known: the budget held too few visits. With a larger --budget the study goes on."
    if len(named["same"]) == len(near):
        if any(is_wide(c["interval"]) for c in near):
            return (
                f"No difference shows, though not all is known well: {joined(named['same'])} beside the powers of two."
            )
        return f"No: {joined(named['same'])} are as fast as the powers of two beside them."
    if len(named["slower"]) == len(near):
        return f"Yes, here: {joined(named['slower'])} are slower than the powers of two beside them."
    words = {"same": "as fast", "faster": "faster", "slower": "slower"}
    parts = [
        f"{joined(those)} {'is' if len(those) == 1 else 'are'} {words[verdict]}"
        for verdict, those in named.items()
        if those
    ]
    return f"It depends: of the neighbours of powers of two {'; '.join(parts)}."


def points(comparisons: Sequence[Mapping[str, Any]], unknown: Sequence[Sequence[int]]) -> list[str]:
    """Say what stands out: sizes that differ and by how much, what is hardly known, what is not."""
    lines = [
        f"Batch {c['batch_size']} is {format_percent(abs(c['ratio'] - 1))} {c['verdict']} than {c['power']}."
        for c in comparisons
        if c["verdict"] in {"faster", "slower"}
    ]
    wide = [c for c in comparisons if c["verdict"] == "same" and is_wide(c["interval"])]
    if wide:
        sizes = joined([str(c["batch_size"]) for c in wide])
        width = format_percent(WIDE)
        lines.append(
            f"Of {sizes} it is only known that no difference shows: the interval is wider than ± {width}. "
            "On a machine that does nothing else it would be narrower."
        )
    if unknown:
        pairs = joined([f"{n} beside {power}" for n, power in unknown])
        lines.append(f"Not known: {pairs}; the budget held too few visits.")
    differing = [c for c in comparisons if c["published"] not in {None, c["verdict"]}]
    if differing:
        lines.append(f"Unlike what was published: {joined([str(c['batch_size']) for c in differing])}.")
    return lines
