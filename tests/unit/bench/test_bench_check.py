"""Checks of `cubatch bench`: right results pass, wrong ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, target
from cubatch.engine import functional
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.unit.bench.building import EVERY, LAYERS, filled


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_right_results_pass_and_unwritten_ones_do_not(case):
    """The engine in float32 is right by the bound, whole or by sample; what nobody wrote is not."""
    arrays = target.fill(np, case, 1)
    whole = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    sample = check.Expected(case, arrays, np.random.default_rng(0))
    check.poison(case, arrays)
    assert not whole.check(arrays).passed
    assert not sample.check(arrays).passed
    case.call(functional, arrays)
    assert whole.check(arrays).worst < 0.7
    assert sample.check(arrays).passed
    assert not check.cuts_of(case) or sample.check(arrays).compared < whole.check(arrays).compared


@pytest.mark.parametrize("case", [case for case in EVERY if case.operation != "dropout"], ids=lambda case: case.name)
def test_one_result_that_is_off_by_a_thousandth_fails(case):
    """Of the largest result, in every array that is written; the message says where and what."""
    arrays, expected = filled(case)
    check.poison(case, arrays)  # padding stays NaN
    case.call(functional, arrays)
    for name in case.results:
        if arrays[name].dtype.kind != "f":
            continue
        flat = arrays[name].reshape(-1)
        index = int(np.nanargmax(np.abs(flat)))
        kept = flat[index]
        flat[index] *= 1.001
        found = expected.check(arrays)
        assert not found.passed, name
        assert found.where.startswith(f"{name}[")
        flat[index] = kept
    assert expected.check(arrays).passed


def test_dropout_may_have_any_mask_but_no_other_values():
    """Which elements are dropped is drawn; an element that is neither dropped nor as large as it should be is wrong."""
    (case,) = (case for case in EVERY if case.operation == "dropout")
    arrays, expected = filled(case)
    case.call(functional, arrays)
    right = arrays["out"].copy()
    arrays["out"][...] = np.where(right == 0, arrays["x"] / np.float32(1 - case.options["p"]), 0)
    assert expected.check(arrays).passed
    arrays["out"][...] = 2.1 * right
    assert not expected.check(arrays).passed


def test_a_long_sum_has_a_bound_that_zeros_do_not_pass():
    """Over 200 000 terms the certain bound holds for anything; what random data practically never exceed does not."""
    case = cases.of_layer(layers.Linear(c=4, k=3), Pass.WGRAD, 200_000)
    arrays, expected = filled(case)
    case.call(functional, arrays)
    assert expected.check(arrays).passed
    arrays["dw"][...] = 0
    assert expected.check(arrays).worst > 3


def test_a_sample_holds_the_last_of_everything():
    """Residues of tiles lie at the ends: an error in the last image's last channel is in every sample."""
    case = cases.of_layer(LAYERS[0], Pass.FPROP, 7)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(5))
    case.call(functional, arrays)
    arrays["out"][-1, -1, -1, -1] += 0.01
    assert not expected.check(arrays).passed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_storage_is_allowed_one_more_rounding_and_not_two(dtype):
    """The right result rounded once passes; moved by two units of the storage it does not."""
    case = cases.of_layer(LAYERS[3], Pass.FPROP, 4, dtype)
    arrays, expected = filled(case)
    right = check._values(arrays["x"]) @ check._values(arrays["w"]).T
    if dtype == "float16":
        arrays["out"][...] = right
        assert expected.check(arrays).passed
        arrays["out"][...] = right * (1 + 2.0**-9)
    else:
        bits = right.astype(np.float32).view(np.uint32)
        arrays["out"][...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert expected.check(arrays).passed
        arrays["out"][...] += 2
    assert not expected.check(arrays).passed


def test_an_element_at_a_bend_may_have_the_slope_of_either_side():
    """Where a ReLU's input rounds to zero its gradient may pass or not; elsewhere it must be the right one."""
    norm = next(layer for layer in LAYERS if isinstance(layer, layers.BatchNorm2d))
    case = cases.of_layer(norm, Pass.DGRAD, 4, activation="relu")
    arrays = target.fill(np, case, 1)
    apart = arrays["x"][0, 0, 0] - arrays["mean"]
    arrays["beta"][...] = -(apart * (arrays["gamma"] * arrays["inv_std"]))
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    case.call(functional, arrays)
    assert expected.check(arrays).passed
    flip = arrays["gamma"] * arrays["inv_std"] * arrays["dy"]
    arrays["out"][0, 0, 0] += 0.9 * flip[0, 0, 0]
    assert expected.check(arrays).passed
    arrays["out"][-1, -1, -1] += 0.9 * flip[-1, -1, -1]
    assert not expected.check(arrays).passed
