"""
The noise model of a run: an estimate of each batch size, with its variance.

With t the logarithm of the step time and r that of the reference step over its median in the run,

    t = f(n) + slope(n) * r + trial + timing

f(n) is the result.  `slope(n)` is the share of a host slowdown that a size takes.  It is near 1, with a spread between
sizes.  `trial` is common to all timings of one trial (place in memory, state of caches); `timing` differs between them.
All spreads are estimated from the timings of the run, robustly, together with a few pseudo-observations.  The same
model serves search, stopping rule and recommendation.  Without a reference r is 0.

Paired references: Bulej et al., "Duet Benchmarking", ICPE 2020.  Trials interleaved in random order: Abedi and Brecht,
"Conducting Repeatable Experiments in Highly Variable Cloud Computing Environments", ICPE 2017.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing, by_trial
from cubatch.measure.stopping import MEDIAN_SD, TO_SD, median
from cubatch.search.curve_posterior import SizeEstimate

Array = NDArray[np.float64]

# Standard deviations before anything is measured, as shares, and the number of observations that they count as.
TIMING_SD, TRIAL_SD, HOST_TRIAL_SD, PRIOR_WEIGHT = 0.005, 0.005, 0.02, 4
SLOPE_SD = 0.25  # of slope(n) around the common slope, and of the common slope around 1, before anything is measured
LEAST_SD = 0.001  # hardware repeats no timing more closely
OUTLIER_SHARE, HOST_OUTLIER_SHARE, OUTLIER_SD = 0.002, 0.03, 0.3  # of timings by events, by the host clock; how far off
LEAST_SPAN, FOLLOWS = 4.0, 0.3  # factor between sizes, exponent of the reference in them: a host drifts by far less
FAR = 3.0  # standard deviations: trials farther off than this and twice the host's slowdown count as if they were not
MEAN_TO_SD = 1.2533  # mean distance from the middle to the standard deviation, of normal noise
FREEDOM = 4.0  # degrees of freedom of Student's t, by which trials of one size are weighted


def usable(timings: Iterable[Timing]) -> list[Timing]:
    """Return the timings at full clock; all timings if every one was throttled."""
    every = list(timings)
    return [timing for timing in every if not timing.throttled] or every


def count_trials(timings: Iterable[Timing]) -> int:
    """Return how many trials the timings of one size are from."""
    return len(by_trial(timings))


def has_cost(timings: Iterable[Timing], goal: Goal) -> bool:
    """Return whether any usable timing has the value that the goal compares: joules for energy, else seconds."""
    return any(_cost(timing, goal) is not None for timing in usable(timings))


def _cost(timing: Timing, goal: Goal) -> float | None:
    return timing.joules if goal.objective == "energy" else timing.seconds


@attrs.frozen
class Noise:
    """
    Hold the noise model of a run. Standard deviations and variances are those of log times.

    Attributes:
        timing: Standard deviation between timings of one trial.
        trial: Standard deviation between trials of one size, beyond what their timings explain.
        slope: Common slope: log of a step's slowdown, divided by log of the reference step's.
        slope_sd: Standard deviation of a size's own slope around it.
        slope_variance: Variance of the common slope: an error that sizes measured at another host speed share.
        drift: Standard deviation of the reference step between trials: the error of a timing without a reference step.
        outliers: Probability that a timing is off by OUTLIER_SD or so.
        reference_batch_size: Batch size of the reference; None without one.
        reference_seconds: Median of the reference step, to which times are normalized; None without one.
    """

    timing: float
    trial: float
    slope: float = 0.0
    slope_sd: float = 0.0
    slope_variance: float = 0.0
    drift: float = 0.0
    outliers: float = OUTLIER_SHARE
    reference_batch_size: int | None = None
    reference_seconds: float | None = None

    @property
    def is_paired(self) -> bool:
        """Whether timings are paired with a reference step."""
        return self.reference_batch_size is not None

    def variance(self, timings: int, trials: int = 1) -> float:
        """Return the variance of a size's log cost estimated from this number of timings and trials."""
        own = (MEDIAN_SD * self.timing) ** 2 / timings + self.trial**2 / trials
        return own + _outlier_share(timings, self.outliers) * OUTLIER_SD**2


@attrs.frozen(eq=False)
class _Trials:
    """
    Arrays with one element for each trial of one size, except `timings`.

    Attributes:
        cost: Log of the median timing of each trial, not corrected for the host's speed.
        host: Log of the reference step's seconds over their median in the run; 0 without a reference step.
        variance: Variance of each trial's cost, by its own timings.
        timings: Total number of timings.
    """

    cost: Array
    host: Array
    variance: Array
    timings: int


