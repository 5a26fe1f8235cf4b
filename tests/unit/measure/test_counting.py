"""In which state of the host sizes are compared, and which timings count there."""

from __future__ import annotations

import pytest

from cubatch.measure.counting import CONTENDS, HELD_UP, SLOW, comparable, counting, host_state
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Timing

QUICK, LONG = 5e-6, 8e-6


def timing(n, visit, seconds, met, **more):
    return Timing(batch_size=n, round=PER_VISIT * visit, seconds=seconds, reference_seconds=met, **more)


def state(*timings, goal=None):
    return host_state(timings, goal or Goal())


def test_a_host_has_states_where_references_take_a_quarter_longer():
    """At 1.25 times the shortest the host is quick still, beyond that slow; one that is not told counts in both."""
    assert state(timing(4, 0, 1.0, QUICK), timing(8, 0, 2.0, SLOW * QUICK)) is None
    found = state(timing(4, 0, 1.0, QUICK), timing(8, 0, 2.0, 1.01 * SLOW * QUICK))
    assert [found.holds(timing(1, 0, 1.0, met)) for met in (QUICK, SLOW * QUICK, LONG, None)] == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("met", [None, QUICK])
def test_a_host_whose_timings_tell_of_one_state_has_none(met):
    """Nothing is told, or all met the same; throttled timings tell nothing."""
    assert state(timing(4, 0, 1.0, met), timing(8, 0, 2.0, met)) is None
    assert state(timing(4, 0, 1.0, met), timing(8, 0, 2.0, LONG, throttled=True)) is None


@pytest.mark.parametrize("first", [QUICK, LONG])
def test_sizes_are_compared_where_most_that_may_be_the_best_were_read(first):
    """16 and 8 are the best of both states and were read together in one, where fewer timings were taken."""
    second = QUICK + LONG - first
    together = [timing(16, 0, 1.0, first), timing(8, 0, 0.51, first)]
    alone = [timing(16, 1, 1.2, second), *(timing(n, 0, n / 4, second) for n in (1, 2, 4))]
    found = state(*together, *alone)
    assert found.contenders == {8, 16}
    assert found.is_quick == (first == QUICK)


def test_where_both_states_tell_as_much_the_one_with_more_timings_is_taken():
    """Three slow, two quick; and of equals the quick one."""
    slow = [timing(16, visit, 1.2, LONG) for visit in (0, 1, 2)]
    quick = [timing(16, visit, 1.0, QUICK) for visit in (3, 4)]
    assert not state(*slow, *quick).is_quick
    assert state(*slow[:2], *quick).is_quick


@pytest.mark.parametrize(("behind", "contends"), [(CONTENDS - 0.005, True), (CONTENDS + 0.005, False)])
def test_a_size_that_is_behind_within_a_state_is_no_contender(behind, contends):
    """8 is compared with 16 as read slow, though 4, which was read quick, is faster than both."""
    slow = [timing(16, 0, 1.6, LONG), timing(8, 0, 0.8 * (1 + behind), LONG)]
    found = state(*slow, timing(4, 0, 0.3, QUICK))
    assert found.contenders == ({4, 8, 16} if contends else {4, 16})


def test_what_a_step_takes_in_the_other_state_is_the_median_of_sizes_read_in_both():
    """1.1, 1.2 and 1.4 times as long slow; without a size read in both nothing is known."""
    quick = [timing(n, 0, n / 16, QUICK) for n in (4, 8, 16)]
    slow = [timing(n, 1, n / 16 * times, LONG) for n, times in ((4, 1.1), (8, 1.4), (16, 1.2))]
    assert state(*quick, *slow).times == pytest.approx(1 / 1.2)
    assert state(quick[0], slow[1]).times == 1.0


