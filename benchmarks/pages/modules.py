"""PyTorch modules and the memory of processes: recommendations next to other finders', predicted and used memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.pages.tables import origin, page, percent, table
from cubatch.units import format_bytes, format_count

WITHIN = 0.1  # of the memory of modules
PLAN_WITHIN, PLAN_WITHIN_BYTES = 0.02, 4 * 2**20  # of the memory of cubatch's own engine
CLOSE = 0.03  # of throughput
NONE = "-"
Visit = dict[str, float]


def answers(result: dict[str, Any]) -> str:
    """Return a row for each finder over all modules and modes: throughput lost, seconds, failures."""
    cases = [case["finders"] for case in result["rows"]]
    rows = []
    for name in [row["finder"] for row in cases[0]]:
        runs = [row for case in cases for row in case if row["finder"] == name]
        lost = [row["lost"] for row in runs]
        mark = "**" if name == "cubatch" else ""
        rows.append([
            f"{mark}{name}{mark}", percent(statistics.fmean(lost)), percent(max(lost)),
            f"{sum(share <= CLOSE for share in lost)} of {len(lost)}",
            f"{statistics.fmean(row['seconds'] for row in runs):.1f}", str(sum(row["failures"] for row in runs)),
        ])  # fmt: skip
    modules = dict.fromkeys(f"`{case['module']}`" for case in result["rows"])
    modes = " and ".join(dict.fromkeys(case["mode"] for case in result["rows"])).capitalize()
    caption = (
        f"{origin(result)}, PyTorch {result['environment']['torch']}. {modes} of {', '.join(modules)}. Sizes up to "
        f"{result['max_batch_size']}, budget of cubatch {result['budget_seconds']:.0f} s. Loss is measured in turns "
        "with the best size of an exhaustive sweep; a size that does not run within the limit loses 100 %"
    )
    head = ["finder", "loss, mean", "loss, worst", f"within {percent(CLOSE, 0)}", "seconds, mean", "out of memory"]
    return page(caption, table(head, rows))


def memory(result: dict[str, Any]) -> str:
    """Return for each module the largest size predicted to fit: memory predicted and used."""
    rows = []
    for row in result["rows"]:
        last = next(size for size in row["sizes"] if size["batch_size"] == row["batch_size"])
        rows.append([
            f"`{row['module']}`", row["mode"], str(row["batch_size"]), format_bytes(last["said"]),
            format_bytes(last["took"]), percent(row["error"], sign="+"), percent(row["walked_error"], sign="+"),
            percent(row["most"], 0),
        ])  # fmt: skip
    caption = f"{origin(result)}, inputs of {'x'.join(map(str, result['image']))}; {_judged(result['rows'])}"
    head = [
        "module", "mode", "largest batch", "predicted", "used", "error", "error of the trace alone",
        "highest use of the limit",
    ]  # fmt: skip
    return page(caption, table(head, rows))


def _judged(rows: Sequence[dict[str, Any]]) -> str:
    near = sum(abs(row["error"]) <= WITHIN for row in rows)
    over = sum(row["most"] > 1 for row in rows)
    return f"{near} of {len(rows)} within {percent(WITHIN, 0)}, {over} with a size above the limit"


def engine_memory(result: dict[str, Any]) -> str:
    """Return each network's largest size, and the range of errors of all its sizes."""
    rows = []
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in result["rows"]):
        ran = [row for row in _ran(result) if (row["model"], row["mode"]) == (model, mode)]
        if not ran:  # the caption counts the failures
            continue
        last = max(ran, key=lambda row: row["batch_size"])
        errors = [row["said"] - row["took"] for row in ran]
        rows.append([
            f"`{model}`", mode, ", ".join(str(row["batch_size"]) for row in ran), format_bytes(last["planned"]),
            format_bytes(last["said"]), format_bytes(last["took"]), percent(last["said"] / last["took"] - 1, sign="+"),
            percent(min(row["planned"] / row["took"] - 1 for row in ran), sign="+"),
            f"{min(errors) / 2**20:+.1f} to {max(errors) / 2**20:+.1f} MiB",
        ])  # fmt: skip
    caption = (
        f"{origin(result)}, BLAS {result['environment']['blas']}, {result['optimizer']}; {_close(result)}, "
        f"{len(result['rows']) - len(_ran(result))} failed"
    )
    head = [
        "network", "mode", "batch sizes", "plan", "predicted", "used", "error", "error of the plan alone",
        "errors of all sizes",
    ]  # fmt: skip
    return page(caption, table(head, rows))


def _ran(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if "took" in row]


def _close(result: dict[str, Any]) -> str:
    ran = _ran(result)
    close = sum(abs(row["said"] - row["took"]) <= max(PLAN_WITHIN * row["took"], PLAN_WITHIN_BYTES) for row in ran)
    over = sum(row["took"] > row["said"] for row in ran)
    within = f"{percent(PLAN_WITHIN, 0)} or {format_bytes(PLAN_WITHIN_BYTES)}"
    return f"{close} of {len(ran)} sizes within {within}, {over} used more than predicted"


