"""`cubatch bench` for what runs on tensor cores: bounds of rounded operands, fused cases, mixed steps, the vendor."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, measure, rivals, target
from cubatch.bench.implementations import TENSOR_FAMILIES
from cubatch.engine import functional
from cubatch.hardware import catalogue
from cubatch.kernels.problem import Problem
from cubatch.kernels.transposing import ranking_transposed
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.cpusim import building
from tests.cpusim.simulator import Simulator
from tests.unit.bench_fakes import World

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


def test_operands_that_are_cut_off_are_not_tf32():
    """A single product shows it: without rounding each factor may be off by twice as much."""
    assert checked(cases.gemm(70, 50, 1, dtype="tf32"), multiplied(lambda x: cut_off(x, 10))) > 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_other_type_allows_operands_to_be_rounded_to_tf32(dtype):
    """float32 stands out at once; the 16-bit types have no more digits than that, so nothing changes."""
    case = cases.gemm(70, 50, 40, dtype=dtype)
    if dtype == "float32":
        assert checked(case, multiplied(lambda x: rounded(x, 10))) > 10
    else:
        arrays = target.fill(np, case, 1)
        assert np.array_equal(rounded(check._values(arrays["x"]), 10), check._values(arrays["x"]))


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


def test_blocks_that_share_tiles_are_judged_by_their_tiles():
    """196 tiles of 128 x 128 on 132 SMs: two on the busiest, 74 % full, though all 132 blocks of the grid run."""
    layer = layers.Conv2d(h=7, w=7, c=512, k=512, r=3, s=3, pad=1)
    entries = measure.plan(
        cases.of_layer(layer, Pass.FPROP, 128, "float16"), H200, variants="all", compiled=False
    ).entries
    (entry,) = (entry for entry in entries if entry.label.startswith("hopper 128x128x64"))
    (launch,) = entry.launches
    rows, columns = 128 * 7 * 7 // 128, 512 // 128
    assert (launch.grid, launch.tiles, launch.busiest_sm_blocks) == ((132, 1, 1), rows * columns, 2)
    assert launch.fill == pytest.approx(196 / 264)
    assert all(launch.tiles is None for entry in entries for launch in entry.launches if "hopper" not in launch.kernel)


def test_a_product_whose_operands_are_transposed_is_timed_too():
    """Two parts of gemm_k, each of 72 tiles in slices; without the family there is none."""
    problem = Problem("gemm_tn", "tf32", 768, 3072, 50432, vector=4)
    case = cases.gemm(problem.m, problem.n, problem.k, dtype="tf32", layout="tn")
    entries = measure.plan(case, H200, variants="ranked", compiled=False).entries
    (entry,) = (entry for entry in entries if entry.label == "hopper 128x256x32 v4 transposed")
    products = [launch for launch in entry.launches if "hopper" in launch.kernel]
    slices = next(count for _, count, kernel in ranking_transposed(problem, H200) if kernel.name == entry.name)
    assert [launch.tiles for launch in products] == [6 * 12 * slices] * 2
    assert sum("transpose" in launch.kernel for launch in entry.launches) == 4
    assert {each.label.split()[0] for each in entries} == {"mma", "hopper"}
    kept = measure.plan(case, H200, variants="ranked", without=["hopper"], compiled=False).entries
    assert {each.label.split()[0] for each in kept} == {"mma"}


def test_where_tensor_cores_cannot_run_it_the_others_are_timed():
    """Odd channels, or a GPU without any."""
    odd = cases.gemm(64, 64, 63, dtype="float16")
    plain = cases.gemm(64, 64, 64, dtype="bfloat16")
    for case, device in ((odd, H200), (plain, catalogue.find("v100-sxm2-16gb"))):
        labels = [entry.label for entry in measure.plan(case, device, variants="ranked", compiled=False).entries]
        assert labels
        assert {label.split()[0] for label in labels} == {"simt"}


@pytest.mark.parametrize(
    ("dtype", "flops"), [("float16", 989.4e12), ("bfloat16", 989.4e12), ("tf32", 494.7e12), ("float32", 66.91e12)]
)
def test_the_roofline_of_a_dtype_is_that_of_its_own_units(dtype, flops):
    """A large product on an H200 takes its FLOPs at the data sheet's rate for that type."""
    case = cases.gemm(8192, 8192, 8192, dtype=dtype)
    assert case.bound(H200) == "compute"
    assert case.roofline_seconds(H200) == pytest.approx(2 * 8192**3 / flops)


