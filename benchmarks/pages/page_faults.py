"""Page faults of PyTorch modules on a CPU: what it costs that glibc gives memory back, and gains to have it kept."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.pages.tables import table
from cubatch.measure.counting import HostState, comparable, host_state
from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.units import format_count


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
                    visits = _of(row[way][how], size, state)
                    cells += [_spread(visits), format_count(_median(visits, "page_faults"))]
            rates.append([*place, *cells])
            gains.append([*place, *_gained(row["alone"], size, state)])
    of_one = Counter(process["visits"][0]["batch_size"] for process in result["rows"][0]["alone"]["kept"])
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}; medians and "
        f"ranges of {max(of_one.values())} processes each, in turns, in the state of the host in which most was read; "
        f"raised by `{result['raised']}`, kept by `{result['kept']}`."
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


def _of(processes: list[dict[str, Any]], size: int, state: HostState | None) -> list[dict[str, float]]:
    """Give the visits to a size that count."""
    visits = [visit for process in processes for visit in process["visits"] if visit["batch_size"] == size]
    those = comparable([_timing(visit) for visit in visits], state)
    return [visit for visit in visits if _timing(visit) in those]


def _gained(alone: dict[str, list[dict[str, Any]]], size: int, state: HostState | None) -> list[str]:
    """Set raised bounds and kept memory against glibc's own way: share of the system, rates, largest resident sets."""

    def figures(how: str) -> tuple[float, float]:
        peaks = [process["peak_bytes"] for process in alone[how] if process["visits"][0]["batch_size"] == size]
        return 1 / _median(_of(alone[how], size, state), "seconds"), statistics.median(peaks)

    rate, peak = figures("given_back")
    after = [figures(how) for how in ("raised", "kept")]
    ratios = [f"{ratio:.2f}" for found, most in after for ratio in (found / rate, most / peak)]
    return [f"{100 * _median(_of(alone['given_back'], size, state), 'system_share'):.0f} %", *ratios]


def _median(visits: list[dict[str, float]], figure: str) -> float:
    return statistics.median(visit[figure] for visit in visits)


def _spread(visits: list[dict[str, float]]) -> str:
    rates = sorted(visit["batch_size"] / visit["seconds"] for visit in visits)
    return f"{format_count(statistics.median(rates))} ({format_count(rates[0])} to {format_count(rates[-1])})"
