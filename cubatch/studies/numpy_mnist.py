"""
`numpy-mnist`: why does a larger batch not train faster on a CPU?

The published question: a CNN in plain NumPy on MNIST, 5 epochs: 1200 s at batch 1, 940 at 4, 890 at 8, about 850 at
16, 32 and 256.  Why no faster?  The advice was to profile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

from cubatch.engine.conditions import conditions, environment
from cubatch.errors import InvalidArgument
from cubatch.measure import step_profile
from cubatch.network.graph import as_network
from cubatch.report.tables import profile as table
from cubatch.report.tables.common import joined, plain
from cubatch.studies.asked import Asked
from cubatch.units import format_seconds

TITLE = "Why does a larger batch not train faster?"
DEFAULT_MODEL = "mnist-cnn"
SIZES, QUICK_SIZES = (1, 4, 8, 16, 32, 256), (1, 8, 64)
PUBLISHED = {1: 1200.0, 4: 940.0, 8: 890.0, 16: 850.0, 32: 850.0, 256: 850.0}
SAMPLES, EPOCHS = 60_000, 5
KEPT = "profiles.json"
_USUAL_SECONDS, _QUICK_SECONDS = 60.0, 3.0
_APART = 1.5  # times, that steps take whose calls are timed: more is not their timing

QUESTION = (
    "Somebody wrote a CNN in plain NumPy and trained it on MNIST for 5 epochs: 1200 s at batch 1, 940 s at 4, 890 s "
    "at 8, and about 850 s at 16, 32 and 256. Why does it not become faster with the batch? The advice was to "
    "profile."
)
METHOD = [
    (
        f"A step of training is timed at each batch size, on random images; {EPOCHS} epochs are what that many steps "
        f"over {SAMPLES} images take. Loading images and testing are left out."
    ),
    (
        "In other steps every call is timed by itself, and sorted by its cause: matrix products, copies that lay "
        "data out for them, passes over arrays, overhead of the calls, threads that wait. cubatch profile shows "
        "the same by layer."
    ),
    "The published network and machine are others: what can be compared is how the seconds fall with the batch.",
]


def study(asked: Asked) -> dict[str, Any]:
    """
    Profile a training step at each size.

    Raises:
        InvalidArgument: If the mode is not training.
        CubatchError: Whatever `profile` raises.
    """
    if asked.mode != "training":
        raise InvalidArgument("mode", asked.mode, '"training": the question is of training')
    work, budget = asked.work, asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS)
    known = {
        "budget": budget,
        "spec": work.spec.to_mapping(),
        "settings": work.settings,
        "conditions": conditions(work.device),
    }
    sizes = [n for n in (QUICK_SIZES if asked.quick else SIZES) if n <= asked.largest(SIZES[-1])]
    kept = _kept(asked, known)
    for number, size in enumerate(sizes):
        asked.show(number, len(sizes), f"batch size {size}")
        if str(size) not in kept:
            found = step_profile.profile(
                work.spec, size, device=work.device, mode="training", dtype=cast("Any", asked.dtype),
                optimizer=cast("Any", asked.optimizer), seed=asked.seed, budget=budget / len(sizes),
            )  # fmt: skip
            kept[str(size)] = plain(found.to_mapping())
            _keep(asked, known, kept)
    profiles = [kept[str(size)] for size in sizes]
    epochs = [
        {
            "batch_size": one["batch_size"],
            "seconds": EPOCHS * math.ceil(SAMPLES / one["batch_size"]) * one["step_seconds"],
            "published_seconds": PUBLISHED.get(one["batch_size"]) if asked.model.lower() == DEFAULT_MODEL else None,
            "shares": {cause: seconds / sum(one["causes"].values()) for cause, seconds in one["causes"].items()},
        }
        for one in profiles
    ]
    device = work.device.to_mapping()
    return {
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **work.settings,
        "input_shape": list(as_network(work.spec).input_shape),
        "budget_seconds": budget,
        "seed": asked.seed,
        "device": {name: device[name] for name in ("name", "kind", "compute_capability", "threads", "memory_bytes")},
        "environment": environment(work.device),
        "title": TITLE,
        "question": [QUESTION],
        "method": METHOD,
        "answer": answer(epochs),
        "points": points(profiles),
        "epochs": epochs,
        "profiles": profiles,
    }


def answer(epochs: Sequence[dict[str, Any]]) -> str:
    """
    Say where the seconds stop falling.

    Example:
        >>> answer([{"batch_size": n, "seconds": s} for n, s in [(1, 100.0), (8, 50.0), (64, 49.0)]])
        'It does, up to batch 8: 5 epochs take 50.0 s there and 100 s at batch 1. Larger ones gain less than a tenth.'
    """
    fastest = min(one["seconds"] for one in epochs)
    first, enough = epochs[0], next(one for one in epochs if one["seconds"] <= 1.1 * fastest)
    if enough is first:
        return f"Batch {first['batch_size']} is as fast as any other here, within a tenth."
    there, here = format_seconds(enough["seconds"]), format_seconds(first["seconds"])
    if enough is epochs[-1]:
        size = enough["batch_size"]
        return f"It does: {EPOCHS} epochs take {there} at batch {size} and {here} at batch {first['batch_size']}."
    return (
        f"It does, up to batch {enough['batch_size']}: {EPOCHS} epochs take {there} there and {here} at batch "
        f"{first['batch_size']}. Larger ones gain less than a tenth."
    )


def points(profiles: Sequence[dict[str, Any]]) -> list[str]:
    """
    Say what makes small batches slow, what the largest spends its time on, and which figures are not to be trusted.

    Args:
        profiles: As `StepProfile.to_mapping` has them, ascending.
    """
    size = profiles[-1]["batch_size"]
    lines = [table.verdict(profiles), table.shares(profiles[-1]).replace("the time", f"the time at batch {size}")]
    apart = [
        str(one["batch_size"])
        for one in profiles
        if not 1 / _APART <= one["step_seconds"] / one["traced_seconds"] <= _APART
    ]
    if apart:
        lines.append(
            f"At batch {joined(apart)} steps with and without their calls being timed took very different times: "
            "something else was at work on this machine."
        )
    return lines


def _kept(asked: Asked, known: dict[str, Any]) -> dict[str, Any]:
    """Give the profiles that an earlier run of the same question left, by size; none of what cannot be read."""
    try:
        found = json.loads((asked.folder / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = isinstance(found, dict) and found.get("known") == json.loads(json.dumps(plain(known)))
    profiles = found.get("profiles") if same else None
    return profiles if isinstance(profiles, dict) else {}


def _keep(asked: Asked, known: dict[str, Any], profiles: dict[str, Any]) -> None:
    """Write them beside, then in place, so that a kill leaves the whole file of before."""
    beside = asked.folder / f"{KEPT}.new"
    beside.write_text(json.dumps({"known": plain(known), "profiles": profiles}), encoding="utf-8")
    beside.replace(asked.folder / KEPT)
