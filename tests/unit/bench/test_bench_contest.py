"""Rounds of `cubatch bench`: readings, warm-up, turns, when they end."""

from __future__ import annotations

import pytest

from cubatch.bench import contest
from cubatch.bench.contest import Contest, Entrant
from cubatch.measure.clocks import HEAD_START, MAX_QUEUED, KernelClock
from cubatch.measure.records import Timing
from tests.unit import bench_fakes
from tests.unit.bench.building import Paced


def clock_of(durations, host, occupied):
    """A KernelClock whose events and host clock read as listed."""
    event, elapsed = bench_fakes.events(durations)
    host_times = iter(host)
    return KernelClock(event, elapsed, occupied.append, None, lambda: next(host_times))


def test_a_reading_that_waited_for_the_host_is_taken_again_behind_other_work():
    """Enqueueing ten steps took 9 of 10 ms: the second reading begins with 1.5 times as long of something else."""
    occupied, done = [], []
    clock = clock_of([0.010, 0.002], [0.0, 0.009, 0.0, 0.009], occupied)
    reading = clock.time(lambda: done.append(1), 10)
    assert reading.seconds == pytest.approx(0.0002)
    assert occupied == [pytest.approx(HEAD_START * 0.009)]
    assert len(done) == 20


def test_a_reading_of_long_kernels_is_taken_once():
    """Enqueueing took a tenth of the time: nothing waited."""
    occupied = []
    assert clock_of([0.010], [0.0, 0.001], occupied).time(lambda: None, 10).seconds == pytest.approx(0.001)
    assert occupied == []


def test_no_more_is_queued_than_a_stream_holds():
    """Of 2000 tiny steps an eighth is enqueued behind the other work, which is as much shorter."""
    occupied, done = [], []
    clock = clock_of([0.010, 0.0005], [0.0, 0.010, 0.0, 0.003], occupied)
    reading = clock.time(lambda: done.append(1), 2000)
    assert reading.seconds == pytest.approx(0.0005 / MAX_QUEUED)
    assert len(done) == 2000 + MAX_QUEUED
    assert occupied == [pytest.approx(HEAD_START * 0.010 * MAX_QUEUED / 2000)]


class Step:
    """A step of known length."""

    def __init__(self, name, seconds):
        self.name, self.seconds = name, seconds

    def __call__(self):
        return self.seconds


def entrants(**seconds):
    """Entrants by name and length; those named v... are the vendor's."""
    return [Entrant(name, "vendor" if name[0] == "v" else "ours", Step(name, each)) for name, each in seconds.items()]


def test_rounds_take_turns_and_end_when_all_is_known():
    """Steps without noise are known after the five timings that a 90 % interval needs; each round has each once."""
    clock, found = Paced(), entrants(a=0.001, b=0.0011, v=0.002)
    Contest(clock).run(found, 100.0)
    # b is a tenth slower than a: dropped after three rounds
    assert [len(entrant.timings) for entrant in found] == [5, 3, 5]
    assert [timing.round for timing in found[0].timings] == [0, 1, 2, 3, 4]
    assert found[1].status == "dropped"
    assert "a" in found[1].reason
    rounds = [name for name, _ in clock.order][-13:]
    assert sorted(rounds[:3]) == ["a", "b", "v"]


def test_the_vendor_is_never_dropped_nor_drops_ours():
    """Sides are compared, not thinned against each other."""
    found = entrants(a=0.001, v=0.1)
    Contest(Paced()).run(found, 100.0)
    assert [entrant.status for entrant in found] == ["ok", "ok"]
    assert [len(entrant.timings) for entrant in found] == [5, 5]


class Elapsed(Paced):
    """A clock that steps move on by themselves."""

    def time(self, step, repeats):
        before = self.clock
        for _ in range(repeats):
            step()
        return bench_fakes.Reading(seconds=max(1e-9, (self.clock - before) / repeats))


@pytest.mark.parametrize("fails_at", [2, 9])
def test_what_failed_drops_nobody_and_is_not_waited_for(fails_at):
    """The other way of that library is timed to the end."""
    clock, taken = Elapsed(), []

    def failing():
        taken.append(1)
        if len(taken) >= fails_at:
            raise RuntimeError("no workspace")
        clock.sleep(0.001)

    steps = {"ours": lambda: clock.sleep(0.001), "vendor": failing, "another": lambda: clock.sleep(0.001)}
    found = [Entrant(name, "ours" if name == "ours" else "vendor", step) for name, step in steps.items()]
    Contest(clock).run(found, 100.0)
    assert [entrant.status for entrant in found] == ["ok", "error", "ok"]
    assert [len(entrant.timings) for entrant in found[::2]] == [5, 5]
    assert found[1].reason == "RuntimeError: no workspace"


