"""
`numpy-mnist`: why a larger batch does not train faster on a CPU.

The published question is about 5 epochs of a CNN in plain NumPy on MNIST.  They took 1200 s at batch 1, 940 s at 4,
890 s at 8, and about 850 s at 16, 32 and 256.  The advice was to profile.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from cubatch.engine import data as files, train as engine
from cubatch.engine.training_run import Training
from cubatch.measure import kernel_context, step_profile
from cubatch.network.graph import as_network
from cubatch.report.tables import profile as table
from cubatch.studies.study_cache import StudyCache
from cubatch.studies.study_request import Findings, Study, StudyRequest, training_facts
from cubatch.units import format_seconds

SIZES, QUICK_SIZES = (1, 4, 8, 16, 32, 256), (1, 8, 64)
PUBLISHED = {1: 1200.0, 4: 940.0, 8: 890.0, 16: 850.0, 32: 850.0, 256: 850.0}
SAMPLES, EPOCHS = 60_000, 5
CACHE = "epochs.jsonl"
_MODEL = "mnist-cnn"
_PROFILES = 0.2  # share of the budget for profiles if epochs are trained too
_LEARNING_RATE = 1e-3  # so low that no batch size diverges: what is learned does not matter here
_MISMATCH = 1.5  # a step whose calls are timed takes this many times another step: not explained by the timing
_METHOD = (
    f"A training step is timed at each batch size, on random images. Without trained epochs, {EPOCHS} epochs are the "
    "steps over {count} images without loading them. The incomplete last batch of an epoch is dropped."
)
_TRAINED = (
    "The sizes train whole epochs on MNIST in turn, the shortest epochs first, as many as the budget allows; "
    f"with fewer than {EPOCHS}, their mean stands for the others. An epoch includes loading images, not testing."
)
_CAUSES = (
    "In other steps every call is timed and assigned to a cause: matrix products, copies that arrange data for them, "
    "elementwise passes, call overhead, waiting threads. cubatch profile shows the same by layer. The published "
    "network and machine differ: compare how the seconds fall with the batch."
)


def run(request: StudyRequest, budget: float) -> Findings:
    """
    Profile a training step at each batch size and, with images, train whole epochs; return the findings.

    `budget` is the measuring time in seconds.
    """
    request.require_training()
    images = None if request.data is None else files.load_mnist(request.data)
    count = SAMPLES if images is None else len(images[0])
    limit = min(request.largest(SIZES[-1]), count)
    sizes = [n for n in (QUICK_SIZES if request.quick else SIZES) if n <= limit]
    if images is not None:
        engine.check(as_network(request.work.spec), images[0], optimizer=request.optimizer)
    key, facts = training_facts(request, budget, images or ())
    cache = StudyCache(request.folder / CACHE, key)
    profiles = _profile_sizes(request, sizes, budget * (1.0 if images is None else _PROFILES), cache)
    trained = {} if images is None else _train_epochs(request, profiles, budget, cache, images)
    epochs = [_epochs(profile, trained.get(profile["batch_size"], []), request, count) for profile in profiles]
    return Findings(
        facts=facts,
        answer=answer(epochs),
        points=points(epochs, profiles),
        method=[_METHOD.format(count=count), *([] if images is None else [_TRAINED]), _CAUSES],
        details={
            "data": None if request.data is None else str(request.data),
            "epochs": epochs,
            "profiles": profiles,
        },
    )


def _profile_sizes(
    request: StudyRequest, sizes: Sequence[int], budget: float, cache: StudyCache
) -> list[dict[str, Any]]:
    work, profiles = request.work, []

    def profile(size: int) -> Mapping[str, Any]:
        return step_profile.profile(
            work.spec, size, device=work.device, mode="training", dtype=cast("Any", request.dtype),
            optimizer=cast("Any", request.optimizer), seed=request.seed, budget=budget / len(sizes),
        ).to_mapping()  # fmt: skip

    for number, size in enumerate(sizes):
        request.show(number, len(sizes), f"profiling batch size {size}")
        profiles.append(cache.get(f"step {size}", functools.partial(profile, size)))
    return profiles


def _train_epochs(
    request: StudyRequest,
    profiles: Sequence[Mapping[str, Any]],
    budget: float,
    cache: StudyCache,
    images: tuple[files.Dataset, files.Dataset],
) -> dict[int, list[float]]:
    """
    Train epochs at the batch sizes of `profiles` in turn; return by batch size the seconds of each epoch.

    The shortest epochs come first. Training ends after `budget` seconds, and finished epochs are cached.
    """
    work, count = request.work, len(images[0])
    expected = {p["batch_size"]: count // p["batch_size"] * p["step_seconds"] for p in profiles}
    turns = [(number, size) for number in range(EPOCHS) for size in sorted(expected, key=lambda size: expected[size])]
    done: dict[int, list[float]] = {}
    spent = _PROFILES * budget
    total = min(budget, spent + EPOCHS * sum(expected.values()))
    context = kernel_context.usual_context(work.device, request.dtype)
    for number, size in turns:
        request.show(spent, total, f"epoch {number + 1} at batch size {size}", "s")
        name = f"epoch {number} at {size}"
        if name not in cache.findings and spent + expected[size] > budget:
            continue
        train = functools.partial(
            engine.train, as_network(work.spec), data=images, batch_size=size, device=work.device, dtype=request.dtype,
            epochs=1, learning_rate=_LEARNING_RATE, optimizer=request.optimizer, seed=request.seed + number,
            context=context,
        )  # fmt: skip
        finding = cache.get(name, functools.partial(_timed, train))
        done.setdefault(size, []).append(finding["seconds"])
        spent += finding["with_test"]
        expected[size] = sum(done[size]) / len(done[size])
    return done


def _timed(train: Callable[[], Training]) -> dict[str, float]:
    start = time.monotonic()
    return {"seconds": train().epochs[0].seconds, "with_test": time.monotonic() - start}


def _epochs(profile: Mapping[str, Any], trained: Sequence[float], request: StudyRequest, count: int) -> dict[str, Any]:
    """
    Return the "seconds" of EPOCHS epochs at the "batch_size" of a profile, and the "shares" of causes in the time.

    They come from `trained`, the seconds of trained epochs, or else from the seconds of a step and `count` images.
    "epochs_trained" is the number of trained epochs, "published_seconds" the author's time; None if unknown.
    """
    size, causes = profile["batch_size"], profile["causes"]
    per_epoch = sum(trained) / len(trained) if trained else count // size * profile["step_seconds"]
    return {
        "batch_size": size,
        "seconds": EPOCHS * per_epoch,
        "epochs_trained": len(trained),
        "published_seconds": PUBLISHED.get(size) if request.model.lower() == _MODEL else None,
        "shares": {cause: seconds / sum(causes.values()) for cause, seconds in causes.items()},
    }


def answer(epochs: Sequence[Mapping[str, Any]]) -> str:
    """
    Return a sentence on the batch size at which the seconds stop falling.

    Example:
        >>> answer([{"batch_size": n, "seconds": s} for n, s in [(1, 100.0), (8, 50.0), (64, 49.0)]])
        'It does, up to batch 8: 5 epochs take 50.0 s there and 100 s at batch 1. Larger ones gain less than a tenth.'
    """
    fastest = min(row["seconds"] for row in epochs)
    first, enough = epochs[0], next(row for row in epochs if row["seconds"] <= 1.1 * fastest)
    if enough is first:
        return f"It does not: already batch {first['batch_size']} is within a tenth of the fastest."
    return (
        f"It does, up to batch {enough['batch_size']}: {EPOCHS} epochs take {format_seconds(enough['seconds'])} there "
        f"and {format_seconds(first['seconds'])} at batch {first['batch_size']}. Larger ones gain less than a tenth."
    )


def points(epochs: Sequence[Mapping[str, Any]], profiles: Sequence[dict[str, Any]]) -> list[str]:
    """
    Return sentences on the trained epochs, the causes of the time, and the batch sizes that interference affected.

    `epochs` are rows of `_epochs`, and `profiles` step profiles in JSON form, both by ascending batch size.
    """
    trained = ", ".join(f"{row['epochs_trained']} at batch {row['batch_size']}" for row in epochs)
    largest = f"the time at batch {profiles[-1]['batch_size']}"
    lines = [
        f"Epochs trained on MNIST: {trained}."
        if any(row["epochs_trained"] for row in epochs)
        else "No epoch was trained: all are computed from single steps. With --data DIR epochs are trained, on MNIST.",
        table.verdict(profiles),
        table.shares(profiles[-1]).replace("the time", largest),
    ]
    disturbed = [
        str(profile["batch_size"])
        for profile in profiles
        if not 1 / _MISMATCH <= profile["step_seconds"] / profile["traced_seconds"] <= _MISMATCH
    ]
    if disturbed:
        lines.append(
            f"Batch {', '.join(disturbed)}: steps with and without timed calls took very different times, so another "
            "process probably interfered."
        )
    return lines


numpy_mnist = Study(
    title="Why does a larger batch not train faster?",
    question=(
        "One user wrote a CNN in plain NumPy and trained it on MNIST for 5 epochs: 1200 s at batch 1, 940 s at 4, "
        "890 s at 8, and about 850 s at 16, 32 and 256. Why does it not become faster with the batch? The advice was "
        "to profile."
    ),
    model=_MODEL,
    modes=("training",),
    budgets=(300.0, 3.0),
    run=run,
    uses_images=True,
)
