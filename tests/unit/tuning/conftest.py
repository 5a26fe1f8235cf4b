"""A model of planted times in the place of the one that was learned, and runs whose runners and clock are watched."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubatch.estimate import expected
from cubatch.estimate.block_counts import num_blocks
from cubatch.estimate.predictions import PassPrediction, StepPrediction
from cubatch.measure import network_runner
from cubatch.measure.network_runner import NetworkRunner
from cubatch.network.passes import Pass
from tests.unit.tuning.forecasts import GO, SCALE_SD


@pytest.fixture
def planted(monkeypatch):
    """Replace the model: give seconds by batch size and how unsure it is."""

    def plant(seconds: dict[int, float], sd: float = 0.1, notes: tuple[str, ...] = ()) -> None:
        def step(spec, sizes, device, *, mode, dtype, library, scales, experimental):
            times = scales.compute * np.array([seconds[n] for n in sizes])
            half = np.exp(1.6448536269514722 * math.hypot(sd, SCALE_SD))
            blocks = np.array([num_blocks(GO, Pass.FPROP, n) for n in sizes], float)
            one = PassPrediction("go", Pass.FPROP, times, ("128x128",) * len(times), blocks)
            return StepPrediction(tuple(sizes), times, times / half, times * half, (one,), notes, SCALE_SD)

        monkeypatch.setattr(expected, "predict_step", step)

    return plant


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "store.sqlite3"


@pytest.fixture
def no_runner(monkeypatch):
    """From now on nothing can be measured: a runner is an error."""

    def forbid():
        def refuse(**_):
            raise AssertionError("a runner was made")

        monkeypatch.setattr(network_runner, "network_runner", refuse)

    return forbid


@pytest.fixture
def counted(monkeypatch):
    """Batch sizes that were prepared, in order."""
    prepared = []
    prepare = NetworkRunner.prepare

    def count(self, batch_size):
        prepared.append(batch_size)
        prepare(self, batch_size)

    monkeypatch.setattr(NetworkRunner, "prepare", count)
    return prepared
