"""A model fitted to published measurements: kept in a file, asked about GPUs and batch sizes that it has not seen."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.estimate.vendor.fitted import LAUNCH_MICROSECONDS, Fitted, shipped, sustained
from cubatch.estimate.vendor.trees import Trees
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from tests.checks import assert_within, gamma
from tests.unit.estimate.building import constants_of, places_of, stump, work_of

CHESS = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)


DOUBLE = 2.0**-53


def model_of(*, trees=None, scales=None, **changes):
    """A model without launches and bytes: all time is arithmetic."""
    known = {"v100-pcie-32gb": (1.25, 0.75)} if scales is None else scales
    return Fitted("neusight", constants_of(), known, trees, 0.125, 0.25, **changes)


def test_tensor_core_launches_take_no_time_of_the_host():
    """DeepBench's times include the host's calls; launches in float32 are as fitted."""
    for name in ("deepbench conv tensor", "deepbench gemm tensor"):
        launches = {value for key, value in shipped(name).constants.items() if key.startswith("launch ")}
        assert launches == {LAUNCH_MICROSECONDS}
    assert shipped("deepbench gemm").constants["launch tiles"] > 2 * LAUNCH_MICROSECONDS


# --- its file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trees", [None, stump("n", 3.0, -0.5, 0.25)], ids=["arithmetic alone", "with trees"])
def test_a_model_is_read_as_it_was_written(tmp_path, trees):
    """Every field comes back: constants to six digits, scales to five places, the rest to the bit."""
    model = model_of(trees=trees, transforms=trees is None, scales={"v100-pcie-32gb": (1.23456, 0.78901)})
    model = attrs.evolve(model, constants={**model.constants, "cost fft": 1 / 3})
    model.save(tmp_path / "model.npz")
    got = Fitted.load(tmp_path / "model.npz")
    for name in ("name", "scales", "sd", "unseen_sd", "transforms"):
        assert getattr(got, name) == getattr(model, name), name
    assert got.constants == {**model.constants, "cost fft": 0.333333}
    if trees is None:
        assert got.trees is None
        return
    for field in attrs.fields(Trees):
        want, found = getattr(trees, field.name), getattr(got.trees, field.name)
        assert np.array_equal(found, want), field.name
        assert getattr(found, "dtype", None) == getattr(want, "dtype", None), field.name


# --- what a GPU adds -----------------------------------------------------------------------------------------


def test_a_gpu_that_was_measured_has_its_own_factors():
    """They are given as fitted, whatever its power and its kin."""
    model = model_of(scales={"t4": (1.5, 1.1), "v100-pcie-32gb": (1.0, 0.5)})
    assert model.scale(catalogue.find("t4")) == (1.5, 1.1, True)


def test_a_t4_goes_by_the_v100_and_by_its_own_power():
    """70 W for 8.14 TFLOP/s at 15 W each hold sqrt(70 / 8.14 / 15) of the clock; a V100's 250 W hold all of it."""
    compute, memory, known = model_of().scale(catalogue.find("t4"))
    assert compute == pytest.approx(1.25 / (70 / 8.14 / 15) ** 0.5, rel=1e-12)
    assert (memory, known) == (pytest.approx(0.75, rel=1e-12), False)


def test_a_v100_goes_by_the_t4_without_what_its_power_took():
    """The other way round: what a T4 lost to its power is taken off again."""
    compute, _, _ = model_of(scales={"t4": (2.0, 1.0)}).scale(catalogue.find("v100-pcie-32gb"))
    assert compute == pytest.approx(2.0 * (70 / 8.14 / 15) ** 0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("asked", "kin"),
    [
        ("rtx-2080-ti", ["v100-pcie-32gb", "a100-pcie-80gb"]),
        ("titan-xp", ["gtx-1080-ti", "m60"]),
        ("p100-sxm2-16gb", ["p100-pcie-16gb"]),
        ("h200-sxm", ["rtx-3090"]),
    ],
)
def test_an_unseen_gpu_has_the_geometric_mean_of_its_kin(asked, kin):
    """Volta, Turing and the A100 are kin; Maxwell and Pascal; the P100 is alone; what came later is the rest."""
    boards = ("v100-pcie-32gb", "a100-pcie-80gb", "gtx-1080-ti", "m60", "p100-pcie-16gb", "rtx-3090")
    scales = {slug: (1.0 + 0.1 * i, 2.0 - 0.1 * i) for i, slug in enumerate(boards)}
    compute, memory, known = model_of(scales=scales).scale(catalogue.find(asked))
    reference = [np.prod([scales[slug][i] for slug in kin]) ** (1 / len(kin)) for i in (0, 1)]
    held = np.prod([sustained(catalogue.find(slug)) for slug in kin]) ** (1 / len(kin))
    held /= sustained(catalogue.find(asked))
    assert (compute, memory, known) == (pytest.approx(reference[0] * held), pytest.approx(reference[1]), False)


