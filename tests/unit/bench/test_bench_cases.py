"""Cases of `cubatch bench`: shapes, traffic, arrays."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from cubatch.bench import cases, check, measure, target
from cubatch.bench.contest import Contest
from cubatch.bench.implementations import Way
from cubatch.engine import functional, layers as engine
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.unit import bench_fakes
from tests.unit.bench.building import EVERY, GEMM, LAYERS
from tests.unit.bench_fakes import DEVICE

# --- cases ---------------------------------------------------------------------------------------------------------

UNTIMED = {
    (layers.Flatten, Pass.FPROP): "is no operation",
    (layers.Flatten, Pass.DGRAD): "is no operation",
    (layers.Add, Pass.DGRAD): "is no operation: the gradient is passed on",
}


def test_every_kind_that_is_written_can_be_timed_in_every_pass():
    """Or there is a reason why not; the tests of the check have a layer of each kind."""
    written = {kind for kind, ops in engine.TABLE.items() if ops is not engine.NOT_WRITTEN}
    pairs = {(kind, pass_) for kind in written for pass_ in (Pass.FPROP, Pass.DGRAD)}
    timed = {pair for pair in pairs if cases.has_case(pair[0].__new__(pair[0]), pair[1])}
    assert timed == pairs - set(UNTIMED)
    assert {kind for kind, _ in timed} == {type(layer) for layer in LAYERS}


@pytest.mark.parametrize(
    ("layout", "product"),
    [
        ("nt", lambda a: a["x"] @ a["w"].T),
        ("nn", lambda a: a["dy"] @ a["w"]),
        ("tn", lambda a: a["dy"].T @ a["x"]),
    ],
)
def test_a_gemm_is_the_product_of_its_layout(layout, product):
    """(m, k) x (k, n) with the operands stored as the letters say; a multiply-add is two FLOP."""
    case = cases.gemm(5, 3, 7, layout=layout)
    arrays = target.fill(np, case, 0)
    case.call(functional, arrays)
    result = arrays[case.results[0]]
    assert result.shape == (5, 3)
    assert case.flops == 2 * 5 * 3 * 7
    np.testing.assert_allclose(result, product(arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "arrays", "launches"), [(6140, 3, 2), (6141, 5, 3)])
def test_layer_norm_moves_its_gradient_and_input_again_for_sums_of_long_rows(channels, arrays, launches):
    """Both are read and the result is written; shared memory holds the two sums of 6140 channels."""
    layer = layers.LayerNorm(h=2, w=2, c=channels)
    backward = cases.of_layer(layer, Pass.DGRAD, 3)
    assert backward.moved_bytes == 4 * (arrays * 3 * 2 * 2 * channels + layer.parameters)
    assert len(Way(backward, catalogue.find("h200-sxm")).launches) == launches


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_mapping_of_a_case_is_json(case):
    """Also where options are tuples."""
    assert json.loads(json.dumps(case.to_mapping(), allow_nan=False))["name"] == case.name


# --- arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_hold_random_data_of_their_kind(dtype):
    """Never zeros: signed data has mean 0 and mean square 1/3, positive lies in [0.5, 1.5], counts are whole."""
    arrays = target.fill(np, cases.of_layer(layers.BatchNorm2d(h=16, w=16, c=32), Pass.FPROP, 4, dtype), 3)
    x, gamma = check._values(arrays["x"]), check._values(arrays["gamma"])
    assert abs(x.mean()) < 0.05
    assert (x**2).mean() == pytest.approx(1 / 3, rel=0.05)
    assert gamma.min() >= 0.5
    assert gamma.max() <= 1.5
    assert np.unique(x).size > 100
    pool = target.fill(np, cases.of_layer(LAYERS[4], Pass.DGRAD, 4), 3)["argmax"]
    assert set(np.unique(pool)) <= set(range(1, 10))  # a tap of every window has won


@pytest.fixture
def generators(monkeypatch):
    """NumPy's generators behave as CuPy's; gives those that are made."""
    made = []

    def generator(_, seed):
        made.append(bench_fakes.CupysGenerator(seed))
        return made[-1]

    monkeypatch.setattr(target.backend, "random_generator", generator)
    return made


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_no_array_is_one_constant_on_a_gpu(case, generators):
    """Where CuPy is handed an array and no size it fills it with one number, which passes any permutation."""
    for name, array in target.fill(np, case, 0).items():
        assert array.size == 1 or np.unique(array).size > 1, name


def test_the_sets_of_a_case_differ_and_come_from_one_generator(generators, world):
    """A generator's states take a GPU longer to make than the data of a small case, and there are up to 128 sets."""
    sets = list(itertools.islice(target.filled(np, GEMM, 0), 3))
    assert len({array.tobytes() for arrays in sets for array in arrays.values()}) == 3 * len(GEMM.operands)
    assert len(generators) == 1
    measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    assert len(generators) == 2


@pytest.mark.parametrize(("layer", "most"), [(layers.ReLU, 1), (layers.ReLU6, 6)])
def test_what_a_relus_gradient_reads_is_what_a_relu_gives(layer, most):
    """Zeros, what lies between, and at the upper bend 6 itself: other numbers tell nothing of where it passes."""
    arrays = target.fill(np, cases.of_layer(layer(h=8, w=8, c=16), Pass.DGRAD, 4), 0)
    saved = arrays.get("saved", arrays.get("y"))
    assert (saved.min(), saved.max()) == (0, pytest.approx(most, abs=0.01))
    assert 0.2 < (saved == 0).mean() < 0.8


def test_buffers_rotate_over_twice_the_l2():
    """As many sets as pass twice the L2, one where a set alone does, and never more than the cap."""
    small = cases.gemm(64, 64, 64)
    assert target.count_sets(small, 10 * small.num_bytes) == 20
    assert target.count_sets(small, small.num_bytes // 2) == 1
    assert target.count_sets(small, None) == 1
    assert target.count_sets(small, 10**4 * small.num_bytes) == target.MAX_SETS


def test_reserved_arrays_have_extents_and_take_no_memory():
    """A hundred gigabytes of them are there at once on a machine of less."""
    case = cases.of_layer(layers.Conv2d(h=224, w=224, c=64, k=64, r=3, s=3, pad=1), Pass.FPROP, 4096)
    arrays = target.reserve(case)
    assert case.num_bytes > 100e9
    assert {name: array.shape for name, array in arrays.items()} == {n: o.shape for n, o in case.operands.items()}


def test_a_roofline_is_the_larger_of_arithmetic_and_bytes():
    """A square product of 1000 is bound by arithmetic, one of k = 1 by its bytes; without rates nothing is said."""
    large, flat = cases.gemm(1000, 1000, 1000), cases.gemm(1000, 1000, 1)
    assert large.roofline_seconds(DEVICE) == pytest.approx(2e9 / 1e12)
    assert flat.roofline_seconds(DEVICE) == pytest.approx(4 * (1000 + 1000 + 10**6) / 1e11)
    assert (large.bound(DEVICE), flat.bound(DEVICE)) == ("compute", "memory")
    assert large.roofline_seconds(Device(name="unknown")) is large.bound(Device(name="unknown")) is None
