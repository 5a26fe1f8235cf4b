"""The workspace rule: blocks fit in it, cover everything once, and never need more than it says."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cubatch.memory import blocks as scratch_blocks, conv_blocks
from cubatch.network.windows import Window, conv_shape, pool_axes

SHAPE = conv_shape((14, 15, 32), (64, 3, 3, 32), (1, 1), (1, 1, 1, 1), (1, 1))
STRIDED = conv_shape((14, 15, 32), (64, 3, 3, 16), (2, 2), (1, 1, 1, 1), (1, 1), groups=2)
DEPTHWISE = conv_shape((14, 15, 32), (32, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1), groups=32)
VERTICAL, HORIZONTAL = pool_axes((14, 15), Window(3, 3, (2, 2), (1, 1, 1, 1)))
NEEDS = [
    *conv_blocks.conv2d_forward(SHAPE, 4),
    *conv_blocks.conv2d_wgrad(STRIDED, 4),
    *conv_blocks.conv2d_dgrad(STRIDED, 8),
    *conv_blocks.conv2d_forward(DEPTHWISE, 2),
    scratch_blocks.Pool(itemsize=4, rows=VERTICAL.out, vertical=VERTICAL, horizontal=HORIZONTAL, channels=5),
    scratch_blocks.Scores(itemsize=4, channels=10),
    scratch_blocks.Norm(itemsize=4, channels=7),
    scratch_blocks.RowNorm(itemsize=4, channels=7),
    scratch_blocks.Attend(itemsize=4, tokens=7, channels=6, heads=2, saves=False),
    scratch_blocks.Attend(itemsize=8, tokens=50, channels=24, heads=3, saves=True),
    scratch_blocks.AttendBackward(itemsize=4, tokens=50, channels=24, heads=3),
    scratch_blocks.Flat(itemsize=8),
    scratch_blocks.Curve(itemsize=4),
    scratch_blocks.Products(itemsize=4, rows=15, channels=7),
]


@given(st.sampled_from(NEEDS), st.integers(0, 40), st.integers(0, 4 * 2**20))
def test_blocks_fit_and_cover_every_row_of_every_sample_once(need, samples, target):
    """Whatever the target, the engine gets through with the workspace that the rule gives."""
    num_bytes = scratch_blocks.workspace_bytes([need], samples, target)
    seen = []
    for block in need.cut(samples, num_bytes):
        count, rows = (part.stop - part.start for part in block)
        assert need.num_bytes(count, rows) <= num_bytes
        seen += [(sample, row) for sample in range(samples)[block[0]] for row in range(need.rows)[block[1]]]
    assert sorted(seen) == [(sample, row) for sample in range(samples) for row in range(need.rows)]
    assert len(seen) == len(set(seen))


@given(st.sampled_from(NEEDS), st.integers(1, 40), st.integers(0, 4 * 2**20))
def test_the_first_block_is_a_largest_one(need, samples, target):
    """Areas are laid out for it once."""
    blocks = need.cut(samples, scratch_blocks.workspace_bytes([need], samples, target))
    sizes = [(part.stop - part.start, rows.stop - rows.start) for part, rows in blocks]
    assert sizes[0] == max(sizes)


def test_a_gradient_needs_room_for_as_many_phases_as_its_input_has_pixels():
    """Of 5 x 4 pixels under a stride of 1000 the 3 x 2 under the filter have a tap; others end with a ReLU's slope."""
    shape = conv_shape((5, 4, 32), (64, 3, 2, 32), (1000, 1000), (0,) * 4, (1, 1))
    for ending, idle in (((), 0), (("positive",), 5 * 4 - 3 * 2)):
        needs = conv_blocks.conv2d_dgrad(shape, 4, frozenset(ending))
        tiles = [need for need in needs if isinstance(need, conv_blocks.Tiles)]
        assert (len(tiles), len(needs) - len(tiles)) == (3 * 2, idle)


def test_the_rule_by_hand():
    """Two rows of 14 x 64 elements, 16 x 17 x 32 bordered inputs, 14 x 15 x 288 columns, 4 bytes each."""
    (need,) = conv_blocks.conv2d_forward(SHAPE, 4)
    one = 2 * (15 * 64 * 4) + 16 * 17 * 32 * 4 + 14 * 15 * 288 * 4
    assert need.whole(1) == one
    assert need.least == 2 * (15 * 64 * 4) + 3 * 17 * 32 * 4 + 15 * 288 * 4
    assert scratch_blocks.workspace_bytes([need], 100, 0) == 2 * (15 * 64 * 4) + 64 * 288 * 4  # as much as the filter
    assert scratch_blocks.workspace_bytes([need], 100, 1 << 20) == 1 << 20
    assert scratch_blocks.workspace_bytes([need], 1, 1 << 20) == one
    assert scratch_blocks.workspace_bytes([], 1, 1 << 20) == 0


@pytest.mark.parametrize("pad", [(0, 0, 0, 0), (1, 0, 0, 0)])
def test_a_pointwise_convolution_needs_columns_only_where_it_pads(pad):
    """Without padding the activations are the operand already."""
    shape = conv_shape((8, 8, 16), (4, 1, 1, 16), (1, 1), pad, (1, 1))
    (need,) = conv_blocks.conv2d_forward(shape, 4)
    grows = need.whole(10) > need.whole(1)
    assert grows == (pad != (0, 0, 0, 0))


def test_products_with_a_short_side_are_kept_small_on_the_host():
    """28 x 28 pixels of 9 x 32 products are 225 792; four samples stay below 10^6."""
    shape = conv_shape((28, 28, 1), (32, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1))
    tiles = conv_blocks.forward_tiles(shape, 4)
    sizes = {part.stop - part.start for part, _ in tiles.cut_on_host(16, 1 << 20)}
    assert sizes == {4}
