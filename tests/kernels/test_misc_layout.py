"""Layout and storage conversions move and round, and nothing else: every equality is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine.native import layout
from cubatch.errors import InvalidArgument
from tests.kernels.cases import DTYPES, decoded, encoded
from tests.kernels.placing import place, room

SHAPES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3, 8, 31, 33, 40]), st.sampled_from([1, 5]), st.sampled_from([1, 7, 13])
)


def _draw(shape):
    return np.random.default_rng(int(np.prod(shape))).standard_normal(shape).astype(np.float32)


@given(shape=SHAPES, extra=st.sampled_from([0, 1, 5]), dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]))
@settings(max_examples=25, deadline=None)
def test_nchw_becomes_nhwc_with_zeros_for_missing_channels(launcher, shape, extra, dtype, shift):
    """Few channels go pixel by pixel, many through tiles; both ways back and forth."""
    n, c, h, w = shape
    x = _draw(shape)
    out = room(launcher, (n, h, w, c + extra), encoded(x, dtype).dtype, shift)
    layout.to_nhwc(launcher.context(), place(launcher, x, shift), out=out)
    want = np.zeros((n, h, w, c + extra), np.float32)
    want[..., :c] = x.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(launcher.get(out), encoded(want, dtype))

    back = room(launcher, shape, np.float32, shift)
    layout.to_nchw(launcher.context(), out, out=back)
    np.testing.assert_array_equal(launcher.get(back), decoded(encoded(x, dtype)))


@given(rows=st.integers(1, 300), c=st.sampled_from([1, 3, 8, 30]), extra=st.sampled_from([0, 1, 2]),
       dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_encode_rounds_and_pads_and_decode_gives_back(launcher, rows, c, extra, dtype, shift):
    """3 channels become 4 for whole vectors; without padding it is elementwise."""
    x = _draw((rows, c))
    out = room(launcher, (rows, c + extra), encoded(x, dtype).dtype, shift)
    layout.encode(launcher.context(), place(launcher, x, shift), out=out)
    want = encoded(np.pad(x, ((0, 0), (0, extra))), dtype)
    np.testing.assert_array_equal(launcher.get(out), want)

    back = room(launcher, want.shape, np.float32, shift)
    layout.decode(launcher.context(), out, out=back)
    np.testing.assert_array_equal(launcher.get(back), decoded(want))


@given(rows=st.integers(1, 300), c=st.integers(1, 9), wanted=st.integers(1, 9), dtype=st.sampled_from(DTYPES),
       shift=st.sampled_from([0, 1]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_channels_are_copied_into_wider_or_narrower_rows(launcher, rows, c, wanted, dtype, shift):
    """A filter of 3 channels beside one of 4, and its gradient back: zeros are added, what is too much is left out."""
    x = encoded(_draw((rows, c)), dtype)
    out = room(launcher, (rows, wanted), x.dtype, shift)
    layout.copy_channels(launcher.context(), place(launcher, x, shift), out=out)
    want = np.pad(x, ((0, 0), (0, max(0, wanted - c))))[:, :wanted]
    np.testing.assert_array_equal(launcher.get(out), want)


@pytest.mark.parametrize("convert", [layout.to_nhwc, layout.encode])
def test_channels_are_never_dropped_on_the_way_in(launcher, convert):
    """A target that is too narrow is a mistake, not a crop."""
    with pytest.raises(InvalidArgument, match="at least the 9"):
        convert(launcher.context(), np.zeros((1, 9, 9, 9), np.float32), out=np.zeros((1, 9, 9, 8), np.float16))
