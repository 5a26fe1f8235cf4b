"""What a few readings say of all sizes: textbook formulas, known curves, and models that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.search import curve_posterior
from cubatch.search.curve_posterior import SizeEstimate, fit_curve

SURE = 1e-8  # variance of a reading of one part in ten thousand
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def line(overhead: float, work: float) -> Callable[[int], float]:
    """A two-term line."""
    return lambda n: overhead + work * n


def read(curve: Callable[[int], float], *sizes: int, variance: float = SURE) -> list[SizeEstimate]:
    """Readings without an error."""
    return [SizeEstimate(n, math.log(curve(n)), variance) for n in sizes]


def log_of(curve: Callable[[int], float], sizes: Sequence[int]) -> np.ndarray:
    """What is true."""
    return np.log([curve(n) for n in sizes])


# --- the formulas --------------------------------------------------------------------------------------------


def prior(a: int, b: int, smooth: float, teeth: float, below: float) -> float:
    """
    Covariance of the misfits at two sizes, spelled out: a common scale, Matern 3/2 and Matern 1/2 in octaves.

    The last is of sizes smaller than `below` alone.
    """
    octaves = abs(math.log2(a / b))
    r = math.sqrt(3) * octaves / 2
    steps = teeth**2 * math.exp(-octaves / 0.25) if a < below and b < below else 0.0
    return 100.0 + smooth**2 * (1 + r) * math.exp(-r) + steps


def textbook(
    seen: Sequence[SizeEstimate],
    sizes: Sequence[int],
    smooth: float,
    teeth: tuple[float, float],
    shape: Callable[[int], float],
) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean, covariance and log evidence of one process (Rasmussen and Williams, algorithm 2.1), by loops."""
    count = len(seen)
    known = np.empty((count, count))
    for i, one in enumerate(seen):
        for j, other in enumerate(seen):
            known[i, j] = prior(one.batch_size, other.batch_size, smooth, *teeth) + (one.variance if i == j else 0.0)
    inverse = np.linalg.inv(known)
    rest = [one.log_cost - shape(one.batch_size) for one in seen]
    mean, covariance = np.empty(len(sizes)), np.empty((len(sizes), len(sizes)))
    across = [[prior(n, one.batch_size, smooth, *teeth) for one in seen] for n in sizes]
    for s, n in enumerate(sizes):
        mean[s] = shape(n)
        for i in range(count):
            for j in range(count):
                mean[s] += across[s][i] * inverse[i, j] * rest[j]
        for t, m in enumerate(sizes):
            covariance[s, t] = prior(n, m, smooth, *teeth)
            for i in range(count):
                for j in range(count):
                    covariance[s, t] -= across[s][i] * inverse[i, j] * across[t][j]
    evidence = -0.5 * np.array(rest) @ inverse @ np.array(rest) - 0.5 * np.linalg.slogdet(known)[1]
    return mean, covariance, float(evidence)


def only(
    monkeypatch: pytest.MonkeyPatch, *processes: tuple[float, float], knees: Sequence[float], below: float = math.inf
) -> None:
    """Leave so many pairs of smooth misfit and teeth, all equally likely, and these knees."""
    smooth, teeth = zip(*processes, strict=True)
    steps = [(size, 0.25, below) for size in teeth]
    monkeypatch.setattr(curve_posterior, "SMOOTH", tuple((size, 1 / len(smooth)) for size in dict.fromkeys(smooth)))
    monkeypatch.setattr(curve_posterior, "STEPS", tuple((*step, 1 / len(steps)) for step in dict.fromkeys(steps)))
    monkeypatch.setattr(curve_posterior, "KNEES", np.array(knees, dtype=float))


NOISY = [
    SizeEstimate(1, 0.7, 0.01),
    SizeEstimate(8, 1.1, 0.003),
    SizeEstimate(32, 1.6, 0.002),
    SizeEstimate(100, 2.9, 0.02),
]
NEAR = [
    SizeEstimate(1, 3.20, 0.002),
    SizeEstimate(8, 3.55, 0.002),
    SizeEstimate(32, 4.00, 0.002),
    SizeEstimate(100, 4.85, 0.002),
]
ASKED = (1, 3, 8, 24, 100, 900)


@pytest.mark.parametrize(("smooth", "teeth"), [(0.3, 0.0), (0.0, 0.1), (0.2, 0.05)])
@pytest.mark.parametrize("below", [8, 9, math.inf])
def test_one_process_is_that_of_the_textbook(
    monkeypatch: pytest.MonkeyPatch, smooth: float, teeth: float, below: float
) -> None:
    """With one shape and one pair of sizes the mixture is a plain Gaussian process, computed here by loops.

    The common scale of 100 beside misfits of 0.01 costs four digits of float64's sixteen, twice.
    """
    only(monkeypatch, (smooth, teeth), knees=[16.0], below=below)
    mean, covariance, _ = textbook(NOISY, ASKED, smooth, (teeth, below), lambda n: math.log(16 + n))
    found = fit_curve(NOISY, ASKED)
    assert found.mean == pytest.approx(mean, abs=1e-7)
    assert found.covariance == pytest.approx(covariance, abs=1e-7)
    assert found.sd == pytest.approx(np.sqrt(np.diag(covariance)), abs=1e-6)


