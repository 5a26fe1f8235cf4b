"""Studies in the JSON form of schema 1, of made-up numbers."""

from __future__ import annotations

from cubatch.studies import (
    generalisation,
    hyperparameter,
    memory_rules,
    numpy_mnist,
    powers_of_two,
    small_batch_floor,
    waves,
)
from tests.unit.tuned import measurement, tuned

WHERE = {
    name: value for name, value in tuned().items() if name not in {"measurements", "reasons", "schema", "spec"}
} | {"schema": 1, "model": "mobilenet-v3-large"}


def compared(batch_size, power, ratio, half, verdict, published=None):
    """A comparison whose interval reaches so far to both sides."""
    return {
        "batch_size": batch_size, "power": power, "ratio": ratio, "interval": [ratio - half, ratio + half],
        "visits": [11, 10], "verdict": verdict, "published": published,
    }  # fmt: skip


def of_powers():
    """Two neighbours alike, one slower, one of which nothing is known."""
    found = [
        compared(100, 128, 0.93, 0.01, "slower", "slower"), compared(127, 128, 0.999, 0.004, "same", "same"),
        compared(129, 128, 0.96, 0.008, "slower", "same"), compared(255, 256, 1.01, 0.04, "same", "same"),
    ]  # fmt: skip
    return WHERE | {
        "study": "powers-of-two", "command": "cubatch study powers-of-two", "title": powers_of_two.TITLE,
        "question": [powers_of_two.QUESTION], "method": ["Measured <evenly>."], "tolerance": 0.01, "sweeps": 11,
        "comparisons": found, "unknown": [[257, 256]], "answer": powers_of_two.answer(found),
        "points": powers_of_two.points(found, [[257, 256]]),
        "result": tuned(measurements=[measurement(n, n / 2000) for n in (100, 127, 128, 129, 255, 256)]),
    }  # fmt: skip


def of_floor():
    """Powers of two up to 8, of which 2 takes hardly longer than 1."""
    seconds = {1: 1e-3, 2: 1.05e-3, 4: 1.5e-3, 8: 2.9e-3}
    found = small_batch_floor.floor_of(seconds)
    return WHERE | {
        "study": "small-batch-floor", "command": "cubatch study small-batch-floor", "title": small_batch_floor.TITLE,
        "question": [small_batch_floor.QUESTION], "method": ["Measured."], "sweeps": 7, **found,
        "answer": small_batch_floor._answer(found, seconds), "points": small_batch_floor._points(found, seconds),
        "result": tuned(measurements=[measurement(n, taken) for n, taken in seconds.items()]),
    }  # fmt: skip


def of_choices():
    """Two sizes worth trying."""
    choices = [
        {"batch_size": n, "cost": cost, "samples_per_second": 3000.0 * (1 - cost), "predicted_peak_bytes": n * 2**20}
        for n, cost in ((32, 0.03), (64, 0.0))
    ]
    return WHERE | {
        "study": "hyperparameter", "command": "cubatch study hyperparameter", "title": hyperparameter.TITLE,
        "question": [hyperparameter.QUESTION], "method": hyperparameter.METHOD, "within": 0.05, "choices": choices,
        "answer": hyperparameter.answer([32, 64]), "points": hyperparameter._points(choices), "result": tuned(),
        "files": {"batch_sizes.json": [32, 64]},
    }  # fmt: skip


def of_rules():
    """A file of 100 MiB, of which training takes four times as much at batch 1."""
    file = 100 * 2**20
    parts = dict.fromkeys(memory_rules.PARTS, 0) | {"weights": file, "activations": 2 * file, "gradients": file}
    taken = [
        {"mode": mode, "batch_size": 1, "planned_bytes": planned, "measured_bytes": measured, "device_bytes": None,
         "parts": parts}
        for mode, planned, measured in (("inference", file, file), ("training", 4 * file, 4 * file + 4096))
    ]  # fmt: skip
    rules = [
        {"name": name, "formula": "", "mode": "training", "batch_size": 1, "bytes": int(factor * file),
         "measured_bytes": 4 * file, "ratio": factor / 4}
        for name, factor in (("textbook count", 0.1), ("2x the file", 2), ("4.5x the file", 4.5))
    ]  # fmt: skip
    largest = {"value": 50.0, "computed": 100.0, "memory_bytes": 2**33}
    return WHERE | {
        "study": "memory-rules", "command": "cubatch study memory-rules", "title": memory_rules.TITLE,
        "question": [memory_rules.QUESTION], "method": memory_rules.METHOD, "file_bytes": file, "taken": taken,
        "rules": rules, "largest": largest, "answer": memory_rules._answer(rules),
        "points": memory_rules._points(taken, rules, largest),
    }  # fmt: skip


