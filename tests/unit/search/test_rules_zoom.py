"""The rules that look closer where the answer may lie: zoom, gaps, belief and doubts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.search import race, rules
from cubatch.search.history import Record
from tests.fakes import FakeDevice, affine, cliff
from tests.unit.search.searching import LATENCY, falling, flat, go, line
from tests.unit.search.walking import seek, share_of_best
from tests.unit.situations import POWERS, along, record, view

# --- zoom ----------------------------------------------------------------------------------------------------


CHEAP: dict[str, Any] = {"ladder": (*POWERS, 1024), "visit_seconds": lambda n, step: step}


def rising() -> dict[int, float | Record]:
    """Read once each: the throughput rises to the end, and what lies between is unknown."""
    return {n: record(n, line(n), visits=1) for n in (1, 8, 64, 512)}


def test_zoom_visits_what_promises_most_for_its_seconds() -> None:
    """The same gains per second, worked out by hand from what the race says of each size."""
    found = view(rising(), **CHEAP)
    gains = race.learning(
        found.field, np.full(len(found.sizes), found.noise.variance(5)), np.isin(found.sizes, [1, 8, 64, 512])
    )
    rates = {n: gain / step for n, gain, step in zip(found.sizes, gains, found.steps, strict=True)}
    best = max(rates, key=rates.__getitem__)
    assert best not in found.read
    assert rules.zoom(found) == [best]
    assert rules.zoom(view(rising(), **CHEAP, closed=[best])) != [best]


def test_what_breaks_the_limit_is_nothing_to_compare_with() -> None:
    """512 is the best that was read and takes too long: what lies between it and 64 still promises much."""
    (size,) = rules.zoom(view(rising(), **CHEAP, goal=Goal(latency_limit=0.3)))
    assert 64 < size < 512


def test_zoom_names_only_what_the_budget_holds() -> None:
    """With a second left, 1024 is not visited."""
    assert rules.zoom(view(rising(), **CHEAP)) == [1024]
    assert rules.zoom(view(rising(), **CHEAP, left=1.0)) != [1024]


def test_zoom_ends_where_the_answer_is_known_or_nothing_was_found_for_long() -> None:
    """A tolerance of 60 % leaves nothing to win; nine visits without something better, and 3 s of 60, are enough."""
    assert rules.zoom(view(rising(), **CHEAP, fruitless=8, fruitless_seconds=3.0)) != []
    assert rules.zoom(view(rising(), **CHEAP, fruitless=9, fruitless_seconds=3.0)) == []
    assert rules.zoom(view(rising(), **CHEAP, fruitless=9, fruitless_seconds=2.9)) != []
    assert rules.zoom(view(rising(), **CHEAP, goal=Goal(tolerance=0.6))) == []
    free: dict[str, Any] = CHEAP | {"visit_seconds": lambda n, step: 1e-6}
    assert rules.zoom(view(rising(), **free, goal=Goal(tolerance=0.06))) == []
    assert rules.zoom(view({1: 9.0}, goal=Goal(latency_limit=1.0))) == []
    assert rules.zoom(view(rising(), **CHEAP, goal=LATENCY)) == []


def test_zoom_ends_where_a_visit_is_not_worth_its_seconds() -> None:
    """Visits that take a hundred thousand times as long win the same and are not worth it."""
    dear: dict[str, Any] = {"ladder": (*POWERS, 1024), "visit_seconds": lambda n, step: 1e5 * step, "left": 1e9}
    assert rules.zoom(view(rising(), **dear)) == []
    assert rules.zoom(view(rising(), **dear, budget=1e9)) != []


def test_a_host_whose_reference_is_timed_is_worth_more_seconds() -> None:
    """Of equal gains visits are worth it there that take 1000 / 120 times as long; tried in steps of a quarter."""

    def dearest(**more: float) -> float:
        read = {n: record(n, line(n), visits=4, **more) for n in (1, 8, 64, 512)}  # so many tell how visits differ
        taken = [
            (times, CHEAP | {"left": 1e9, "visit_seconds": lambda n, step, times=times: times * step})
            for times in np.geomspace(1, 1e6, 61)
        ]
        return max(times for times, options in taken if rules.zoom(view(read, **options)))

    assert view({8: record(8, 1.0, visits=1, reference_seconds=1e-5)}).noise.visit == 0.02
    assert dearest(reference_seconds=1e-5) / dearest() == pytest.approx(1000 / 120, rel=0.3)


def noisy(visits: int = 1) -> dict[int, float | Record]:
    """Two sizes 0.4 % apart whose visits lie 3 % apart, and one that is hopeless."""

    def some(n: int, rate: float, count: int) -> Record:
        return record(n, [[n / rate * (0.97, 1.0, 1.03)[visit % 3]] * 3 for visit in range(count)])

    return {64: some(64, 100.0, visits), 200: some(200, 100.4, visits), 16: some(16, 30.0, visits)}


NOISY: dict[str, Any] = {
    "ladder": [],
    "extends": False,
    "goal": Goal(tolerance=0.0),
    "visit_seconds": lambda n, step: 1e-3,
}


def test_contenders_are_swept_together_in_an_order_of_the_seed() -> None:
    """What is hardly told apart is visited again as a sweep, without the hopeless; another seed, another order."""
    orders = {seed: tuple(rules.zoom(view(noisy(6), seed=seed, **NOISY))) for seed in range(12)}
    assert {tuple(sorted(order)) for order in orders.values()} == {(64, 200)}
    assert len(set(orders.values())) == 2
    assert tuple(rules.zoom(view(noisy(6), seed=3, **NOISY))) == orders[3]
    later = {seed: tuple(rules.zoom(view(noisy(7), seed=seed, **NOISY))) for seed in range(12)}
    assert any(later[seed] != order for seed, order in orders.items())  # each sweep has an order of its own


def test_what_was_visited_often_is_not_visited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that does not average away in so many visits will not in more: six of at most seven are not enough."""
    monkeypatch.setattr(rules, "MOST_VISITS", 7)
    assert rules.zoom(view(noisy(6), **NOISY)) != []
    monkeypatch.setattr(rules, "MOST_VISITS", 6)
    assert rules.zoom(view(noisy(6), **NOISY)) == []


