"""What a prediction is made of: seconds and doubts of passes and steps."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cubatch.estimate import ours
from cubatch.estimate.vendor.algorithms import Array
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

Z90 = 1.6448536269514722
"""Standard deviations either side of the middle that hold 90 of 100 normal draws."""

BYTES_SD = 0.3
NEVER_SEEN_SD = 0.6


@attrs.frozen
class Scales:
    """
    Factors on a GPU's predicted times, by which its measurements differ from the model.

    Attributes:
        compute: Factor on the time of arithmetic.
        memory: Factor on the time of bytes.
    """

    compute: float = 1.0
    memory: float = 1.0


@attrs.frozen(eq=False)
class PassPrediction:
    """
    One pass of one layer, at each batch size.

    Attributes:
        layer: Its name.
        pass_: Which of its passes.
        seconds: Predicted time, one for each batch size.
        algorithms: What should run, one for each batch size: "128x128", "winograd 2x2", a kernel of ours, "bytes",
            "fused" for what a neighbour does.
        blocks: Of the grid of that; 0 of a layer that moves only.
    """

    layer: str
    pass_: Pass
    seconds: Array
    algorithms: tuple[str, ...]
    blocks: Array


@attrs.frozen(eq=False)
class StepPrediction:
    """
    One step of a network, at each batch size; nothing of it was measured.

    Attributes:
        batch_sizes: In the order asked for.
        seconds: Predicted time of a step.
        low, high: The interval that should hold 90 of 100 such steps.
        passes: What it is the sum of.
        notes: What the model has never seen of what was asked, in sentences.
        scale_sd: Of the interval, what is unknown of the GPU and the framework alike for all steps: standard deviation
            of the logarithm.
    """

    batch_sizes: tuple[int, ...]
    seconds: Array
    low: Array
    high: Array
    passes: tuple[PassPrediction, ...]
    notes: tuple[str, ...]
    scale_sd: float


@attrs.frozen(eq=False)
class Part:
    """Passes that one model answers for: (passes, sizes), and the model's own error of each pass."""

    seconds: Array
    algorithms: Sequence[tuple[str, ...]]
    blocks: Array
    sd: Array


MOVED = (
    "Of layers that only move bytes, such as norms and activations, no time was published to us: theirs are predicted "
    f"from {100 * ours.MOVED_SHARE:g} % of the data sheet's bandwidth."
)


STORED = "{} without Tensor Cores is computed in float32, with half the bytes."


def never_seen(layer: Layer, notes: list[str]) -> float | None:
    """Return the standard deviation of a kind that no measurement is of, and note it; None for others."""
    shape = layer.convolution
    if shape is not None and (shape.groups > 1 or (shape.vertical.step, shape.horizontal.step) != (1, 1)):
        notes.append("Grouped, depthwise and dilated convolutions were never seen by the model: their times are rough.")
        return NEVER_SEEN_SD
    if layer.products_in_turn:
        notes.append("Attention was never seen by the model: it is the sum of its matrix products.")
        return NEVER_SEEN_SD
    return None
