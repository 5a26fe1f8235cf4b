"""Records of predictions: seconds and uncertainty of passes and steps."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from cubatch.estimate.vendor.algorithms import Array
from cubatch.network.passes import Pass

Z90 = 1.6448536269514722
"""Half-width of the interval of 90 % of a normal distribution, in standard deviations."""

BYTES_SD = 0.3
NEVER_SEEN_SD = 0.6
COMMON = 0.2
"""Correlation of the errors of different passes, an assumption."""


@attrs.frozen
class Scales:
    """Factors measured / predicted that multiply the predicted seconds of a GPU, fitted to its measurements."""

    compute: float = 1.0  # factor on the time of arithmetic
    memory: float = 1.0  # factor on the time of bytes


UNSCALED = Scales()


@attrs.frozen(eq=False)
class PassPrediction:
    """Predicted seconds and algorithm of one pass of one layer, at each batch size."""

    layer: str  # name of the layer
    pass_: Pass  # one of its passes
    seconds: Array  # predicted time per batch size
    # algorithm per batch size: "128x128", "winograd 2x2", a cubatch kernel, "bytes", "fused"
    algorithms: tuple[str, ...]
    blocks: Array  # blocks of its grid; 0 for a pass that only moves bytes


@attrs.frozen
class ModelNote:
    """A note on the accuracy of a prediction, as a code: `tuning.explain` has the sentence for each code."""

    code: str  # key of the sentence
    value: object = None  # value in the sentence: a dtype, a multiple, names of measurements


@attrs.frozen(eq=False)
class StepPrediction:
    """Predicted seconds of one step of a network and of its passes, at each batch size."""

    batch_sizes: tuple[int, ...]  # batch sizes in the requested order
    seconds: Array  # predicted time of a step
    low: Array  # low, high: interval that should contain 90 % of such steps
    high: Array
    passes: tuple[PassPrediction, ...]  # passes of the step
    notes: tuple[ModelNote, ...]  # notes on the accuracy of the prediction
    # uncertainty of the GPU and the framework that all steps share: standard deviation of the logarithm
    scale_sd: float


@attrs.frozen(eq=False)
class Part:
    """Predicted seconds, algorithms and blocks of several passes, by the same model."""

    seconds: Array  # seconds, blocks: arrays of shape (passes, batch sizes)
    algorithms: Sequence[tuple[str, ...]]  # for each pass the algorithm at each batch size
    blocks: Array
    sd: Array  # relative standard deviation of each pass's seconds


def never_measured(notes: list[ModelNote], *, is_unusual: bool, is_attention: bool) -> float | None:
    """
    Return the relative standard deviation of predicted seconds if no times were published for a pass; else None.

    A note on the missing times is appended. Unusual are groups and dilation.
    """
    if not (is_unusual or is_attention):
        return None
    notes.append(ModelNote("grouped_or_dilated" if is_unusual else "attention"))
    return NEVER_SEEN_SD


def step_sd(part: Part, counts: Array, total: Array) -> Array:
    """
    Return the relative standard deviation of a step's time, by batch size; a call occurs `counts` times.

    Calls of the library with equal extents have equal errors; those of different calls have the correlation COMMON.
    """
    errors = part.seconds * counts[:, None] * part.sd[:, None]
    own, together = (errors**2).sum(axis=0), errors.sum(axis=0) ** 2
    spread: Array = np.sqrt((1 - COMMON) * own + COMMON * together) / np.where(total > 0, total, 1.0)
    return spread