# --- gaps, belief, doubts ------------------------------------------------------------------------------------


def test_a_wide_gap_beside_the_best_is_looked_into() -> None:
    """512 is the best: of its gap to 64 the ladder's size nearest to the middle of the logarithms is named."""
    read = along(line, 1, 2, 4, 8, 16, 32, 64, 512)
    assert rules.gaps(view(read)) == [128]  # as near to 181 as 256, and the first of them
    assert rules.gaps(view(read, ladder=[64, 180, 256, 512])) == [180]
    assert rules.gaps(view(read, closed=[128, 256])) == []
    assert rules.gaps(view({**read, 172: line(172)})) == []
    assert rules.gaps(view(read, goal=LATENCY)) == []
    assert rules.gaps(view(read, left=10 * line(180) / 0.1 * 0.5)) == []
    assert rules.gaps(view({1: 9.0}, goal=Goal(latency_limit=1.0))) == []


def test_a_gap_that_is_narrow_or_far_behind_is_left() -> None:
    """A factor of three is no gap; nor is one between sizes that have a half of the best throughput, e to the -0.7."""
    assert rules.gaps(view(along(line, 200, 600), ladder=[300])) == []
    assert rules.gaps(view(along(line, 199, 600), ladder=[300])) == [300]
    behind = {1: 1.0, 16: 8.0, 64: 16.0, 65: 16.25, 66: 16.5}
    assert rules.gaps(view(behind, ladder=[4], left=1e4)) == []
    assert rules.gaps(view({**behind, 16: 6.0}, ladder=[4], left=1e4)) == [4]  # log(2.67 / 4) = -0.4


