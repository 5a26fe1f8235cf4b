"""Activations: functions of one element, or of the channels of one position."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs
from attrs import field

from cubatch.network.extents import between
from cubatch.network.layer import Layer


@attrs.frozen(kw_only=True)
class _Activation(Layer):
    """An elementwise function."""

    elementwise: ClassVar[bool] = True
    in_place: ClassVar[bool] = True


@attrs.frozen(kw_only=True)
class ReLU(_Activation):
    """max(x, 0)."""

    type: ClassVar[str] = "relu"
    slope_of_input: ClassVar[bool] = True
    backward_reads: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class ReLU6(_Activation):
    """min(max(x, 0), 6)."""

    type: ClassVar[str] = "relu6"
    slope_of_input: ClassVar[bool] = True
    backward_reads: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class Sigmoid(_Activation):
    """1 / (1 + exp(-x)), whose slope is y (1 - y)."""

    type: ClassVar[str] = "sigmoid"
    backward_reads: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class HardSigmoid(_Activation):
    """min(max(x + 3, 0), 6) / 6, the gate of MobileNetV3 (Howard et al., 2019, arXiv:1905.02244, section 5.2)."""

    type: ClassVar[str] = "hard_sigmoid"
    backward_reads: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class HardSwish(_Activation):
    """Input times its hard sigmoid (Howard et al., 2019, arXiv:1905.02244, section 5.2)."""

    type: ClassVar[str] = "hard_swish"
    slope_of_input: ClassVar[bool] = True
    backward_reads: ClassVar[frozenset[str]] = frozenset({"x"})


@attrs.frozen(kw_only=True)
class SiLU(_Activation):
    """Input times its sigmoid (Elfwing et al., 2017, arXiv:1702.03118)."""

    type: ClassVar[str] = "silu"
    slope_of_input: ClassVar[bool] = True
    backward_reads: ClassVar[frozenset[str]] = frozenset({"x"})


@attrs.frozen(kw_only=True)
class GELU(_Activation):
    """Input times the normal distribution function of the input."""

    type: ClassVar[str] = "gelu"
    slope_of_input: ClassVar[bool] = True
    backward_reads: ClassVar[frozenset[str]] = frozenset({"x"})


@attrs.frozen(kw_only=True)
class Softmax(Layer):
    """exp(x) divided by its sum along the channels; a network for training ends in logits, without it."""

    type: ClassVar[str] = "softmax"
    adds_up_to_one: ClassVar[bool] = True
    backward_reads: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class Dropout(_Activation):
    """
    Zero a share of the elements while training and scale the rest up; nothing in inference.

    Attributes:
        p: Share of the elements that is zeroed.
    """

    type: ClassVar[str] = "dropout"
    idle_in_inference: ClassVar[bool] = True
    p: float = field(default=0.5, validator=between(0, 1, "a number from 0, below 1", high_open=True))

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Return one tensor of one byte per element, which marks the elements that were not zeroed."""
        return {"mask": (math.prod(self.input_shape), 1)}
