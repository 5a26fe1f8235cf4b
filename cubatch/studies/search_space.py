"""`hyperparameter`: the batch sizes worth trying when the batch size is searched with other hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence

from cubatch.search.events import Event
from cubatch.studies.study_request import Findings, Study, StudyRequest, tuning_facts
from cubatch.units import format_percent, join_words

WITHIN = 0.05
_METHOD = [
    "Sizes are searched as by cubatch tune, until the fastest is known or the budget is spent.",
    (
        f"Listed are sizes that cost at most {format_percent(WITHIN)} of the best throughput; of two closer than a "
        "factor of 1.25 only the faster one, since training can hardly distinguish them."
    ),
    "The effect of a size on learning is not measured: a larger batch makes fewer updates per epoch.",
]


def run(request: StudyRequest, budget: float) -> Findings:
    """Tune for at most `budget` seconds; return the batch sizes that cost at most 5 % of the best throughput."""

    def watch(event: Event) -> None:
        request.show(event.done, event.total, event.so_far, "s")

    result = request.tune(budget=budget, max_batch_size=request.max_batch_size, progress=watch)
    measured = {m.batch_size: m for m in result.measurements}
    costs = result.choices(within=WITHIN)
    choices = [
        {
            "batch_size": n,
            "cost": cost,
            "samples_per_second": measured[n].samples_per_second,
            "predicted_peak_bytes": measured[n].predicted_peak_bytes,
        }
        for n, cost in costs.items()
    ]
    return Findings(
        facts=tuning_facts(result),
        answer=answer([*costs]),
        points=[
            f'For Optuna: trial.suggest_categorical("batch_size", {[*costs]}); the list is in batch_sizes.json.',
            f"In Python: cubatch.autotune(...).choices(within={WITHIN}).",
        ],
        method=_METHOD,
        details={
            "tolerance": result.tolerance,
            "within": WITHIN,
            "choices": choices,
            "result": result.to_mapping(),
        },
        files={"batch_sizes.json": [*costs]},
    )


def answer(sizes: Sequence[int]) -> str:
    """
    Return a sentence with the batch sizes that cost at most 5 % of the best throughput.

    Example:
        >>> answer([64, 128])
        '64 and 128: each costs at most 5.00 % of the throughput.'
        >>> answer([64])
        'Only 64: every other measured size costs more than 5.00 % of the throughput, or is close to it.'
        >>> answer([])
        'Unknown: no sizes were compared.'
    """
    if not sizes:
        return "Unknown: no sizes were compared."
    share = format_percent(WITHIN)
    if len(sizes) == 1:
        return (
            f"Only {sizes[0]}: every other measured size costs more than {share} of the throughput, or is close to it."
        )
    return f"{join_words([str(n) for n in sizes])}: each costs at most {share} of the throughput."


hyperparameter = Study(
    title="Which batch sizes are worth trying?",
    question=(
        "How well a network learns depends on the batch size, and no speed measurement shows which is best: it "
        "remains a hyperparameter. A search need not try all sizes: slow ones waste time, and so do sizes that hardly "
        "differ. Which ones are worth trying on this device?"
    ),
    model="mnist-cnn",
    modes=("training",),
    budgets=(60.0, 10.0),
    run=run,
)
