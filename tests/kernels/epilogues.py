"""Drawn epilogues of products: bias and activation for nt, residual and mask for nn, residual for tn."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from cubatch.engine.native.operands import Fused
from tests.kernels import cases

PARTS = st.sampled_from([(), ("residual",), ("mask",), ("residual", "mask")])
"""What the product of a gradient has; one that has nothing is stored another way in places."""


@attrs.frozen(eq=False)
class Epilogue:
    """
    Drawn arrays; None where there is no such term.

    Attributes:
        bias: (n,).
        residual, mask: (m, n).
        activation: "none", "relu", ...
    """

    bias: Any = None
    residual: Any = None
    mask: Any = None
    activation: str = "none"

    def put(self, launcher: Any) -> tuple[Any, Fused]:
        """Give the bias and all else on the device."""
        bias, residual, mask = (
            None if array is None else launcher.put(array) for array in (self.bias, self.residual, self.mask)
        )
        return bias, Fused(residual=residual, mask=mask, activation=self.activation)

    def added(self) -> Any:
        """Give what is added to the product, in float64."""
        return sum((cases.decoded(array) for array in (self.bias, self.residual) if array is not None), np.float64(0))

    def masked(self, values: Any) -> Any:
        """Put zeros where nothing passes: to results, and to bounds of their errors."""
        return values if self.mask is None else np.where(cases.decoded(self.mask) <= 0, 0, values)


def drawn(
    random: np.random.Generator, layout: str, m: int, n: int, dtype: str, *, activation: str, parts: tuple[str, ...]
) -> Epilogue:
    """
    Draw what a layout's product of (m, n) elements can end with.

    Args:
        random: Fills the arrays.
        layout: "nt", "nn" or "tn".
        m, n: Extents.
        dtype: Storage type.
        activation: Of nt, which has a bias too.
        parts: Of nn; tn has no mask. With "bias" any layout ends like nt, as those of the naive kernels may.
    """
    if layout == "nt" or "bias" in parts:
        return Epilogue(bias=cases.drawn(random, (n,), dtype), activation=activation)
    allowed = parts if layout == "nn" else [part for part in parts if part != "mask"]
    terms = {part: cases.drawn(random, (m, n), dtype) for part in allowed}
    if "mask" in terms:
        terms["mask"][:1, :1] = cases.encoded(np.nan, dtype)  # passes
    return Epilogue(**terms)
