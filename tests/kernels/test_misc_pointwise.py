"""Elementwise kernels against their formulas in float64, on and off the alignment of vectors."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from cubatch.engine import functional
from cubatch.engine.native import activation_functions, pointwise
from tests.checks import assert_within
from tests.kernels.cases import DTYPES, bound, decoded, drawn, encoded
from tests.kernels.placing import place, room
from tests.reference import CURVES

# Sizes around one vector, one block of float32 (4096) and one of 16 bits (8192).
SIZES = st.sampled_from([1, 3, 8, 9, 100, 4096, 4097, 8200])
SHIFTS = st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (1, 1)])
SPECIAL = (-math.inf, -200.0, -3.0, -0.0, 0.0, 3.0, 6.0, 7.0, math.inf, math.nan)
KINDS = activation_functions.ACTIVATIONS[1:]


@given(kind=st.sampled_from(KINDS), size=SIZES, shifts=SHIFTS, dtype=st.sampled_from(DTYPES))
@settings(max_examples=30, deadline=None)
def test_activations_stay_within_the_rounding_of_their_formulas(launcher, kind, size, shifts, dtype):
    """
    At most 8 roundings of the result, or of 1 + |x| where erf is added to 1: the exponential and erf of CUDA err by
    2 units in the last place (CUDA C++ Programming Guide, mathematical functions), which counts as 4 roundings.
    """
    x = encoded(np.random.default_rng(size).uniform(-8, 8, size), dtype)
    y = room(launcher, x.shape, x.dtype, shifts[1])
    activation_functions.activation(launcher.context(), place(launcher, x, shifts[0]), kind=kind, out=y)

    want = CURVES[kind][0](decoded(x))
    magnitude = abs(want) if kind != "gelu" else abs(decoded(x)) * (1 + abs(decoded(x)))
    assert_within(decoded(launcher.get(y)), want, bound(8, magnitude, want, dtype), label=f"{kind} {size} {dtype}")


@given(kind=st.sampled_from(KINDS), size=SIZES, shifts=SHIFTS, dtype=st.sampled_from(DTYPES))
@settings(max_examples=30, deadline=None)
def test_activation_gradients_are_dy_times_the_slope(launcher, kind, size, shifts, dtype):
    """With the slope worked out from what the layer saves, its input or its output."""
    random = np.random.default_rng(size)
    x, dy = encoded(random.uniform(-8, 8, size), dtype), drawn(random, size, dtype)
    saves_output = kind in {"relu", "relu6", "sigmoid", "hard_sigmoid"}
    saved = encoded(CURVES[kind][0](decoded(x)), dtype) if saves_output else x
    dx = room(launcher, dy.shape, dy.dtype, shifts[1])
    arrays = place(launcher, dy, shifts[0]), place(launcher, saved, shifts[0])
    activation_functions.activation_backward(launcher.context(), *arrays, kind=kind, out=dx)

    y = decoded(saved)
    by_output = {
        "relu": y > 0, "relu6": (y > 0) & (y < 6), "sigmoid": y * (1 - y), "hard_sigmoid": ((y > 0) & (y < 1)) / 6
    }  # fmt: skip
    slope = by_output[kind] if saves_output else CURVES[kind][1](decoded(x))
    want = decoded(dy) * slope
    # Terms of the slope are at most 1 + |x| (1 + |x|), reached by x times the density, whose exponent is rounded.
    within = bound(14, abs(decoded(dy)) * (1 + abs(decoded(x)) * (1 + abs(decoded(x)))), want, dtype)
    assert_within(decoded(launcher.get(dx)), want, within, label=f"{kind} backward {size} {dtype}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"relu", "gelu"}])
def test_kinks_infinities_and_nans_are_the_numpy_engines(launcher, kind):
    """Flat sides have slope zero even for an infinite dy, kinks PyTorch's slope, and a NaN stays one."""
    x = np.float32(SPECIAL)
    y = room(launcher, x.shape, x.dtype)
    activation_functions.activation(launcher.context(), place(launcher, x), kind=kind, out=y)
    with np.errstate(all="ignore"):
        want = functional.activation(x, kind=kind)
        np.testing.assert_allclose(launcher.get(y), want, rtol=1e-6)
        for error in (1.0, np.inf):
            dy, finite = np.full(x.shape, error, np.float32), np.where(np.isfinite(want), want, 0)
            saved = finite if kind in {"relu6", "sigmoid", "hard_sigmoid"} else np.where(np.isfinite(x), x, 1)
            dx = room(launcher, x.shape, x.dtype)
            arrays = place(launcher, dy), place(launcher, saved.astype(np.float32))
            activation_functions.activation_backward(launcher.context(), *arrays, kind=kind, out=dx)
            wanted = functional.activation_backward(dy, saved.astype(np.float32), kind=kind)
            np.testing.assert_allclose(launcher.get(dx), wanted, rtol=1e-6)


@pytest.mark.parametrize(("kind", "passed"), [("relu", [0, 0, 2, 2, 2]), ("relu6", [0, 0, 2, 0, 2])])
def test_what_comes_back_to_a_nan_is_passed_on(launcher, kind, passed):
    """PyTorch gives -1, 0, 3, 7 and NaN these gradients where 2 comes back; only its vectors of relu6 give a NaN 0."""
    dy, saved = np.full(5, 2, np.float32), np.float32([0, 0, 3, 6 if kind == "relu6" else 7, np.nan])
    dx = room(launcher, dy.shape, dy.dtype)
    activation_functions.activation_backward(
        launcher.context(), launcher.put(dy), launcher.put(saved), kind=kind, out=dx
    )
    np.testing.assert_array_equal(launcher.get(dx), passed)
    engines = {"relu": functional.relu_backward, "relu6": partial(functional.activation_backward, kind="relu6")}
    np.testing.assert_array_equal(engines[kind](dy, saved), passed)