@pytest.mark.parametrize(
    "case",
    [
        cases.gemm(20, 24, 40, dtype="tf32"),
        conv_relu(layers.Conv2d(h=5, w=4, c=8, k=8, r=3, s=3, pad=1), 2, "float16", residual=True),
        conv_relu(layers.Conv2d(h=5, w=4, c=8, k=8, r=3, s=3, pad=1), 2, "float32"),
        cases.of_layer(
            layers.Conv2d(h=5, w=4, c=8, k=8, r=3, s=3, pad=1), Pass.FPROP, 2, "float16", ending=["folded"]
        ),
        cases.of_layer(
            layers.Conv2d(h=5, w=4, c=8, k=8, r=1, s=1), Pass.DGRAD, 2, "float16", ending=["residual", "positive"]
        ),
        cases.fold([40, 8], [True, False], "float16"),
        cases.of_layer(layers.LayerNorm(h=5, w=3, c=24), Pass.FPROP, 2, "float16", mode="training"),
        cases.of_layer(layers.BatchNorm2d(h=5, w=3, c=24), Pass.FPROP, 2, "float16", mode="inference"),
        cases.of_layer(layers.MaxPool2d(h=6, w=6, c=8, r=2, s=2), Pass.FPROP, 2, "float16", mode="inference"),
        *(cases.of_layer(layers.Tokens(h=4, w=3, c=8), pass_, 2, "float16") for pass_ in (Pass.FPROP, Pass.DGRAD)),
        *(cases.of_layer(layers.ClassToken(h=4, w=1, c=8), pass_, 2) for pass_ in (Pass.FPROP, Pass.DGRAD)),
        cases.of_layer(layers.Dropout(h=4, w=3, c=8, p=0.3), Pass.FPROP, 2, "float16"),
        cases.of_layer(layers.Concat(h=4, w=5, c=12, channels=[4, 8]), Pass.DGRAD, 2, "float16"),
        cases.optimizer_step("adam", 300, "float16"),
        cases.optimizer_step("momentum", 300, "bfloat16"),
        cases.loss_scale(700),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_the_kernels_are_right_by_these_bounds(case):
    """Executed on the CPU from their own source: the variant that the plan puts first."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    device = catalogue.find("a100-sxm4-40gb")
    here = target.Target(device, Simulator(80), np, World())
    way, planned = measure.ways(case, device)[0], measure.plan(case, device, compiled=False)
    checked = measure._Checked.of(case, here, 0, 1, images=None, channels=None)
    entry, step = checked.variant(way, planned.entries[0])
    assert step is not None, entry.reason
    assert 0 <= entry.worst_error <= 1


# --- the vendor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", list(Pass))
def test_without_pytorch_float16_is_multiplied_by_the_array_module(pass_, monkeypatch):
    """And is right by the case's own bound; a fused case and the other types have no vendor then."""
    monkeypatch.setattr(rivals, "_torch", lambda: None)
    case = cases.of_layer(layers.Linear(c=13, k=7), pass_, 9, "float16")
    # Quarters, whose products and sums float16 holds: NumPy adds float16 in float16.
    arrays = {name: np.round(4 * array) / 4 for name, array in target.fill(np, case, 1).items()}
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    check.poison(case, arrays)
    rivals.rivals(case, np)[0].bind(arrays)()
    assert expected.check(arrays).passed
    for other in (conv_relu(CONV, 2, "float16"), cases.of_layer(CONV, pass_, 2, "bfloat16")):
        assert "not installed" in rivals.rivals(other, np)
