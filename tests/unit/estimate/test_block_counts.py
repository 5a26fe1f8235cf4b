"""Blocks of every algorithm counted by walking, and the general form of Coulom's rule against brute force."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from cubatch.estimate.block_counts import (
    largest_batch,
    num_blocks,
)
from cubatch.hardware.waves import busiest_sm_blocks, coulom_batch_size
from cubatch.network.extents import MAX_EXTENT
from cubatch.network.layers import Attention, Conv2d, Linear, ReLU
from cubatch.network.passes import Pass
from tests.thorough import examples

GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)
TILES = st.sampled_from([(256, 128), (256, 64), (128, 128), (128, 64), (128, 32), (64, 64)])

# lc0, 10 blocks x 128 filters on boards of 8 x 8, RTX 2080 Super (48 SMs), thousand evaluations per second by batch:
# https://github.com/LeelaChessZero/lc0/pull/1101
CHESS = {95: 91.6749, 96: 91.9849, 97: 65.3764, 191: 100.903, 192: 101.279, 193: 81.6904, 256: 94.4273}
# 80 layers x 128 filters on boards of 19 x 19, Tesla V100 (80 SMs), float16, milliseconds of a batch:
# https://www.game-ai-forum.org/viewtopic.php?f=21&t=694
GO_MILLISECONDS = {64: 11.713, 128: 17.741, 256: 29.899, 512: 59.264}


# --- implicit products ---------------------------------------------------------------------------------------


@given(
    h=st.integers(1, 30), c=st.integers(1, 200), k=st.integers(1, 300), n=st.integers(1, 50), stride=st.integers(1, 3),
    tile=TILES,
)  # fmt: skip
def test_blocks_are_tiles_counted_one_by_one(h, c, k, n, stride, tile):
    """Every pass has a block for each tile of each of its products."""
    layer = Conv2d(h=h, w=h, c=c, k=k, r=3, s=3, pad=1, stride=stride)
    for pass_ in Pass:
        walked = 0
        for gemm in layer.gemms(pass_, n):
            walked += gemm.count * len(range(0, gemm.m, tile[0])) * len(range(0, gemm.n, tile[1]))
        assert num_blocks(layer, pass_, n, tile) == walked


def test_attention_is_judged_by_its_largest_product():
    """Of deit-tiny's products the projection to queries, keys and values is the largest: 197 n x 576."""
    assert num_blocks(Attention(h=197, w=1, c=192, heads=3), Pass.FPROP, 13) == len(range(0, 13 * 197, 128)) * 5


def test_layers_without_products_have_no_blocks():
    """An elementwise layer is bounded by its bytes."""
    assert num_blocks(ReLU(h=8, w=8, c=8), Pass.FPROP, 100) == 0


# --- the general rule ----------------------------------------------------------------------------------------


def crest(n=1, *, blocks, num_sms, blocks_per_sm=1):
    """The largest batch at which no SM gets more than n blocks."""
    return largest_batch(blocks, n * num_sms * blocks_per_sm, MAX_EXTENT)


@pytest.mark.case("coulom-rule")
def test_the_published_rule_is_the_tile_of_128_by_128():
    """V100, boards of 19 x 19, 128 channels: 28, 56, 85, 113."""
    found = [crest(n, blocks=partial(num_blocks, GO, Pass.FPROP), num_sms=80) for n in (1, 2, 3, 4)]
    assert found == [28, 56, 85, 113]


@given(n=st.integers(1, 40), h=st.integers(1, 60), wide=st.integers(1, 8), num_sms=st.integers(1, 150))
def test_the_published_formula_is_exact_where_channels_are_whole_tiles(n, h, wide, num_sms):
    """
    With a multiple of 128 filters both rules are the same number, where the SMs hold whole rows of tiles.

    Elsewhere the published one, which rounds once, is larger by less than a row of tiles: 128 pixels.
    """
    layer = Conv2d(h=h, w=h, c=128 * wide, k=128 * wide, r=3, s=3, pad=1)
    general = crest(n, blocks=partial(num_blocks, layer, Pass.FPROP), num_sms=num_sms)
    published = coulom_batch_size(n, h=h, w=h, c=128 * wide, num_sms=num_sms)
    if n * num_sms % wide == 0:
        assert general == published
    else:
        assert published - math.ceil(128 / (h * h)) <= general <= published


