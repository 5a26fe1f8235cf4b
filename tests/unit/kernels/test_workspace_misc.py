"""Grids and scratch memory of the memory-bound kernels, as numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.hardware.facts import Device
from cubatch.kernels.workspace import misc

ROWS, CHANNELS, SMS = st.integers(1, 2**27), st.integers(1, 5000), st.integers(1, 200)


def _vectors(channels, itemsize):
    wide = 16 // itemsize
    return [1, wide] if channels % wide == 0 else [1]


@given(rows=ROWS, channels=CHANNELS, sms=SMS, itemsize=st.sampled_from([2, 4]))
def test_tiles_cover_every_row_and_channel_once(rows, channels, sms, itemsize):
    """No tile is empty, lanes are a power of two up to a warp, and a grid's second extent stays in 16 bits."""
    for vector in _vectors(channels, itemsize):
        device = Device(name="any", num_sms=sms)
        for cut in (misc.summed_tiles, misc.walked_tiles):
            tiles = cut(rows, channels, vector, itemsize, device)
            assert (tiles.tiles - 1) * tiles.rows_per_tile < rows <= tiles.tiles * tiles.rows_per_tile
            width = tiles.lanes * vector
            assert (tiles.blocks - 1) * width < channels <= tiles.blocks * width < channels + 32 * vector
            assert tiles.lanes in {1, 2, 4, 8, 16, 32}
            assert tiles.blocks < 2**16
            assert tiles.rows_per_tile < 2**31


@pytest.mark.parametrize("channels", [16, 64, 72, 256, 2048])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_sums_fill_the_gpu_and_few_lanes_idle(channels, itemsize):
    """Four blocks an SM, or so, whatever the channels; at most a quarter of the lanes have no channel."""
    device = Device(name="any", num_sms=132)
    vector = 16 // itemsize
    tiles = misc.summed_tiles(256 * 56 * 56, channels, vector, itemsize, device)
    assert 3 * 132 <= tiles.tiles * tiles.blocks <= 5 * 132
    assert channels >= 0.75 * tiles.blocks * tiles.lanes * vector


@given(rows=ROWS, channels=CHANNELS, sms=SMS, dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
def test_workspaces_hold_what_a_launch_writes(rows, channels, sms, dtype):
    """Whether or not addresses turn out to be aligned when the memory is already planned."""
    device, itemsize = Device(name="any", num_sms=sms), 4 if dtype == "float32" else 2
    for vector in _vectors(channels, itemsize):
        tiles = misc.summed_tiles(rows, channels, vector, itemsize, device).tiles
        assert misc.column_sums_workspace(rows, channels, dtype, device) >= 4 * tiles * channels
        slices, per_slice = misc.merged_tiles(tiles)
        assert slices * per_slice >= tiles or slices == 0
        moments = 12 * (tiles + slices) * channels
        assert misc.batch_norm_workspace(rows, channels, dtype, device) >= moments
        assert misc.batch_norm_backward_workspace(rows, channels, dtype, device) >= 8 * (tiles + 1) * channels
        sums = misc.summed_rows(rows, channels, vector, device)[1] or tiles
        assert misc.layer_norm_backward_workspace(rows, channels, dtype, device) >= 8 * (sums + 1) * channels


@given(rows=ROWS, channels=st.integers(1, 7000), sms=SMS, itemsize=st.sampled_from([2, 4]))
def test_sums_of_rows_fit_into_shared_memory(rows, channels, sms, itemsize):
    """Two for each channel and row at a time in 48 KiB, of which a block with one row needs 8 floats more."""
    for vector in _vectors(channels, itemsize):
        lanes, blocks = misc.summed_rows(rows, channels, vector, Device(name="any", num_sms=sms))
        assert lanes in {1, 2, 4, 8, 16, 32, 256}
        assert (blocks == 0) == (channels > 6140)
        if blocks:
            assert 4 * (2 * channels * (256 // lanes) + 8 * (lanes == 256)) <= 48 * 2**10
            assert blocks <= 4 * sms
            assert (blocks - 1) * max(256 // lanes, 4) < rows


@given(tiles=st.integers(1, 10**6))
def test_merged_slices_cover_all_tiles(tiles):
    """Many tiles are merged into at most 256 slices, none of which is empty."""
    slices, per_slice = misc.merged_tiles(tiles)
    assert (slices == 0) == (tiles <= 1024)
    if slices:
        assert (slices - 1) * per_slice < tiles <= slices * per_slice
        assert slices <= 256


@given(rows=st.integers(1, 10**9), classes=st.integers(1, 10**5), sms=SMS)
def test_scores_get_a_bounded_number_of_blocks(rows, classes, sms):
    """Eight bytes of loss for each of at most 16 blocks an SM, and no block without a row."""
    device = Device(name="any", num_sms=sms)
    blocks, lanes = misc.row_blocks(rows, classes, device), misc.row_lanes(rows, classes, device)
    assert 1 <= blocks <= 16 * sms
    assert (blocks - 1) * (256 // lanes) < rows
    assert lanes in {*(2 ** np.arange(6)), 256}
    assert misc.softmax_cross_entropy_workspace(rows, classes, device) == 8 * blocks


@given(count=st.integers(1, 2**34), itemsize=st.sampled_from([2, 4]))
def test_blocks_of_elements_cover_them_all(count, itemsize):
    """256 threads of four loads of 16 bytes: no element is without a block, no block without one."""
    blocks = misc.element_blocks(count, itemsize)
    each = 256 * 4 * 16 // itemsize
    assert (blocks - 1) * each < count <= blocks * each
    assert misc.loss_scale_workspace(count, "float16") == 4 * misc.element_blocks(count, 2)
