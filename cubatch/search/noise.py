"""
The noise model of a run: an estimate of each batch size, with its variance.

With t the logarithm of the step time and r that of the reference step over its median in the run,

    t = f(n) + slope(n) * r + trial + timing

f(n) is the result.  `slope(n)` is the share of a host slowdown that a size takes.  It is near 1, with a spread between
sizes, so timings on a fast host tell most: sizes are compared at that speed.  `trial` is common to all timings of one
trial (place in memory, state of caches); `timing` differs between them.  All spreads are estimated from the timings of
the run, robustly, together with a few pseudo-observations.  The same model serves search, stopping rule and
recommendation.  Without a reference r is 0.

Paired references: Bulej et al., "Duet Benchmarking", ICPE 2020.  Trials interleaved in random order: Abedi and Brecht,
"Conducting Repeatable Experiments in Highly Variable Cloud Computing Environments", ICPE 2017.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing, by_trial
from cubatch.measure.stopping import MEDIAN_SD, TO_SD, median
from cubatch.search.curve_posterior import SizeEstimate

Array = NDArray[np.float64]

TIMING_SD, HOST_TRIAL_SD, PRIOR_WEIGHT = 0.005, 0.02, 4
"""Standard deviation between timings, and between trials on a GPU; between trials on a CPU.  They are shares, assumed
before anything is measured, and count as this number of observations."""
SLOPE_SD = 0.5  # of slope(n) around the common slope, and of the common slope around 1, before anything is measured
LEAST_SD = 0.001  # hardware repeats no timing more closely
OUTLIER_SHARE, HOST_OUTLIER_SHARE, OUTLIER_SD = 0.002, 0.03, 0.3  # of timings by events, by the host clock; how far off
LEAST_SPAN, FOLLOWS = 4.0, 0.3  # factor between sizes, exponent of the reference in them: a host drifts by far less
FAST = 0.1  # share of the timings on a fast host; the rest of the reference steps are slower
FAR = 3.0  # standard deviations: trials farther off than this and twice the host's slowdown count as if they were not
FREEDOM = 4.0  # degrees of freedom of Student's t, by which trials of one size are weighted


def usable(timings: Iterable[Timing]) -> list[Timing]:
    """Return the timings that were not throttled; all timings if all were throttled."""
    every = list(timings)
    return [timing for timing in every if not timing.throttled] or every


def has_cost(timings: Iterable[Timing], goal: Goal) -> bool:
    """Return whether any usable timing has the value that the goal compares: joules for energy, else seconds."""
    return any(_cost(timing, goal) is not None for timing in usable(timings))


def _cost(timing: Timing, goal: Goal) -> float | None:
    return timing.joules if goal.objective == "energy" else timing.seconds


@attrs.frozen
class Noise:
    """The noise model of a run. Standard deviations and variances are those of log times."""

    timing: float  # standard deviation between timings of one trial
    trial: float  # standard deviation between trials of one size, beyond what their timings explain
    slope: float = 0.0  # common slope: log of a step's slowdown, divided by log of the reference step's
    slope_sd: float = 0.0  # standard deviation of a size's own slope around it
    slope_variance: float = 0.0  # of the common slope: an error that sizes measured at another host speed share
    drift: float = 0.0  # standard deviation of the reference step between trials: error of a timing without one
    fast: float = 0.0  # as r: log of the reference step's seconds on a fast host over their median in the run
    outliers: float = OUTLIER_SHARE  # probability that a timing is off by OUTLIER_SD or so
    prior: float = TIMING_SD  # standard deviation between trials, before anything is measured
    # the reference step, to which times are normalized, as `batch_size` and median `seconds`; None without one
    reference: Mapping[str, Any] | None = None

    @property
    def is_paired(self) -> bool:
        """Whether timings are paired with a reference step."""
        return self.reference is not None

    def variance(self, timings: int, trials: int = 1) -> float:
        """Return the variance of a size's log cost, estimated from `timings` timings in `trials` trials."""
        return (MEDIAN_SD * self.timing) ** 2 / timings + self.trial**2 / trials + self.outlier_variance(timings)

    def outlier_variance(self, timings: int) -> float:
        """Return the variance that outliers add to a median of this number of timings: half of them may be outliers."""
        half = (timings + 1) // 2
        return min(1.0, math.comb(timings, half) * self.outliers**half) * OUTLIER_SD**2