@settings(max_examples=examples(200))
@given(
    n=st.integers(1, 9), b=st.integers(1, 3), num_sms=st.integers(1, 150), h=st.integers(1, 60), c=st.integers(1, 300),
    k=st.integers(1, 600), stride=st.integers(1, 2), slices=st.integers(1, 4), tile=TILES,
)  # fmt: skip
def test_the_general_rule_is_its_closed_form(n, b, num_sms, h, c, k, stride, slices, tile):
    """floor(floor(n SM B / (s ceil(K / Tn))) Tm / (P Q)), and the same of C and H W for dgrad of stride 1."""
    layer = Conv2d(h=h, w=h, c=c, k=k, r=3, s=3, pad=1, stride=stride)
    p, q, _ = layer.output_shape

    def closed(width: int, pixels: int) -> int:
        return n * num_sms * b // (slices * math.ceil(width / tile[1])) * tile[0] // pixels

    def found(pass_: Pass) -> int:
        return crest(
            n, blocks=lambda size: slices * num_blocks(layer, pass_, size, tile), num_sms=num_sms, blocks_per_sm=b
        )

    assert found(Pass.FPROP) == closed(k, p * q)
    if stride == 1:
        assert found(Pass.DGRAD) == closed(c, h * h)


@settings(max_examples=examples(150))
@given(
    n=st.integers(1, 4), num_sms=st.integers(1, 60), h=st.integers(1, 20), c=st.integers(1, 70), k=st.integers(1, 70),
    pass_=st.sampled_from([Pass.FPROP, Pass.DGRAD]), stride=st.integers(1, 2), tile=TILES,
)  # fmt: skip
def test_at_a_crest_no_sm_has_more_and_at_one_more_sample_one_has(n, num_sms, h, c, k, pass_, stride, tile):
    """It holds forward and for gradients, phases of a strided gradient included."""
    layer = Conv2d(h=h, w=h, c=c, k=k, r=3, s=3, pad=1, stride=stride)
    blocks = partial(num_blocks, layer, pass_, tile=tile)
    top = crest(n, blocks=blocks, num_sms=num_sms)
    assert busiest_sm_blocks(blocks(top + 1), num_sms) > n
    assert top == 0 or busiest_sm_blocks(blocks(top), num_sms) <= n


@pytest.mark.case("coulom-rule")
def test_the_law_alone_gives_the_cliffs_of_a_chess_network():
    """
    Published throughput falls exactly where the busiest SM gets one more block, from 96 to 97 and 192 to 193.

    Within a step of the law it does not fall; across one it falls by a fifth and more.
    """
    chess = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)
    blocks = partial(num_blocks, chess, Pass.FPROP)
    assert [crest(n, blocks=blocks, num_sms=48) for n in (1, 2)] == [96, 192]
    for before, after in itertools.pairwise(CHESS):
        if after == before + 1:
            steps = busiest_sm_blocks(blocks(after), 48) - busiest_sm_blocks(blocks(before), 48)
            assert steps == (CHESS[after] < 0.81 * CHESS[before])
            assert steps or CHESS[after] > CHESS[before]


def test_a_batch_of_go_boards_takes_as_long_as_its_busiest_sm():
    """With tiles of 256 x 128 the published times are 5.9 ms for each block of the busiest SM, within 3 %."""
    blocks = partial(num_blocks, GO, Pass.FPROP, tile=(256, 128))
    found = {batch: busiest_sm_blocks(blocks(batch), 80) for batch in GO_MILLISECONDS}
    assert found == {64: 2, 128: 3, 256: 5, 512: 10}
    each = [milliseconds / found[batch] for batch, milliseconds in GO_MILLISECONDS.items()]
    assert max(each) / min(each) < 1.03
    # Proportional to the batch instead, the times would be apart by more than half.
    plain = [milliseconds / batch for batch, milliseconds in GO_MILLISECONDS.items()]
    assert max(plain) / min(plain) > 1.5


def test_a_sample_of_more_blocks_than_asked_for_gives_no_batch():
    """One image of 224 x 224 x 64 is 392 blocks: 80 SMs have five each at least, and n = 4 has no batch."""
    large = partial(num_blocks, Conv2d(h=224, w=224, c=64, k=64, r=3, s=3, pad=1), Pass.FPROP)
    assert [crest(n, blocks=large, num_sms=80) for n in (4, 5)] == [0, 1]


def test_the_rule_holds_for_linear_layers():
    """1000 outputs are 8 tiles wide, so 80 SMs hold 10 rows of them with 128 samples each."""
    for layer in (Linear(c=64, k=1000), Conv2d(h=1, w=1, c=64, k=1000, r=1, s=1)):
        assert crest(blocks=partial(num_blocks, layer, Pass.FPROP), num_sms=80) == 1280