def test_timings_before_a_size_had_settled_do_not_count_there_either():
    """Three first steps of 16 took a second and a half: by its median it would be no contender."""
    first = [Timing(batch_size=16, round=r, seconds=1.5, reference_seconds=QUICK) for r in (0, 1, 2)]
    settled = [Timing(batch_size=16, round=r, seconds=0.8, reference_seconds=QUICK) for r in (3, 4)]
    assert state(*first, *settled, timing(8, 0, 0.45, QUICK), timing(4, 0, 0.9, LONG)).contenders == {4, 16}


def test_costs_are_those_of_the_goal():
    """By latency the smallest is the best, by energy what was not read has no cost."""
    read = [timing(4, 0, 0.5, QUICK, joules=9.0), timing(16, 0, 1.0, QUICK), timing(1, 0, 0.4, LONG, joules=1.0)]
    assert state(*read).contenders == {1, 16}
    assert state(*read, goal=Goal(objective="latency")).contenders == {1, 4}
    assert state(*read, goal=Goal(objective="energy")).contenders == {1, 4}


def test_what_breaks_the_latency_limit_is_no_contender():
    """16 is the best per sample, and takes too long; 32 does so in the slow state alone."""
    read = [timing(8, 0, 0.6, QUICK), timing(16, 0, 1.0, QUICK), timing(8, 1, 0.7, LONG)]
    assert state(*read).contenders == {8, 16}
    assert state(*read, goal=Goal(latency_limit=0.9)).contenders == {8}
    read += [timing(32, 0, 0.85, QUICK), timing(32, 1, 0.95, LONG)]
    assert state(*read, goal=Goal(latency_limit=0.9)).contenders == {8, 32}


def test_a_slow_visit_counts_where_a_reference_tells_that_nobody_was_behind_it():
    """26 made 586 samples a second once and 491 twice: the heap was lucky once, and is not when it is used."""
    taken = [26 / 586, 26 / 491, 26 / 490]
    read = [timing(26, visit, seconds, QUICK) for visit, seconds in enumerate(taken)]
    assert counting(read) == tuple(read)
    assert counting([timing(26, visit, seconds, None) for visit, seconds in enumerate(taken)])[0].seconds == taken[0]
    assert len(counting([timing(26, visit, seconds, None) for visit, seconds in enumerate(taken)])) == 1


HELD = 1.01 * HELD_UP * QUICK


def test_what_another_process_held_up_is_of_no_state():
    """Such timings are never compared with others, many as they are; they make no contender, and no state of theirs."""
    quick, held = [timing(8, 0, 0.6, QUICK)], [timing(n, 0, n / 99, HELD) for n in (16, 32, 64)]
    found = state(*quick, *held)
    assert (found.is_quick, found.contenders, found.times) == (True, {8}, 1.0)
    assert [found.was_held_up(one) for one in (*quick, *held)] == [False, True, True, True]
    assert not any(map(found.holds, held))
    slow = [timing(8, 1, 0.7, LONG), timing(16, 1, 1.0, LONG)]
    found = state(*quick, *held, *slow)
    assert (found.is_quick, found.contenders) == (False, {8, 16})
    assert [found.was_held_up(one) for one in (*slow, timing(1, 0, 1.0, None))] == [False, False, False]
    assert not any(map(found.holds, held))
    assert counting([timing(16, 0, 0.5, HELD), slow[1]], state=found) == (slow[1],)


def test_timings_of_the_other_state_count_only_where_there_are_no_others():
    """Far ones of 16 do not count beside quick ones, those of 4 do; full clocks come first."""
    read = [timing(16, 0, 1.0, QUICK), timing(16, 1, 1.05, LONG), timing(8, 0, 0.6, QUICK), timing(4, 0, 0.4, LONG)]
    found = state(*read)
    assert found.is_quick
    assert counting(read[:2], state=found) == (read[0],)
    assert counting(read[3:], state=found) == (read[3],)
    assert counting(read[:2]) == (read[0], read[1])
    throttled = timing(16, 2, 1.0, QUICK, throttled=True)
    assert comparable([read[1], throttled], found) == [read[1]]
