"""How a wanted batch is cut into steps for the Trainer of Hugging Face."""

from __future__ import annotations

import json

import pytest

from cubatch.errors import InvalidArgument
from cubatch.integrations.huggingface import TrainerResult, batch_arguments, tune_trainer
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import measurement, tuned


def result(**more):
    """Of training: 1000 samples/s at 16, which was dropped, and 2000, 3000, 3020 samples/s at 32, 64, 128."""
    return TuningResult.from_json(json.dumps(tuned(**more)))


@pytest.mark.parametrize(
    ("target", "num_devices", "expected"),
    [
        (512, 1, (128, 4)),  # 4 x 128/3020 s = 169.5 ms, 8 x 64/3000 s = 170.7 ms
        (192, 1, (96, 2)),  # 3 x 64/3000 s = 64.0 ms; half-way from 21.33 to 42.38 ms are 31.86 ms, twice 63.7 ms
        (320, 1, (80, 4)),  # a quarter of the way: 4 x 26.60 = 106.4 ms; 5 x 21.33 = 106.7 ms
        (64, 1, (64, 1)),
        (256, 4, (64, 1)),  # no size above a device's share
        (127, 1, (127, 1)),
    ],
)
def test_a_batch_is_cut_into_the_steps_that_take_the_least_time(target, num_devices, expected):
    """Worked out by hand from the three timings; the product is the target exactly."""
    given = batch_arguments(result(), target, num_devices=num_devices)
    assert given == dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), expected, strict=True))
    assert expected[0] * expected[1] * num_devices == target


@pytest.mark.parametrize(
    ("target", "num_devices", "size", "words"),
    [
        (131, 1, 1, r"of 1 sample, fewer than.*; 128 and 256 can.*not measured: 131\. Raise"),  # a prime
        (48, 1, 48, "of 48 samples, at 85.1 % of .*; 128 can"),  # half-way from 16 to 21.33 ms are 18.67 ms
        (
            524,
            2,
            2,
            r"of 2 samples, fewer than were measured; 512 and 768 can.*not measured: 131\. Raise",
        ),  # 262 did not fit
    ],
)
def test_a_batch_that_cannot_be_cut_well_is_cut_with_a_warning(target, num_devices, size, words):
    """Learning rates keep their meaning; whoever is free to change the batch is told of nearer ones."""
    with pytest.warns(UserWarning, match=words):
        given = batch_arguments(result(), target, num_devices=num_devices)
    assert given["per_device_train_batch_size"] == size
    assert size * given["gradient_accumulation_steps"] * num_devices == target


def test_no_throughput_is_told_of_a_size_below_what_was_measured():
    """20 took the 16 ms of 32 there, and so 62.5 % of a throughput that nobody measured."""
    sizes = [measurement(32, 0.016), measurement(64, 0.032)]
    with pytest.warns(UserWarning, match="of 20 samples, fewer than were measured; 64 can") as told:
        given = batch_arguments(result(measurements=sizes, batch_size=64, fastest_batch_size=64, tied_with=[]), 20)
    assert given == {"per_device_train_batch_size": 20, "gradient_accumulation_steps": 1}
    assert "%" not in str(told[0].message)


def test_no_target_is_advised_that_would_be_cut_into_what_breaks_a_limit():
    """128 is the fastest, and over the latency limit: 64 is the best there is, and divides the target."""
    sizes = [measurement(64, 64 / 3000), measurement(128, 128 / 9000, status="over_limit")]
    given = batch_arguments(result(measurements=sizes, batch_size=64, fastest_batch_size=64, tied_with=[]), 128)
    assert given["per_device_train_batch_size"] == 64


def test_a_result_without_a_recommendation_is_divided_with_a_warning():
    """Only one size was measured: 1 x 64 is not what the user should train with."""
    one = {"measurements": [measurement(1, 0.3)], "batch_size": None, "fastest_batch_size": 1, "tied_with": []}
    with pytest.warns(UserWarning, match=r"of 1 without a recommendation\. Only batch size 1 was measured\."):
        batch_arguments(result(**one, reasons=["Only batch size 1 was measured."]), 64)


def test_the_result_of_a_trainer_counts_as_that_of_training_and_prints_its_tables():
    """Both are taken; printed are the tables of training, then those of evaluation if there are any."""
    training, judged = result(), result(mode="inference")
    both = TrainerResult(training=training, evaluation=judged)
    assert batch_arguments(both, 512) == batch_arguments(training, 512)
    assert str(both) == f"{training}\n\n{judged}"
    assert str(TrainerResult(training=training, evaluation=None)) == str(training)


def test_what_is_no_trainer_and_no_result_is_refused_by_name():
    """Their attributes would be missing later."""
    with pytest.raises(InvalidArgument, match=r"trainer must be a transformers.Trainer, got 'object'\. Call autotune"):
        tune_trainer(object())
    with pytest.raises(InvalidArgument, match="result must be a TuningResult"):
        batch_arguments(object(), 64)


@pytest.mark.parametrize(
    ("more", "target", "num_devices", "words"),
    [
        ({}, 100, 3, "a multiple of num_devices=3, got 100. 99 is the nearest"),
        ({}, 0, 1, "target_batch_size must be"),
        ({}, 8, 0, "num_devices must be"),
        ({"mode": "inference"}, 64, 1, "Tune with mode='training'"),
        ({"measurements": [measurement(8, status="error")]}, 64, 1, "without a size that ran"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_way_on(more, target, num_devices, words):
    """Rather than a batch of another size, or sizes of steps that keep no gradients."""
    with pytest.raises(InvalidArgument, match=words):
        batch_arguments(result(**more), target, num_devices=num_devices)
