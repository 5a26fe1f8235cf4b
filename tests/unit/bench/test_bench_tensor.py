"""`cubatch bench` for what runs on tensor cores: bounds of rounded operands, fused cases and mixed steps."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, measure, target
from cubatch.bench.implementations import TENSOR_FAMILIES
from cubatch.engine import functional
from cubatch.hardware import catalogue
from cubatch.network import layers
from cubatch.network.passes import Pass

H200 = catalogue.find("h200-sxm")
CONV = layers.Conv2d(h=5, w=4, c=6, k=7, r=1, s=1)


def rounded(x, bits):
    """Floats rounded to nearest with so many bits after the point, ties away from zero."""
    mantissa, exponent = np.frexp(x.astype(float))
    scale = 2.0 ** (bits + 1)
    return np.ldexp(np.trunc(mantissa * scale + np.copysign(0.5, mantissa)) / scale, exponent)


def cut_off(x, bits):
    """Floats cut off behind so many bits after the point."""
    mantissa, exponent = np.frexp(x.astype(float))
    scale = 2.0 ** (bits + 1)
    return np.ldexp(np.trunc(mantissa * scale) / scale, exponent)


def checked(case, result, seed=1):
    """The worst error of what a function of the operands gives, in units of the bound; all results are compared."""
    arrays = target.fill(np, case, seed)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    for name, values in result(arrays).items():
        arrays[name][...] = values
    return expected.check(arrays).worst


def conv_relu(layer, batch_size, dtype="float32", *, residual=False):
    """A convolution with a bias and ReLU, and another branch between them."""
    ending = ["residual"] if residual else []
    return cases.of_layer(layer, Pass.FPROP, batch_size, dtype, with_bias=True, ending=ending, relu=True)


# --- tf32 ----------------------------------------------------------------------------------------------------------


def multiplied(turn):
    """The product of a linear layer's operands, each turned first."""
    return lambda arrays: {"out": turn(arrays["x"]) @ turn(arrays["w"]).T}


@pytest.mark.parametrize("k", [1, 3, 40, 3000])
def test_operands_rounded_to_tf32_pass_and_coarser_ones_do_not(k):
    """10 bits after the point are within the bound of a sum of any length, 7 as in bfloat16 are not; nor is noise."""
    case = cases.gemm(70, 50, k, dtype="tf32")
    assert 0.1 < checked(case, multiplied(lambda x: rounded(x, 10))) < 1
    assert checked(case, multiplied(lambda x: x.astype(float))) < 0.1
    assert checked(case, multiplied(lambda x: rounded(x, 7))) > 1
    assert checked(case, lambda arrays: {"out": 1.01 * (arrays["x"].astype(float) @ arrays["w"].T)}) > 1


def test_the_gradient_of_a_bias_is_never_rounded_to_tf32():
    """It is a plain sum beside a product, held to float32."""
    case = cases.of_layer(layers.Linear(c=4, k=3), Pass.WGRAD, 50, "tf32", with_bias=True)

    def gradients(arrays, *, turned):
        dy = rounded(arrays["dy"], 10)
        return {"dw": dy.T @ rounded(arrays["x"], 10), "db": (dy if turned else arrays["dy"].astype(float)).sum(axis=0)}

    assert checked(case, lambda arrays: gradients(arrays, turned=False)) < 1
    assert checked(case, lambda arrays: gradients(arrays, turned=True)) > 1


# --- sums of tensor cores ------------------------------------------------------------------------------------------


def accumulated(x, w, group, bits):
    """The sum of products, a group at a time, everything cut off behind so many bits of the largest of them."""
    products = check._values(x)[:, None, :] * check._values(w)[None, :, :]
    total = np.zeros(products.shape[:2])
    for start in range(0, products.shape[2], group):
        terms = np.concatenate([total[:, :, None], products[:, :, start : start + group]], axis=2)
        unit = 2.0 ** (np.frexp(np.abs(terms).max(axis=2, keepdims=True))[1] - bits)
        total = (np.trunc(terms / unit) * unit).sum(axis=2)
        total = cut_off(total, bits - 1)
    return total


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", [4, 16])
def test_sums_that_tensor_cores_cut_off_pass_and_16_bit_sums_do_not(dtype, group):
    """24 bits of the largest term, by groups of 4 as on Volta or 16; sums kept in 11 bits are something else."""
    case = cases.gemm(12, 10, 800, dtype=dtype)

    def result(bits):
        def values(arrays):
            total = accumulated(arrays["x"], arrays["w"], group, bits)
            if dtype == "float16":
                return {"out": total.astype(np.float16)}
            found = total.astype(np.float32).view(np.uint32)
            return {"out": (found + 0x7FFF + (found >> 16 & 1)) >> 16}

        return values

    assert checked(case, result(24)) <= 1
    assert checked(case, result(8)) > 1