def estimate_noise(sizes: Collection[Sequence[Timing]], goal: Goal) -> Noise:
    """
    Return the noise model of a run.

    Args:
        sizes: The timings of each of its sizes.
        goal: Objective whose cost is compared.
    """
    timings = [timing for taken in sizes for timing in usable(taken)]
    unpaired = _with_spreads(sizes, goal, Noise(TIMING_SD, TRIAL_SD), prior_trial=TRIAL_SD)
    references = [(t.reference_batch_size, t.reference_seconds) for t in timings if t.reference_seconds is not None]
    if not references:
        return unpaired
    size = Counter(n for n, _ in references).most_common(1)[0][0]  # timings with another count as timings without
    if _follows_size([t for t in timings if t.reference_batch_size == size]):
        return unpaired
    usual = median([seconds for n, seconds in references if n == size and seconds is not None])
    noise = Noise(
        TIMING_SD, HOST_TRIAL_SD, 1.0, SLOPE_SD, SLOPE_SD**2, outliers=HOST_OUTLIER_SHARE, reference_batch_size=size,
        reference_seconds=usual,
    )  # fmt: skip
    shifts = [shift for timing in timings if (shift := _host_shift(timing, noise)) is not None]
    noise = attrs.evolve(noise, drift=max(LEAST_SD, TO_SD * median([abs(shift) for shift in shifts])))
    noise = _with_slopes(sizes, goal, _with_spreads(sizes, goal, noise, prior_trial=HOST_TRIAL_SD))
    return _with_spreads(sizes, goal, noise, prior_trial=HOST_TRIAL_SD)


def _follows_size(timings: Sequence[Timing]) -> bool:
    """Return whether the reference step takes longer with larger candidates: it cannot measure the host then."""
    pairs = [(math.log(t.batch_size), math.log(t.reference_seconds)) for t in timings if t.reference_seconds]
    size, reference = np.array(pairs).T - np.mean(pairs, axis=0)[:, None]
    return float(np.ptp(size)) > math.log(LEAST_SPAN) and float(size @ reference) > FOLLOWS * float(size @ size)


def estimate(timings: Sequence[Timing], noise: Noise, goal: Goal) -> SizeEstimate | None:
    """
    Return the log of a size's cost (seconds or joules of a step) and its variance; None if it was not measured.

    The cost is corrected to the median speed of the host.  Trials are combined by generalized least squares.  Their
    errors are independent, except for that of the size's slope: its log cost against the log of the host's speed.
    Trials that disagree are weighted by Student's t, and widen the variance as far as they do (Birge's ratio).

    Args:
        timings: The timings of the size.
        noise: The noise model of the run.
        goal: Objective whose cost is estimated.
    """
    trials = _trials(timings, noise, goal)
    if trials is None:
        return None
    cost = trials.cost - noise.slope * trials.host
    own = trials.variance + noise.trial**2
    shared = noise.slope_sd**2 * np.outer(trials.host, trials.host)
    weight, mean, variance, host = np.ones(len(cost)), 0.0, 0.0, 0.0
    for _ in range(4):
        solved = np.linalg.solve(np.diag(own / weight) + shared, np.ones(len(cost)))
        variance = 1.0 / float(solved.sum())
        mean, host = variance * float(solved @ cost), variance * float(solved @ trials.host)
        distance = (cost - mean) ** 2 / (own + np.diag(shared))
        weight = np.minimum(1.0, (FREEDOM + 1.0) / (FREEDOM + distance))
    if len(cost) > 1:
        variance *= max(1.0, float((weight * distance).sum()) / (len(cost) - 1))
    variance += _outlier_share(trials.timings, noise.outliers) * OUTLIER_SD**2
    return SizeEstimate(timings[0].batch_size, mean, variance, host)


def trial_costs(timings: Sequence[Timing], noise: Noise, goal: Goal) -> list[float]:
    """Return the log cost of each trial of one size at the usual host speed."""
    trials = _trials(timings, noise, goal)
    return [] if trials is None else (trials.cost - noise.slope * trials.host).tolist()


def _outlier_share(timings: int, share: float) -> float:
    """Return the probability that outliers decide the median of this number of timings; `share` of all are outliers."""
    half = (timings + 1) // 2
    return min(1.0, math.comb(timings, half) * share**half)


def _host_shift(timing: Timing, noise: Noise) -> float | None:
    """Return the log of a timing's reference seconds over the median of the run; None without a reference step."""
    seconds = timing.reference_seconds
    if seconds is None or noise.reference_seconds is None or timing.reference_batch_size != noise.reference_batch_size:
        return None
    return math.log(seconds / noise.reference_seconds)