@given(size=SIZES, dtype=st.sampled_from(DTYPES))
@settings(max_examples=8, deadline=None)
def test_relu_works_in_place_and_so_does_its_gradient(launcher, size, dtype):
    """Both are exact; `out` may be the input, dy or y."""
    random = np.random.default_rng(size)
    x, dy = drawn(random, size, dtype), drawn(random, size, dtype)
    x.reshape(-1)[:1] = encoded(np.nan, dtype)
    y = place(launcher, x)
    activation_functions.relu(launcher.context(), y, out=y)
    np.testing.assert_array_equal(decoded(launcher.get(y)), np.maximum(decoded(x), 0))
    want = np.where(decoded(x) <= 0, 0, decoded(dy))  # a NaN lets it pass
    activation_functions.relu_backward(launcher.context(), place(launcher, dy), y, out=y)
    np.testing.assert_array_equal(decoded(launcher.get(y)), want)


@given(count=st.integers(2, 9), size=SIZES, shifts=SHIFTS, dtype=st.sampled_from(DTYPES), relu=st.booleans(),
       in_place=st.booleans())  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_add_sums_any_number_of_branches(launcher, count, size, shifts, dtype, relu, in_place):
    """Four at a launch, so a sum of 9 is stored three times; the first branch may be overwritten."""
    random = np.random.default_rng(size)
    branches = [drawn(random, size, dtype) for _ in range(count)]
    arrays = [place(launcher, branch, shifts[index % 2]) for index, branch in enumerate(branches)]
    out = arrays[0] if in_place else room(launcher, (size,), branches[0].dtype, shifts[1])
    pointwise.add(launcher.context(), arrays, relu=relu, out=out)

    values = np.stack([decoded(branch) for branch in branches])
    want = np.maximum(values.sum(axis=0), 0) if relu else values.sum(axis=0)
    size_of = abs(values).sum(axis=0)
    within = bound(count, size_of, want, dtype) + 2 * (bound(count, size_of, size_of, dtype) if count > 4 else 0)
    assert_within(decoded(launcher.get(out)), want, within, label=f"add {count} x {size} {dtype}")


@given(widths=st.tuples(*[st.sampled_from([0, 1, 3, 4, 8, 16, 24])] * 3), rows=st.integers(1, 150),
       dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]),
       beside=st.sampled_from(["nothing", "others", "others in place"]))  # fmt: skip
@example(widths=(8, 16, 8), rows=5, dtype="float16", shift=0, beside="nothing")  # whole vectors
@example(widths=(3, 8, 5), rows=5, dtype="float32", shift=0, beside="nothing")  # from the middle of one
@settings(max_examples=20, deadline=None)
def test_a_range_of_channels_is_copied_and_its_gradient_placed(launcher, widths, rows, dtype, shift, beside):
    """Bits are copied; the channels before and after have zeros, or what was there."""
    random, (before, width, after) = np.random.default_rng(rows), widths
    width = max(width, 1)
    x = drawn(random, (rows, 1, before + width + after), dtype)
    y = room(launcher, (rows, 1, width), x.dtype, shift)
    pointwise.slice_channels(launcher.context(), place(launcher, x, shift), before, before + width, out=y)
    np.testing.assert_array_equal(launcher.get(y), x[..., before : before + width])

    want = np.zeros_like(x) if beside == "nothing" else drawn(random, x.shape, dtype)
    parts = None if beside == "nothing" else place(launcher, want, shift)
    dx = parts if beside == "others in place" else room(launcher, x.shape, x.dtype, shift)
    pointwise.slice_channels_backward(launcher.context(), y, before, parts=parts, out=dx)
    want[..., before : before + width] = x[..., before : before + width]
    np.testing.assert_array_equal(launcher.get(dx), want)


@given(widths=st.lists(st.sampled_from([1, 3, 4, 8, 16, 24]), min_size=2, max_size=4), rows=st.integers(1, 150),
       dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]))  # fmt: skip
@example(widths=[8, 3], rows=5, dtype="float32", shift=0)  # whole vectors, in rows that are not
@settings(max_examples=20, deadline=None)
def test_concat_and_its_gradient_copy_columns(launcher, widths, rows, dtype, shift):
    """Bits are copied, so equality is exact; a branch without a gradient is left out."""
    random = np.random.default_rng(rows)
    branches = [drawn(random, (rows, 1, width), dtype) for width in widths]
    y = room(launcher, (rows, 1, sum(widths)), branches[0].dtype, shift)
    pointwise.concat(launcher.context(), [place(launcher, branch, shift) for branch in branches], out=y)
    np.testing.assert_array_equal(launcher.get(y), np.concatenate(branches, axis=-1))

    outs = [None, *(room(launcher, branch.shape, branch.dtype, shift) for branch in branches[1:])]
    pointwise.concat_backward(launcher.context(), y, widths, outs=outs)
    for branch, out in zip(branches[1:], outs[1:], strict=True):
        np.testing.assert_array_equal(launcher.get(out), branch)
