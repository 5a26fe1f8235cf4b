"""Studies in the JSON form of schema 1, of made-up numbers."""

from __future__ import annotations

from cubatch.studies import generalisation, memory_rules, numpy_mnist, search_space, sweep
from cubatch.studies.run import STUDIES
from cubatch.studies.size_comparison import SizeComparison, answer_slower, doubts, list_verdicts
from tests.unit.tuned import measurement, tuned

WHERE = {
    name: value for name, value in tuned().items() if name not in {"measurements", "reasons", "schema", "spec"}
} | {"schema": 1, "model": "mobilenet-v3-large"}


def payload(name, **numbers):
    """Return a study with its own texts and these numbers."""
    study = STUDIES[name]
    texts = {"title": study.title, "question": [study.question], "method": ["Measured <evenly>."]}
    return WHERE | texts | {"study": name, "command": f"cubatch study {name}"} | numbers


def compared(batch_size, reference, ratio, half, verdict, rule=""):
    """Return a comparison with a symmetric interval."""
    return SizeComparison(
        batch_size=batch_size,
        reference=reference,
        ratio=ratio,
        interval=(ratio - half, ratio + half),
        trials=(11, 10),
        verdict=verdict,
        rule=rule,
    )


def of_powers():
    """Two neighbors alike, one slower, one unclear."""
    comparisons = [
        compared(100, 128, 0.93, 0.01, "slower"),
        compared(127, 128, 0.999, 0.004, "same"),
        compared(129, 128, 0.96, 0.008, "slower"),
        compared(255, 256, 1.01, 0.04, "unclear"),
    ]
    return payload(
        "powers-of-two",
        comparisons=[c.to_mapping() | {"published": sweep.PUBLISHED.get(c.batch_size)} for c in comparisons],
        answer=answer_slower(comparisons[1:]),
        points=doubts(comparisons, [(257, 256)]),
        result=tuned(measurements=[measurement(n, n / 2000) for n in (100, 127, 128, 129, 255, 256)]),
    )


def of_floor():
    """Powers of two up to 8; batch 2 takes hardly longer than 1."""
    seconds = {1: 1e-3, 2: 1.05e-3, 4: 1.5e-3, 8: 2.9e-3}
    sizes = sweep.floor_of(seconds)
    return payload(
        "small-batch-floor",
        **sizes,
        answer=sweep.answer_floor(sizes["floor"], seconds),
        points=["A step of one sample takes 1 ms."],
        result=tuned(measurements=[measurement(n, step) for n, step in seconds.items()]),
    )


def of_choices():
    """Two sizes worth trying."""
    choices = [
        {"batch_size": n, "cost": cost, "samples_per_second": 3000.0 * (1 - cost), "predicted_peak_bytes": n * 2**20}
        for n, cost in ((32, 0.03), (64, 0.0))
    ]
    answer = search_space.answer([32, 64])
    return payload("hyperparameter", choices=choices, answer=answer, points=["For Optuna: [32, 64]."], result=tuned())


def of_rules():
    """A file of 100 MiB; training takes four times as much at batch 1."""
    file = 100 * 2**20
    parts = dict.fromkeys(memory_rules.PARTS, 0) | {"weights": file, "activations": 2 * file, "gradients": file}
    row = {"batch_size": 1, "device_bytes": None, "parts": parts}
    measured = [
        row | {"mode": mode, "planned_bytes": planned, "measured_bytes": peak}
        for mode, planned, peak in (("inference", file, file), ("training", 4 * file, 4 * file + 4096))
    ]
    rules = [
        {"name": name, "mode": "training", "batch_size": 1, "bytes": int(factor * file), "ratio": factor / 4}
        for name, factor in (("textbook count", 0.1), ("2x the file", 2), ("4.5x the file", 4.5))
    ]
    largest = {"value": 50.0, "computed": 100.0, "memory_bytes": 2**33}
    return payload(
        "memory-rules",
        file_bytes=file,
        measured=measured,
        rules=rules,
        largest=largest,
        answer=memory_rules.answer(rules),
        points=memory_rules.points(measured, rules, largest),
    )


