"""Waves, busiest SM and Coulom sizes against brute force; occupancy also in test_occupancy_header.py."""

from __future__ import annotations

import functools
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import architectures, waves

pytestmark = pytest.mark.case("titan-x-test-batch")

SMALL = st.integers(1, 60)


def waves_by_hand(num_blocks: int, slots: int) -> tuple[int, int]:
    """Fill waves one block at a time: how many there are, and how many blocks are in the last."""
    num_waves, in_wave = 1, 0
    for _ in range(num_blocks):
        if in_wave == slots:
            num_waves, in_wave = num_waves + 1, 0
        in_wave += 1
    return num_waves, in_wave


@given(num_blocks=st.integers(1, 500), blocks_per_sm=st.integers(1, 8), num_sms=SMALL)
def test_waves_are_those_of_filling_slots_one_by_one(num_blocks, blocks_per_sm, num_sms):
    """Closed form and counting agree, so no off-by-one hides at a boundary."""
    slots = blocks_per_sm * num_sms
    num_waves, last = waves_by_hand(num_blocks, slots)

    found = waves.count_waves(num_blocks, blocks_per_sm=blocks_per_sm, num_sms=num_sms)

    assert (found.num_waves, found.blocks_per_wave) == (num_waves, slots)
    assert found.last_wave_fraction == last / slots
    assert found.wave_efficiency == float(Fraction(num_blocks, num_waves * slots))


@given(num_blocks=st.integers(1, 500), num_sms=SMALL)
def test_the_busiest_sm_is_that_of_dealing_blocks_round(num_blocks, num_sms):
    """Blocks dealt to SMs in turn give the count and the fill."""
    dealt = [0] * num_sms
    for block in range(num_blocks):
        dealt[block % num_sms] += 1

    assert waves.busiest_sm_blocks(num_blocks, num_sms) == max(dealt)
    assert waves.fill(num_blocks, num_sms) == sum(dealt) / (max(dealt) * num_sms)


@pytest.mark.parametrize(
    ("num_sms", "width", "channels", "published"),
    [
        (80, 19, 128, [28, 56, 85, 113]),  # V100
        (24, 19, 256, [4, 8, 12, 17, 21]),  # Titan X (Maxwell)
        (28, 19, 256, [4, 9, 14, 19, 24]),  # Titan X (Pascal)
        (40, 19, 256, [7, 14, 21]),  # T4
        (108, 19, 256, [19, 38, 57]),  # A100
        (132, 19, 256, [23, 46, 70]),  # H200
    ],
)
def test_coulom_sizes_are_the_published_ones(num_sms, width, channels, published):
    """The rule is known by these numbers; rounding differently would change them."""
    found = [
        waves.coulom_batch_size(n, h=width, w=width, c=channels, num_sms=num_sms) for n in range(1, len(published) + 1)
    ]

    assert found == published


@given(n=st.integers(1, 10**6), h=SMALL, w=SMALL, c=st.integers(1, 4096), num_sms=st.integers(1, 200))
def test_coulom_size_is_exact_where_floating_point_would_round(n, h, w, c, num_sms):
    """The result is the floor of the exact quotient, for any size."""
    exact = Fraction(n * (1 << 14) * num_sms, h * w * c)

    found = waves.coulom_batch_size(n, h=h, w=w, c=c, num_sms=num_sms)

    assert found <= exact < found + 1


@pytest.mark.parametrize(
    ("compute_capability", "blocks"),
    [((7, 0), 2), ((7, 5), 1), ((8, 0), 3), ((8, 9), 2), ((9, 0), 4), ((12, 0), 2)],
)
def test_occupancy_counts_resident_warps(compute_capability, blocks):
    """128 threads, 128 registers, 48 KiB: four warps per block over the most of the SM, 32, 48 or 64."""
    most = {(7, 5): 32, (8, 9): 48, (12, 0): 48}.get(compute_capability, 64)

    found = waves.occupancy(
        compute_capability=compute_capability,
        threads_per_block=128,
        registers_per_thread=128,
        shared_bytes_per_block=48 * 1024,
    )

    assert found.blocks_per_sm == blocks
    assert found.occupancy == 4 * blocks / most


@pytest.mark.parametrize(("compute_capability", "most"), [((7, 0), 98304), ((8, 0), 166912), ((9, 0), 232448)])
def test_a_block_may_use_all_that_its_architecture_lets_it_opt_in_to(compute_capability, most):
    """The largest dynamic shared memory of the CUDA programming guide launches, a byte more does not."""
    fits, fails = (
        waves.occupancy(
            compute_capability=compute_capability,
            threads_per_block=128,
            registers_per_thread=32,
            shared_bytes_per_block=size,
        )
        for size in (most, most + 1)
    )

    assert (fits.blocks_per_sm, fails.blocks_per_sm) == (1, 0)
    assert fails.limiters == ("shared_memory",)


COUNTS = {"num_blocks": 4, "blocks_per_sm": 2, "num_sms": 8}
LAUNCH = {"threads_per_block": 128, "registers_per_thread": 32, "shared_bytes_per_block": 1024}


@pytest.mark.parametrize(
    ("call", "arguments", "field", "value"),
    [
        *((waves.count_waves, COUNTS, field, value)
          for field in COUNTS for value in (0, 1.5, "8", True)),
        *((functools.partial(waves.occupancy, compute_capability=(7, 0)), LAUNCH, field, value)
          for field, value in (("threads_per_block", 1025), ("threads_per_block", 0), ("registers_per_thread", 256),
                               ("registers_per_thread", -1), ("shared_bytes_per_block", -1),
                               ("shared_carveout_bytes", 2**20))),
    ],
)  # fmt: skip
def test_what_no_launch_can_have_is_refused(call, arguments, field, value):
    """What is no count, or beyond the hardware's range, is an error with its name and value, and no occupancy of 0."""
    with pytest.raises(InvalidArgument) as caught:
        call(**arguments | {field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@given(
    arch=st.sampled_from([one.compute_capability for one in architectures.known().values()]),
    warps=st.integers(1, 32), registers=st.integers(1, 255), shared=st.integers(0, 227 << 10),
)  # fmt: skip
def test_the_carveout_that_is_wished_for_holds_what_the_largest_does(arch, warps, registers, shared):
    """`occupancy` without a wish assumes the largest: the wish gives as many blocks, a percent less is too little."""
    facts = {"compute_capability": arch, "shared_bytes_per_block": shared}
    launch = facts | {"threads_per_block": 32 * warps, "registers_per_thread": registers}
    blocks = waves.occupancy(**launch).blocks_per_sm
    sm, percent = architectures.of(arch), waves.carveout_percent(**facts, blocks_per_sm=blocks)
    wished, below = (part * sm.shared_bytes_per_sm // 100 for part in (percent, percent - 1))
    assert waves.occupancy(**launch, shared_carveout_bytes=wished).blocks_per_sm == blocks
    assert (
        below
        < blocks * -(-(shared + sm.reserved_shared_bytes) // sm.shared_unit_bytes) * sm.shared_unit_bytes
        <= wished
    )


def test_occupancy_of_an_unknown_architecture_is_an_error():
    """There is no silent default for limits that are not in the table."""
    with pytest.raises(UnknownName) as caught:
        waves.occupancy(compute_capability=(3, 5), threads_per_block=128, registers_per_thread=32)

    assert caught.value.value == "3.5"
