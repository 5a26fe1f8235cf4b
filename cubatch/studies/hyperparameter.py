"""`hyperparameter`: which batch sizes are worth trying, when they are searched with the learning rate and the rest?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.tables.common import joined
from cubatch.search.events import Event
from cubatch.studies.asked import Asked, shared
from cubatch.units import format_percent

TITLE = "Which batch sizes are worth trying?"
DEFAULT_MODEL = "mnist-cnn"
MODES = ("training",)
WITHIN = 0.05
_USUAL_SECONDS, _QUICK_SECONDS = 60.0, 10.0

QUESTION = (
    "How well a network learns depends on the batch size, and no measurement of speed can tell which is best: it "
    "stays a hyperparameter. But a search need not try all: sizes that are slow waste its time, and sizes that "
    "hardly differ do so too. Which are sensible on this device?"
)
METHOD = [
    "Sizes are searched as by cubatch tune, until the fastest is known or the budget is spent.",
    (
        f"Of those measured, the ones that cost at most {format_percent(WITHIN)} of the best throughput are listed; of "
        "those nearer to each other than a factor of 1.25 the faster one, since training can hardly tell them apart."
    ),
    "What a size does to learning is not measured here: a larger batch makes fewer updates in an epoch.",
]


def study(asked: Asked) -> dict[str, Any]:
    """
    Tune, and list the sizes that are nearly as fast as the fastest.

    Raises:
        CubatchError: Whatever `autotune` raises.
    """

    def watch(event: Event) -> None:
        asked.show(event.done, event.total, event.so_far, "s")

    budget = asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS)
    result = asked.tuned(budget=budget, max_batch_size=asked.max_batch_size, progress=watch)
    rates = {m.batch_size: m for m in result.measurements}
    choices = [
        {
            "batch_size": n,
            "cost": cost,
            "samples_per_second": rates[n].samples_per_second,
            "predicted_peak_bytes": rates[n].predicted_peak_bytes,
        }
        for n, cost in result.choices(within=WITHIN).items()
    ]
    return {
        **shared(result),
        "title": TITLE,
        "question": [QUESTION],
        "method": METHOD,
        "answer": answer([*result.choices(within=WITHIN)]),
        "points": _points(choices),
        "tolerance": result.tolerance,
        "within": WITHIN,
        "choices": choices,
        "files": {"batch_sizes.json": [choice["batch_size"] for choice in choices]},
        "result": result.to_mapping(),
    }


def answer(sizes: Sequence[int]) -> str:
    """
    List the sizes in a sentence.

    Example:
        >>> answer([64, 128])
        '64 and 128: each costs at most 5.00 % of the speed.'
        >>> answer([64])
        'Only 64: every other size measured costs more than 5.00 % of the speed, or is close to it.'
    """
    share = format_percent(WITHIN)
    if len(sizes) == 1:
        return f"Only {sizes[0]}: every other size measured costs more than {share} of the speed, or is close to it."
    return f"{joined([str(n) for n in sizes])}: each costs at most {share} of the speed."


def _points(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    sizes = [choice["batch_size"] for choice in choices]
    return [
        f'For Optuna: trial.suggest_categorical("batch_size", {sizes}); the list is in batch_sizes.json.',
        "In Python: cubatch.autotune(...).choices(within=0.05).",
    ]
