"""A host that is slower at times, of which no clock tells: sizes that were read at such a time are read again."""

from __future__ import annotations

import math

import attrs
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Measured, Timing
from cubatch.search import rules, state_rules, verdicts
from cubatch.search.history import Record
from tests.fakes import Behaviour, FakeClock, FakeDevice, FakeRunner
from tests.unit.search.walking import given, seek
from tests.unit.situations import record, view

SLOWER = 1.17  # times, as the two states of a virtual machine did (benchmarks/README.md, PyTorch modules)
TWICE = [[0.1] * 3, [0.1 * SLOWER] * 3]
AGREE = [[0.1] * 3, [0.103] * 3]
READ = {8: record(8, 0.06, visits=1), 16: record(16, TWICE), 32: record(32, 0.24, visits=1)}


def test_all_that_is_not_far_behind_is_visited_again_where_visits_to_one_size_disagree():
    """16 took a sixth longer at its second visit; 8 and 32 are 17 % behind, 4 is 22 %."""
    read = {4: record(4, 0.032, visits=1), **READ}
    assert sorted(state_rules.states(view(read))) == [8, 16, 32]


def test_what_was_visited_first_is_visited_again_where_nothing_tells_of_states():
    """16 had two visits that agree, one after the other; 2 is too far behind to tell."""
    read = {2: record(2, 0.03, visits=1), **READ, 16: record(16, AGREE)}
    assert state_rules.states(view(read, visited=[2, 32, 8, 16, 16])) == [32]
    assert state_rules.states(view(read, visited=[2, 16, 32, 8, 16])) == []
    assert state_rules.states(view(read, visited=[2, 16, 16, 32, 8])) == [16]
    assert state_rules.states(view(read, visited=[2, 16, 16, 32])) == [16]
    assert state_rules.states(view({16: READ[16]}, visited=[2, 16, 16])) == []


def test_nothing_is_visited_again_where_visits_agree():
    """Two visits 4 % apart are no two states, 6 % are; nor are two 12 % apart whose readings are."""
    for share, found in ((1.04, []), (1.06, [8, 16])):
        read = {n: record(n, [[n / 160] * 5, [n / 160 * share] * 5]) for n in (8, 16)}
        assert sorted(state_rules.states(view(read))) == found
    wide = [[0.1, 0.106, 0.112, 0.118, 0.124], [0.112, 0.118, 0.124, 0.13, 0.136]]
    assert (
        state_rules.states(view({n: record(n, [[v * n / 16 for v in visit] for visit in wide]) for n in (8, 16)})) == []
    )


def test_a_clock_that_is_read_tells_of_slow_states_by_itself():
    """What was read under a lowered clock is flagged and does not count."""
    assert state_rules.states(view({**READ, 16: record(16, TWICE, sm_clock_mhz=1500.0)})) == []


@pytest.mark.parametrize(
    "known",
    [{"goal": Goal(objective="latency")}, {"closed": (8, 16, 32)}, {"left": 0.0}],
    ids=lambda known: next(iter(known)),
)
def test_nothing_is_visited_again_where_it_may_not_be(known):
    """Latency has a rule of its own, and closed sizes are closed."""
    assert state_rules.states(view(READ, **known)) == []
    assert state_rules.states(view({**READ, 16: record(16, AGREE)}, visited=[8, 16, 16, 32], **known)) == []


def test_four_visits_to_each_do():
    """Those that had four are left out, and a fastest that is alone is not visited for this."""
    often = {n: record(n, [[seconds] * 3] * 4) for n, seconds in ((8, 0.06), (32, 0.24))}
    assert state_rules.states(view({**READ, **often})) == []
    assert sorted(state_rules.states(view({**READ, 8: often[8]}))) == [16, 32]


def test_a_sweep_takes_a_quarter_of_what_is_left_the_best_first():
    """A visit takes ten steps: 1 s to 16, 0.6 s to 8, 2.4 s to 32."""
    assert sorted(state_rules.states(view(READ, left=16.1))) == [8, 16, 32]
    assert sorted(state_rules.states(view(READ, left=15.0))) == [8, 16]
    assert state_rules.states(view(READ, left=3.9)) == []


