"""What a result says of a host that was in another state at times, and which sizes it compares."""

from __future__ import annotations

import pytest

from cubatch.measure.counting import host_state
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Candidate, Measured, Outcome, Timing
from cubatch.report import facts
from cubatch.tuning import host_wording
from cubatch.tuning.answer import answer

QUICK, SLOW = 5e-6, 8e-6


def timings(n, visit, seconds, met, count=5):
    first = PER_VISIT * visit
    return [Timing(batch_size=n, round=first + r, seconds=seconds, reference_seconds=met) for r in range(count)]


def result(*taken, dropped=()):
    sizes = sorted({timing.batch_size for timing in taken})
    outcomes = tuple(Outcome(n, "dropped" if n in dropped else "ok") for n in sizes)
    return answer([Candidate(n) for n in sizes], Measured(timings=taken, outcomes=outcomes), goal=Goal(), setting={})


def test_a_result_says_how_many_timings_were_taken_in_the_other_state_and_compares_the_rest():
    """16 and 8 were read in the quick state, 16 in the slow one too, a fifth longer; 4 in the slow one alone."""
    taken = [
        *timings(8, 0, 0.55, QUICK), *timings(16, 0, 1.0, QUICK), *timings(16, 1, 1.2, SLOW), *timings(4, 0, 0.4, SLOW),
    ]  # fmt: skip
    found = result(*taken, dropped=(4,))
    assert found.batch_size == 16
    assert found.measurements[-1].latency_seconds == 1.0
    assert [m.disturbed for m in found.measurements] == [0, 0, 0]
    assert found.reasons[-1] == (
        "10 of 20 timings were taken while this host was in its slow state: a sine of 4096 elements took PyTorch "
        "8.00 µs instead of 5.00 µs, and a step 1.20 times as long. Virtual machines have such states, for seconds "
        "each. Sizes are compared as read with the other timings; of 4 there are none, and its row says what those "
        "timings do."
    )


@pytest.mark.parametrize("dropped", [(), (40,)])
def test_a_size_of_the_other_state_is_no_answer_ties_with_none_and_is_judged_as_in_this_one(dropped):
    """40 was read in the quick state, and is the best for that; in the slow one it would be 12 % behind 20: a peak."""
    slow = [*timings(16, 0, 1.2, SLOW), *timings(20, 0, 1.4, SLOW), *timings(12, 0, 1.0, SLOW)]
    quick = [*timings(12, 1, 0.8, QUICK), *timings(40, 0, 2.5, QUICK)]
    found = result(*slow, *quick, dropped=dropped)
    assert (found.batch_size, found.fastest_batch_size, found.decided_by) == (20, 20, "peak")
    assert found.tied_with == ()


def test_where_slow_timings_are_compared_the_others_were_quick():
    """One timing of three, of a size that was not read in the slow state."""
    taken = [*timings(16, 0, 1.2, SLOW, 1), *timings(8, 0, 0.6, SLOW, 1), *timings(4, 0, 0.4, QUICK, 1)]
    state = host_state(taken, Goal())
    said = host_wording.sentences(taken, state, {16: taken[:1], 8: taken[1:2], 4: taken[2:]})
    assert said[0].startswith(
        "1 of 3 timings was taken while this host was in its quick state: a sine of 4096 elements"
    )
    assert "times as long" not in said[0]


HELD = 7e-3


def test_timings_that_were_held_up_are_told_by_themselves():
    """16 was read in the slow state too, which is not told as held up; 4 has no other timings."""
    taken = [
        *timings(8, 0, 0.55, QUICK), *timings(16, 0, 1.0, QUICK), *timings(16, 1, 1.2, SLOW), *timings(4, 0, 0.4, HELD),
    ]  # fmt: skip
    found = result(*taken, dropped=(4,))
    assert found.reasons[-2].startswith("5 of 20 timings were taken while this host was in its slow state: a sine of")
    assert found.reasons[-2].endswith("Sizes are compared as read with the other timings.")
    assert found.reasons[-1] == (
        "5 of 20 timings were taken while another process held up a thread of this one: a sine of 4096 elements took "
        "PyTorch 7.00 ms instead of 5.00 µs. Sizes are compared as read with the other timings; of 4 there are none, "
        "and its row says what those timings do."
    )


@pytest.mark.parametrize("met", [HELD, QUICK])
def test_what_was_held_up_rules_no_larger_size_out(met):
    """16 is the best that could be read, and 32 a third slower: a peak, unless another process held 32 up."""
    taken = [*timings(8, 0, 0.55, QUICK), *timings(16, 0, 1.0, QUICK), *timings(32, 0, 2.7, met)]
    found = result(*taken, dropped=(32,))
    assert found.decided_by == ("budget" if met == HELD else "peak")
    held = "The budget decided: a larger size was read only while another process held it up, and might be better."
    assert (held in found.reasons) == (met == HELD)


def test_a_row_that_cannot_be_compared_is_no_choice_and_no_share_of_the_best():
    """24 was read in the quick state alone, a third above the answer; 16 is the best of those that were read slow."""
    taken = [*timings(16, 0, 1.0, SLOW), *timings(15, 0, 0.96, SLOW), *timings(24, 0, 1.1, QUICK)]
    found = result(*taken, dropped=(24,))
    assert {m.batch_size: m.comparable for m in found.measurements} == {15: True, 16: True, 24: False}
    assert list(found.choices(within=0.05)) == [16]
    assert facts.share_of_best(found.to_mapping()) == pytest.approx({15: 15 / 0.96 / 16, 16: 1.0})
    assert {m.comparable for m in result(*timings(16, 0, 1.0, None)).measurements} == {None}
    alone = facts.share_of_best({**found.to_mapping(), "fastest_batch_size": 24})  # all that keeps a limit, say
    assert alone.keys() == {15, 16, 24}


@pytest.mark.parametrize("met", [None, QUICK])
def test_nothing_is_said_where_the_host_had_one_state(met):
    """Or told of none."""
    taken = [*timings(16, 0, 1.2, met), *timings(8, 0, 0.55, met)]
    assert not any("state" in reason for reason in result(*taken).reasons)


@pytest.mark.parametrize(("count", "is_said"), [(1, False), (2, True)])
def test_few_timings_of_the_other_state_are_not_worth_a_word(count, is_said):
    """Of 37 and of 38: a twentieth is, or a size that has no others."""
    taken = [*timings(16, 0, 1.0, QUICK, 12), *timings(8, 0, 0.55, QUICK, 12), *timings(4, 0, 0.3, QUICK, 12)]
    found = result(*taken, *timings(16, 1, 1.2, SLOW, count))
    assert any("state" in reason for reason in found.reasons) == is_said
    alone = result(*taken, *timings(2, 0, 0.2, SLOW, 1), dropped=(2,))
    assert any("of 2 there are none" in reason for reason in alone.reasons)