def of_epochs():
    """Seconds that fall from batch 1 to 8."""
    epochs = [
        {"batch_size": n, "seconds": seconds, "published_seconds": numpy_mnist.PUBLISHED[n], "epochs_trained": trained,
         "shares": {"products": 1 - overhead, "overhead": overhead}}
        for n, seconds, trained, overhead in ((1, 400.0, 0, 0.6), (8, 100.0, 2, 0.1), (256, 95.0, 5, 0.01))
    ]  # fmt: skip
    return WHERE | {
        "study": "numpy-mnist", "command": "cubatch study numpy-mnist", "title": numpy_mnist.TITLE,
        "question": [numpy_mnist.QUESTION], "method": ["Measured."], "epochs": epochs,
        "answer": numpy_mnist.answer(epochs), "points": [numpy_mnist.measured(epochs), "Most of all for overhead."],
    }  # fmt: skip


def of_waves():
    """One crest at 28 that holds, in the middle of powers of two and multiples of 8; batch 30 was not measured."""
    compared_with = {"batch_size": 28, "beside": 29, "ratio": 1.4, "interval": [1.35, 1.45], "visits": [7, 7]}
    alike = {"batch_size": 28, "beside": 28, "ratio": 1.0, "interval": [0.99, 1.01], "visits": [7, 7]}
    tops = [
        {"batch_size": 28, "past": 29, "busiest": [1, 2], "rule_ratio": 2 * 28 / 29, "predicted_ratio": 1.6,
         "comparison": compared_with | {"verdict": "faster"}, "fastest": 28,
         "fastest_beside": alike | {"verdict": "same"}}
    ]  # fmt: skip
    marks = {24: ["multiple of 8"], 28: ["crest", "Coulom n=1"], 29: ["past crest"], 32: ["power of two"]}
    rows = [
        {"batch_size": n, "busiest": 1 + (n > 28), "samples_per_second": rate,
         "interval": rate and [0.98 * rate, 1.02 * rate], "predicted": 100.0 * n / (1 + (n > 28)),
         "rule": 2800 * n / 28 / (1 + (n > 28)), "marks": marks.get(n, [])}
        for n, rate in ((24, 2400.0), (28, 2800.0), (29, 2000.0), (30, None), (32, 2200.0))
    ]  # fmt: skip
    slower = {"batch_size": 32, "beside": 28, "ratio": 0.79, "interval": [0.78, 0.8], "visits": [7, 7],
              "verdict": "slower", "is_crest": False}  # fmt: skip
    common = {"Coulom": [alike | {"verdict": "same", "is_crest": True}], "power of two": [slower]}
    return WHERE | {
        "study": "waves", "command": "cubatch study waves", "title": waves.TITLE, "question": [waves.QUESTION],
        "method": ["Measured."], "tolerance": 0.01, "sweeps": 7, "crests": tops, "sizes": rows,
        "dealt": {"what": "blocks of conv1", "to": "SM", "count": 80}, "answer": waves.answer(tops),
        "points": waves.points(tops, common), "result": tuned(),
    }  # fmt: skip


def of_generalisation():
    """Three seeds at three sizes: with a fixed rate the largest has learnt less, with a scaled one it diverges once."""
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
        rows.append(generalisation.row_of(policy, generalisation.Cell(n, rate, 0), runs))
    rows = [row | {"beside_base": generalisation.beside_base(row, rows)} for row in rows]
    return WHERE | {
        "study": "generalisation", "command": "cubatch study generalisation", "title": generalisation.TITLE,
        "question": [generalisation.QUESTION], "method": ["Trained."], "epochs": 5, "seeds": 3, "rows": rows,
        "answer": generalisation.answer(rows), "points": generalisation.points(rows, missing=3),
    }  # fmt: skip


ALL = {
    payload["study"]: payload
    for payload in (
        of_powers(), of_floor(), of_choices(), of_rules(), of_epochs(), of_waves(), of_generalisation()
    )
}  # fmt: skip