def test_clocks_are_warmed_once():
    """Half a second of work before the first timing of a process, none before the next contest's."""
    clock = Paced()
    contest_ = Contest(clock)
    contest_.run(entrants(a=0.001), 0.0)
    assert clock.now() > contest.WARM_SECONDS
    before = clock.now()
    contest_.run(entrants(a=0.001), 0.0)
    assert clock.now() - before < 0.02


def flags(mhz, **seconds):
    """What of each entrant's timings counted as throttled, at clocks by its name and how many timings it has."""
    clock = Paced()
    found = {entrant.name: entrant for entrant in entrants(**seconds)}
    clock.mhz = lambda _: mhz(clock.order[-1][0], len(found[clock.order[-1][0]].timings))
    Contest(clock).run(list(found.values()), 100.0)
    return {name: [timing.throttled for timing in entrant.timings] for name, entrant in found.items()}


def test_a_sunken_clock_is_flagged():
    """Half of what the same entrant ran at before: the timing is kept and does not count."""
    sunken = flags(lambda _, done: 900.0 if done == 2 else 1800.0, v=0.0001)
    assert sunken == {"v": [False, False, True, False, False, False]}


def test_who_draws_more_is_not_flagged_for_the_power_limit():
    """Products at 1.3 GHz beside a copy at 1.98: each is held against itself, and every timing counts."""
    found = flags(lambda name, _: {"a": 1300.0, "v": 1980.0}[name], a=0.0001, v=0.0002)
    assert not any(any(timings) for timings in found.values())


# --- when a median is known --------------------------------------------------------------------------------------


def entrant_of(*seconds, throttled=0):
    """An entrant with these timings, of which the last are throttled."""
    found = Entrant("a", "ours", None)
    clear = len(seconds) - throttled
    found.timings += [
        Timing(batch_size=1, round=n, seconds=each, throttled=n >= clear) for n, each in enumerate(seconds)
    ]
    return found


def test_a_median_is_known_after_five_timings_whose_interval_is_narrow():
    """Four equal timings are not enough; a range of 2 % after five is not 1 %, until ten more agree."""
    assert not entrant_of(*[1.0] * 4).is_known
    assert entrant_of(*[1.0] * 5).is_known
    spread = (1.0, 1.005, 1.01, 1.015, 1.02)
    assert not entrant_of(*spread).is_known
    assert entrant_of(*spread, *[1.01] * 10).is_known


def test_throttled_timings_count_only_without_others():
    """No rows of NaN (nvbench#231): ten throttled timings and no other are used."""
    mixed = entrant_of(*[1.0] * 5, 9.0, throttled=1)
    assert (mixed.seconds, mixed.is_known) == (1.0, True)
    assert "1 of them throttled" in str(mixed)
    assert not entrant_of(*[2.0] * 9, throttled=9).is_known
    assert entrant_of(*[2.0] * 10, throttled=10).is_known
    assert entrant_of(*[2.0] * 10, throttled=10).seconds == 2.0


@pytest.mark.parametrize(("best", "expected"), [(1.061, True), (1.059, False)])
def test_dropping_needs_a_gap_beyond_the_margin_and_three_timings(best, expected):
    """The fastest timing must take over 1.06 times the other's slowest; no entrant is slower than itself."""
    leader, other = entrant_of(0.9, 0.95, 1.0), entrant_of(best, 2.0, 2.0)
    assert other.is_clearly_slower(leader) is expected
    assert not entrant_of(9.0, 9.0).is_clearly_slower(leader)
    assert not entrant_of(9.0, 9.0, 9.0).is_clearly_slower(entrant_of(1.0, 1.0))
    assert not other.is_clearly_slower(other)


def test_ratios_cancel_what_changes_between_rounds():
    """Rounds that differ tenfold still show a constant ratio of 1.1 exactly."""
    slow, fast = entrant_of(1.1, 11.0, 110.0, 1.1, 11.0), entrant_of(1.0, 10.0, 100.0, 1.0, 10.0, 5.0)
    assert contest.time_ratio(slow, fast)[1] == pytest.approx((1.1, 1.1))
    assert contest.time_ratio(entrant_of(), fast) == (None, None)
