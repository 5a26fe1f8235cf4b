"""Training loops as Markdown: a row for each, with the reported rate against that of the plain loop."""

from __future__ import annotations

import statistics
from typing import Any

import attrs

from benchmarks.pages.tables import origin, page, percent, table

HEAD = [
    "loop", "recommended", "reported, samples/s", "plain loop", "reported / plain", "reported / plain right after",
    "best other size", "wall seconds", "Lightning's rule", "powers of two timed once",
]  # fmt: skip
RATE_ERROR, GAIN = 0.10, 0.05  # goals of each loop
WALL_SHARE, WALL_SECONDS = 1.5, 10.0  # goal: 1.5 times the budget plus 10 s


@attrs.frozen(kw_only=True)
class Summary:
    """
    Rates of a loop, from its turns.

    Attributes:
        plain: Samples per second of the plain loop at the recommended size, median of the rounds.
        ratio: The reported rate over that.
        ratio_after: The reported rate over the median of the turns right after the call, in the same process.
        best: The batch size with the largest gain, other than the recommended one; None if there was no other.
        gain: Its rate over that of the recommended size, minus 1: the median over rounds that ran both.
        gains: The same of each other size.
    """

    plain: float
    ratio: float
    ratio_after: float
    best: int | None
    gain: float
    gains: dict[int, float]


def summarize(row: dict[str, Any]) -> Summary:
    """Summarize a loop that did not fail."""
    rates = {int(n): [samples / seconds for samples, seconds in turns] for n, turns in row["turns"].items()}
    own = rates[row["recommended"]]
    gains = {
        n: statistics.median(rate / base for rate, base in zip(each, own, strict=False)) - 1
        for n, each in rates.items()
        if n != row["recommended"]
    }
    best, plain = max(gains, key=lambda n: gains[n], default=None), statistics.median(own)
    after = statistics.median(samples / seconds for samples, seconds in row["turns_after"])
    return Summary(
        plain=plain, ratio=row["reported"] / plain, ratio_after=row["reported"] / after,
        best=best, gain=0.0 if best is None else gains[best], gains=gains,
    )  # fmt: skip


def training_loops(result: dict[str, Any]) -> str:
    """Return the table of a result, and below it how many loops meet each goal."""
    versions = [f"{name} {result['environment'][name]}" for name in ("torch", "lightning", "transformers")
                if name in result["environment"]]  # fmt: skip
    budget = result["budget_seconds"]
    limit = WALL_SHARE * budget + WALL_SECONDS
    caption = (
        f"{origin(result)}, {', '.join(versions)}; budget {budget:g} s, {result['rounds']} rounds of "
        f"{result['turn_seconds']:g} s for each size. Gains are against the recommended size in the same rounds"
    )
    rows = result["loops"]
    done = [(row, summarize(row)) for row in rows if not row["error"]]
    counts = {
        f"reported rate within {percent(RATE_ERROR, 0)}": sum(abs(each.ratio - 1) <= RATE_ERROR for _, each in done),
        "the same of the loop right after": sum(abs(each.ratio_after - 1) <= RATE_ERROR for _, each in done),
        "the same of both plain loops": sum(abs(each.ratio_after / each.ratio - 1) <= RATE_ERROR for _, each in done),
        f"no other size more than {percent(GAIN, 0)} faster": sum(each.gain <= GAIN for _, each in done),
        f"at most {limit:g} s": sum(row["wall_seconds"] <= limit for row, _ in done),
    }
    goals = "; ".join(f"{goal}: {count} of {len(rows)}" for goal, count in counts.items())
    return page(caption, table(HEAD, [lines(row) for row in rows]), f"Loops that meet a goal: {goals}.")


def lines(row: dict[str, Any]) -> list[str]:
    """Return the cells of a loop."""
    name, wall = f"`{row['loop']}`", f"{row['wall_seconds']:.1f}" if "wall_seconds" in row else ""
    if row["error"]:
        return [name, row["error"].replace("|", "/"), "", "", "", "", "", wall, "", ""]
    each = summarize(row)
    best = "" if each.best is None else f"{each.best}: {percent(each.gain, sign='+')}"
    rules = [row["lightning"], row["timed_once"]]
    others = [f"{n}: {percent(each.gains.get(n, 0.0), sign='+')}" for n in rules]
    return [
        name, str(row["recommended"]), f"{row['reported']:,.0f}", f"{each.plain:,.0f}", f"{each.ratio:.2f}",
        f"{each.ratio_after:.2f}", best, wall, *others,
    ]  # fmt: skip