def test_what_sums_may_lose_is_seen_before_it_is_stored():
    """Of a product that is stored in float32 the bound is that of 24 bits cut off, below that of 23."""
    case = cases.gemm(12, 10, 1000, dtype="tf32")
    arrays = {name: rounded(array, 4).astype(np.float32) for name, array in target.fill(np, case, 1).items()}
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    arrays["out"][...] = accumulated(arrays["x"], arrays["w"], 8, 24)
    assert expected.check(arrays).passed


# --- fused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_rival_may_store_what_its_kernels_hand_on(dtype):
    """A product, a factor and term, and a sum, each rounded: right where that is known; a lost term never is."""
    linear = layers.Linear(c=200, k=40)
    case = cases.of_layer(linear, Pass.FPROP, 60, dtype, ending=["folded", "residual"])
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    value = {name: array.astype(np.float64) for name, array in arrays.items()}

    def result(*, shift=1.0):
        product = (value["x"] @ value["w"].T).astype(dtype)
        scaled = (product * value["scale"] + shift * value["shift"]).astype(dtype)
        return {**arrays, "out": (scaled + value["residual"]).astype(dtype)}

    assert expected.check(result(), stored_between=3).passed
    assert expected.check(result()).passed == (dtype == "float32")
    assert not expected.check(result(shift=0.0), stored_between=3).passed


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "tf32"])
def test_a_fused_case_is_the_convolution_with_all_that_follows(residual, dtype):
    """relu(x w + b + residual), written as a matrix product; without the bias or the clamp it is not right."""
    case = conv_relu(CONV, 3, dtype, residual=residual)

    def result(arrays, *, bias=1.0, clamp=0.0):
        value = {name: check._values(array) for name, array in arrays.items()}
        y = np.einsum("nhwc,kc->nhwk", value["x"], value["w"].reshape(7, 6)) + bias * value["b"]
        y = np.maximum(y + value["residual"] if residual else y, clamp)
        if dtype == "bfloat16":
            bits = y.astype(np.float32).view(np.uint32)
            return {"out": (bits + 0x7FFF + (bits >> 16 & 1)) >> 16}
        return {"out": y}

    assert checked(case, result) <= 1
    assert checked(case, lambda arrays: result(arrays, bias=0.9)) > 1
    assert checked(case, lambda arrays: result(arrays, clamp=-np.inf)) > 1


# --- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_mixed_step_is_taken_on_the_copy_and_rounded_once(name, dtype):
    """Right by the engine's rule on float64; a step that forgets the loss scale is off by more than the bound."""
    case = cases.optimizer_step(name, 500, dtype)
    assert "master" in case.results
    assert all(case.reads(part) for part in case.results)

    def result(arrays, *, scaling=True):
        value = {part: check._values(array) for part, array in arrays.items()}
        if not scaling:
            value["scaling"][1] = 1
        case.call(functional, value)
        if dtype == "bfloat16":
            bits = value["parameters"].astype(np.float32).view(np.uint32)
            value["parameters"] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return {part: value[part] for part in case.results}

    assert checked(case, result) <= 1
    if dtype == "float16" and name != "adam":  # Adam's step hardly depends on the gradient's size
        assert checked(case, lambda arrays: result(arrays, scaling=False)) > 1


# --- the kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_only_tensor_cores_are_timed_where_they_can_run_it(dtype, pass_):
    """All others are checked with them: the slow families are there where all are asked for."""
    case = cases.of_layer(layers.Conv2d(h=8, w=8, c=64, k=64, r=3, s=3, pad=1), pass_, 2, dtype)
    timed, all_ = (
        {entry.label.split()[0] for entry in measure.plan(case, H200, variants=which, compiled=False).entries}
        for which in ("ranked", "all")
    )
    assert timed
    assert timed <= set(TENSOR_FAMILIES)
    assert {"simt", "naive"} < all_
