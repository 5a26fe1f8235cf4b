"""Options of the network runner that tests share."""

from __future__ import annotations

OPTIONS = {
    "device": "cpu", "mode": "training", "dtype": "float32", "optimizer": "adam", "library": "im2col",
    "recompute": False, "seed": 1,
}  # fmt: skip
