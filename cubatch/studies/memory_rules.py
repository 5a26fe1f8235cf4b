"""`memory-rules`: how far are the rules of thumb off, and what makes the difference?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from cubatch.hardware import room
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.memory.parts import footprint_of
from cubatch.memory.rules import rules_of_thumb
from cubatch.studies.asked import Asked, shared
from cubatch.tuning.results import Measurement
from cubatch.units import format_bytes, format_count

TITLE = "What do rules of thumb for memory miss?"
DEFAULT_MODEL = "mnist-cnn"
MODES = ("inference", "training")
SIZES, QUICK_SIZES = (1, 32, 256), (1, 8)
_USUAL_SECONDS, _QUICK_SECONDS = 60.0, 10.0
PARTS = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")

QUESTION = (
    "A network takes twice its file on disk, some say; three times with gradients and momentum, say others; somebody "
    "measured 4.5 times and asked why. None of these rules knows the batch size. How far off are they?"
)
METHOD = [
    (
        "Each batch size runs in each mode, and what the engine took from the device is read while it runs: "
        "parameters, and one block in which the memory plan gives every buffer its place."
    ),
    (
        "Beside it stands the plan, which is computed before anything runs, and each rule. On a GPU the driver is "
        "asked as well, whose figure holds the context and what libraries take; of a CPU there is no such figure."
    ),
    "The formula for the largest batch is compared with the largest that the plan fits into the memory that is free.",
]


def study(asked: Asked) -> dict[str, Any]:
    """
    Run some sizes in each mode, and compare what they take with the plan and the rules.

    Raises:
        CubatchError: Whatever `autotune` raises.
    """
    most = (QUICK_SIZES if asked.quick else SIZES)[-1]
    sizes = [n for n in (QUICK_SIZES if asked.quick else SIZES) if n <= asked.largest(most)]
    budget = asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS)
    taken, rules, results = [], [], []
    for number, mode in enumerate(asked.modes):
        asked.show(number, len(asked.modes), f"measuring {mode}")
        one = attrs.evolve(asked, modes=(mode,))
        result = one.tuned(budget=budget / len(asked.modes), batch_sizes=sizes, sweeps=1)
        results.append(result)
        for m in result.measurements:
            taken.append(_taken(one, m))
            rules += _rules(one, m)
    largest = _largest(asked, sizes[-1])
    return {
        **shared(results[-1]),
        "mode": " and ".join(asked.modes),
        "budget_seconds": budget,
        "seconds_spent": sum(result.seconds_spent or 0.0 for result in results),
        "title": TITLE,
        "question": [QUESTION],
        "method": METHOD,
        "answer": _answer(rules),
        "points": _points(taken, rules, largest),
        "file_bytes": 4 * asked.work.spec.parameters,
        "taken": taken,
        "rules": rules,
        "largest": largest,
        "results": [result.to_mapping() for result in results],
    }


def _taken(asked: Asked, m: Measurement) -> dict[str, Any]:
    whole = footprint_of(asked.work, m.batch_size)
    return {
        "mode": asked.mode,
        "batch_size": m.batch_size,
        "planned_bytes": whole.total,
        "measured_bytes": m.peak_bytes,
        "device_bytes": m.peak_device_bytes if asked.work.device.kind == "cuda" else None,  # the driver's own count
        "parts": {name: getattr(whole, name) for name in PARTS},
    }


def _rules(asked: Asked, m: Measurement) -> list[dict[str, Any]]:
    """Compare each rule that speaks of bytes, or of elements, with what was measured."""
    if not m.peak_bytes:
        return []
    found = []
    for rule in rules_of_thumb(asked.spec, batch_size=m.batch_size, **_options(asked)):
        each = BYTES_PER_ELEMENT[cast("Any", asked.dtype)] if rule.unit == "elements" else 1
        value = int(rule.value * each)
        found.append(
            {
                "name": rule.name, "formula": rule.formula, "mode": asked.mode, "batch_size": m.batch_size,
                "bytes": value, "measured_bytes": m.peak_bytes, "ratio": value / m.peak_bytes,
            }
        )  # fmt: skip
    return found


def _largest(asked: Asked, batch_size: int) -> dict[str, Any]:
    """Compare the formula for the largest batch with the plan."""
    free = room.memory_limit(asked.work.device, asked.memory_limit).bytes
    rules = rules_of_thumb(asked.spec, batch_size=batch_size, memory=free, **_options(asked))
    rule = next(rule for rule in rules if rule.unit == "samples")
    return rule.to_mapping() | {"memory_bytes": free}


def _options(asked: Asked) -> dict[str, Any]:
    names = ("mode", "dtype", "optimizer")
    return {name: getattr(asked, name) for name in names} | {"device": asked.work.device}


def _answer(rules: Sequence[Mapping[str, Any]]) -> str:
    """
    Say from where to where the rules of the file's size reach.

    Example:
        >>> _answer([{"name": "2x the file", "ratio": 0.01}, {"name": "2x the file", "ratio": 1.9}])
        'The batch: rules that know only the size of the file give from 0.01 to 1.9 times what was measured.'
    """
    ratios = [rule["ratio"] for rule in rules if rule["name"].endswith("the file")]
    if not ratios:
        return "Not known: nothing was measured."
    least, most = min(ratios), max(ratios)
    given = f"from {least:.2g} to {most:.2g} times what was measured"
    return f"The batch: rules that know only the size of the file give {given}."


def _points(
    taken: Sequence[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]], largest: Mapping[str, Any]
) -> list[str]:
    lines = []
    known = [t for t in taken if t["measured_bytes"]]
    if known:
        off = max(abs(t["planned_bytes"] / t["measured_bytes"] - 1) for t in known)
        lines.append(f"The memory plan, computed beforehand, is off by {100 * off:.2g} % at most.")
    near = [r["ratio"] for r in rules if r["name"] == "textbook count"]
    if near:
        lines.append(
            f"The textbook count of activations, which knows the batch, gives {min(near):.2g} to {max(near):.2g} "
            "times what was measured: it knows no parameters and no workspace, nor that buffers share memory."
        )
    last = taken[-1]
    parts = sorted(((size, name) for name, size in last["parts"].items() if size), reverse=True)
    told = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
    lines.append(
        f"At batch {last['batch_size']} {last['mode']} needs {told}; they share memory, so the peak is below their sum."
    )
    if last["device_bytes"] and last["measured_bytes"]:
        beyond = format_bytes(last["device_bytes"] - last["measured_bytes"])
        lines.append(f"The driver counts {beyond} more, which no rule knows: context, kernels and libraries.")
    gives, plan = format_count(int(largest["value"])), format_count(int(largest["computed"]))
    lines.append(
        f"The formula for the largest batch gives {gives} in {format_bytes(largest['memory_bytes'])}, the plan {plan}."
    )
    return lines
