"""Activations: functions of one element, or of the channels of one position."""

from __future__ import annotations

import math

import attrs
from attrs import field

from cubatch.network.extents import between
from cubatch.network.layer import Layer


@attrs.frozen(kw_only=True)
class _Activation(Layer, elementwise=True, in_place=True):
    """An elementwise function."""


@attrs.frozen(kw_only=True)
class ReLU(_Activation, type="relu", slope_of_input=True, backward_reads=frozenset("y")):
    """max(x, 0)."""


@attrs.frozen(kw_only=True)
class ReLU6(_Activation, type="relu6", slope_of_input=True, backward_reads=frozenset("y")):
    """min(max(x, 0), 6)."""


@attrs.frozen(kw_only=True)
class Sigmoid(_Activation, type="sigmoid", backward_reads=frozenset("y")):
    """1 / (1 + exp(-x)), whose slope is y (1 - y)."""


@attrs.frozen(kw_only=True)
class HardSigmoid(_Activation, type="hard_sigmoid", backward_reads=frozenset("y")):
    """min(max(x + 3, 0), 6) / 6, the gate of MobileNetV3 (Howard et al., 2019, arXiv:1905.02244, section 5.2)."""


@attrs.frozen(kw_only=True)
class HardSwish(_Activation, type="hard_swish", slope_of_input=True, backward_reads=frozenset("x")):
    """Input times its hard sigmoid (Howard et al., 2019, arXiv:1905.02244, section 5.2)."""


@attrs.frozen(kw_only=True)
class SiLU(_Activation, type="silu", slope_of_input=True, backward_reads=frozenset("x")):
    """Input times its sigmoid (Elfwing et al., 2017, arXiv:1702.03118)."""


@attrs.frozen(kw_only=True)
class GELU(_Activation, type="gelu", slope_of_input=True, backward_reads=frozenset("x")):
    """Input times the normal distribution function of the input."""


@attrs.frozen(kw_only=True)
class Softmax(Layer, type="softmax", adds_up_to_one=True, backward_reads=frozenset("y")):
    """exp(x) divided by its sum along the channels; a network for training ends in logits, without it."""


@attrs.frozen(kw_only=True)
class Dropout(_Activation, type="dropout", idle_in_inference=True):
    """
    Zero a share of the elements while training and scale the rest up; nothing in inference.

    Attributes:
        p: Share of the elements that is zeroed.
    """

    p: float = field(default=0.5, validator=between(0, 1, "a number from 0, below 1", high_open=True))

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Return {"mask": (elements per sample, 1)}: one byte per element marks those that were not zeroed."""
        return {"mask": (math.prod(self.input_shape), 1)}
