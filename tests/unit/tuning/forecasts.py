"""What tests of forecasts share: the network they ask about, its sizes and times."""

from __future__ import annotations

from typing import Any

from cubatch.hardware import catalogue
from cubatch.network.layers import Conv2d
from cubatch.tuning.prediction import predict

V100 = catalogue.find("v100-sxm2-16gb")


GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1, name="go")


SCALE_SD = 0.2


SIZES = (8, 16, 32, 64, 128)


def rates(**by_size: float) -> dict[int, float]:
    """Seconds of a step from samples per second: rates(n8=100)."""
    return {int(name[1:]): int(name[1:]) / rate for name, rate in by_size.items()}


SAW = rates(n8=100, n16=150, n32=198.5, n64=200, n128=190)


def ask(**options: Any):
    return predict(GO, **{"device": V100, "batch_sizes": list(SIZES)} | options)