def test_a_mixture_is_weighted_by_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of two shapes and two sizes of teeth each is as likely as it makes the readings, and the mixture has the mean
    and the covariance of all four: the mean of theirs, and the spread of their means on top.
    """
    only(monkeypatch, (0.1, 0.02), (0.1, 0.2), knees=[16.0, 32.0])
    parts = [
        textbook(NEAR, ASKED, 0.1, (teeth, math.inf), lambda n, knee=knee: math.log(knee + n))
        for teeth in (0.02, 0.2)
        for knee in (16.0, 32.0)
    ]
    weights = np.exp([evidence for _, _, evidence in parts])
    weights /= weights.sum()
    mean = sum(weight * part[0] for weight, part in zip(weights, parts, strict=True))
    covariance = sum(
        weight * (part[1] + np.outer(part[0] - mean, part[0] - mean))
        for weight, part in zip(weights, parts, strict=True)
    )
    assert weights.min() > 0.01  # each of them matters
    found = fit_curve(NEAR, ASKED)
    assert found.mean == pytest.approx(mean, abs=1e-6)
    assert found.covariance == pytest.approx(covariance, abs=1e-6)


def test_shapes_are_weighted_by_what_they_are_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    One timing tells no shape from another, for all know the scale: two lines say of a size the mean of both.

    With a scale unknown within e to the 100, a shape that is off by e to the 4 is 1 - exp(-4**2 / 2 / 100**2) less
    likely, which is 0.1 %.
    """
    only(monkeypatch, (0.1, 0.02), knees=[4.0, 64.0])
    monkeypatch.setattr(curve_posterior, "SCALE", 100.0)
    (seen,) = read(line(1.0, 0.0), 8)
    ratios = [math.log((4 + 32) / (4 + 8)), math.log((64 + 32) / (64 + 8))]
    found = fit_curve([seen], [32])
    assert found.mean[0] == pytest.approx(0.5 * ratios[0] + 0.5 * ratios[1], abs=2e-3)


def test_processes_are_weighted_by_what_they_are_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single reading tells no size of misfit from another: the variance at a far size is that of their mean."""
    monkeypatch.setattr(curve_posterior, "KNEES", np.array([16.0]))
    monkeypatch.setattr(curve_posterior, "SMOOTH", ((0.1, 0.8), (0.4, 0.2)))
    monkeypatch.setattr(curve_posterior, "STEPS", ((0.05, 0.25, math.inf, 0.3), (0.2, 0.25, math.inf, 0.7)))
    found = fit_curve(read(line(1.0, 0.0), 1), [2**40])
    expected = 2 * (0.8 * 0.1**2 + 0.2 * 0.4**2 + 0.3 * 0.05**2 + 0.7 * 0.2**2)  # of the two ends' misfits
    assert found.sd[0] ** 2 == pytest.approx(expected, rel=0.02)


def test_the_weights_beforehand_are_probabilities() -> None:
    """Whatever the sizes are called, one of each is the case."""
    for sizes in (
        curve_posterior.SMOOTH,
        curve_posterior.STEPS,
        curve_posterior.HOST_SMOOTH,
        curve_posterior.HOST_STEPS,
    ):
        assert math.fsum(weight for *_, weight in sizes) == pytest.approx(1.0)


@pytest.mark.parametrize("host", [True, False])
def test_a_jump_leaves_far_larger_sizes_open(host: bool) -> None:
    """
    Where a second thread begins at 3, a step takes 40 ms instead of 0.1 ms, and 8 samples take 47 ms.

    1 is then the fastest size measured. From 8 the line goes on to 0.6 or to 6 s for 1024: both must be possible.
    """
    curve = fit_curve(
        [SizeEstimate(n, math.log(t), 0.01) for n, t in ((1, 1e-4), (3, 0.04), (8, 0.047))], [1, 1024], host=host
    )
    fastest, slowest = curve.interval(1024)
    assert fastest / 1024 < 1e-4 < slowest / 1024


@pytest.mark.parametrize("slow", [(1,), (1, 2, 4)])
def test_slow_small_sizes_leave_the_rest_of_the_curve_known(slow: tuple[int, ...]) -> None:
    """
    Small sizes that take 20 times the line's seconds on a CPU tell nothing of the others, which are known as without.

    The slow sizes may still be the first of a curve that is rough everywhere, so a tenth of its doubt is added.
    """
    true = line(6.0, 1.0)
    sizes = tuple(2**k for k in range(4, 12))
    rest = read(true, *sizes, variance=0.02**2)
    alone = fit_curve(rest, sizes, host=True)
    curve = fit_curve([*(SizeEstimate(n, math.log(20 * true(n)), 0.02**2) for n in slow), *rest], sizes, host=True)
    assert np.all(np.abs(curve.mean - alone.mean) < alone.sd)
    for n in sizes[4:]:
        doubts = [fit.difference_sd(fit.place(n), fit.place(256)) for fit in (alone, curve)]
        assert doubts[1] <= 1.1 * doubts[0] + 1e-6


# --- what it says of curves ----------------------------------------------------------------------------------


@given(
    knee=st.floats(-3, 13),
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=8, unique=True),
    errors=st.lists(st.floats(-0.1, 0.1), min_size=8, max_size=8),
)
def test_a_size_that_was_read_well_is_what_was_read(knee: float, sizes: list[int], errors: list[float]) -> None:
    """With a variance of next to nothing, mean and reading agree within some of its deviations, whatever the curve.

    An error of 0.1 beside teeth of 0.3 % lies 30 of their deviations off: the most that is pulled away is a reading's
    variance times that many, which 10 of its own deviations hold.
    """
    curve = line(1.0, 2.0**-knee)
    seen = [SizeEstimate(n, math.log(curve(n)) + e, SURE) for n, e in zip(sizes, errors, strict=False)]
    found = fit_curve(seen, sizes)
    wanted = {one.batch_size: one.log_cost for one in seen}
    assert found.sizes.tolist() == sorted(sizes)
    assert found.mean == pytest.approx([wanted[n] for n in sorted(sizes)], abs=10 * math.sqrt(SURE))
    assert np.all(found.sd <= 2 * math.sqrt(SURE))


@pytest.mark.parametrize("knee", [0.5, 6.0, 40.0, 700.0])
def test_a_line_is_continued_within_its_doubt(knee: float) -> None:
    """Read at 1, 8 and 64, also a knee that is none of the shapes' is met at sizes 8 times beyond, and between."""
    curve, asked = line(knee, 1.0), (2, 4, 16, 32, 128, 256, 512)
    found = fit_curve(read(curve, 1, 8, 64, variance=1e-6), asked)
    off = np.abs(found.mean - log_of(curve, asked))
    assert np.all(off <= found.sd)
    assert off.max() <= 0.1  # and the doubt is not bought by saying nothing
    assert found.sd[:4].max() < 0.12


