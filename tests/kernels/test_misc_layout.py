"""Copies into other layouts move elements and change none: every equality is exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import layout
from tests.kernels.cases import DTYPES, encoded
from tests.kernels.placing import place, room


def _draw(shape, dtype):
    return encoded(np.random.default_rng(int(np.prod(shape))).standard_normal(shape).astype(np.float32), dtype)


@given(rows=st.integers(1, 100), columns=st.sampled_from([1, 3, 8, 31, 32, 33, 70]), dtype=st.sampled_from(DTYPES),
       shift=st.sampled_from([0, 1]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_a_matrix_is_transposed(launcher, rows, columns, dtype, shift):
    """Tiles of 32 x 32 with residues on both sides."""
    x = _draw((rows, columns), dtype)
    out = room(launcher, (columns, rows), x.dtype, shift)
    layout.transpose(launcher.context(), place(launcher, x, shift), out=out)
    np.testing.assert_array_equal(launcher.get(out), x.T)


@given(shape=st.tuples(*(st.integers(1, most) for most in (9, 7, 7, 4))), more=st.integers(0, 3),
       patch=st.tuples(st.integers(1, 4), st.integers(1, 4)), dtype=st.sampled_from(DTYPES),
       shift=st.sampled_from([0, 1]))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_a_filter_is_copied_into_one_over_patches_and_its_gradient_back(launcher, shape, more, patch, dtype, shift):
    """Zeros for missing taps and channels; back, they are left out and may be any number."""
    (k, r, s, c), (high, wide) = shape, patch
    w, rows, columns = _draw(shape, dtype), -(-r // high), -(-s // wide)
    out = room(launcher, (k, rows, columns, high * wide * (c + more)), w.dtype, shift)
    layout.copy_filter(launcher.context(), place(launcher, w, shift), patch, out=out)
    padded = np.pad(w, ((0, 0), (0, rows * high - r), (0, columns * wide - s), (0, more)))
    want = padded.reshape(k, rows, high, columns, wide, c + more).swapaxes(2, 3).reshape(out.shape)
    np.testing.assert_array_equal(launcher.get(out), want)
    gradient, back = _draw(out.shape, dtype), room(launcher, shape, w.dtype, shift)
    layout.copy_filter(launcher.context(), back, patch, out=place(launcher, gradient, shift), back=True)
    want = gradient.reshape(k, rows, columns, high, wide, c + more).swapaxes(2, 3)
    want = want.reshape(padded.shape)[:, :r, :s, :c]
    np.testing.assert_array_equal(launcher.get(back), want)
