"""What a product ends with: nt bias and activation; nn residual and mask, or nothing; tn a residual, or nothing."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from cubatch.engine.native.product import Fused
from tests.kernels import cases


@attrs.frozen(eq=False)
class Ends:
    """
    Drawn arrays; None where there is no such end.

    Attributes:
        bias: (n,).
        residual, mask: (m, n).
        activation: "none", "relu", ...
    """

    bias: Any
    residual: Any
    mask: Any
    activation: str

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
        return values if self.mask is None else np.where(cases.decoded(self.mask) > 0, values, 0)


def drawn(random: np.random.Generator, layout: str, m: int, n: int, dtype: str, activation: str = "none") -> Ends:
    """Draw what a layout's product of (m, n) elements ends with; only nt has an activation."""
    if layout == "nt":
        return Ends(cases.drawn(random, (n,), dtype), None, None, activation)
    if random.integers(2):
        return Ends(None, None, None, "none")
    residual = cases.drawn(random, (m, n), dtype)
    return Ends(None, residual, cases.drawn(random, (m, n), dtype) if layout == "nn" else None, "none")
