"""The index arithmetic of windows against counting."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, strategies as st

from cubatch.network.windows import Axis, ConvShape, conv_shape, phases, seen_taps, working_phases

AXES = st.builds(
    Axis,
    size=st.integers(1, 12),
    out=st.integers(1, 8),
    taps=st.integers(1, 4),
    stride=st.integers(1, 4),
    step=st.integers(1, 3),
    offset=st.integers(-6, 6),
)
STRIDES = st.sampled_from([1, 2, 3, 4, 500])


def _reads(axis):
    """Output and source position of every tap inside the source."""
    places = (
        (out, out * axis.stride + tap * axis.step + axis.offset) for out in range(axis.out) for tap in range(axis.taps)
    )
    return sorted((out, source) for out, source in places if 0 <= source < axis.size)


@given(AXES, AXES)
def test_taps_are_left_out_only_where_no_output_sees_them(vertical, horizontal):
    """What is left reads the same source positions, and is a view of the filter by output channel."""
    shape, rows, columns = seen_taps(ConvShape(vertical, horizontal, c=3, k=2, groups=1))
    assert (_reads(shape.vertical), _reads(shape.horizontal)) == (_reads(vertical), _reads(horizontal))
    filters = np.zeros((2, vertical.taps, horizontal.taps, 3))[:, rows, columns]
    assert filters.shape[1:3] == (shape.vertical.taps, shape.horizontal.taps)
    assert np.shares_memory(filters, filters.reshape(2, -1))


@given(AXES, st.integers(0, 3), st.data())
def test_valid_names_exactly_the_reads_inside_the_source(axis, tap, data):
    """Every output of the band whose tap lies inside is paired with the position it reads, and no other."""
    start = data.draw(st.integers(0, axis.out))
    stop = data.draw(st.integers(start, axis.out))
    outputs, sources = axis.valid(tap, start, stop)
    want = [
        (o, o * axis.stride + tap * axis.step + axis.offset)
        for o in range(start, stop)
        if 0 <= o * axis.stride + tap * axis.step + axis.offset < axis.size
    ]
    got = zip(range(start, stop)[outputs], range(axis.size)[sources], strict=True)
    assert list(got) == want


@given(AXES)
def test_reaching_out_is_reading_outside(axis):
    """Whether a zero border is needed, by looking at every read."""
    reads = [o * axis.stride + t * axis.step + axis.offset for o in range(axis.out) for t in range(axis.taps)]
    assert axis.reaches_out == (min(reads) < 0 or max(reads) >= axis.size)
    assert axis.span(axis.out) == max(reads) - min(reads) + 1


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_phases_pair_every_input_with_every_tap_that_reads_it(size, taps, stride, step, top, bottom):
    """Together the phases hold each product of the forward pass once, with the tap that made it."""
    if size + top + bottom < (taps - 1) * step + 1:
        return
    shape = conv_shape((size, 1, 1), (1, taps, 1, 1), (stride, 1), (top, bottom, 0, 0), (step, 1))
    want = {
        (p * stride - top + r * step, r, p)
        for p in range(shape.vertical.out)
        for r in range(taps)
        if 0 <= p * stride - top + r * step < size
    }
    got = []
    for phase in phases(shape):
        for index in range(phase.vertical.out):
            for tap, r in enumerate(range(taps)[phase.rows]):
                p = index * phase.vertical.stride + tap * phase.vertical.step + phase.vertical.offset
                if 0 <= p < shape.vertical.out:
                    got.append((phase.top + index * stride, r, p))
    assert len(got) == len(set(got))
    assert set(got) == want


@given(
    hw=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    rs=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    step=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_the_phases_that_work_are_those_of_all_that_have_taps(hw, rs, stride, step):
    """What a layer's products are is what the engine computes, in the same order."""
    shape = conv_shape((*hw, 1), (1, *rs, 1), stride, (9, 9, 9, 9), step)
    assert working_phases(shape) == tuple(phase for phase in phases(shape) if phase.works)


@given(hw=st.tuples(st.integers(1, 9), st.integers(1, 9)), stride=st.tuples(STRIDES, STRIDES))
def test_every_input_pixel_is_in_one_phase_and_none_is_empty(hw, stride):
    """However far a stride steps beyond the input: there are no more phases than pixels."""
    shape = conv_shape((*hw, 1), (1, 2, 3, 1), stride, (3, 3, 3, 3), (1, 1))
    found = [
        [
            (phase.top + i * stride[0], phase.left + j * stride[1])
            for i in range(phase.vertical.out)
            for j in range(phase.horizontal.out)
        ]
        for phase in phases(shape)
    ]
    assert all(found)
    assert sorted(itertools.chain(*found)) == list(itertools.product(range(hw[0]), range(hw[1])))