def of_epochs():
    """Seconds that fall from batch 1 to 8."""
    epochs = [
        {
            "batch_size": n,
            "seconds": seconds,
            "published_seconds": numpy_mnist.PUBLISHED[n],
            "epochs_trained": trained,
            "shares": {"products": 1 - overhead, "overhead": overhead},
        }
        for n, seconds, trained, overhead in ((1, 400.0, 0, 0.6), (8, 100.0, 2, 0.1), (256, 95.0, 5, 0.01))
    ]
    answer = numpy_mnist.answer(epochs)
    return payload("numpy-mnist", epochs=epochs, answer=answer, points=["Most time is overhead of calls."])


def of_waves():
    """One full wave at 28, between powers of two and multiples of 8; batch 30 was not measured."""
    past, slower = compared(29, 28, 0.7, 0.05, "slower", "past full wave"), compared(32, 28, 0.79, 0.01, "slower")
    marks = {24: ["multiple of 8"], 28: ["full wave", "Coulom n=1"], 29: ["past full wave"], 32: ["power of two"]}
    rows = [
        {
            "batch_size": n,
            "busiest": 1 + (n > 28),
            "samples_per_second": rate,
            "interval": rate and [0.98 * rate, 1.02 * rate],
            "predicted": 100.0 * n / (1 + (n > 28)),
            "rule": 2800 * n / 28 / (1 + (n > 28)),
            "marks": marks.get(n, []),
        }
        for n, rate in ((24, 2400.0), (28, 2800.0), (29, 2000.0), (30, None), (32, 2200.0))
    ]
    return payload(
        "waves",
        full_waves=[{"batch_size": 28, "busiest": [1, 2], "rule_ratio": 29 / 56, "predicted_ratio": 0.6}],
        sizes=rows,
        distribution={"items": "blocks of conv1", "unit": "SM", "count": 80},
        answer=answer_slower([past]),
        points=[f"Power of two vs nearest full wave: {list_verdicts([slower])}."],
        result=tuned(),
    )


def of_generalisation():
    """Three seeds at three sizes: with a fixed rate the largest has learned less, with a scaled one it diverges."""
    rows = []
    for policy, n, rate, accuracies, loss, sharp in (
        ("fixed", 16, 0.05, (0.98, 0.981, 0.982), 0.02, 40.0), ("fixed", 64, 0.05, (0.978, 0.98, 0.981), 0.03, 20.0),
        ("fixed", 4096, 0.05, (0.90, 0.91, 0.92), 0.4, 2.0), ("scaled", 64, 0.05, (0.978, 0.98, 0.981), 0.03, 20.0),
        ("scaled", 4096, 3.2, (0.098, 0.098, 0.113), None, None),
    ):  # fmt: skip
        runs = [
            {"batch_size": n, "learning_rate": rate, "seed": seed, "updates": 5 * 60000 // n, "test_accuracy": accuracy,
             "training_loss": loss, "diverged": loss is None, "seconds": 900 / n, "spent_seconds": 1000 / n,
             "sharpness": sharp and {"eigenvalue": sharp + seed, "iterations": 9, "settled": True}}
            for seed, accuracy in enumerate(accuracies)
        ]  # fmt: skip
        rows.append(generalisation.summarize(policy, generalisation.Cell(n, rate, 0), runs))
    rows = [row | {"gap": generalisation.gap_to_base(row, rows)} for row in rows]
    answer, points = generalisation.answer(rows), generalisation.points(rows, missing=3)
    return payload("generalisation", rows=rows, answer=answer, points=points)


ALL = {
    one["study"]: one
    for one in (of_powers(), of_floor(), of_choices(), of_rules(), of_epochs(), of_waves(), of_generalisation())
}
