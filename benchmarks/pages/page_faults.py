"""Page faults of PyTorch modules on a CPU: what it costs that glibc gives memory back, and gains to have it kept."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.pages.tables import table
from cubatch.measure.counting import HostState, host_state
from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.units import format_count

NONE = "-"


def page_faults(result: dict[str, Any]) -> str:
    """Each module and size: alone in a process and visited in turns with others, and what keeping memory gains."""
    rates, gains = [], []
    for row in result["rows"]:
        processes = [process for way in ("alone", "in_turns") for of in row[way].values() for process in of]
        state = host_state((_timing(visit) for process in processes for visit in process["visits"]), Goal())
        for size in sorted({int(visit["batch_size"]) for process in processes for visit in process["visits"]}):
            place = [f"`{row['module']}`", row["mode"], str(size)]
            cells = []
            for how in ("given_back", "raised"):
                for way in ("alone", "in_turns"):
                    visits = _of(row[way][how], size)
                    cells += [_spread(_alike(visits, state)), format_count(_median(visits, "page_faults"))]
            rates.append([*place, *cells])
            gains.append([*place, *_gained(row["alone"], size, state)])
    of_one = Counter(process["visits"][0]["batch_size"] for process in result["rows"][0]["alone"]["kept"])
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}; medians and "
        f"ranges of {max(of_one.values())} processes each, in turns, rates in the state of the host in which most "
        f"was read ({NONE}: none was); raised by `{result['raised']}`, kept by `{result['kept']}`."
    )
    ways = [f"{how}, {way}" for how in ("as it is", "raised") for way in ("alone", "in turns")]
    of_rates = table(["module", "mode", "batch", *(head for way in ways for head in (way, "page faults"))], rates)
    heads = ["of the CPU time", "raised, times", "memory, times", "kept, times", "memory, times"]
    return f"{caption}\n\n{of_rates}\n\n{table(['module', 'mode', 'batch', *heads], gains)}"


def _timing(visit: dict[str, float]) -> Timing:
    return Timing(
        batch_size=int(visit["batch_size"]), round=0, seconds=visit["seconds"],
        reference_seconds=visit["reference_seconds"],
    )  # fmt: skip


def _of(processes: list[dict[str, Any]], size: int) -> list[dict[str, float]]:
    return [visit for process in processes for visit in process["visits"] if visit["batch_size"] == size]


def _alike(visits: list[dict[str, float]], state: HostState | None) -> list[dict[str, float]]:
    """Give visits of the state in which they are compared; there may be none."""
    return [visit for visit in visits if state is None or state.holds(_timing(visit))]


def _gained(alone: dict[str, list[dict[str, Any]]], size: int, state: HostState | None) -> list[str]:
    """Set raised bounds and kept memory against glibc's own way: share of the system, rates, largest resident sets."""
    visits = {how: _of(processes, size) for how, processes in alone.items()}
    seconds = {how: _median(those, "seconds") for how, of in visits.items() if (those := _alike(of, state))}
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


def _median(visits: list[dict[str, float]], figure: str) -> float:
    return statistics.median(visit[figure] for visit in visits)


def _spread(visits: list[dict[str, float]]) -> str:
    if not visits:
        return NONE
    rates = sorted(visit["batch_size"] / visit["seconds"] for visit in visits)
    return f"{format_count(statistics.median(rates))} ({format_count(rates[0])} to {format_count(rates[-1])})"
