"""
Correct a prediction by anchors: measurements of the same or similar workloads.

The logarithm of a measured step is that of the prediction plus four errors:

    log measured = log predicted(scales of the GPU and source) + rest of those + error of the network + noise

Each error is normal with mean zero, so the prediction given the anchors is kriging. Let S be the covariance of the
anchors' log ratios y, and C their covariance with the prediction. The mean is C S^-1 y, and the covariance is reduced
by C S^-1 C'.

    scales    Two per GPU and source (library and dtype), for arithmetic and for bytes, with the model's standard
              deviation (`StepPrediction.scale_sd`) and a correlation of 0.8: a few anchors move both as one factor,
              about ten with different mixtures separate them. One half of the variance is shared by all sources of a
              GPU, a quarter by all GPUs of a source, a quarter belongs to the pair.
    rest      Uncertainty of the GPU and source that neither scale explains: launches, the framework. Shared likewise.
    network   The remaining width of the model's interval. Four fifths are common to all batch sizes, one fifth has a
              correlation of 1/e over a factor of two. One half is common to all GPUs. So a size that was measured on
              the same GPU with the same source is predicted as its timings are.
    noise     The uncertainty of each measurement, at least 0.02 (`anchors.Anchor.sds`).

If the measurements of a GPU and source scatter more than this, either the model or the measurements may be wrong. The
excess variance is then added to both (`_unexplained`).

The share of a network's error that is common to all GPUs is 0.85 in one set of measurements, and at most
0.25 in another. The other shares are judgment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.estimate.expected import step_of
from cubatch.estimate.predictions import Z90, Scales, StepPrediction
from cubatch.tuning.anchors import Anchor, gpu_of, source_of, work_of
from cubatch.workload import Workload

Array = NDArray[np.float64]
Case = tuple[Workload, Sequence[int]]

TOGETHER = 0.8
GPU_SHARE, SOURCE_SHARE, PAIR_SHARE = 0.5, 0.25, 0.25
ALL_SIZES_SHARE = 0.8
OTHER_GPU_SHARE = 0.5
_PAIR = np.array([[1.0, TOGETHER], [TOGETHER, 1.0]])
_LEAST_SD = 0.02
_STEP = 0.05
_MOST_SLOPES = 8
"""Batch sizes at which derivatives are computed."""
_ROUNDS = 2
_HALVINGS = 40


@attrs.frozen(eq=False)
class Sharpened:
    """A prediction, corrected by measurements (the anchors) if there are any."""

    step: StepPrediction  # seconds, interval and passes, as from `predict_step`
    covariance: Array  # covariance of the logarithms of the seconds, by pairs of batch sizes
    # compute, memory: factors by which compute and memory time are corrected, for this GPU, library and dtype
    compute: float = 1.0
    memory: float = 1.0
    ratios: tuple[float, ...] = ()  # measured over predicted time of each anchor: the median over its batch sizes


def sharpen(predicted: Workload, sizes: Sequence[int], anchors: Sequence[Anchor]) -> Sharpened:
    """Return the predicted step at each of distinct batch sizes, corrected by measured results if `anchors` has any."""
    cases = [(predicted, list(sizes)), *((anchor.work, list(anchor.seconds)) for anchor in anchors)]
    steps = [step_of(work, ladder) for work, ladder in cases]
    slopes = _diagonal([_slopes(partial(_at, work), step) for (work, _), step in zip(cases, steps, strict=True)])
    sds = [step.scale_sd for step in steps]
    shared = np.array([[_scales_shared(a, b) for b, _ in cases] for a, _ in cases])
    scales = np.kron(shared * np.outer(sds, sds), _PAIR)
    explained = slopes @ scales @ slopes.T
    owner = np.repeat(np.arange(len(cases)), [len(ladder) for _, ladder in cases])
    left = np.sqrt(np.maximum(np.array(sds)[owner] ** 2 - np.diag(explained), 0.0))
    others = shared[np.ix_(owner, owner)] * np.outer(left, left) + _errors(cases, steps)
    if not anchors:
        return Sharpened(steps[0], explained + others)
    own, known = slice(0, len(sizes)), slice(len(sizes), None)
    measured = np.log([seconds for anchor in anchors for seconds in anchor.seconds.values()])
    noise = np.array([anchor.sds[n] ** 2 for anchor in anchors for n in anchor.seconds])
    off = measured - np.log(np.concatenate([step.seconds for step in steps[1:]]))
    doubt = (explained + others)[known, known] + np.diag(noise)
    kind, extra = _kinds(cases), np.zeros(len(owner))
    for number in set(kind[known]):
        here = kind[known] == number
        extra[kind == number] = _unexplained(off[here], doubt[np.ix_(here, here)], slopes[known][here])
    others, noise = others + _same(cases) * extra, noise + extra[known]
    total = explained + others
    ratios = tuple(
        float(np.median(list(anchor.seconds.values()) / step.seconds))
        for anchor, step in zip(anchors, steps[1:], strict=True)
    )
    noisy = total[known, known] + np.diag(noise)
    logs, weights = np.zeros((len(cases), 2)), np.zeros(len(measured))
    # The model is not quite linear in the scales: evaluate it again at the new ones.
    for _ in range(_ROUNDS):
        unscaled = np.log(np.concatenate([step.seconds for step in steps])) - slopes @ logs.ravel()
        weights = np.linalg.solve(noisy, measured - unscaled[known])
        logs = (scales @ slopes[known].T @ weights).reshape(-1, 2)
        steps = [_at(*case, log) for case, log in zip(cases, logs, strict=True)]
    covariance = total[own, own] - total[own, known] @ np.linalg.solve(noisy, total[known, own])
    pull, spread = np.exp(others[own, known] @ weights), np.exp(Z90 * np.sqrt(np.diag(covariance)))
    seconds = steps[0].seconds * pull
    step = attrs.evolve(
        steps[0],
        seconds=seconds,
        low=seconds / spread,
        high=seconds * spread,
        passes=tuple(attrs.evolve(item, seconds=item.seconds * pull) for item in steps[0].passes),
    )
    compute, memory = map(float, np.exp(logs[0]))
    return Sharpened(step, covariance, compute, memory, ratios)


def unanchored(step: StepPrediction, predict: Callable[[Sequence[int], Scales], StepPrediction]) -> Sharpened:
    """
    Return a prediction that no measurement corrects, with its covariance.

    `predict` returns the prediction of given batch sizes for given factors on the seconds of arithmetic and of bytes.
    """
    slopes = _slopes(lambda sizes, logs: predict(sizes, Scales(*map(float, np.exp(logs)))), step)
    explained = slopes @ (step.scale_sd**2 * _PAIR) @ slopes.T
    left = np.sqrt(np.maximum(step.scale_sd**2 - np.diag(explained), 0.0))
    own = _own_sd(step)
    errors = np.outer(own, own) * _alike(step.batch_sizes, step.batch_sizes)
    return Sharpened(step, explained + np.outer(left, left) + errors)


def _kinds(cases: Sequence[Case]) -> NDArray[np.int_]:
    """Return a number per step, equal for steps of the same GPU, library and dtype."""
    return _numbered([(gpu_of(work), source_of(work)) for work, sizes in cases for _ in sizes])


def _same(cases: Sequence[Case]) -> NDArray[np.bool_]:
    works = [(gpu_of(work), work_of(work), sizes) for work, sizes in cases]
    which = _numbered([(gpu, work, n) for gpu, work, sizes in works for n in sizes])
    return np.equal.outer(which, which)


def _numbered(keys: Sequence[object]) -> NDArray[np.int_]:
    places: dict[object, int] = {}
    return np.array([places.setdefault(key, len(places)) for key in keys])


def _unexplained(off: Array, covariance: Array, slopes: Array) -> float:
    """
    Return the variance of measurements beyond their covariance, after fitting two scales.

    This is the estimator of Paule and Mandel (Journal of Research of the National Bureau of Standards 87, 1982). With
    this variance the weighted sum of squares equals its expectation. `off` are logarithms of measured over predicted
    seconds of one GPU, and `slopes` their derivatives by those of all scales.
    """
    own = slopes.reshape(len(off), -1, 2).sum(axis=1)  # both scales of that GPU and source
    axes = np.linalg.svd(own)[0][:, np.linalg.matrix_rank(own) :]
    stated, turned = np.linalg.eigh(axes.T @ covariance @ axes)
    seen = (turned.T @ axes.T @ off) ** 2
    if not len(seen):
        return 0.0
    low, high = 0.0, float(np.mean(seen))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.mean(seen / (stated + middle)) > 1 else (low, middle)
    return low


def _at(work: Workload, sizes: Sequence[int], logs: Array) -> StepPrediction:
    """Return the predicted step; `logs` are the logarithms of the factors on compute and memory seconds."""
    compute, memory = map(float, np.exp(logs))
    return step_of(work, sizes, Scales(compute, memory))


def _scales_shared(a: Workload, b: Workload) -> float:
    same_gpu, same_source = gpu_of(a) == gpu_of(b), source_of(a) == source_of(b)
    return GPU_SHARE * same_gpu + SOURCE_SHARE * same_source + PAIR_SHARE * (same_gpu and same_source)


def _works_shared(works: Sequence[Workload]) -> Array:
    """Return the correlations, between workloads, of the prediction error that a network causes."""
    network, gpu = _numbered([work_of(work) for work in works]), _numbered([gpu_of(work) for work in works])
    return np.equal.outer(network, network) * np.where(np.equal.outer(gpu, gpu), 1.0, OTHER_GPU_SHARE)


def _alike(a: Sequence[int], b: Sequence[int]) -> Array:
    """Return the correlations, between batch sizes a and b, of the prediction error that a network causes."""
    octaves = np.abs(np.subtract.outer(np.log2(a), np.log2(b)))
    return ALL_SIZES_SHARE + (1 - ALL_SIZES_SHARE) * np.exp(-octaves)


def _own_sd(step: StepPrediction) -> Array:
    """Return the standard deviation of log(seconds) by batch size, without the part from the GPU's scales."""
    whole = np.log(step.high / step.low) / (2 * Z90)
    return np.sqrt(np.maximum(whole**2 - step.scale_sd**2, _LEAST_SD**2))


