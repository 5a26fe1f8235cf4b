"""Studies in the JSON form of schema 1, of made-up numbers."""

from __future__ import annotations

from cubatch.studies import hyperparameter, memory_rules, numpy_mnist, powers_of_two, small_batch_floor
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
        "answer": small_batch_floor._answer(found), "points": small_batch_floor._points(found, seconds),
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
        {"batch_size": n, "seconds": seconds, "published_seconds": numpy_mnist.PUBLISHED[n],
         "shares": {"products": 1 - overhead, "overhead": overhead}}
        for n, seconds, overhead in ((1, 400.0, 0.6), (8, 100.0, 0.1), (256, 95.0, 0.01))
    ]  # fmt: skip
    return WHERE | {
        "study": "numpy-mnist", "command": "cubatch study numpy-mnist", "title": numpy_mnist.TITLE,
        "question": [numpy_mnist.QUESTION], "method": numpy_mnist.METHOD, "epochs": epochs,
        "answer": numpy_mnist.answer(epochs), "points": ["Most of all for overhead."],
    }  # fmt: skip


ALL = {payload["study"]: payload for payload in (of_powers(), of_floor(), of_choices(), of_rules(), of_epochs())}
