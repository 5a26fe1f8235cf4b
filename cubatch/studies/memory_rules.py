"""`memory-rules`: how far rules of thumb for memory are off, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from cubatch.hardware import memory_limit as hardware_memory
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.memory.step_footprint import footprint_of
from cubatch.memory.thumb_rules import rules_of_thumb
from cubatch.studies.study_request import Findings, Study, StudyRequest, tuning_facts
from cubatch.tuning.results import Measurement
from cubatch.units import format_bytes, format_count

SIZES, QUICK_SIZES = (1, 32, 256), (1, 8)
PARTS = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")
_METHOD = [
    (
        "Each batch size runs in each mode while the bytes that the engine allocates are read: parameters, and one "
        "block in which the memory plan places every buffer. The plan is computed before anything runs."
    ),
    (
        "On a GPU the driver reports its figure too, with the context and libraries. The formula for the largest "
        "batch is compared with the largest that the plan fits into the available memory."
    ),
]


def run(request: StudyRequest, budget: float) -> Findings:
    """
    Run some batch sizes in each mode; return measured bytes compared with the memory plan and rules of thumb.

    `budget` is the measuring time of all modes in seconds.
    """
    chosen = QUICK_SIZES if request.quick else SIZES
    limit = request.largest(chosen[-1])
    sizes = [n for n in chosen if n <= limit]
    measured: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = []
    results = []
    for number, mode in enumerate(request.modes):
        request.show(number, len(request.modes), f"measuring {mode}")
        of_mode = attrs.evolve(request, modes=(mode,))
        result = of_mode.tune(budget=budget / len(request.modes), batch_sizes=sizes, sweeps=1)
        results.append(result)
        for m in result.measurements:
            measured.append(_bytes_of(of_mode, m))
            rules += _compare_rules(of_mode, m)
    largest = _largest(request, sizes[-1])
    return Findings(
        facts=tuning_facts(results[-1])
        | {
            "mode": " and ".join(request.modes),
            "budget_seconds": budget,
            "seconds_spent": sum(result.seconds_spent or 0.0 for result in results),
        },
        answer=answer(rules),
        points=points(measured, rules, largest),
        method=_METHOD,
        details={
            "file_bytes": 4 * request.work.spec.parameters,
            "measured": measured,
            "rules": rules,
            "largest": largest,
            "results": [result.to_mapping() for result in results],
        },
    )


def _bytes_of(request: StudyRequest, m: Measurement) -> dict[str, Any]:
    plan = footprint_of(request.work, m.batch_size)
    return {
        "mode": request.mode,
        "batch_size": m.batch_size,
        "planned_bytes": plan.total,
        "measured_bytes": m.peak_bytes,
        "device_bytes": m.peak_device_bytes if request.work.device.kind == "cuda" else None,  # the driver's own count
        "parts": {name: getattr(plan, name) for name in PARTS},
    }


def _compare_rules(request: StudyRequest, m: Measurement) -> list[dict[str, Any]]:
    """Return a row for each rule of thumb with "bytes" and "ratio", bytes / measured; empty if `m` lacks peak bytes."""
    if not m.peak_bytes:
        return []
    compared = []
    for rule in rules_of_thumb(request.spec, batch_size=m.batch_size, **_options(request)):
        value = int(rule.value * (BYTES_PER_ELEMENT[cast("Any", request.dtype)] if rule.unit == "elements" else 1))
        compared.append(
            {
                "name": rule.name,
                "formula": rule.formula,
                "mode": request.mode,
                "batch_size": m.batch_size,
                "bytes": value,
                "measured_bytes": m.peak_bytes,
                "ratio": value / m.peak_bytes,
            }
        )
    return compared


def _largest(request: StudyRequest, batch_size: int) -> dict[str, Any]:
    available = hardware_memory.memory_limit(request.work.device, request.memory_limit).bytes
    rules = rules_of_thumb(request.spec, batch_size=batch_size, memory=available, **_options(request))
    rule = next(rule for rule in rules if rule.unit == "samples")
    return rule.to_mapping() | {"memory_bytes": available}


def _options(request: StudyRequest) -> dict[str, Any]:
    names = ("mode", "dtype", "optimizer")
    return {name: getattr(request, name) for name in names} | {"device": request.work.device}


def answer(rules: Sequence[Mapping[str, Any]]) -> str:
    """
    Return a sentence on the rules that know only the file's size: the range of their bytes / measured bytes.

    Example:
        >>> answer([{"name": "2x the file", "ratio": 0.01}, {"name": "2x the file", "ratio": 1.9}])
        'The batch: rules that know only the size of the file give 0.01 to 1.9 times the measured bytes.'
    """
    ratios = [rule["ratio"] for rule in rules if rule["name"].endswith("the file")]
    if not ratios:
        return "Unknown: nothing was measured."
    return (
        f"The batch: rules that know only the size of the file give {min(ratios):.2g} to {max(ratios):.2g} times the "
        "measured bytes."
    )


def points(
    measured: Sequence[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]], largest: Mapping[str, Any]
) -> list[str]:
    """
    Return sentences on the errors of memory plan and textbook count, the parts of memory, and the largest batch.

    Args:
        measured: A row of `_bytes_of` for each mode and batch size; the sentence on parts describes the last row.
        rules: Rows of `_compare_rules`, each with "ratio", a rule's bytes / measured bytes.
        largest: The result of `_largest`: the largest batch by the formula ("value") and by the plan ("computed").
    """
    lines = []
    errors = [abs(row["planned_bytes"] / row["measured_bytes"] - 1) for row in measured if row["measured_bytes"]]
    if errors:
        lines.append(f"The memory plan is off by {100 * max(errors):.2g} % at most.")
    ratios = [rule["ratio"] for rule in rules if rule["name"] == "textbook count"]
    if ratios:
        lines.append(
            f"The textbook count of activations gives {min(ratios):.2g} to {max(ratios):.2g} times the measured bytes: "
            "it omits parameters and workspace, and does not know that buffers share memory."
        )
    last = measured[-1]
    parts = sorted(((size, name) for name, size in last["parts"].items() if size), reverse=True)
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
    lines.append(
        f"At batch {last['batch_size']} {last['mode']} needs {listed}; they share memory, so the peak is below the sum."
    )
    if last["device_bytes"] and last["measured_bytes"]:
        more = format_bytes(last["device_bytes"] - last["measured_bytes"])
        lines.append(f"The driver counts {more} more, which no rule includes: context, kernels and libraries.")
    formula, plan = format_count(int(largest["value"])), format_count(int(largest["computed"]))
    available = format_bytes(largest["memory_bytes"])
    lines.append(f"The largest batch in {available} is {formula} by the formula and {plan} by the plan.")
    return lines


memory_rules = Study(
    title="What do rules of thumb for memory miss?",
    question=(
        "A network takes twice its file on disk, some say; three times with gradients and momentum, say others; "
        "one user measured 4.5 times. None of these rules knows the batch size. How far off are they?"
    ),
    model="mnist-cnn",
    modes=("inference", "training"),
    budgets=(60.0, 10.0),
    run=run,
    is_timed=False,
)