def test_what_lies_far_beyond_a_plateau_is_looked_at() -> None:
    """The ladder goes on for more than three times 512, the largest read: its last affordable size is named."""
    read, beyond = along(flat, *POWERS), [1500, 1600, 4096]
    assert rules.gaps(view(read, ladder=beyond, left=1e5)) == [4096]
    assert rules.gaps(view(read, ladder=[1500], left=1e5)) == []  # not so far
    assert rules.gaps(view(read, ladder=beyond)) == []  # dear
    assert rules.gaps(view(read, ladder=beyond, left=1e5, failed=[600])) == []
    assert rules.gaps(view(read, ladder=beyond, left=1e5, extends=False)) == []
    assert rules.gaps(view(along(falling, *POWERS), ladder=beyond, left=1e9)) == []


def test_a_late_rise_far_beyond_a_plateau_is_found() -> None:
    """From 5000 on steps take 0.6 of what they do before: scouts end at 4096, and the best lies at 5000 or above."""

    def late(n: int) -> float:
        return (1e-4 + 1e-4 * n) * (0.6 if n >= 5000 else 1.0)

    device = FakeDevice(late, noise=0.003, seed=3)
    _, result = seek(device, 30000, budget=600.0)
    assert share_of_best(device, result, 30000) > 0.99
    _, result = seek(FakeDevice(late, noise=0.003, seed=3), 30000, budget=10.0)  # too little to look there
    assert "up to 30000" not in " ".join(result.reasons)


def test_a_cliff_between_scouts_is_found() -> None:
    """Throughput that falls by half above 100 and rises again to 512: the best is at 100 or less, and is found."""
    truth = cliff(affine(0.01, 0.001), 100, 2.0)
    runner, _ = go(FakeDevice(truth, noise=0.002))
    best = max(runner.ran, key=lambda n: n / truth(n))
    assert best / truth(best) >= 0.97 * 100 / truth(100)


def test_what_is_near_the_best_is_visited_twice_before_it_is_believed() -> None:
    """512 and 352, 5 % behind, once visited: both again, in some order; 256, 10 % behind, is not; nor what is dear."""
    once = {1: 2, 8: 2, 256: 1, 352: 1, 512: 1}
    read = along(line, *once)
    cheap: dict[str, Any] = {"visit_seconds": lambda n, step: 0.1}
    assert sorted(rules.believed(view(read, visits=once, **cheap))) == [352, 512]
    assert rules.believed(view(read, visits=2, **cheap)) == []
    assert rules.believed(view(read, visits=once, closed=[352], **cheap)) == [512]
    assert rules.believed(view(read, visits=once, visit_seconds=lambda n, step: 0.008 * 60 * 1.01)) == []
    assert rules.believed(view({1: 9.0}, goal=Goal(latency_limit=1.0), **cheap)) == []


def test_by_latency_all_that_was_read_once_is_read_again() -> None:
    """Whatever lies behind: it is few sizes, and cheap ones."""
    cheap: dict[str, Any] = {"visit_seconds": lambda n, step: 0.1}
    found = view({1: 0.1, 64: 0.9}, visits={1: 2, 64: 1}, goal=LATENCY, **cheap)
    assert rules.believed(found) == [64]


def test_the_answer_is_read_until_it_has_an_interval() -> None:
    """Two visits of two readings are four: the answer needs five, or four visits; another size does not."""
    two = {n: record(n, [[line(n)] * 2] * 2) for n in (256, 512)}
    cheap: dict[str, Any] = {"visit_seconds": lambda n, step: 0.1, "ladder": []}
    assert rules.believed(view(two, **cheap)) == [512]
    tied = {256: record(256, [[0.256] * 2] * 2), 512: record(512, [[0.51] * 2] * 2), 64: record(64, [[0.068] * 2] * 2)}
    assert sorted(rules.believed(view(tied, **cheap))) == [256, 512]  # the answer, and the fastest
    single = {n: record(n, [[line(n)]] * 4) for n in (256, 512)}
    assert rules.believed(view(single, **cheap)) == []