def test_without_kin_all_gpus_speak():
    """A GPU of a generation that was never measured has the mean of all of the catalogue's; Kepler has no say."""
    model = model_of(scales={"v100-pcie-32gb": (1.0, 4.0), "gtx-1080-ti": (4.0, 1.0), "k40": (100.0, 100.0)})
    assert model.scale(catalogue.find("h200-sxm")) == (pytest.approx(2.0), pytest.approx(2.0), False)


@pytest.mark.parametrize(
    ("capability", "tflops", "watts", "want"),
    [
        ((6, 1), 5.0, 75.0, 1.0),  # exactly 15 W for each TFLOP/s
        ((6, 1), 5.0, 18.75, 0.5),  # a quarter of the power, half of the clock
        ((7, 5), 20.0, 75.0, 0.5),
        ((7, 0), 5.0, 300.0, 1.0),  # no GPU runs above its boost clock
        ((8, 6), 20.0, 75.0, 1.0),  # of other generations nothing is known
        ((5, 2), 20.0, 75.0, 1.0),
        ((7, 0), None, 75.0, 1.0),
        ((7, 0), 20.0, None, 1.0),
    ],
)
def test_power_holds_the_clock_down_by_its_square(capability, tflops, watts, want):
    """min(1, sqrt(watts / TFLOP/s / 15)) of Pascal to Turing, 1 where a figure or the law is not known."""
    rates = {} if tflops is None else {"float32": tflops * 1e12}
    device = Device(name="card", compute_capability=capability, peak_flops_per_second=rates, power_limit_watts=watts)
    assert sustained(device) == pytest.approx(want, rel=1e-12)


# --- predictions ---------------------------------------------------------------------------------------------

STEP = stump("n", np.log(24), 0.0, 0.5)  # a correction that jumps at 24 samples


def asked(model, sizes):
    """Seconds of forward passes of CHESS at several batch sizes."""
    work = work_of(*((CHESS, Pass.FPROP, int(n)) for n in sizes))
    return model.predict(work, places_of(len(work.n)))[0]


def test_the_correction_is_a_factor_on_the_arithmetic():
    """What the trees add to the logarithm multiplies the time that the arithmetic gives."""
    sizes = [16, 24, 25, 32]
    plain = asked(model_of(), sizes)
    want = plain * np.exp([0, 0, 0.5, 0.5])
    assert_within(asked(model_of(trees=STEP), sizes), want, gamma(4, DOUBLE) * want)


def test_the_shortest_algorithm_is_named_with_its_time():
    """Seconds are those of the algorithm that the index points to, and no other of the list is shorter."""
    work, places = work_of((CHESS, Pass.FPROP, 97), (CHESS, Pass.WGRAD, 5)), places_of(2)
    times, found, best = model_of().predict(work, places)
    assert [found[i].usable[case] for case, i in enumerate(best)] == [True, True]
    # All costs are alike, so fewest multiply-adds on the busiest SM win.
    for case in range(2):
        steps = [
            np.ceil(one.blocks[case] / 48) * one.tile * one.depth[case] if one.usable[case] else np.inf for one in found
        ]
        assert times[case] == pytest.approx(min(steps) / 115.2e9)
        assert int(np.argmin(steps)) == best[case]


def test_dilation_tells_cases_apart():
    """Of two layers that differ in nothing else, trees see of one only that it has no Winograd."""
    layers = [Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=spread, dilation=spread) for spread in (1, 2)]
    work = work_of(*((layer, Pass.FPROP, 96) for layer in layers))
    ratio = "ratio winograd 2x2"  # at most e^2 times the shortest of the plain one
    plain = model_of().predict(work, places_of(2))[0]
    got = model_of(trees=stump(ratio, 2.0, 0.0, 0.5)).predict(work, places_of(2))[0]
    assert np.log(got / plain) == pytest.approx([0, 0.5])


def test_a_model_without_transforms_never_names_one():
    """Tensor Cores multiply tiles."""
    work, places = work_of((CHESS, Pass.FPROP, 97)), places_of(1)
    _, found, _ = model_of(transforms=False).predict(work, places)
    assert {one.family for one in found} <= {"tiles", "scattered"}
    _, found, best = model_of().predict(work, places)
    assert found[best[0]].family not in {"tiles", "scattered"}
