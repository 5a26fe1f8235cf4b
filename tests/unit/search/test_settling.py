"""Sizes whose first steps are slow, and noisy machines: what was read at a bad time rules nothing out."""

from __future__ import annotations

import attrs
import pytest

from cubatch.measure.counting import UNSETTLED, counting
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Measured, Timing
from cubatch.search import rules
from cubatch.search.history import suspect
from cubatch.search.verdicts import verdicts
from cubatch.search.walk import Event
from tests.fakes import Behaviour, FakeDevice, affine
from tests.unit.search.walking import seek, share_of_best, statuses
from tests.unit.situations import record, view

CURVE = affine(0.024, 5e-4)
LATENCY = Goal(objective="latency")


@attrs.define
class SlowSteps(Behaviour):
    """The first six steps take 0.7 s: of the session, or of each size."""

    of_each: bool = False
    _steps: dict[int, int] = attrs.field(factory=dict)
    _is_slow: bool = False

    def step(self, batch_size: int) -> None:
        """Count."""
        key = batch_size if self.of_each else 0
        self._steps[key] = self._steps.get(key, 0) + 1
        self._is_slow = self._steps[key] <= 6

    def factor(self) -> float:
        """Nothing else counts while it is slow."""
        return 0.0 if self._is_slow else 1.0

    def delay(self) -> float:
        """Give what a slow step takes."""
        return 0.7 if self._is_slow else 0.0


def slow_first(*, of_each: bool) -> FakeDevice:
    """A device that prepares a size in no time and then is slow."""
    return FakeDevice(CURVE, behaviours=(SlowSteps(of_each),), prepare_seconds=1e-4)


@pytest.mark.parametrize("of_each", [False, True])
def test_slow_first_steps_do_not_decide_the_lowest_latency(*, of_each: bool) -> None:
    """The smallest size is the fastest, though its first steps took 29 times as long."""
    measured, result = seek(slow_first(of_each=of_each), 64, goal=LATENCY, budget=20.0)
    assert result.batch_size == 1
    chosen = result.measurements[0]
    assert chosen.latency_seconds == pytest.approx(CURVE(1))
    assert len(chosen.timings_seconds) >= 5
    assert measured.seconds_spent < 20


@pytest.mark.parametrize("of_each", [False, True])
def test_slow_first_steps_do_not_decide_the_throughput(*, of_each: bool) -> None:
    """The answer's own size is stepped until it has settled, and what was read before is doubted."""
    device = slow_first(of_each=of_each)
    _, result = seek(device, 64, budget=30.0)
    assert share_of_best(device, result, 64) >= 0.99
    chosen = next(m for m in result.measurements if m.batch_size == result.batch_size)
    assert chosen.latency_seconds == pytest.approx(CURVE(64), rel=0.1)
    assert len(chosen.timings_seconds) >= 5


@pytest.mark.parametrize(("first", "later", "count"), [(1.51, 2, 2), (1.49, 2, 4), (1.51, 1, 3)])
def test_timings_before_a_visit_settled_do_not_count(first: float, later: int, count: int) -> None:
    """Two that took half as long again as any of two or more after them are left out; one after them proves nothing."""
    seconds = [first, first, *[1.0] * later]
    timings = [Timing(batch_size=1, round=PER_VISIT + number, seconds=value) for number, value in enumerate(seconds)]
    assert pytest.approx(0.5) == UNSETTLED
    assert len(counting(timings)) == count


def test_first_steps_far_above_what_other_sizes_take_are_doubted() -> None:
    """Twice as long a sample as at a smaller size, or half as long again as a larger size: not after eight steps."""
    read = {1: record(1, [[0.02] * 9]), 8: record(8, [[0.33]]), 16: record(16, [[0.1] * 9])}
    assert suspect(read) == {8}
    assert suspect(read | {8: record(8, [[0.33], [0.33]])}) == {8}
    assert suspect(read | {8: record(8, [[0.33] * 5] * 2)}) == set()
    del read[16]
    assert suspect(read) == {8}
    assert suspect(read | {8: record(8, [[0.31]])}) == set()


def test_what_is_doubted_is_visited_again_while_it_is_cheap_and_not_ruled_out_before() -> None:
    """By latency the smallest size comes before any comparison; where the budget is gone it is not called slower."""
    read = {1: record(1, [[0.7]], goal=LATENCY), 3: 0.0255, 64: 0.056}
    assert rules.next_visits(view(read, ladder=[], goal=LATENCY)) == [1]
    short = view(read, ladder=[], goal=LATENCY, left=0.001)
    assert rules.unsettled(short) == []
    assert verdicts(short)[1].status == "ok"