def test_what_is_far_behind_and_the_first_of_a_run_tell_nothing():
    """4 was a sixth slower once and is 22 % behind; 16 met a cold process where it came first."""
    read = {4: record(4, [[0.032] * 5, [0.032 * SLOWER] * 5]), **READ, 16: record(16, AGREE)}
    assert state_rules.states(view(read, visited=[4, 16, 8, 32, 16])) == []
    assert state_rules.states(view(READ, visited=[16, 8, 32, 8])) == []
    assert sorted(state_rules.states(view(READ, visited=[4, 16, 8, 32, 16]))) == [8, 16, 32]


def test_a_size_that_broke_the_latency_limit_in_a_slow_state_is_visited_again():
    """32 took 0.24 s, which is 14 % more than 0.21, and 26 % more than 0.19."""
    found = state_rules.states(view(READ, goal=Goal(latency_limit=0.21)))
    assert sorted(found) == [8, 16, 32]
    assert sorted(state_rules.states(view(READ, goal=Goal(latency_limit=0.19)))) == [8, 16]


# --- where a reference tells of states -------------------------------------------------------------------------


QUICK, SLOW = 5e-6, 8e-6


def told(n, *visits):
    """Readings of a size: of each visit the seconds, and what the reference took."""
    return Record(n, Goal(), [
        Timing(batch_size=n, round=PER_VISIT * visit + number, seconds=seconds, reference_seconds=met)
        for visit, (seconds, met) in enumerate(visits)
        for number in range(3)
    ])  # fmt: skip


APART = {8: told(8, (0.1, QUICK)), 16: told(16, (0.2 * SLOWER, SLOW)), 32: told(32, (0.41 * SLOWER, SLOW))}


def test_what_may_be_the_best_is_visited_in_the_state_in_which_the_host_is():
    """8 was read in the quick state, 16 and 32 in the slow one; where the last visit was, the others are not known."""
    assert state_rules.moved(view(APART, visited=[16, 32, 8])) in ([16, 32], [32, 16])
    assert state_rules.moved(view(APART, visited=[8, 16, 32])) == [8]


def test_one_reading_in_the_state_of_all_others_does_not_rule_a_size_out():
    """32 took half as long again in the quick state as in proportion, and less in the slow one, one visit each."""
    read = {n: told(n, (0.013 * n, QUICK), (0.013 * n, QUICK)) for n in (8, 16, 64)}
    once = (0.013 * 32 * SLOWER, SLOW), (0.013 * 32 * 1.5, QUICK)
    assert rules.doubts(view({**read, 32: told(32, *once)}, ladder=[])) == [32]
    assert rules.doubts(view({**read, 32: told(32, *once, once[1])}, ladder=[])) == []
    for visits, found in ((4, [32]), (5, [])):  # five are enough
        assert rules.doubts(view({**read, 32: told(32, *[once[0]] * (visits - 1), once[1])}, ladder=[])) == found


def test_of_two_visits_that_disagree_a_third_decides():
    """32 took twice as long in one of two visits, and by its neighbours should not have; 5 % is no disagreement."""
    read = {n: told(n, (0.013 * n, QUICK), (0.013 * n, QUICK)) for n in (8, 16, 64)}
    for factor, found in ((2.0, [32]), (1.05, [])):
        twice = (0.0135 * 32, QUICK), (0.0135 * 32 * factor, QUICK)
        assert rules.doubts(view({**read, 32: told(32, *twice)}, ladder=[])) == found
    assert rules.doubts(view({**read, 32: told(32, *twice, twice[0])}, ladder=[])) == []


def test_what_is_behind_in_its_own_state_is_not_visited_for_that():
    """4 was read in the quick state and is 20 % behind 8, which was too."""
    read = {4: told(4, (0.06, QUICK)), **APART}
    assert state_rules.moved(view(read, visited=[4, 8, 16, 32])) == [8]


def test_nothing_is_visited_for_that_where_all_that_may_be_the_best_were_read_in_one_state():
    """Whatever the host is now; nor is it where no timing tells."""
    together = {**APART, 8: told(8, (0.1, QUICK), (0.1 * SLOWER, SLOW))}
    for last in (8, 16):
        assert state_rules.moved(view(together, visited=[8, 16, 32, 8, last])) == []
    assert state_rules.moved(view(READ, visited=[16, 8, 32])) == []


