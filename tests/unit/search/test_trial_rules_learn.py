"""The rules that look closer where the answer may lie: learn and confirm."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.search import trial_rules
from tests.fakes import FakeDevice, affine, cliff
from tests.unit.search.searching import LATENCY, go, rising
from tests.unit.search.walking import seek, share_of_best
from tests.unit.situations import POWERS, record, view

# --- learn ---------------------------------------------------------------------------------------------------


CHEAP: dict[str, Any] = {"ladder": (*POWERS, 1024), "seconds_of_trial": lambda n, step: step}


def test_learn_visits_what_promises_most_for_its_seconds() -> None:
    """The same gains per second, worked out by hand from what the race says of each size."""
    found = view(rising(), **CHEAP)
    gains = found.knowledge_gradient(found.fitted.noise.variance(5))
    rates = {n: gain / step for n, gain, step in zip(found.sizes, gains, found.step_seconds, strict=True)}
    best = max(rates, key=rates.__getitem__)
    assert best not in found.measured
    assert trial_rules.learn(found) == [best]
    assert trial_rules.learn(view(rising(), **CHEAP, closed=[best])) != [best]


def test_what_breaks_the_limit_is_nothing_to_compare_with() -> None:
    """512 is the best that was read and takes too long: what lies between it and 64 still promises much."""
    (size,) = trial_rules.learn(view(rising(), **CHEAP, goal=Goal(latency_limit=0.3)))
    assert 64 < size < 512


def test_learn_names_only_what_the_budget_holds() -> None:
    """With a second left, 1024 is not visited."""
    assert trial_rules.learn(view(rising(), **CHEAP)) == [1024]
    assert trial_rules.learn(view(rising(), **CHEAP, left=1.0)) != [1024]


@pytest.mark.parametrize(
    ("spent", "budget", "paired", "learns"),
    [(12.0, 60.0, True, True), (18.0, 60.0, True, False), (30.0, 60.0, False, True), (25.0, 280.0, True, True)],
)
def test_learn_on_a_cpu_ends_at_an_expected_loss_that_grows_with_the_seconds_spent(
    spent: float, budget: float, paired: bool, learns: bool
) -> None:
    """It is 4.7 tolerances here: 0.32 tolerances a second end it with paired timings, half of that by twice 140 s."""
    state = view(rising(), **CHEAP, budget=budget, left=budget - spent)
    assert state.expected_loss / state.tolerance == pytest.approx(4.7, rel=0.05)
    if paired:
        noise = attrs.evolve(state.fitted.noise, reference={"batch_size": 1, "seconds": 0.01})
        state.__dict__["fitted"] = attrs.evolve(state.fitted, noise=noise)
    assert (trial_rules.learn(state) != []) is learns


def test_learn_ends_where_the_answer_is_known() -> None:
    """A tolerance of 60 % leaves nothing to win, nor one of 6 % where trials cost nothing."""
    assert trial_rules.learn(view(rising(), **CHEAP)) != []
    assert trial_rules.learn(view(rising(), **CHEAP, goal=Goal(tolerance=0.6))) == []
    free: dict[str, Any] = CHEAP | {"seconds_of_trial": lambda n, step: 1e-6}
    assert trial_rules.learn(view(rising(), **free, goal=Goal(tolerance=0.06))) == []
    assert trial_rules.learn(view({1: 9.0}, goal=Goal(latency_limit=1.0))) == []
    assert trial_rules.learn(view(rising(), **CHEAP, goal=LATENCY)) == []


def test_learn_ends_where_a_visit_is_not_worth_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that take a hundred thousand times as long win the same: not worth it, unless much more may be lost."""
    expensive: dict[str, Any] = {"ladder": (*POWERS, 1024), "seconds_of_trial": lambda n, step: 1e5 * step, "left": 1e9}
    assert trial_rules.learn(view(rising(), **expensive)) != []
    monkeypatch.setattr(trial_rules, "MUCH", 1e9)
    assert trial_rules.learn(view(rising(), **expensive)) == []
    assert trial_rules.learn(view(rising(), **expensive, budget=1e9)) != []