def test_the_answer_and_its_ties_have_five_timings_in_two_visits_where_that_is_cheap() -> None:
    """A reading wants four more of 0.1 s: a visit of 1 s and 0.3 s more are a fifth of 6.5 s; a tie is worth less."""
    read = {n: record(n, [[0.1 * n / 64]]) for n in (64, 65)}
    assert rules.readings_wanted(view(read, ladder=[], left=6.51), 64) == 4
    assert rules.readings_wanted(view(read, ladder=[], left=6.4), 64) == 1
    assert rules.readings_wanted(view(read, ladder=[], left=2.01), 64) == 1
    assert rules.readings_wanted(view(read, ladder=[], left=1.99), 64) == 0
    assert rules.readings_wanted(view(read, ladder=[], left=6.51), 65) == 0
    assert sorted(rules.certain(view(read, ladder=[], left=660.0))) == [64, 65]
    twice = {n: record(n, [[0.1 * n / 64] * 3] * 2) for n in (64, 65)}
    assert rules.certain(view(twice, ladder=[], left=660.0)) == []


def test_the_fastest_has_a_second_visit_where_a_twentieth_of_what_is_left_holds_it() -> None:
    """The best of many sizes that were read once mostly had luck: a visit of 1.01 s is a twentieth of 20.2 s."""
    read = {64: record(64, [[0.1]]), 65: record(65, [[0.101]])}  # 64 is within 1 % of 65
    assert rules.readings_wanted(view(read, ladder=[], left=20.3), 65) == 1
    assert rules.readings_wanted(view(read, ladder=[], left=20.1), 65) == 0
    assert rules.certain(view({**read, 64: 0.1}, ladder=[], left=20.3)) == [65]
    assert rules.certain(view({64: 0.1, 65: record(65, [[0.101], [0.101]])}, ladder=[], left=20.3)) == []


@pytest.mark.parametrize("step", [0.1, 0.3, 0.7])
def test_an_answer_rests_on_five_timings_while_most_of_the_budget_is_left(step: float) -> None:
    """Readings that are dear beside a visit are one or two of it; an answer has more before the search ends."""
    measured, result = seek(FakeDevice(affine(step, 1e-5), noise=0.01), 64)
    chosen = next(m for m in result.measurements if m.batch_size == result.batch_size)
    assert len(chosen.timings_seconds) >= 5
    assert len({timing.round // PER_VISIT for timing in measured.of(chosen.batch_size)}) >= 2
    assert statuses(measured)[chosen.batch_size] == "ok"


def test_a_size_at_half_speed_is_visited_again_where_it_is_near_the_best() -> None:
    """256 took twice its time in its only visit: not the answer by its neighbours, yet near; 8 is far behind."""
    read = {n: record(n, 0.02 + 0.001 * n) for n in (1, 64, 128, 512)}
    halted = {256: record(256, 2 * (0.02 + 0.256), visits=1), 8: record(8, 2 * 0.028, visits=1)}
    cheap = {"visit_seconds": lambda n, step: 0.1}
    assert rules.doubts(view(read | {256: halted[256]}, ladder=[], **cheap)) == [256]
    assert rules.doubts(view(read | {8: halted[8]}, ladder=[], **cheap)) == []


def test_what_may_be_gained_never_rises_and_is_never_more_than_all() -> None:
    """A bound that goes up from line to line is none, and 63993 % says nothing."""
    events: list[Event] = []
    seek(FakeDevice(affine(0.02, 1e-3), noise=0.02, outliers=0.1), 512, progress=events.append)
    gains = [event.could_gain for event in events if event.could_gain is not None]
    assert gains == sorted(gains, reverse=True)
    assert 0 < gains[0] <= 1


def test_a_resumed_run_says_that_it_goes_on() -> None:
    """With how many timings, and what is spent; a new run says nothing of the kind."""
    timings = tuple(Timing(batch_size=8, round=number, seconds=0.02) for number in range(3))
    for kept, said in ((Measured(), []), (Measured(timings=timings, seconds_spent=12.8), ["resume"])):
        events: list[Event] = []
        seek(FakeDevice(affine(0.02, 1e-3)), 64, budget=30.0, kept=kept, progress=events.append)
        assert [event.kind for event in events if event.kind == "resume"] == said
    assert events[0].message == "going on with 3 timings; 12.8 s of 30.0 s are spent"
    assert events[0].best_batch_size is None
