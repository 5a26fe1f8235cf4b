"""A model of planted times in the place of the one that was learned."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubatch.estimate import expected
from cubatch.estimate.blocks import num_blocks
from cubatch.estimate.parts import PassPrediction, StepPrediction
from cubatch.network.passes import Pass
from tests.unit.tuning.forecasts import GO, SCALE_SD


@pytest.fixture
def planted(monkeypatch):
    """Replace the model: give seconds by batch size and how unsure it is."""

    def plant(seconds: dict[int, float], sd: float = 0.1, notes: tuple[str, ...] = ()) -> None:
        def step(spec, sizes, device, *, mode, dtype, library, scales):
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
