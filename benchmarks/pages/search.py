"""The search on devices and hosts whose best batch size is known: tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pages.tables import origin, page, percent, table

_ALL = "all classes"
_GOAL_BUDGETS = (2.0, 5.0, 10.0, 60.0)
_MOST_RIVALS = 5
_MUST_BE_ZERO = ("lost", "twice", "no_answer", "wrong", "orphans", "late")


def search(result: dict[str, Any]) -> str:
    """Return regret and seconds of cubatch and of all other rules on fake devices."""
    return _search(result, [row for row in result["summary"] if row["kind"] == _ALL])


def search_best(result: dict[str, Any]) -> str:
    """Return regret and seconds of cubatch at the budgets that have goals, and of the best of the other rules."""
    rows = [row for row in result["summary"] if row["kind"] == _ALL]
    own = [row for row in rows if row["budget"] in _GOAL_BUDGETS]
    rivals = sorted((row for row in rows if row["budget"] is None), key=lambda row: row["regret"]["mean"])
    return _search(result, [*own, *rivals[:_MOST_RIVALS]])


def _search(result: dict[str, Any], summary: Sequence[dict[str, Any]]) -> str:
    rows = []
    for row in summary:
        name = _label(row["finder"]) if row["budget"] is None else f"**{row['finder']}, {row['budget']:g} s**"
        failed = f"{row['unusable']} of {row['devices']}" if row["unusable"] else ""
        regret, seconds = row["regret"], row["seconds"]["mean"]
        rows.append([name, percent(regret["mean"]), percent(regret["p95"]), f"{seconds:.1f}", failed])
    caption = (
        f"{origin(result)}: {result['devices']} fake devices of {len(_classes(result))} classes, seed "
        f"{result['seed']}. Regret is the throughput lost beyond a tolerance of {percent(result['tolerance'], 0)}; a "
        "failed search counts as 100 %"
    )
    return page(caption, table(["finder", "regret, mean", "95th percentile", "seconds, mean", "failed"], rows))


def search_classes(result: dict[str, Any]) -> str:
    """Return the mean regret for each class of fake devices: cubatch at its default budget, and each other rule."""
    finders = [row["finder"] for row in result["summary"] if row["kind"] == _ALL and row["budget"] in (None, 60.0)]
    regrets = {
        (row["kind"], row["finder"]): row["regret"]["mean"]
        for row in result["summary"] if row["budget"] in (None, 60.0)
    }  # fmt: skip
    kinds = list(dict.fromkeys(row["kind"] for row in result["summary"] if row["kind"] != _ALL))
    rows = [[kind, *(percent(regrets.get((kind, finder))) for finder in finders)] for kind in kinds]
    return page(
        f"{origin(result)}: mean regret, cubatch with a budget of 60 s", table(["class", *map(_label, finders)], rows)
    )


def _label(finder: str) -> str:
    return finder.replace("readings", "timings")  # a result keeps the name that the finder had


def _classes(result: dict[str, Any]) -> list[str]:
    kinds = dict.fromkeys(row["kind"] for row in result["summary"])
    return [kind for kind in kinds if kind != _ALL and "networks" not in kind]


def ablation(result: dict[str, Any]) -> str:
    """Return a row for each rule that was left out of the search."""
    names = ("regret_60", "regret_10", "seconds_60", "regret_host", "seconds_host")
    rows = [
        [
            f"`{row['without']}`" if row["without"] else "none",
            *(percent(row[name], 2) if name.startswith("regret") else f"{row[name]:.1f}" for name in names),
        ]
        for row in result["rows"]
    ]
    of_devices = ("regret, 60 s", "regret, 10 s", "seconds, 60 s")
    heads = ["rule left out", *of_devices, "regret, fake hosts", "seconds, fake hosts"]
    caption = (
        f"{origin(result)}: {result['devices']} fake devices and {result['hosts']} fake hosts, seed {result['seed']}, "
        "which was not used to choose a rule"
    )
    return page(caption, table(heads, rows))


def hosts(result: dict[str, Any]) -> str:
    """Return a row for each spread of slow/fast ratios and finder."""
    rows = [
        [
            row["finder"], percent(row["spread"], 0), percent(row["regret"], 2), f"{row['spread_median']:.2g}",
            f"{row['spread_90']:.2g}", f"{row['seconds']:.1f}", f"{row['seconds_90']:.1f}",
        ]
        for row in result["summary"]
    ]  # fmt: skip
    heads = [
        "finder", "ratios vary by", "mean regret", "spread, median", "spread, 90th percentile", "seconds, mean",
        "seconds, 90th percentile",
    ]  # fmt: skip
    caption = (
        f"{origin(result)}: {result['hosts']} hosts of family {result['family']}, {result['seeds']} searches of each, "
        f"budget {result['budget']:g} s, ratios {result['ratios']}. Spread is the largest recommendation for a host "
        "over its smallest"
    )
    return page(caption, table(heads, rows))


def faults(result: dict[str, Any]) -> str:
    """Return a row for each kind of fault: runs, faults, and how often a run broke a promise."""
    counts = ("runs", "sessions", "faults", "timings", *_MUST_BE_ZERO)
    total = {name: sum(row.get(name, 0) for row in result["summary"]) for name in counts}
    rows = [
        [
            row["kind"] + (" *" if row["kind"] in result["virtual"] else ""),
            *(f"{row.get(name, 0):,}" for name in counts),
        ]
        for row in result["summary"]
    ]
    rows.append(["**all**", *(f"**{total[name]:,}**" for name in counts)])
    warned = sum(row["said"] for row in result["summary"])
    caption = (
        f"{origin(result)}, seed {result['seed']}. Kinds marked * are devices in virtual time with a real cache, the "
        f"others real processes. {warned} runs, whose disk was still full at the end, warned that timings were not kept"
    )
    head = [
        "fault", "runs", "sessions", "faults", "timings kept", "timings lost", "taken twice", "no result",
        "wrong result", "orphans", "beyond a deadline",
    ]  # fmt: skip
    return page(caption, table(head, rows))