def test_a_slow_early_single_visit_is_revisited() -> None:
    """
    On a plateau 400 took 1.5 times as long as it should, which is no longer than larger sizes do.

    The model has its crest there, and its neighbours bear the model out: it would be the answer, so that it is
    visited again.  Not a second time; not where it is closed, dear or 2 % off; and not by latency.
    """
    plateau: dict[int, float | Record] = {n: flat(n) for n in (256, 384, 640, 768)}
    read = plateau | {400: record(400, flat(400) * 1.5, visits=1)}
    better = {n: seconds * (0.9 if n == 400 else 1.0) for n, seconds in along(flat, 256, 400, 384, 640, 768).items()}
    model = better  # a model of time that says 400 is a tenth better than its neighbours
    assert rules.doubts(view(read, ladder=[], model=model)) == [400]
    assert rules.doubts(view(read, ladder=[], model=model, closed=[400])) == []
    assert rules.doubts(view(read, ladder=[], model=model, left=1.0)) == []
    assert rules.doubts(view(read, ladder=[], model=model, goal=LATENCY)) == []
    twice = plateau | {400: record(400, flat(400) * 1.5, visits=2)}
    assert rules.doubts(view(twice, ladder=[], model=model)) == []
    low = {n: seconds * (0.98 if n == 400 else 1.0) for n, seconds in along(flat, 256, 400, 384, 640, 768).items()}
    expected = view(plateau, ladder=[400], model=low, extends=False)
    assert (
        expected.steps[expected.place(400)] < flat(400) < 1.03 * expected.steps[expected.place(400)] < flat(400) * 1.03
    )
    for factor, found in ((1.0, []), (1.03, [400])):
        near = plateau | {400: record(400, [[factor * flat(400)] * 5])}
        assert rules.doubts(view(near, ladder=[], model=low)) == found


def test_a_size_read_at_a_bad_time_that_would_not_be_the_answer_is_left() -> None:
    """100 took 1.5 times its line: by its neighbours it lies far behind 512, whatever it would read."""
    read: dict[int, float | Record] = {n: line(n) for n in (64, 128, 512)}
    assert rules.doubts(view({**read, 100: record(100, 1.5 * line(100), visits=1)}, ladder=[])) == []
    assert rules.doubts(view({64: line(64)}, ladder=[])) == []


def test_the_largest_size_read_is_doubted_where_larger_ones_are_judged_by_it() -> None:
    """400 took 1.2 times its line and would not be the answer; but if that is true, what lies beyond is worse."""

    def sinking(n: int) -> float:
        return 0.01 * n**1.01

    slow: dict[int, float | Record] = along(sinking, 64, 128, 256, 320)
    slow[400] = record(400, 1.2 * sinking(400), visits=1)
    assert rules.doubts(view(slow, ladder=[800])) == [400]
    assert rules.doubts(view(slow, ladder=[], extends=False)) == []
    assert rules.doubts(view({**slow, 800: sinking(800)}, ladder=[], extends=False)) == []


def test_a_size_that_another_process_slowed_down_is_visited_again() -> None:
    """The first visit of all takes 20 times as long: longer than larger sizes do, so it counts as not read."""
    read = along(falling, 16, 32, 64, 128)
    found = view({**read, 8: record(8, 20 * falling(8), visits=1)}, ladder=[], visits=2)
    assert [seen.batch_size for seen in found.seen] == [16, 32, 64, 128]
    assert found.steps[found.place(8)] == pytest.approx(falling(8), rel=0.7)
    assert 8 in (rules.zoom(found) or rules.doubts(found))
