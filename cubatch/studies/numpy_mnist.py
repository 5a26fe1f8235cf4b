"""
`numpy-mnist`: why does a larger batch not train faster on a CPU?

The published question: a CNN in plain NumPy on MNIST, 5 epochs: 1200 s at batch 1, 940 at 4, 890 at 8, about 850 at
16, 32 and 256.  Why no faster?  The advice was to profile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from cubatch.engine import data as files
from cubatch.engine import train as engine
from cubatch.measure import kernel_choice, step_profile
from cubatch.network.graph import as_network
from cubatch.report.tables import profile as table
from cubatch.report.tables.common import joined, plain
from cubatch.studies.asked import Asked, only_training, situation
from cubatch.studies.kept import Kept
from cubatch.units import format_seconds

TITLE = "Why does a larger batch not train faster?"
DEFAULT_MODEL = "mnist-cnn"
MODES = ("training",)
SIZES, QUICK_SIZES = (1, 4, 8, 16, 32, 256), (1, 8, 64)
PUBLISHED = {1: 1200.0, 4: 940.0, 8: 890.0, 16: 850.0, 32: 850.0, 256: 850.0}
SAMPLES, EPOCHS = 60_000, 5
KEPT = "epochs.json"
_USUAL_SECONDS, _QUICK_SECONDS = 300.0, 3.0
_PROFILES = 0.2  # share of the budget, where epochs are to be trained, too
_RATE = 1e-3  # so low that no batch size diverges: what is learnt does not matter here
_APART = 1.5  # times, that steps take whose calls are timed: more is not their timing

QUESTION = (
    "Somebody wrote a CNN in plain NumPy and trained it on MNIST for 5 epochs: 1200 s at batch 1, 940 s at 4, 890 s "
    "at 8, and about 850 s at 16, 32 and 256. Why does it not become faster with the batch? The advice was to "
    "profile."
)
_STEPS = (
    f"A step of training is timed at each batch size, on random images. Where no epoch was trained, {EPOCHS} epochs "
    "are what the steps over {count} images take, without loading them."
)
_TRAINED = (
    "The sizes take turns in training whole epochs on MNIST, those with the shortest epochs first, as many as the "
    f"budget holds; where it holds fewer than {EPOCHS}, their mean stands for the others. Loading images is part of an "
    "epoch, testing is not."
)
_CAUSES = (
    "In other steps every call is timed by itself, and sorted by its cause: matrix products, copies that lay data out "
    "for them, passes over arrays, overhead of the calls, threads that wait. cubatch profile shows the same by layer."
)
_OTHERS = (
    "A last batch of an epoch that would not be whole is left out. The published network and machine are others: what "
    "can be compared is how the seconds fall with the batch."
)


def study(asked: Asked) -> dict[str, Any]:
    """
    Profile a training step at each size and, where there are images, train whole epochs.

    Raises:
        InvalidArgument: If the mode is not training, the images are none for the network, or a finding cannot be kept.
        CubatchError: Whatever `profile` and `train` raise.
    """
    only_training(asked)
    budget = asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS)
    images = None if asked.data is None else files.load_mnist(asked.data)
    count = SAMPLES if images is None else len(images[0])
    most = min(asked.largest(SIZES[-1]), count)
    sizes = [n for n in (QUICK_SIZES if asked.quick else SIZES) if n <= most]
    if images is not None:
        engine.check(as_network(asked.work.spec), images[0], optimizer=asked.optimizer)
    told = situation(asked, budget, images or ())
    kept = Kept(asked.folder / KEPT, told.known)
    profiles = _profiled(asked, sizes, budget * (1.0 if images is None else _PROFILES), kept)
    trained = _trained(asked, profiles, budget, kept, images) if images is not None else {}
    epochs = [_epochs(one, trained.get(one["batch_size"], []), asked, count) for one in profiles]
    return {
        **told.facts,
        "title": TITLE,
        "question": [QUESTION],
        "method": [_STEPS.format(count=count), *([] if images is None else [_TRAINED]), _CAUSES, _OTHERS],
        "answer": answer(epochs),
        "points": [measured(epochs), *points(profiles)],
        "data": None if asked.data is None else str(asked.data),
        "epochs": epochs,
        "profiles": profiles,
    }


def _profiled(asked: Asked, sizes: Sequence[int], budget: float, kept: Kept) -> list[dict[str, Any]]:
    """Profile a step at each size, but for those that are kept."""
    work = asked.work
    for number, size in enumerate(sizes):
        asked.show(number, len(sizes), f"profiling batch size {size}")
        if f"step {size}" not in kept.found:
            found = step_profile.profile(
                work.spec, size, device=work.device, mode="training", dtype=cast("Any", asked.dtype),
                optimizer=cast("Any", asked.optimizer), seed=asked.seed, budget=budget / len(sizes),
            )  # fmt: skip
            kept.keep(f"step {size}", plain(found.to_mapping()))
    return [kept.found[f"step {size}"] for size in sizes]


def _trained(
    asked: Asked,
    profiles: Sequence[Mapping[str, Any]],
    budget: float,
    kept: Kept,
    images: tuple[files.Dataset, files.Dataset],
) -> dict[int, list[float]]:
    """Train epochs by turns, those of the shortest first, while the budget holds one; give their seconds by size."""
    work, count = asked.work, len(images[0])
    expected = {one["batch_size"]: count // one["batch_size"] * one["step_seconds"] for one in profiles}
    turns = [(number, size) for number in range(EPOCHS) for size in sorted(expected, key=lambda size: expected[size])]
    done: dict[int, list[float]] = {}
    spent = _PROFILES * budget
    total = min(budget, spent + EPOCHS * sum(expected.values()))
    context = kernel_choice.usual_context(work.device, asked.dtype)
    for number, size in turns:
        asked.show(spent, total, f"epoch {number + 1} at batch size {size}", "s")
        name = f"epoch {number} at {size}"
        if name not in kept.found:
            if spent + expected[size] > budget:
                continue
            began = time.monotonic()
            (epoch,) = engine.train(
                as_network(work.spec), data=images, batch_size=size, device=work.device, dtype=asked.dtype, epochs=1,
                learning_rate=_RATE, optimizer=asked.optimizer, seed=asked.seed + number, context=context,
            ).epochs  # fmt: skip
            kept.keep(name, {"seconds": epoch.seconds, "with_test": time.monotonic() - began})
        done.setdefault(size, []).append(kept.found[name]["seconds"])
        spent += kept.found[name]["with_test"]
        expected[size] = sum(done[size]) / len(done[size])
    return done


def _epochs(profile: Mapping[str, Any], trained: Sequence[float], asked: Asked, count: int) -> dict[str, Any]:
    """Say what the epochs of so many images take at a size, and how that is known."""
    size, causes = profile["batch_size"], profile["causes"]
    each = sum(trained) / len(trained) if trained else count // size * profile["step_seconds"]
    return {
        "batch_size": size,
        "seconds": EPOCHS * each,
        "epochs_trained": len(trained),
        "published_seconds": PUBLISHED.get(size) if asked.model.lower() == DEFAULT_MODEL else None,
        "shares": {cause: seconds / sum(causes.values()) for cause, seconds in causes.items()},
    }


def answer(epochs: Sequence[Mapping[str, Any]]) -> str:
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


def measured(epochs: Sequence[Mapping[str, Any]]) -> str:
    """
    Say which epochs were trained, and which are computed.

    Example:
        >>> measured([{"batch_size": 1, "epochs_trained": 0}, {"batch_size": 8, "epochs_trained": 5}])
        'Trained on MNIST: 5 epochs at batch 8. Computed from single steps: batch 1.'
        >>> measured([{"batch_size": 1, "epochs_trained": 0}])
        'No epoch was trained: all are computed from single steps. With --data DIR and time they are, on MNIST.'
    """
    by_count: dict[int, list[str]] = {}
    for one in epochs:
        by_count.setdefault(one["epochs_trained"], []).append(str(one["batch_size"]))
    stepped = by_count.pop(0, [])
    if not by_count:
        return "No epoch was trained: all are computed from single steps. With --data DIR and time they are, on MNIST."
    counted = [
        f"{count} epoch{'s' if count > 1 else ''} at batch {joined(sizes)}"
        for count, sizes in sorted(by_count.items(), reverse=True)
    ]
    text = f"Trained on MNIST: {'; '.join(counted)}."
    return f"{text} Computed from single steps: batch {joined(stepped)}." if stepped else text


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