def test_an_answer_of_one_visit_is_compared_in_the_state_that_the_host_is_in_by_now():
    """All were read in the slow state, the answer 16 once, and the host is quick: the others are read there too."""
    slow = {n: told(n, (0.0125 * n * SLOWER, SLOW), (0.0125 * n * SLOWER, SLOW)) for n in (8, 32)}
    once = told(16, (0.19 * SLOWER, SLOW), (0.19, QUICK))
    assert sorted(state_rules.moved(view({**slow, 16: once}, visited=[8, 32, 16, 8, 32, 16]))) == [8, 32]
    twice = told(16, (0.19 * SLOWER, SLOW), (0.19 * SLOWER, SLOW), (0.19, QUICK))
    assert state_rules.moved(view({**slow, 16: twice}, visited=[8, 32, 16, 8, 32, 16, 16])) == []


def test_what_broke_the_latency_limit_in_the_slow_state_alone_is_visited_in_the_quick_one():
    """32 took 0.24 s there, and 0.205 as 8 and 16 do: 0.21 allows it, 0.2 does not."""
    read = {n: told(n, (n / 80, QUICK), (n / 80 * SLOWER, SLOW), (n / 80, QUICK)) for n in (8, 12)}
    read |= {16: told(16, (0.1, QUICK), (0.1, QUICK)), 32: told(32, (0.205 * SLOWER, SLOW))}
    for limit, found in ((0.21, [32]), (0.2, [])):
        seen = view(read, visited=[32, 8, 12, 16], goal=Goal(latency_limit=limit))
        assert state_rules.moved(seen) == found
        assert seen.answer == 16


def test_a_size_read_in_the_slow_state_is_no_suspect_for_that():
    """60 took 0.35 s there, as it should, and 64 takes 0.32 in the quick one: in the slow one it would take longer."""
    read = {n: told(n, (n / 200, QUICK), (n / 200 * SLOWER, SLOW)) for n in (4, 8)}
    seen = view({**read, 60: told(60, (0.3 * SLOWER, SLOW)), 64: told(64, (0.31, QUICK))}, visited=[4, 8, 60, 64])
    assert seen.suspects == set()


def test_two_visits_in_different_states_are_one_that_counts():
    """Each tells of its own state."""
    read = told(8, (0.1, QUICK), (0.1 * SLOWER, SLOW))
    seen = view({4: told(4, (0.06, QUICK)), 8: read, 16: told(16, (0.21, QUICK))}, visited=[4, 8, 8, 16])
    assert (seen.read[8].visits, seen.read[8].comparable_visits) == (2, 1)


def test_a_size_that_failed_is_not_visited_again():
    """16 and 32 are judged by what was read of them, in the slow state: 8 is read there too, once the host is in it."""
    assert state_rules.moved(view(APART, visited=[8, 16, 32], closed=[16, 32])) == [8]
    assert state_rules.moved(view(APART, visited=[16, 32, 8], closed=[16, 32])) == []


def test_a_sweep_for_that_is_bounded():
    """A visit takes ten steps and may take a quarter of what is left; eight visits to a size do."""
    assert state_rules.moved(view(APART, visited=[16, 32, 8], left=10.0)) == [16]
    assert state_rules.moved(view(APART, visited=[16, 32, 8], left=1.0)) == []
    often = {**APART, 16: told(16, *[(0.2 * SLOWER, SLOW)] * 8)}
    assert state_rules.moved(view(often, visited=[16, 32, 8])) == [32]


def test_what_a_reference_tells_leaves_nothing_to_guess():
    """Visits to 16 disagree, and it is known why."""
    read = {**APART, 16: told(16, (0.2, QUICK), (0.2 * SLOWER, SLOW))}
    assert state_rules.states(view(read, visited=[16, 8, 32, 16])) == []


def test_the_answer_is_a_size_that_was_read_in_the_state_of_the_comparison():
    """8 seems faster than 16 and 32, which were read in the slow state, as 4 was, that is known in both."""
    read = {4: told(4, (0.06, QUICK), (0.06 * SLOWER, SLOW)), **APART}
    seen = view(read, visited=[4, 8, 4, 16, 32])
    assert (seen.answer, seen.fastest) == (16, 16)
    assert seen.belief.mean[seen.place(8)] == pytest.approx(math.log(0.1 * SLOWER), abs=0.01)
    found = verdicts.verdicts(seen)[8]
    assert (found.status, found.facts) == ("dropped", {"limit": "budget"})  # a larger one reads it there too
    assert found.reason == (
        "3 readings while this host was in its quick state; sizes are compared as read in its slow one"
    )