def memory_errors(*results: dict[str, Any]) -> str:
    """Return one row for each result about memory: how far predicted and used bytes differ."""
    rows = []
    for result in results:
        if "stages" in result:  # of the GPU pass: plans of cubatch's engine
            items = [item for run in result["stages"] if run["name"] == "memory" for item in run["items"]]
            pairs = [(i["planned_bytes"], i["held_bytes"]) for i in items if i["status"] == "ok"]
            what, verdict = "cubatch's engine: plan and CuPy's pool", f"{len(pairs)} steps"
        elif result["benchmark"] == "memory":
            largest = {(r["model"], r["mode"]): r for r in sorted(_ran(result), key=lambda r: r["batch_size"])}
            pairs = [(row["said"], row["took"]) for row in largest.values()]
            what, verdict = "cubatch's engine: whole process", _close(result)
        else:
            pairs = [(row["said"], row["took"]) for row in map(_largest, result["rows"])]
            what, verdict = "PyTorch modules", _judged(result["rows"])
        errors = [predicted / used - 1 for predicted, used in pairs]
        digits = 1 if max(map(abs, errors)) > 1e-3 else 3
        worst = percent(max(errors, key=abs), digits, "+")
        rows.append([what, origin(result), percent(statistics.median(map(abs, errors)), digits), worst, verdict])
    return table(["predicted memory of", "measured on", "error, median", "error, worst", "verdict"], rows)


def _largest(row: dict[str, Any]) -> dict[str, Any]:
    size_row: dict[str, Any] = next(size for size in row["sizes"] if size["batch_size"] == row["batch_size"])
    return size_row


def page_faults(result: dict[str, Any]) -> str:
    """Return throughput and page faults of each module and size under three settings of glibc's heap."""
    rates, gains = [], []
    for row in result["rows"]:
        processes = [process for way in ("alone", "in_turns") for group in row[way].values() for process in group]
        visits = [visit for process in processes for visit in process["visits"]]
        for size in sorted({int(visit["batch_size"]) for visit in visits}):
            place = [f"`{row['module']}`", row["mode"], str(size)]
            cells = []
            for how in ("given_back", "raised"):
                for way in ("alone", "in_turns"):
                    trials = _visits_of(row[way][how], size)
                    cells += [_spread(trials), format_count(_median(trials, "page_faults"))]
            rates.append([*place, *cells])
            gains.append([*place, *_gains(row["alone"], size)])
    caption = (
        f"{origin(result)}; medians of samples/s with range and number of trials. Raised: `{result['raised']}`; kept: "
        f"`{result['kept']}`"
    )
    ways = [f"{how}, {way}" for how in ("default", "raised") for way in ("alone", "in turns")]
    of_rates = table(["module", "mode", "batch", *(head for way in ways for head in (way, "page faults"))], rates)
    heads = ["share of CPU time", "raised, speed", "raised, memory", "kept, speed", "kept, memory"]
    of_gains = table(["module", "mode", "batch", *heads], gains)
    return page(caption, of_rates, "Relative to the default, in processes that run one batch size only:", of_gains)


def _visits_of(processes: Sequence[dict[str, Any]], size: int) -> list[Visit]:
    return [visit for process in processes for visit in process["visits"] if visit["batch_size"] == size]


def _gains(alone: dict[str, list[dict[str, Any]]], size: int) -> list[str]:
    """Return the share of system time by default, then speed and memory with raised bounds and with kept memory."""
    visits = {how: _visits_of(processes, size) for how, processes in alone.items()}
    seconds = {how: _median(group, "seconds") for how, group in visits.items() if group}
    peaks = {
        how: statistics.median(each["peak_bytes"] for each in group if each["visits"][0]["batch_size"] == size)
        for how, group in alone.items()
    }
    cells = [percent(_median(visits["given_back"], "system_share"), 0)]
    for how in ("raised", "kept"):
        is_timed = {"given_back", how} <= seconds.keys()
        cells.append(f"{seconds['given_back'] / seconds[how]:.2f}" if is_timed else NONE)
        cells.append(f"{peaks[how] / peaks['given_back']:.2f}")
    return cells


def _median(visits: Sequence[Visit], figure: str) -> float:
    return statistics.median(visit[figure] for visit in visits)


def _spread(visits: Sequence[Visit]) -> str:
    if not visits:
        return NONE
    rates = sorted(visit["batch_size"] / visit["seconds"] for visit in visits)
    middle = format_count(statistics.median(rates))
    if len(rates) == 1:
        return f"{middle} (1)"
    return f"{middle} ({format_count(rates[0])} to {format_count(rates[-1])}; {len(rates)})"


def published_memory(result: dict[str, Any]) -> str:
    """Return a row for each published figure: memory of a training step on a GPU, measured and predicted."""
    rows = [
        [
            f"{row['model']}, batch {row['batch_size']}", row["source"], row["counted"],
            format_bytes(row["measured"] * 2**20), format_bytes(row["predicted"] * 2**20),
            percent(row["predicted"] / row["measured"] - 1, sign="+"),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    head = ["model", "source", "counted", "measured", "predicted", "error"]
    return page(
        f"{result['date']}, commit {result['commit']}, traced with PyTorch {result['torch']}", table(head, rows)
    )
