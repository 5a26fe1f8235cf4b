"""What a walk without data says of memory is corrected by what smaller sizes took, in both directions."""

from __future__ import annotations

import pytest

from cubatch.frameworks.memory_plan import MemoryPlan
from cubatch.frameworks.torch_memory import Peaks

MIB = 2**20


def made(grain=0, scatter=0.08):
    """A step of 100 MiB and 10 MiB a sample, by the walk."""
    return MemoryPlan(Peaks({2: 120 * MIB, 4: 140 * MIB}), grain, scatter)


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_what_grows_is_taken_for_as_many_times_what_was_walked(times):
    """A device whose steps take `times` as much a sample is known from one size up to the weight of the prior."""
    plan = made()
    plan.learn(64, round(100 + 640 * times) * MIB)
    assert plan.at(64) == round(100 + 640 * times) * MIB
    assert plan.at(256) == pytest.approx((100 + 2560 * times) * MIB, rel=0.03)
    assert plan.largest(3000 * MIB) == pytest.approx(2900 / (10 * times), rel=0.03)


def test_without_a_trace_sizes_below_all_measured_ones_are_unknown():
    """Nothing tells them apart from 0 bytes; larger ones follow the measured size."""
    plan = MemoryPlan(Peaks({1: 500 * MIB, 2: 1000 * MIB}), grain=16 * MIB, scatter=0.2, is_traced=False)
    assert plan.known_at(2) is None
    plan.learn(2, 8 * MIB)
    assert [plan.known_at(1), plan.known_at(2)] == [None, 8 * MIB]
    assert plan.known_at(4) == plan.at(4) > 0
    plan.learn(1, 4 * MIB)
    assert plan.predicted == {2: None, 1: None}
    assert made().known_at(1) == made().at(1)


def test_without_a_trace_a_line_through_the_measured_sizes_replaces_the_guess():
    """60 MiB and 1/4 MiB a sample; by the guess all that the first step took would grow with its two samples."""
    plan = MemoryPlan(Peaks({1: 500 * MIB, 2: 1000 * MIB}), grain=MIB, scatter=0.2, is_traced=False)
    plan.learn(2, 60 * MIB)
    assert plan.at(66) > 1000 * MIB
    plan.learn(66, 76 * MIB)
    plan.learn(34, 68 * MIB)
    assert plan.at(1026) == pytest.approx(316 * MIB, rel=0.02)
    assert plan.most(1026) > 316 * MIB


def test_growth_of_less_than_four_grains_is_rough():
    """A meter that is 16 MiB off makes at most a quarter of 64 MiB; what does not grow with the batch is left out."""
    plan = made(grain=16 * MIB)
    assert not plan.is_rough  # nothing was measured: there is only the trace
    plan.learn(6, 163 * MIB)
    assert plan.is_rough
    plan.learn(7, 174 * MIB)
    assert not plan.is_rough


def test_the_largest_size_measured_below_counts_and_below_all_the_smallest():
    """Of sizes far apart that took 2 and 3 times as much, each speaks for those up to the next."""
    plan = made()
    plan.learn(90, 1900 * MIB)
    plan.learn(200, 6100 * MIB)
    assert plan.at(90) == 1900 * MIB
    assert plan.at(150) == pytest.approx(3100 * MIB, rel=0.01)
    assert plan.at(50) == pytest.approx(1100 * MIB, rel=0.01)
    assert plan.at(300) == pytest.approx(9100 * MIB, rel=0.01)


def test_the_nearest_size_says_most_of_a_larger_one():
    """Of two that are alike it is the mean, 3 times as much; one of half the size says next to nothing."""
    plan = made()
    plan.learn(200, 8100 * MIB)
    plan.learn(199, (100 + 2 * 10 * 199) * MIB)
    assert plan.at(200) == 8100 * MIB
    assert plan.at(300) == pytest.approx(9100 * MIB, rel=0.02)
    plan = made()
    plan.learn(200, 8100 * MIB)
    plan.learn(100, 2100 * MIB)
    assert plan.at(300) == pytest.approx((100 + 3000 * 4) * MIB, rel=0.001)


def test_a_size_near_by_that_took_far_more_says_what_another_may_take():
    """
    Steps of two convolutions on an H200 took 0.90 MiB a sample or 1.15, by the algorithm that cuDNN chose.

    Of 3301 samples, which took 3782 MiB, the nearest size said 2956; with what a meter scatters by that is too little.
    """
    plan = MemoryPlan(Peaks({2: 2 * MIB, 4: 4 * MIB}), grain=20 * MIB, scatter=0.12)
    for size, took in {1774: 2034, 2210: 2540, 2776: 2488}.items():
        plan.learn(size, took * MIB)
    assert plan.at(3301) == pytest.approx(2956 * MIB, rel=0.02)
    assert 3782 * MIB <= plan.most(3301) <= 1.1 * 3782 * MIB
    assert plan.most(2776) == 2488 * MIB


def test_a_meter_that_scatters_leaves_more_room():
    """By the share that measurements of what grows differ; fixed bytes do not scatter."""
    quiet, loud = made(scatter=0.18), made(scatter=0.28)
    for plan in (quiet, loud):
        plan.learn(10, 200 * MIB)
    assert loud.most(11) - quiet.most(11) == round(0.1 * 110 * MIB)
    assert loud.most(10) == quiet.most(10)


def test_what_was_said_before_a_size_ran_is_kept():
    """It is what the measured bytes are to be compared with, also when the size is measured again."""
    plan = made()
    plan.learn(10, 300 * MIB)
    plan.learn(10, 250 * MIB)
    assert plan.predicted == {10: 200 * MIB}
    assert plan.measured == {10: 300 * MIB}