def _errors(cases: Sequence[Case], steps: Sequence[StepPrediction]) -> Array:
    """Return the covariance matrix of the prediction errors that networks cause, over the steps of all cases."""
    sizes, sds = [n for _, ladder in cases for n in ladder], np.concatenate([_own_sd(step) for step in steps])
    owner = np.repeat(np.arange(len(cases)), [len(ladder) for _, ladder in cases])
    shared = _works_shared([work for work, _ in cases])
    return shared[np.ix_(owner, owner)] * np.outer(sds, sds) * _alike(sizes, sizes)


def _slopes(at: Callable[[Sequence[int], Array], StepPrediction], step: StepPrediction) -> Array:
    """
    Return the derivatives of log(seconds) by the logarithms of compute and memory factor, as (batch sizes, 2).

    They change slowly with the batch size: between a few sizes they are interpolated. `step` is the prediction for
    factors of 1.
    """
    octaves = np.log2(step.batch_sizes)
    wanted = np.linspace(octaves.min(), octaves.max(), _MOST_SLOPES)
    few = np.unique(np.abs(octaves[:, None] - wanted).argmin(axis=0))
    few = few[np.argsort(octaves[few])]
    sizes = [step.batch_sizes[i] for i in few]
    moved = [at(sizes, log).seconds for log in (np.array([_STEP, 0.0]), np.array([0.0, _STEP]))]
    slopes = [np.log(seconds / step.seconds[few]) / _STEP for seconds in moved]
    return np.stack([np.interp(octaves, octaves[few], each) for each in slopes], axis=1)


def _diagonal(parts: Sequence[Array]) -> Array:
    """Return the block-diagonal matrix of these matrices, which have two columns each."""
    whole = np.zeros((sum(map(len, parts)), 2 * len(parts)))
    row = 0
    for place, part in enumerate(parts):
        whole[row : row + len(part), 2 * place : 2 * place + 2] = part
        row += len(part)
    return whole
