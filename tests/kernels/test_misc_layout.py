"""Copies into other layouts move elements and change none: every equality is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import layout
from cubatch.errors import InvalidArgument
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


@given(rows=st.integers(1, 300), c=st.integers(1, 9), wanted=st.integers(1, 9), dtype=st.sampled_from(DTYPES),
       shift=st.sampled_from([0, 1]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_channels_are_copied_into_wider_or_narrower_rows(launcher, rows, c, wanted, dtype, shift):
    """A filter of 3 channels next to one of 4, and its gradient back: zeros are added, surplus channels are cut."""
    x = _draw((rows, c), dtype)
    out = room(launcher, (rows, wanted), x.dtype, shift)
    layout.copy_channels(launcher.context(), place(launcher, x, shift), out=out)
    want = np.pad(x, ((0, 0), (0, max(0, wanted - c))))[:, :wanted]
    np.testing.assert_array_equal(launcher.get(out), want)


@pytest.mark.parametrize("copy", [layout.transpose, layout.copy_channels])
def test_a_target_that_is_too_small_is_rejected(launcher, copy):
    """A kernel would write beyond its end."""
    with pytest.raises(InvalidArgument, match="out"):
        copy(launcher.context(), np.zeros((9, 8), np.float32), out=np.zeros((8, 8), np.float32))