def noisy(visits: int = 1) -> dict[int, float | list[Timing]]:
    """Two sizes 0.4 % apart whose visits lie 3 % apart, and one that is hopeless."""

    def some(n: int, rate: float, count: int) -> list[Timing]:
        return record(n, [[n / rate * (0.97, 1.0, 1.03)[visit % 3]] * 3 for visit in range(count)])

    return {64: some(64, 100.0, visits), 200: some(200, 100.4, visits), 16: some(16, 30.0, visits)}


NOISY: dict[str, Any] = {
    "ladder": [],
    "extends": False,
    "goal": Goal(tolerance=0.0),
    "seconds_of_trial": lambda n, step: 1e-3,
}


def test_contenders_are_swept_together_in_an_order_of_the_seed() -> None:
    """What is hardly told apart is visited again as a sweep, without the hopeless; another seed, another order."""
    orders = {seed: tuple(trial_rules.learn(view(noisy(6), seed=seed, **NOISY))) for seed in range(12)}
    assert {tuple(sorted(order)) for order in orders.values()} == {(64, 200)}
    assert len(set(orders.values())) == 2
    assert tuple(trial_rules.learn(view(noisy(6), seed=3, **NOISY))) == orders[3]
    later = {seed: tuple(trial_rules.learn(view(noisy(7), seed=seed, **NOISY))) for seed in range(12)}
    assert any(later[seed] != order for seed, order in orders.items())  # each sweep has an order of its own


def test_what_was_visited_often_is_not_visited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that does not average away in so many visits will not in more: six of at most seven are not enough."""
    monkeypatch.setattr(trial_rules, "MOST_TRIALS", 7)
    assert trial_rules.learn(view(noisy(6), **NOISY)) != []
    monkeypatch.setattr(trial_rules, "MOST_TRIALS", 6)
    assert trial_rules.learn(view(noisy(6), **NOISY)) == []


# --- confirm -------------------------------------------------------------------------------------------------


def test_a_late_rise_far_beyond_a_plateau_is_found() -> None:
    """From 5000 on steps take 0.6 of what they do before: the best lies at 5000 or above."""

    def late(n: int) -> float:
        return (1e-4 + 1e-4 * n) * (0.6 if n >= 5000 else 1.0)

    device = FakeDevice(late, noise=0.003, seed=3)
    _, result = seek(device, 30000, budget=600.0)
    assert share_of_best(device, result, 30000) > 0.99
    _, result = seek(FakeDevice(late, noise=0.003, seed=3), 30000, budget=10.0)  # too little to look there
    assert "up to 30000" not in " ".join(result.reasons)


def test_a_cliff_is_found() -> None:
    """Throughput falls by half above 100 and rises again to 512: a size within 5 % of the best, 100, is found."""
    truth = cliff(affine(0.01, 0.001), 100, 2.0)
    runner, _ = go(FakeDevice(truth, noise=0.002))
    best = max(runner.ran, key=lambda n: n / truth(n))
    assert best / truth(best) >= 0.95 * 100 / truth(100)


def test_confirm_names_the_answer_until_it_has_two_trials() -> None:
    """256 is within the tolerance of 512 and is named alone, unless it is closed or too expensive."""
    once = {64: record(64, [[0.08] * 5]), 256: record(256, [[0.257] * 5]), 512: record(512, [[0.512] * 5])}
    cheap: dict[str, Any] = {"seconds_of_trial": lambda n, step: 0.1, "ladder": []}
    assert trial_rules.confirm(view(once, **cheap)) == [256]
    assert trial_rules.confirm(view(once, **cheap, closed=[256])) == []
    assert trial_rules.confirm(view(once, **cheap, left=0.09)) == []
    assert trial_rules.confirm(view(once, **cheap, requested=[64])) == [256]
    half = once | {256: record(256, [[0.257] * 5] * 2)}
    assert trial_rules.confirm(view(half, **cheap, requested=[64])) == [64]
    twice = {n: record(n, [[seconds] * 5] * 2) for n, seconds in ((64, 0.08), (256, 0.257), (512, 0.512))}
    assert trial_rules.confirm(view(twice, **cheap)) == []
    assert trial_rules.confirm(view({1: 9.0}, goal=Goal(latency_limit=1.0), **cheap)) == []
