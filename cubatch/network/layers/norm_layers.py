"""Normalization layers with a trained scale and shift, and a trained scale alone."""

from __future__ import annotations

import attrs
from attrs import field

from cubatch.network.extents import between
from cubatch.network.layer import Layer

_EPSILON = between(0, 1, "a number above 0, at most 1", low_open=True)


@attrs.frozen(kw_only=True)
class BatchNorm2d(
    Layer, type="batch_norm2d", in_place=True, can_add=True, can_clamp=True, can_activate=True, has_statistics=True,
    backward_reads=frozenset("x"),
):  # fmt: skip
    """
    Batch normalization over n, h, w, per channel, with a trained scale and shift.

    Attributes:
        eps: Added to the variance.
        momentum: Share of the new batch in the running statistics; 0 leaves them unchanged.
    """

    eps: float = field(default=1e-5, validator=_EPSILON)
    momentum: float = field(default=0.1, validator=between(0, 1, "a number from 0 to 1"))

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of scale "gamma" and shift "beta", (c,) each."""
        c = self.input_shape[2]
        return {"gamma": (c,), "beta": (c,)}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the running "mean" and variance "var", (c,) each."""
        c = self.input_shape[2]
        return {"mean": (c,), "var": (c,)}


@attrs.frozen(kw_only=True)
class LayerScale(Layer, type="layer_scale", in_place=True, can_add=True, backward_reads=frozenset("x")):
    """A trained factor for each channel, the same for all samples (Touvron et al., 2021, arXiv:2103.17239)."""

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the factors "gamma", (c,)."""
        return {"gamma": (self.input_shape[2],)}


@attrs.frozen(kw_only=True)
class LayerNorm(
    Layer, type="layer_norm", adds_gradients=True, gradients_at_once=True, backward_reads=frozenset("x")
):  # fmt: skip
    """
    Normalization over the channels of each position, with a trained scale and shift.

    Attributes:
        eps: Added to the variance.
    """

    eps: float = field(default=1e-6, validator=_EPSILON)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of scale "gamma" and shift "beta", (c,) each."""
        c = self.input_shape[2]
        return {"gamma": (c,), "beta": (c,)}

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Return {"statistics": (elements per sample, 4)}: mean and inverse deviation of each position, as float32."""
        h, w, _ = self.input_shape
        return {"statistics": (2 * h * w, 4)}