# --- where visits differ ----------------------------------------------------------------------------------------


def differing(n, rate, *shares):
    """Readings of a size whose visits take so much longer than at this many samples per second."""
    return told(n, *((n / rate * (1 + share), QUICK) for share in shares))


CONTEST = {
    12: differing(12, 80.0, -0.02, 0.02),
    16: differing(16, 100.0, -0.02, 0.02),
    24: differing(24, 99.0, -0.03, 0.03),
}


def test_what_may_be_better_by_far_is_read_again_beside_the_answer():
    """Visits differ by 2 to 3 %: 24, which is 1 % behind 16, may be 2 % ahead of it; 12, 20 % behind, may not."""
    seen = view(CONTEST, ladder=[])
    assert (seen.answer, sorted(state_rules.contested(seen))) == (16, [16, 24])
    impatient = view(CONTEST, ladder=[], fruitless=rules.PATIENCE, fruitless_seconds=60.0)
    assert sorted(rules.next_visits(impatient)) == [16, 24]


def test_visits_that_agree_leave_nothing_to_contest():
    """24 is 1 % behind in each of three; and without a reference, as on a GPU, visits are not thought to differ."""
    calm = {n: differing(n, rate, 0.0, 0.0, 0.0) for n, rate in ((8, 60.0), (12, 80.0), (16, 100.0), (24, 99.0))}
    assert state_rules.contested(view(calm, ladder=[])) == []
    silent = {n: record(n, [[t.seconds] * 3 for t in one.timings[::3]]) for n, one in CONTEST.items()}
    assert state_rules.contested(view(silent, ladder=[])) == []


def test_six_visits_to_each_end_the_contest():
    """Noise that they do not average away is left."""
    often = {n: differing(n, rate, *[-0.05, 0.05] * 3) for n, rate in ((16, 100.0), (24, 99.9))}
    assert state_rules.contested(view({**CONTEST, **often}, ladder=[])) == []
    assert state_rules.contested(view({**CONTEST, 16: often[16]}, ladder=[])) == [24]
    for against_nothing in ({"closed": [24]}, {"left": 8.0}):  # a quarter of which holds 16 alone
        assert state_rules.contested(view(CONTEST, ladder=[], **against_nothing)) == []


# --- where another process held a thread up ----------------------------------------------------------------------


HELD = 7e-3


def test_what_was_held_up_is_not_seen_and_visited_again():
    """16 took 30 ms longer; 8 is what is known, and the answer, until 16 is read while nothing holds it up."""
    read = {8: told(8, (0.1, QUICK)), 16: told(16, (0.23, HELD))}
    seen = view(read, visited=[8, 16], left=600.0)
    assert (seen.suspects, [one.batch_size for one in seen.seen], seen.answer) == ({16}, [8], 8)
    assert rules.unsettled(seen) == [16]
    found = verdicts.verdicts(seen)[16]
    assert (found.status, found.facts) == ("dropped", {"limit": "budget"})  # a larger one reads it again
    assert found.reason == "3 readings, all held up by another process: they say little of it"
    again = view({**read, 16: told(16, (0.23, HELD), (0.19, QUICK))}, visited=[8, 16, 16])
    assert (again.suspects, again.answer, again.read[16].seconds) == (set(), 16, 0.19)


def test_what_was_held_up_breaks_no_latency_limit():
    """0.23 s are above 0.2, which 0.19 would not be: that limit does not end it, the budget does."""
    read = {8: told(8, (0.1, QUICK)), 16: told(16, (0.23, HELD))}
    found = verdicts.verdicts(view(read, visited=[8, 16], goal=Goal(latency_limit=0.2)))[16]
    assert (found.status, found.facts) == ("dropped", {"limit": "budget"})


def test_what_was_held_up_is_not_taken_for_a_timing_of_the_other_state():
    """8 was read slow and quick; whatever that makes of other sizes, 16 is what was read of it."""
    read = {8: told(8, (0.1, QUICK), (0.1 * SLOWER, SLOW)), 16: told(16, (0.23, HELD))}
    assert view(read, visited=[8, 8, 16]).read[16].times == 1.0
    other = told(24, (0.3, SLOW), (0.9, HELD))
    assert view({**read, 24: other}, visited=[8, 8, 16, 24]).read[24].seconds == 0.3


