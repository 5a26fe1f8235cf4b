"""The rules of the race: against Monte Carlo, exact integrals and what must be nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from cubatch.search import state
from cubatch.search.curve_posterior import CurvePosterior
from cubatch.search.state import SearchState

SIZES = (8, 16, 24, 32)


@attrs.frozen(eq=False)
class Field:
    """What the value of a trial depends on; costs are what is not gained."""

    value: np.ndarray
    posterior: CurvePosterior
    feasibility: np.ndarray
    tolerance: float
    recommended: int
    measured: set[int]

    _base = property(lambda self: self.recommended)
    sizes = property(lambda self: list(range(len(self.value))))

    def is_feasible(self, n: int) -> bool:
        """All that were measured keep the limits."""
        return n in self.measured

    def losses(self) -> np.ndarray:
        """Draws of the loss."""
        return SearchState.draw_losses(self, self.feasibility)

    def gains(self, variance: float) -> np.ndarray:
        """The knowledge gradient."""
        return SearchState.knowledge_gradient(self, variance)


def field_of(
    value: list[float],
    covariance: list[list[float]] | np.ndarray,
    *,
    answer: int = 0,
    tolerance: float = 0.0,
    allowed: list[float] | None = None,
    visited: Iterable[int] = (),
) -> Field:
    """A field of the first sizes, of which the answer and others were visited."""
    count = len(value)
    belief = CurvePosterior(np.array(SIZES[:count]), -np.array(value), np.array(covariance, dtype=float))
    return Field(np.array(value), belief, np.array(allowed or [1.0] * count), tolerance, answer, {answer, *visited})


COVARIANCE = np.array([
    [0.010, 0.006, 0.001, 0.0],
    [0.006, 0.040, 0.020, 0.0],
    [0.001, 0.020, 0.090, 0.0],
    [0.000, 0.000, 0.000, 0.2],
])  # fmt: skip
VALUE = [0.0, 0.05, -0.1, 0.02]


def mean_above(z: float) -> float:
    """Mean of what a standard normal number exceeds z by."""
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2


# --- draw_losses --------------------------------------------------------------------------------------------------


def test_the_mean_loss_of_two_sizes_is_that_of_the_formula() -> None:
    """The difference of two is normal: what it exceeds the tolerance by on average has a closed form.

    256 draws have a standard error of the sample's deviation over 16; four of them are allowed.
    """
    field = field_of(VALUE[:2], COVARIANCE[:2, :2], tolerance=0.01)
    sd = math.sqrt(0.010 + 0.040 - 2 * 0.006)
    lost = field.losses()
    assert lost.shape == (state.DRAWS,)
    assert lost.min() >= 0
    assert lost.mean() == pytest.approx(sd * mean_above((0.01 - 0.05) / sd), abs=4 * lost.std() / 16)


def test_the_mean_loss_of_four_sizes_is_that_of_many_draws() -> None:
    """Values drawn by their covariance, each there with its probability: what the best has beyond the tolerance."""
    allowed, answer, tolerance = [1.0, 0.7, 0.2, 0.5], 1, 0.02
    field = field_of(VALUE, COVARIANCE, answer=answer, tolerance=tolerance, allowed=allowed)
    random = np.random.default_rng(1)
    values = random.multivariate_normal(VALUE, COVARIANCE, 200_000)
    ahead = values - values[:, [answer]] - tolerance
    ahead = np.where(random.random(ahead.shape) < np.array(allowed), ahead, 0.0)
    expected = np.maximum(ahead, 0).max(axis=1).mean()
    lost = field.losses()
    assert lost.mean() == pytest.approx(expected, abs=4 * lost.std() / 16)


@pytest.mark.parametrize(
    ("value", "allowed", "tolerance"),
    [([0.0, -9.0], [1.0, 1.0], 0.0), ([0.0, 9.0], [1.0, 0.0], 0.0), ([0.0, 1.0], [1.0, 1.0], 9.0)],
    ids=["hopeless", "not allowed", "within the tolerance"],
)
def test_nothing_is_lost_where_nothing_can_be_gained(
    value: list[float], allowed: list[float], tolerance: float
) -> None:
    """A size ten deviations behind, one that does not run, and a lead that may be given up cost nothing."""
    field = field_of(value, COVARIANCE[:2, :2], allowed=allowed, tolerance=tolerance)
    assert field.losses().max() == 0
    assert field.gains(0.001).max() == pytest.approx(0, abs=1e-12)


def test_losses_repeat_themselves_and_stand_a_belief_without_doubt() -> None:
    """The same field gives the same draws; a covariance of zero has a root too, and the loss is the lead itself."""
    field = field_of(VALUE, COVARIANCE)
    assert field.losses().tolist() == field.losses().tolist()
    known = field_of([0.0, 0.05], np.zeros((2, 2)), tolerance=0.02).losses()
    assert known == pytest.approx(0.05 - 0.02, abs=1e-4)  # the jitter's root is 1e-5


# --- learning ------------------------------------------------------------------------------------------------


def knowledge_gradient(
    field: Field, at: int, variance: float, visited: list[int], draws: int = 100_000
) -> tuple[float, float]:
    """What the answer gains by one reading of a size, and its standard error, by drawing readings and updating beliefs.

    The update is Bayes' for a normal belief, computed anew from each reading.
    """
    mean, covariance = field.value, field.posterior.covariance
    random = np.random.default_rng(2)
    truth = random.normal(mean[at], math.sqrt(covariance[at, at]), draws)
    reading = truth + random.normal(0.0, math.sqrt(variance), draws)
    gain = covariance[:, at] / (covariance[at, at] + variance)
    updated = mean[None] + (reading - mean[at])[:, None] * gain[None]
    ahead = updated - updated[:, [field.recommended]] - field.tolerance
    ahead[:, field.recommended] = 0.0
    now = mean - mean[field.recommended] - field.tolerance
    now[field.recommended] = 0.0
    after = ahead[:, sorted({*visited, at})].max(axis=1) - now[visited].max()
    return float(after.mean()), float(after.std() / math.sqrt(draws))


@pytest.mark.parametrize("tolerance", [0.0, 0.02])
@pytest.mark.parametrize("visited", [[0], [0, 1], [0, 1, 2]])
@pytest.mark.parametrize("answer", [0, 1])
def test_learning_is_the_knowledge_gradient(tolerance: float, visited: list[int], answer: int) -> None:
    """
    What a visit wins is the mean of the best after it less the best before, over all that it may read.

    Nine outcomes stand for all of them: within 6 % or a thousandth, beside four standard errors of the draws.
    """
    visited = sorted({*visited, answer})
    field = field_of(VALUE, COVARIANCE, answer=answer, tolerance=tolerance, visited=visited)
    for at, variance in enumerate((0.001, 0.002, 0.03, 0.01)):
        expected, error = knowledge_gradient(field, at, variance, visited)
        assert field.gains(variance)[at] == pytest.approx(expected, abs=0.06 * expected + 0.001 + 4 * error)


def test_learning_counts_only_what_may_run() -> None:
    """What a visit wins is won with the probability that the size runs."""
    whole = field_of(VALUE, COVARIANCE).gains(0.01)
    part = field_of(VALUE, COVARIANCE, allowed=[1.0, 0.5, 0.25, 0.0]).gains(0.01)
    assert part == pytest.approx(whole * [1.0, 0.5, 0.25, 0.0])


@given(
    value=st.lists(st.floats(-1, 1), min_size=4, max_size=4),
    root=st.lists(st.floats(-0.5, 0.5), min_size=16, max_size=16),
    visited=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_learning_wins_nothing_less_than_nothing(value: list[float], root: list[float], visited: list[bool]) -> None:
    """Knowing more never makes the expected answer worse, and a noisier visit wins no more than a clear one.

    Both hold of the nine outcomes as they do of all, for what is won is convex in what moves the beliefs.
    """
    half = np.array(root).reshape(4, 4)
    seen = [place for place, is_seen in enumerate(visited) if is_seen]
    field = field_of(value, half @ half.T + 0.01 * np.eye(4), visited=seen)
    clear, noisy = field.gains(0.001), field.gains(1.0)
    assert clear.min() >= 0
    assert np.all(noisy <= clear + 1e-12)


# --- sizes_between -------------------------------------------------------------------------------------------


@given(low=st.integers(1, 10**6), high=st.integers(1, 10**6))
def test_a_gap_is_closed_within_one_percent_or_one(low: int, high: int) -> None:
    """The two sides lie 1 apart, or as near as a hundredth of the smaller."""
    assume(low < high)
    assert state.is_closed(low, high) == (high - low == 1 or 100 * (high - low) <= low)


@given(low=st.integers(1, 10**5), high=st.integers(1, 10**5), multiple=st.sampled_from([1, 2, 8, 32]))
def test_openings_lie_strictly_between_and_are_multiples(low: int, high: int, multiple: int) -> None:
    """At most three to a gap, ascending, and none in a gap that is closed."""
    assume(low < high)
    found = state.sizes_between(low, high, multiple)
    assert found == sorted(set(found))
    assert all(n % multiple == 0 and low < n < high for n in found)
    assert len(found) <= 3
    assert not found or not state.is_closed(low, high)


def test_openings_divide_a_gap_evenly_in_its_logarithm() -> None:
    """From 100 to 1600, a factor of 16, each step is one of 2; a gap of exactly a percent has none."""
    assert state.sizes_between(100, 1600) == [200, 400, 800]
    assert state.sizes_between(100, 101) == state.sizes_between(1000, 1010) == []
    assert state.sizes_between(1000, 1011) == [1003, 1005, 1008]
    assert state.sizes_between(100, 1600, 64) == [192, 384, 768]
