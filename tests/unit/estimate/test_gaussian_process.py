"""The Gaussian process of what the arithmetic leaves: sums by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.estimate.vendor import trees
from cubatch.estimate.vendor.algorithms import algorithms, seconds
from cubatch.estimate.vendor.fitted import Fitted
from cubatch.estimate.vendor.gaussian_process import FEATURES, GaussianProcess, near, table
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from tests.unit.estimate.building import constants_of, places_of, work_of

CHESS = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)
V100, T4, P100 = ("v100-pcie-32gb", "Volta"), ("t4", "Volta"), ("p100-pcie-16gb", "P100")


def described(work, places):
    """What the process sees of the cases."""
    found = algorithms(work, places.num_sms)
    return trees.features(work, places, found, seconds(work, places, constants_of(), found))


def process_of(work, places, weights):
    """A process over some measurements, all lengths alike."""
    lengths = np.full(len(FEATURES), 2.0, np.float32)
    points = (table(described(work, places)) / lengths).astype(np.float32)
    return GaussianProcess(
        lengths, points, np.array(weights, np.float32), places.gpu, places.kin, np.array([0.5, 0.25, 0.125], np.float32)
    )


def on(gpus):
    """Cases of one size, each on a GPU of its own name and kin."""
    names, kin = np.array(gpus).T
    return attrs.evolve(places_of(len(gpus)), gpu=names, kin=kin)


def test_a_correction_is_the_weighted_sum_of_what_is_near_on_gpus_alike():
    """A batch twice as large is ln 2 away in rows and waves; a V100 shares all with itself, kin with a T4."""
    known = on([V100, P100])
    process = process_of(work_of((CHESS, Pass.FPROP, 64), (CHESS, Pass.FPROP, 64)), known, [2.0, 1.0])
    asked = on([V100, T4, P100, ("", "later")])
    work = work_of(*[(CHESS, Pass.FPROP, 128)] * 4)
    columns = described(work, asked)
    moved = table(columns)[0] - table(described(work_of((CHESS, Pass.FPROP, 64)), on([V100])))[0]
    assert moved[FEATURES.index("m")] == pytest.approx(np.log(2))
    alike = np.exp(-((moved / 2) ** 2).sum() / 2)
    want = alike * np.array([2 * 0.875 + 0.5, 2 * 0.75 + 0.5, 2 * 0.5 + 0.875, 2 * 0.5 + 0.5])
    assert process(columns, asked) == pytest.approx(want, rel=1e-5)


def test_each_gradient_has_a_feature_of_its_own():
    """One of the last two columns is 1 in a gradient of the input or of the filter, none in a forward pass."""
    x = table(described(work_of(*((CHESS, pass_, 8) for pass_ in Pass)), places_of(3)))
    assert x[:, [FEATURES.index(name) for name in ("dgrad", "wgrad")]].tolist() == [[0, 0], [1, 0], [0, 1]]


def test_nothing_is_more_like_a_case_than_itself():
    """In float32 the square of a distance of nothing may come out below it, far from the origin."""
    points = np.random.default_rng(1).normal(0, 3, (50, len(FEATURES))).astype(np.float32)
    alike, apart = near(points, points), points[:, None].astype(float) - points
    assert alike.max() == 1
    assert alike == pytest.approx(np.exp(-(apart**2).sum(axis=2) / 2), abs=1e-4)


def test_far_from_all_that_was_measured_it_says_nothing():
    """A layer e^10 times as deep has next to no correction."""
    process = process_of(work_of((CHESS, Pass.FPROP, 64)), on([V100]), [1.0])
    work = work_of((Linear(c=25_000_000, k=128), Pass.FPROP, 4096))
    assert abs(process(described(work, on([V100])), on([V100]))[0]) < 1e-5


def test_many_cases_are_as_each_alone():
    """Cases are cut into parts; none is lost, and none takes another's place."""
    process = process_of(work_of((CHESS, Pass.FPROP, 64), (CHESS, Pass.WGRAD, 8)), on([V100, P100]), [1.0, -1.0])
    gpus = [(V100, T4, P100)[i % 3] for i in range(2200)]
    work, places = work_of(*[(CHESS, (Pass.FPROP, Pass.WGRAD)[i % 2], 1 + i) for i in range(2200)]), on(gpus)
    columns = described(work, places)
    got = process(columns, places)
    for i in (0, 511, 512, 1533, 1536, 1537, 2199):
        alone = process({name: column[[i]] for name, column in columns.items()}, places.take(np.array([i])))
        assert got[i] == pytest.approx(alone[0], rel=1e-5, abs=1e-6)


def test_a_model_with_a_process_is_read_as_it_was_written(tmp_path):
    """Its arrays come back to the bit, and so do its predictions, which are the arithmetic times its correction."""
    work, places = work_of((CHESS, Pass.FPROP, 64), (CHESS, Pass.DGRAD, 64)), on([V100, P100])
    process = process_of(work, places, [0.5, -0.25])
    model = Fitted("deepbench conv", constants_of(), {}, None, 0.125, 0.25, process=process)
    model.save(tmp_path / "model.npz")
    got = Fitted.load(tmp_path / "model.npz")
    for field in attrs.fields(GaussianProcess):
        want, found = getattr(process, field.name), getattr(got.process, field.name)
        assert np.array_equal(found, want), field.name
        assert found.dtype == want.dtype, field.name
    plain = attrs.evolve(model, process=None).predict(work, places)[0]
    want = plain * np.exp(process(described(work, places), places))
    assert got.predict(work, places)[0] == pytest.approx(want, rel=1e-12)