def _trials(timings: Sequence[Timing], noise: Noise, goal: Goal) -> _Trials | None:
    cost, host, variance, count = [], [], [], 0
    for taken in by_trial(usable(timings)).values():
        read = [(math.log(value), timing) for timing in taken if (value := _cost(timing, goal)) is not None]
        if not read:
            continue
        shifts = [_host_shift(timing, noise) for _, timing in read]
        own = [_variance_of(timing, shift, noise) for (_, timing), shift in zip(read, shifts, strict=True)]
        level = sum((shift or 0.0) / v for shift, v in zip(shifts, own, strict=True)) / sum(1.0 / v for v in own)
        # Within a trial the host may change: timings are compared at its mean level.
        values = [
            value - noise.slope * ((shift or 0.0) - level) for (value, _), shift in zip(read, shifts, strict=True)
        ]
        cost.append(_weighted_median(values, [1.0 / v for v in own]))
        host.append(level)
        expected = (MEDIAN_SD**2 if len(own) > 2 else 1.0) / sum(1.0 / v for v in own)  # noqa: PLR2004
        seen = (MEDIAN_SD * _sd_without_farthest(values)) ** 2 / len(values)
        variance.append(max(expected, seen))  # timings that scatter more than usual count for less
        if None in shifts:  # the host's speed is unknown there
            variance[-1] += (noise.slope * noise.drift) ** 2
        count += len(read)
    return _Trials(np.array(cost), np.array(host), np.array(variance), count) if cost else None


def _variance_of(timing: Timing, shift: float | None, noise: Noise) -> float:
    """
    Return the variance of the log of one timing; larger if the host's speed changed during the timing.

    `shift` is the result of `_host_shift`.
    """
    change = 0.0
    if shift is not None and timing.reference_after_seconds and timing.reference_before_seconds:
        change = 0.5 * noise.slope * math.log(timing.reference_after_seconds / timing.reference_before_seconds)
    return noise.timing**2 + change**2


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted median of values, interpolated between the two nearest ones."""
    order = np.argsort(values)
    ordered, weight = np.array(values)[order], np.array(weights)[order]
    reached = (np.cumsum(weight) - 0.5 * weight) / weight.sum()
    return float(np.interp(0.5, reached, ordered))


def _with_spreads(sizes: Collection[Sequence[Timing]], goal: Goal, noise: Noise, *, prior_trial: float) -> Noise:
    """
    Return the noise model with new standard deviations within and between trials, given its slopes.

    `prior_trial` is the standard deviation between trials that is assumed before any timing.
    """
    within, between, shares = [TIMING_SD / TO_SD] * PRIOR_WEIGHT, [prior_trial / TO_SD] * PRIOR_WEIGHT, list[float]()
    for timings in sizes:
        trials = [
            [
                math.log(cost) - noise.slope * (_host_shift(timing, noise) or 0.0)
                for timing in taken
                if (cost := _cost(timing, goal)) is not None
            ]
            for taken in by_trial(usable(timings)).values()
        ]
        trials = [costs for costs in trials if costs]
        within += [distance for costs in trials for distance in _distances(costs)]
        if len(trials) > 1:
            between += _distances([median(costs) for costs in trials])
            shares += [1 / len(costs) for costs in trials]
    timing = max(LEAST_SD, TO_SD * median(within))
    explained = (MEDIAN_SD * timing) ** 2 * median(shares or [0.0])
    trial = math.sqrt(max((TO_SD * median(between)) ** 2 - explained, LEAST_SD**2))
    return attrs.evolve(noise, timing=timing, trial=trial)


def _sd_without_farthest(values: Sequence[float]) -> float:
    """Return the standard deviation of values without the one farthest from the median, from distances of pairs."""
    middle = median(values)
    nearest = sorted(values, key=lambda value: abs(value - middle))[: max(2, len(values) - 1)]
    return MEAN_TO_SD * fmean(_distances(nearest) or [0.0])


def _distances(values: Sequence[float]) -> list[float]:
    """Return the absolute difference of each pair of values, divided by the square root of 2."""
    return [abs(a - b) / math.sqrt(2) for a, b in itertools.combinations(values, 2)]


def _with_slopes(sizes: Collection[Sequence[Timing]], goal: Goal, noise: Noise) -> Noise:
    """
    Return the noise model with new slopes of log cost against the log of the host's speed.

    The common slope comes from ridge regression within sizes, and each size's own slope departs from it.
    """
    spread = noise.trial**2 + noise.timing**2
    precision, product = spread / SLOPE_SD**2, spread / SLOPE_SD**2
    fits: list[tuple[float, float]] = []
    for timings in sizes:
        trials = _trials(timings, noise, goal)
        if trials is None or len(trials.cost) < 2:  # noqa: PLR2004 - one trial determines no slope
            continue
        host, cost = trials.host - np.median(trials.host), trials.cost - np.median(trials.cost)
        far = FAR * math.sqrt(spread)
        cost = np.clip(cost, 2 * np.minimum(host, 0.0) - far, 2 * np.maximum(host, 0.0) + far)
        fits.append((float(host @ host), float(host @ cost)))
        precision, product = precision + fits[-1][0], product + fits[-1][1]
    slope = product / precision
    squares, weights = PRIOR_WEIGHT * SLOPE_SD**2, float(PRIOR_WEIGHT)
    for own_precision, own_product in fits:
        if own_precision > spread / SLOPE_SD**2:  # else the prior is more certain than its own slope
            squares += max(0.0, (own_product / own_precision - slope) ** 2 - spread / own_precision)
            weights += 1.0
    return attrs.evolve(noise, slope=slope, slope_sd=math.sqrt(squares / weights), slope_variance=spread / precision)