def test_what_is_held_up_at_every_visit_is_believed_at_last_and_stays_out_of_the_answer():
    """Three visits are spared; from a fourth on the search goes by them, and nothing is compared with them."""
    for visits, found in ((3, {16}), (4, set())):
        read = {8: told(8, (0.1, QUICK)), 16: told(16, *[(0.23, HELD)] * visits)}
        seen = view(read, visited=[8, *[16] * visits])
        assert (seen.suspects, seen.answer) == (found, 8)
        assert verdicts.verdicts(seen)[16].status == "dropped"


def test_a_host_whose_last_timing_was_held_up_may_be_in_the_state_of_the_comparison():
    """8 and 12 were read quick, 16 slow: it is visited, though nobody knows how the host is now."""
    read = {n: told(n, (n / 80, QUICK), (n / 80, QUICK)) for n in (8, 12)}
    for visits in ([(0.2 * SLOWER, SLOW)], [(0.2 * SLOWER, SLOW), (0.9, HELD)]):
        seen = view({**read, 16: told(16, *visits), 64: told(64, (9.0, HELD))}, visited=[8, 12, 16, 64])
        assert state_rules.moved(seen) == [16]


@attrs.define
class SlowFrom(Behaviour):
    """Slow for some seconds."""

    begins: float
    ends: float
    passed: float = 0.0

    def factor(self) -> float:
        return SLOWER if self.begins <= self.passed < self.ends else 1.0

    def spend(self, seconds: float, *, busy: bool) -> None:
        self.passed += seconds


class HostClock(FakeClock):
    """Seconds, and no clock of a processor; a reference may."""

    def time(self, step, repeats):
        is_slow = any(behaviour.factor() > 1 for behaviour in self._runner.behaviours)
        met = (SLOW if is_slow else QUICK) if self._runner.tells else None
        return attrs.evolve(super().time(step, repeats), sm_clock_mhz=None, reference_seconds=met)


class Host(FakeRunner):
    def __init__(self, device, *, tells=False):
        super().__init__(device)
        self.tells = tells
        self._clock = HostClock(self)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize(("begins", "lasts"), [(1.25, 3.0), (2.0, 6.0), (2.75, 6.0)])
def test_the_answer_is_right_though_some_sizes_were_read_in_the_slow_state(begins, lasts, tells):
    """Throughput rises by 7 % from 20 samples to 32, which were read in the slow state, and 20 before."""
    device = FakeDevice(lambda n: 0.04 + 0.01 * n, noise=0.005, behaviours=(SlowFrom(begins, begins + lasts),))
    _, result = seek(lambda: Host(device, tells=tells), given(1, 2, 3, 4, 6, 8, 12, 16, 24, 32), budget=30.0)
    assert device.throughput(result.batch_size) >= 0.97 * device.throughput(32)


def test_a_run_that_goes_on_knows_the_order_of_earlier_visits(monkeypatch):
    """8, 4 and 8 again, each visit of two readings: before this call takes any."""
    rounds = ((8, 0), (8, 1), (4, 0), (4, 1), (8, PER_VISIT), (8, PER_VISIT + 1))
    kept = Measured(timings=tuple(Timing(batch_size=n, round=number, seconds=0.1) for n, number in rounds))
    seen = []
    monkeypatch.setattr(rules, "next_visits", lambda view: seen.append(list(view.of.visited)) or [])
    seek(FakeDevice(lambda n: 0.1), given(4, 8), kept=kept)
    assert seen[0] == [8, 4, 8]


@pytest.mark.parametrize("begins", [3.0, 5.0, 8.0, 12.0, 16.0])
def test_sweeps_of_dear_steps_leave_budget_for_the_largest_size(begins):
    """Steps of 0.3 to 4 s: sweeps that took what was left ended before 128, and answered 8 % below it."""
    device = FakeDevice(lambda n: 0.3 + 0.03 * n, noise=0.005, behaviours=(SlowFrom(begins, begins + 6.0),))
    ladder = given(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    _, result = seek(lambda: Host(device), ladder, budget=60.0)
    assert device.throughput(result.batch_size) >= 0.97 * device.throughput(128)
