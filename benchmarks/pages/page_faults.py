"""Page faults of PyTorch modules on a CPU: what it costs that glibc gives memory back, and gains to have it kept."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import table
from cubatch.units import format_count

NONE = "-"
Visit = dict[str, float]


def page_faults(result: dict[str, Any]) -> str:
    """Each module and size: alone in a process and visited in turns with others, and what keeping memory gains."""
    rates, gains = [], []
    for row in result["rows"]:
        processes = [process for way in ("alone", "in_turns") for of in row[way].values() for process in of]
        visits = [visit for process in processes for visit in process["visits"]]
        for size in sorted({int(visit["batch_size"]) for visit in visits}):
            place = [f"`{row['module']}`", row["mode"], str(size)]
            cells = []
            for how in ("given_back", "raised"):
                for way in ("alone", "in_turns"):
                    of = _of(row[way][how], size)
                    cells += [_spread(of), format_count(_median(of, "page_faults"))]
            rates.append([*place, *cells])
            gains.append([*place, *_gained(row["alone"], size)])
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}; medians, and "
        f"ranges of so many visits. Raised by `{result['raised']}`, kept by `{result['kept']}`."
    )
    ways = [f"{how}, {way}" for how in ("as it is", "raised") for way in ("alone", "in turns")]
    of_rates = table(["module", "mode", "batch", *(head for way in ways for head in (way, "page faults"))], rates)
    heads = ["of the CPU time", "raised, times", "its memory, times", "kept, times", "its memory, times"]
    of_gains = table(["module", "mode", "batch", *heads], gains)
    return f"{caption}\n\n{of_rates}\n\nOf the processes that know one size:\n\n{of_gains}"


def _of(processes: list[dict[str, Any]], size: int) -> list[Visit]:
    return [visit for process in processes for visit in process["visits"] if visit["batch_size"] == size]


def _gained(alone: dict[str, list[dict[str, Any]]], size: int) -> list[str]:
    """Set raised bounds and kept memory against glibc's own way: share of the system, rates, largest resident sets."""
    visits = {how: _of(processes, size) for how, processes in alone.items()}
    seconds = {how: _median(those, "seconds") for how, those in visits.items() if those}
    peaks = {
        how: statistics.median(each["peak_bytes"] for each in of if each["visits"][0]["batch_size"] == size)
        for how, of in alone.items()
    }
    told = [f"{100 * _median(visits['given_back'], 'system_share'):.0f} %"]
    for how in ("raised", "kept"):
        is_told = {"given_back", how} <= seconds.keys()
        told.append(f"{seconds['given_back'] / seconds[how]:.2f}" if is_told else NONE)
        told.append(f"{peaks[how] / peaks['given_back']:.2f}")
    return told


def _median(visits: list[Visit], figure: str) -> float:
    return statistics.median(visit[figure] for visit in visits)


def _spread(visits: list[Visit]) -> str:
    if not visits:
        return NONE
    rates = sorted(visit["batch_size"] / visit["seconds"] for visit in visits)
    middle = format_count(statistics.median(rates))
    if len(rates) == 1:
        return f"{middle} (1)"
    return f"{middle} ({format_count(rates[0])} to {format_count(rates[-1])}; {len(rates)})"
