"""
Dynamic loss scaling: gradients too small for float16 are made larger, by as much as the largest of them allow.

The loss's gradient is multiplied by a scale and the parameters' gradients are divided by it again before the
step.  Where one of them is not finite, the step is skipped and the scale halved; after many steps that went well
it is doubled (Micikevicius et al., 2018, arXiv:1710.03740, section 3.2).  Start, factors and interval are those
of PyTorch's torch.amp.GradScaler.  float32 and bfloat16 have the exponents to do without.

The state is four float32 words where the arrays are, so that no step waits for the host to look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

INITIAL = 2.0**16
FACTOR = 2.0
INTERVAL = 2000
"""Steps that must go well, one after the other, before the scale is doubled."""

LEAST, MOST = 2.0**-126, 2.0**126
"""Bounds of the scale: it and its inverse stay normal numbers, also where every step of a lost run is skipped."""

SCALE, UNSCALE, GOOD, SKIPPED = range(4)
"""Words of the state: the scale; what this step's gradients are multiplied by, 0 if it is skipped; steps gone well
since the scale changed; steps skipped in all."""

STATE_WORDS = 4


def initial_state() -> np.ndarray[Any, Any]:
    """
    Give the state before the first step.

    Example:
        >>> initial_state().tolist()
        [65536.0, 0.0, 0.0, 0.0]
    """
    return np.array([INITIAL, 0, 0, 0], dtype=np.float32)


def update_loss_scale(
    state: Any,
    gradients: Sequence[Any],
    *,
    interval: int = INTERVAL,
    workspace: Any = None,  # noqa: ARG001 - hand-written kernels need it
) -> None:
    """
    Look for gradients that are not finite, and set what the step multiplies them by and the next step's scale.

    Args:
        state: float32 array of four words, see `initial_state`; overwritten.
        gradients: Flat arrays of any float type: the parts of the gradient.
        interval: Steps that must go well before the scale is doubled.
        workspace: Not used.

    Example:
        >>> state = initial_state()
        >>> update_loss_scale(state, [np.array([1.0, np.inf], np.float16)])
        >>> state.tolist()
        [32768.0, 0.0, 0.0, 1.0]
    """
    scale, good = float(state[SCALE]), int(state[GOOD]) + 1
    if not all(np.isfinite(part).all() for part in gradients):
        state[SCALE], state[UNSCALE], state[GOOD] = max(scale / FACTOR, LEAST), 0, 0
        state[SKIPPED] += 1
    else:
        grows = good >= interval
        state[SCALE], state[UNSCALE] = min(scale * FACTOR, MOST) if grows else scale, 1 / scale
        state[GOOD] = 0 if grows else good