@attrs.frozen(eq=False)
class _Trials:
    """The trials of one size, as arrays with one element for each trial."""

    values: Sequence[Array]  # log cost of each timing, at the speed `host` of its trial
    cost: Array  # median of the values; in medians timings on a fast host weigh more
    host: Array  # log of the reference step's seconds over their median in the run; 0 without a reference step
    variance: Array  # of the cost, by the trial's own timings

    @classmethod
    def of(cls, timings: Sequence[Timing], noise: Noise, goal: Goal) -> Self:
        """Return the trials of one size under a noise model; those without a cost (seconds or joules) are left out."""
        every = by_trial(timing for timing in usable(timings) if _cost(timing, goal) is not None).values()
        shifts = [np.array([_host_shift(timing, noise) for timing in taken]) for taken in every]
        slow = [noise.slope_sd * np.nan_to_num(shift - noise.fast, nan=noise.drift) for shift in shifts]
        weights = [1 / (noise.timing**2 + own**2) for own in slow]
        host = np.array(list(map(_median, shifts, weights)))
        values = [
            np.log([_cost(timing, goal) or math.nan for timing in taken])
            - np.nan_to_num(noise.slope * (shift - level))  # within a trial the host may change
            for taken, shift, level in zip(every, shifts, host, strict=True)
        ]
        cost = np.array(list(map(_median, values, weights)))
        sd = np.array([max(noise.timing, _sd_without_farthest(own)) for own in values])
        count = np.array([len(own) for own in values])
        variance = np.where(count > 2, MEDIAN_SD * sd, sd) ** 2 / count  # noqa: PLR2004 - else the median is the mean
        variance += np.where(np.isnan(host), noise.slope * noise.drift, 0.0) ** 2  # the host's speed is unknown there
        return cls(values, cost, np.nan_to_num(host), variance)


def estimate_noise(sizes: Collection[Sequence[Timing]], goal: Goal, *, on_host: bool = False) -> Noise:
    """Return the noise model of a run from the timings of its sizes, compared by `goal`; `on_host`: taken on a CPU."""
    paired = [t for taken in sizes for t in usable(taken) if t.reference_seconds is not None]
    if paired:  # timings with another reference count as timings without
        size = Counter(timing.reference_batch_size for timing in paired).most_common(1)[0][0]
        paired = [timing for timing in paired if timing.reference_batch_size == size]
    prior, outliers = (HOST_TRIAL_SD, HOST_OUTLIER_SHARE) if paired or on_host else (TIMING_SD, OUTLIER_SHARE)
    noise = Noise(TIMING_SD, prior, prior=prior, outliers=outliers)
    if not paired or _follows_size(paired):
        return _with_spreads(sizes, goal, noise)
    seconds = [timing.reference_seconds or math.nan for timing in paired]
    usual = median(seconds)
    noise = attrs.evolve(
        noise, slope_sd=SLOPE_SD, slope_variance=SLOPE_SD**2, reference={"batch_size": size, "seconds": usual},
        drift=max(LEAST_SD, TO_SD * median([abs(math.log(each / usual)) for each in seconds])),
        slope=1.0, fast=math.log(float(np.quantile(seconds, FAST)) / usual),
    )  # fmt: skip
    return _with_spreads(sizes, goal, _with_slopes(sizes, goal, _with_spreads(sizes, goal, noise)))


def _follows_size(timings: Sequence[Timing]) -> bool:
    """Return whether the reference step takes longer with larger candidates: it cannot measure the host then."""
    pairs = np.log([(timing.batch_size, timing.reference_seconds or math.nan) for timing in timings])
    size, reference = (pairs - pairs.mean(axis=0)).T
    return float(np.ptp(size)) > math.log(LEAST_SPAN) and float(size @ reference) > FOLLOWS * float(size @ size)


def estimate(timings: Sequence[Timing], noise: Noise, goal: Goal) -> SizeEstimate | None:
    """
    Return the log of a size's cost by `goal` (seconds or joules of a step) with its variance; None if not measured.

    The cost is corrected to the median speed of the host.  Trials are combined by generalized least squares.  Their
    errors are independent, except for that of the size's slope: its log cost against the log of the host's speed.  This
    error is 0 on a fast host.
    Trials that disagree are weighted by Student's t, and widen the variance as far as they do (Birge's ratio).
    """
    trials = _Trials.of(timings, noise, goal)
    if not trials.values:
        return None
    cost, host = trials.cost - noise.slope * trials.host, trials.host
    own = trials.variance + noise.trial**2
    shared = noise.slope_sd**2 * np.outer(host - noise.fast, host - noise.fast)
    weight = np.ones(len(cost))
    for _ in range(4):
        solved = np.linalg.solve(np.diag(own / weight) + shared, np.ones(len(cost)))
        variance = 1.0 / float(solved.sum())
        distance = (cost - variance * float(solved @ cost)) ** 2 / (own + np.diag(shared))
        weight = np.minimum(1.0, (FREEDOM + 1.0) / (FREEDOM + distance))
    birge = max(1.0, float(weight @ distance) / (len(cost) - 1)) if len(cost) > 1 else 1.0
    total = birge * variance + noise.outlier_variance(sum(map(len, trials.values)))
    return SizeEstimate(timings[0].batch_size, variance * float(solved @ cost), total, variance * float(solved @ host))


