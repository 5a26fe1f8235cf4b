"""Tables of `cubatch profile`: the time of a step by layer and pass, and by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.measure.profile_records import StepProfile
from cubatch.report.grid import Grid
from cubatch.report.tables.common import plain
from cubatch.units import format_count, format_metric, format_percent, format_seconds, join_words

MEANINGS = {
    "products": "matrix products",
    "copies": "copies that rearrange their operands",
    "elementwise": "passes over arrays",
    "overhead": "calls of functions",
    "waiting": "threads that wait for the slowest",
}
_LEAST_SHARE = 0.0005  # of a step; shorter passes have no row


def mapping(profiles: Sequence[StepProfile], model: str) -> dict[str, Any]:
    """Return profiles of one network in the JSON form that docs/reference/api.md lists for `cubatch profile`."""
    first = profiles[0]
    return {
        "schema": 1, "model": model, **first.work.settings, "device": str(first.work.device),
        "kind": first.work.device.kind, "environment": plain(first.environment),
        "profiles": [plain(profile.to_mapping()) for profile in profiles],
    }  # fmt: skip


def title(payload: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    """Return a line with network, settings and device of `payload`, from `mapping`, and time and rate of a profile."""
    what = f"{payload['model']}, {payload['mode']}, {payload['dtype']}, batch {profile['batch_size']}"
    seconds, rate = format_seconds(profile["step_seconds"]), format_count(profile["samples_per_second"])
    return f"{what}, on {payload['device']}: {seconds} a step, {rate} samples/s"


def layers(profile: Mapping[str, Any], *, title: str) -> Grid:
    """Return the table of a profile (in JSON form): a row per pass in the order of the step; the longest is marked."""
    shown = [row for row in profile["layers"] if row["share"] >= _LEAST_SHARE]
    columns = {
        "layer": named,
        "pass": lambda row: row["pass"],
        "time": lambda row: format_seconds(row["seconds"]),
        "share": lambda row: format_percent(row["share"]),
        "FLOP/s": lambda row: _rate(row["flops"], row["seconds"], "FLOP/s"),
        "bytes/s": lambda row: _rate(row["bytes"], row["seconds"], "B/s"),
        "calls": lambda row: row["calls"] or None,
        "bound by": lambda row: row["bound_by"],
    }
    longest = max(range(len(shown)), key=lambda index: shown[index]["seconds"])
    notes = [shares(profile), _remark(profile)]
    left_out = len(profile["layers"]) - len(shown)
    if left_out:
        notes.append(f"Passes of less than {format_percent(_LEAST_SHARE)} of the time are not listed: {left_out}.")
    return Grid.of(shown, columns, title=title, marked=[longest], notes=notes)


def shares(profile: Mapping[str, Any]) -> str:
    """
    Return a sentence with the share of each cause in a step's time, largest first.

    `profile` has "causes", the seconds by cause.

    Example:
        >>> shares({"causes": {"products": 3.0, "copies": 0.0, "elementwise": 1.0, "overhead": 0.0, "waiting": 0.0}})
        'Of the time, 75.0 % goes to products (matrix products) and 25.0 % to elementwise (passes over arrays).'
    """
    total = sum(profile["causes"].values())
    ranked = sorted(profile["causes"].items(), key=lambda item: -item[1])
    parts = [
        f"{format_percent(seconds / total)} {'goes ' if not index else ''}to {cause} ({MEANINGS[cause]})"
        for index, (cause, seconds) in enumerate(ranked)
        if seconds / total >= _LEAST_SHARE
    ]
    return f"Of the time, {join_words(parts)}."


def sizes(profiles: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of seconds per sample at each batch size, in total and by cause, of profiles in JSON form."""
    causes = list(profiles[0]["causes"])
    rows = [
        [
            profile["batch_size"],
            format_count(profile["samples_per_second"]),
            format_seconds(profile["step_seconds"] / profile["batch_size"]),
            *(format_seconds(profile["causes"][cause] / profile["batch_size"]) for cause in causes),
        ]
        for profile in profiles
    ]
    fastest = max(range(len(rows)), key=lambda index: profiles[index]["samples_per_second"])
    return Grid(title="Time for each sample", columns=["batch", "samples/s", "a sample", *causes], rows=rows,
                marked=[fastest], notes=[verdict(profiles)])  # fmt: skip


def named(row: Mapping[str, Any]) -> str:
    """Return the name of a profile's row: its layer, and the layers fused into its pass, joined by "+"."""
    return " + ".join([row["layer"] or {"update": "optimizer"}.get(row["pass"], row["pass"]), *row["then"]])


def verdict(profiles: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the main cause of the slowest size taking more time per sample than the fastest."""
    each = [{cause: seconds / p["batch_size"] for cause, seconds in p["causes"].items()} for p in profiles]
    taken = [p["step_seconds"] / p["batch_size"] for p in profiles]
    slow, fast = taken.index(max(taken)), taken.index(min(taken))
    more = {cause: each[slow][cause] - each[fast][cause] for cause in each[slow]}
    cause = max(more, key=more.__getitem__)
    if slow == fast or more[cause] <= 0:
        return "A sample takes as long at all of these sizes."
    lost, least = format_seconds(taken[slow] - taken[fast]), profiles[fast]["batch_size"]
    return (
        f"A sample takes {lost} longer at batch {profiles[slow]['batch_size']} than at {least}, mostly for "
        f"{cause} ({MEANINGS[cause]}): {format_seconds(more[cause])}."
    )


def _remark(profile: Mapping[str, Any]) -> str:
    threads = f", the mean over {profile['threads']} threads" if profile["threads"] > 1 else ""
    return (
        f"Rows are medians of {profile['steps']} steps whose calls were timed one by one{threads}, and come to "
        f"{format_seconds(profile['traced_seconds'])}; FLOP/s and bytes/s count each array of a pass once."
    )


def _rate(amount: float, seconds: float, unit: str) -> str | None:
    return format_metric(amount / seconds, unit) if amount and seconds else None
