"""What a result gives to Optuna and to the Trainer of Hugging Face, in those themselves."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")  # first: a module that was skipped before is there in part only

from cubatch.integrations.huggingface import batch_arguments
from cubatch.tuning.results import TuningResult
from tests.parity.beside_torchvision import registering_nothing
from tests.unit.tuned import about, tuned

optuna = pytest.importorskip("optuna")
pytest.importorskip("transformers")
with registering_nothing():
    from transformers import TrainingArguments


def test_optuna_tries_each_choice_and_finds_the_best_of_them():
    """A grid over what `choices` gives runs each size once."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    choices = TuningResult.from_json(json.dumps(about({32: 960.0, 64: 1000.0, 128: 990.0, 256: 300.0}))).choices()

    def loss(trial):
        return abs(trial.suggest_categorical("batch_size", list(choices)) - 100)

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"batch_size": list(choices)}, seed=0))
    study.optimize(loss, n_trials=len(choices))
    assert sorted(trial.params["batch_size"] for trial in study.trials) == [32, 64, 128]
    assert study.best_params == {"batch_size": 128}


def test_the_trainer_of_hugging_face_takes_the_arguments_and_steps_over_the_target(tmp_path):
    """Its own count of samples an optimiser step is the target."""
    result = TuningResult.from_json(json.dumps(tuned()))
    with registering_nothing():  # what it needs is imported when it is made
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **batch_arguments(result, 192))
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (96, 2)
    assert arguments.train_batch_size * arguments.gradient_accumulation_steps == 192