def _host_shift(timing: Timing, noise: Noise) -> float:
    """Return log(reference seconds of a timing / their median in the run); NaN without the run's reference step."""
    usual, seconds = noise.reference, timing.reference_seconds
    if usual is None or seconds is None or timing.reference_batch_size != usual["batch_size"]:
        return math.nan
    return math.log(seconds / usual["seconds"])


def _with_spreads(sizes: Collection[Sequence[Timing]], goal: Goal, noise: Noise) -> Noise:
    """Return the noise model with new standard deviations within and between trials, given its slopes."""
    every = [_Trials.of(timings, noise, goal) for timings in sizes]
    within = [_distances(values) for trials in every for values in trials.values]
    between = [_distances(trials.cost - noise.slope * trials.host) for trials in every]
    # Two trials at other speeds of the host also differ by the size's slope.  The weight is the trials' part in that.
    weights = [1 / (1 + (noise.slope_sd / HOST_TRIAL_SD * _distances(trials.host)) ** 2) for trials in every]
    timing = max(LEAST_SD, _spread(within, [np.ones(len(values)) for values in within], TIMING_SD))
    trial = _spread(between, weights, noise.prior)
    shares = [1 / len(values) for trials in every if len(trials.values) > 1 for values in trials.values]
    explained = (MEDIAN_SD * timing) ** 2 * median(shares or [0.0])
    return attrs.evolve(noise, timing=timing, trial=math.sqrt(max(trial**2 - explained, LEAST_SD**2)))


def _spread(distances: Sequence[Array], weights: Sequence[Array], prior: float) -> float:
    """Return a robust, weighted standard deviation of `_distances` and PRIOR_WEIGHT pseudo-observations of `prior`."""
    every = np.concatenate([np.full(PRIOR_WEIGHT, prior / TO_SD), *distances])
    return TO_SD * _median(every, np.concatenate([np.ones(PRIOR_WEIGHT), *weights]))


def _sd_without_farthest(values: Array) -> float:
    """Return the standard deviation of all values but the farthest from their median; of two both count; of one 0."""
    nearest = values[np.argsort(np.abs(values - _median(values)))][: max(2, len(values) - 1)]
    return math.sqrt(math.pi / 2) * float(_distances(nearest).mean()) if len(nearest) > 1 else 0.0


def _median(values: Array, weights: Array | None = None) -> float:
    """Return the weighted median (`weights` None: all weigh the same); NaN if any value is NaN."""
    if np.isnan(values).any():
        return math.nan
    order, every = np.argsort(values), np.ones(len(values)) if weights is None else weights
    below = np.cumsum(every[order]) - every[order] / 2
    return float(np.interp(every.sum() / 2, below, values[order]))


def _distances(values: Array) -> Array:
    """Return |a - b| / sqrt(2) of each pair of values."""
    first, second = np.triu_indices(len(values), 1)
    return np.abs(values[first] - values[second]) / math.sqrt(2)


def _with_slopes(sizes: Collection[Sequence[Timing]], goal: Goal, noise: Noise) -> Noise:
    """
    Return the noise model with new slopes of log cost against the log of the host's speed.

    The common slope comes from ridge regression within sizes, and each size's own slope departs from it.
    """
    spread = noise.trial**2 + noise.timing**2
    fits = []
    for trials in (_Trials.of(timings, noise, goal) for timings in sizes):
        if len(trials.cost) > 1:
            host, cost = trials.host - _median(trials.host), trials.cost - _median(trials.cost)
            far = FAR * math.sqrt(spread)
            cost = np.clip(cost, 2 * np.minimum(host, 0.0) - far, 2 * np.maximum(host, 0.0) + far)
            fits.append((float(host @ host), float(host @ cost)))
    prior = spread / SLOPE_SD**2
    precision = prior + sum(own for own, _ in fits)
    slope = (prior + sum(product for _, product in fits)) / precision
    own_slopes = [  # squared departure of each size whose own slope is more certain than the prior
        max(0.0, (product / own - slope) ** 2 - spread / own) for own, product in fits if own > prior
    ]
    squares = PRIOR_WEIGHT * SLOPE_SD**2 + sum(own_slopes)
    slope_sd = math.sqrt(squares / (PRIOR_WEIGHT + len(own_slopes)))
    return attrs.evolve(noise, slope=slope, slope_sd=slope_sd, slope_variance=spread / precision)