@given(scale=st.floats(1e-6, 1e4))
def test_the_unit_does_not_matter(scale: float) -> None:
    """
    Microseconds or hours: all costs so many times higher give the same curve, so many times higher, as sure.

    Not exactly, for a scale that is unknown within e to the 10 makes a shape that is farther off from it less likely:
    by a share of the doubt, of which a tenth is allowed.
    """
    curve = line(3.0, 0.2)
    found, scaled = (fit_curve(read(c, 1, 8, 64), SIZES) for c in (curve, lambda n: scale * curve(n)))
    assert np.all(np.abs(scaled.mean - found.mean - math.log(scale)) <= 1e-5 + 0.1 * found.sd)
    assert scaled.sd == pytest.approx(found.sd, rel=0.1)


def test_doubt_grows_away_from_readings() -> None:
    """Between two readings it is largest in the middle octaves, and beyond the last it rises with every octave."""
    found = fit_curve(read(line(16, 1), 1, 8, 512), [1, 2, 8, 16, 64, 256, 512, 1024, 4096, 2**14])
    sd = dict(zip(found.sizes.tolist(), found.sd, strict=True))
    assert sd[1] < sd[2]
    assert sd[8] < sd[16] < sd[64]
    assert sd[512] < sd[256] < sd[64]
    assert sd[512] < sd[1024] < sd[4096] < sd[2**14]


def test_more_readings_leave_less_doubt_beside_them() -> None:
    """The surer a reading, the surer are its neighbors; a second size beside them helps too."""
    curve = line(16, 1)
    rough, fine = (fit_curve(read(curve, 8, 64, variance=v), [20]).sd[0] for v in (1e-2, 1e-6))
    assert fit_curve(read(curve, 8, 24, 64, variance=1e-6), [20]).sd[0] < fine < rough


def test_neighbors_move_together_and_far_sizes_do_not() -> None:
    """What a reading of 64 would teach is more of 65 than of 512."""
    found = fit_curve(read(line(16, 1), 1, 8), [64, 65, 512])
    scaled = found.covariance / np.outer(found.sd, found.sd)
    assert scaled[0, 1] > 0.9
    assert scaled[0, 2] < scaled[0, 1]
    assert found.covariance == pytest.approx(found.covariance.T)
    assert np.linalg.eigvalsh(found.covariance).min() > -1e-9


def test_where_there_are_teeth_more_of_them_are_expected() -> None:
    """
    The same seven sizes on a line and with 10 % more at every other one, which no smooth curve holds: beside a
    reading the doubt after teeth is several times that after a line.
    """
    sizes = (64, 72, 80, 88, 96, 104, 112)
    smooth = read(line(16, 1), *sizes, variance=1e-6)
    toothed = [SizeEstimate(s.batch_size, s.log_cost + 0.1 * (place % 2), 1e-6) for place, s in enumerate(smooth)]
    doubt = {name: fit_curve(seen, [84, 92]).sd.max() for name, seen in (("line", smooth), ("teeth", toothed))}
    assert doubt["teeth"] > 5 * doubt["line"]