def test_doubt_grows_with_the_distance_from_what_was_measured():
    """At a size that was measured there is none, else half of what is added, and of the rest."""
    plan = made()
    assert plan.most(10) == (100 + 16 * 100) * MIB
    plan.learn(10, 200 * MIB)
    assert plan.most(10) == plan.at(10) == 200 * MIB
    assert plan.most(20) == (300 + 50 + 25) * MIB
    assert plan.most(110) == pytest.approx((1700 + 100 / 2.2) * MIB)


def test_what_a_meter_cannot_tell_does_not_grow():
    """Less by the grain is nothing, more is there at every size alike; beyond the grain all of it grows."""
    plan = made(grain=16 * MIB)
    for taken, at_10, at_30 in ((185, 200, 400), (215, 215, 415)):
        plan.learn(10, taken * MIB)
        assert (plan.at(10), plan.at(30)) == (at_10 * MIB, at_30 * MIB)
    plan.learn(10, 217 * MIB)
    assert plan.at(10) == 217 * MIB
    assert plan.at(30) == pytest.approx((84 + 316 * 133 / 116) * MIB)


def test_a_small_limit_is_kept_where_steps_take_a_little_more_than_was_walked():
    """5 MiB more at every size, less than the grain: no size is said to fit that would not."""
    plan = made(grain=16 * MIB)
    plan.learn(1, 115 * MIB)
    assert plan.largest(120 * MIB) == 1
    assert plan.largest(145 * MIB) == 4


def test_a_size_that_is_small_beside_the_grain_says_little_of_larger_ones():
    """10 MiB that grew, read by a meter of 16 MiB: what it did not tell may all be of what grows."""
    plan = made(grain=16 * MIB)
    plan.learn(1, 110 * MIB)
    assert plan.at(10) == 200 * MIB
    likely = 110 + 90 * 2.6
    assert plan.most(10) == pytest.approx((likely + (likely - 110 + 90) / 2) * MIB)
    plan.learn(100, 1100 * MIB)
    assert plan.most(101) < 1220 * MIB


def test_no_size_that_is_said_to_fit_by_most_is_above_the_limit_of_a_device_within_the_doubt():
    """
    A device whose steps take more a sample the larger they are, up to 1.5 times what is extrapolated.

    Going up to the largest size that is sure, again and again, comes near the limit and never above it.
    """
    limit = 5000 * MIB

    def takes(n):
        return round(100 + 10 * n * (1 + n / 1000)) * MIB

    plan, size, steps = made(), 1, 0
    while size not in plan.measured:
        assert takes(size) <= limit
        plan.learn(size, takes(size))
        size, steps = plan.largest(limit, plan.most), steps + 1
    assert takes(max(plan.measured)) > 0.9 * limit
    assert steps < 20


def test_the_largest_that_fits_is_no_smaller_than_one_that_was_measured():
    """Its neighbours are known less well: smaller ones may be thought to take more than it did."""
    plan = made()
    plan.learn(60, 700 * MIB)
    plan.learn(100, 995 * MIB)
    assert plan.most(95) > 1000 * MIB
    assert plan.largest(1000 * MIB, plan.most) >= 100


def test_what_was_learned_counts_until_a_size_was_measured_anew():
    """Readings of a time when steps took more bound those that come, and say nothing of them once one is there."""
    plan = made(scatter=1.0)
    plan.learn(10, 400 * MIB)
    assert plan.most(20) == (700 + 600) * MIB
    plan.restart(scatter=0.08)
    assert plan.at(20) == 700 * MIB
    assert plan.most(20) == (700 + 175) * MIB
    plan.learn(20, 320 * MIB)
    assert (plan.predicted, plan.earlier) == ({10: 200 * MIB, 20: 700 * MIB}, {10: 400 * MIB})
    assert plan.at(10) == 210 * MIB
    assert plan.at(30) == 430 * MIB


def test_bytes_that_two_sizes_share_do_not_grow_whatever_the_trace_says():
    """36 MiB at each size, of which 28 were traced: within a limit of 60 MiB, nearly all that fit are found to fit."""
    limit = 60 * MIB

    def takes(n):
        return round((36 + n / 3) * MIB)

    plan, size = MemoryPlan(Peaks({2: 29 * MIB, 64: 60 * MIB}), grain=16 * MIB, scatter=1.0), 1
    while size not in plan.measured:
        assert takes(size) <= limit
        plan.learn(size, takes(size))
        size = plan.largest(limit, plan.most)
    assert max(plan.measured) >= 20
    assert takes(64) <= plan.at(64) < 1.2 * takes(64)


@pytest.mark.parametrize("power", [1, 2])
def test_without_a_trace_measured_sizes_bound_those_up_to_twice_as_large(power):
    """With doubt, a step whose memory is quadratic in the batch stays within the limit, and comes near it."""
    limit, own = 4000 * MIB, 100 * MIB

    def takes(n):
        return own + n**power * MIB

    share = (limit - own) // 2
    plan = MemoryPlan(Peaks({1: own + share, 2: limit}), grain=0, scatter=0.2, doubt=2.0)
    size, runs = 2, 0
    while size not in plan.measured:
        assert takes(size) <= limit
        plan.learn(size, takes(size))
        size, runs = min(2 * size, plan.largest(limit, plan.most)), runs + 1
    assert takes(max(plan.measured)) > 0.7 * limit
    assert runs < 40
