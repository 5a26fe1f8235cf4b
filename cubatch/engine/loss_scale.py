"""
Dynamic loss scaling: gradients too small for float16 are enlarged, by as much as the largest of them allow.

The loss's gradient is multiplied by a scale, and the parameters' gradients are divided by it before the step. If one of
them is not finite, the step is skipped and the scale halved. After many good steps the scale is doubled
(Micikevicius et al., 2018, arXiv:1710.03740, section 3.2). Start, factors and interval are those of PyTorch's
torch.amp.GradScaler. float32 and bfloat16 have enough exponent bits without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

INITIAL = 2.0**16
FACTOR = 2.0
INTERVAL = 2000
"""Consecutive good steps before the scale is doubled."""

LEAST, MOST = 2.0**-126, 2.0**126
"""Bounds of the scale: it and its inverse stay normal numbers, even if every step is skipped."""

SCALE, UNSCALE, GOOD, SKIPPED = range(4)
"""Words of the state: scale, factor of this step's gradients (0 skips it), good steps since a change, skipped steps."""

STATE_WORDS = 4


def initial_state() -> np.ndarray[Any, Any]:
    """Return the state of loss scaling before the first step: four float32 words."""
    return np.array([INITIAL, 0, 0, 0], dtype=np.float32)


def update_loss_scale(
    state: Any,  # float32 array of four words, see `initial_state`; overwritten
    gradients: Sequence[Any],  # flat arrays of any float type: the parts of the gradient
    *,
    interval: int = INTERVAL,  # good steps before the scale is doubled
    workspace: Any = None,  # noqa: ARG001 - hand-written kernels need it
) -> None:
    """
    Set the factor of this step's gradients and the scale of the next step.

    The factor is 1 / scale. If a gradient is not finite, the factor is 0, which skips the step, and the scale is
    halved. After `interval` finite steps in a row the scale is doubled.
    """
    scale, good = float(state[SCALE]), int(state[GOOD]) + 1
    if not all(np.isfinite(part).all() for part in gradients):
        state[SCALE], state[UNSCALE], state[GOOD] = max(scale / FACTOR, LEAST), 0, 0
        state[SKIPPED] += 1
    else:
        grows = good >= interval
        state[SCALE], state[UNSCALE] = min(scale * FACTOR, MOST) if grows else scale, 1 / scale
        state[GOOD] = 0 if grows else good
