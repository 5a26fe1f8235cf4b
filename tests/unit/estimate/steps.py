"""A GPU, layers and models of their times that tests of steps share."""

from __future__ import annotations

import numpy as np

from cubatch.estimate.vendor.algorithms import FAMILIES
from cubatch.estimate.vendor.fitted import Fitted
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network.layers import Conv2d, Linear
from tests.checks import assert_within, gamma
from tests.unit.estimate.building import COSTS, constants_of

# An SM makes 10^11 multiply-adds a second.
CARD = Device(
    name="card", slug="card", compute_capability=(7, 5), num_sms=48, tensor_cores=True, l2_bytes=2**22,
    peak_flops_per_second={"float32": 48 * 2e11, "float16": 8 * 48 * 2e11}, peak_bytes_per_second=1.25e12,
)  # fmt: skip


P100, V100, A100, H200 = map(catalogue.find, ("p100-pcie-16gb", "v100-pcie-16gb", "a100-pcie-80gb", "h200-sxm"))


CONV = Conv2d(h=28, w=28, c=256, k=256, r=3, s=3, pad=1)


CHESS = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)


SMALL = Conv2d(h=28, w=28, c=256, k=64, r=1, s=1)


LINEAR = Linear(c=2048, k=1000)


SUM = gamma(100, 2.0**-53)


def tiles_alone():
    """Constants that leave one algorithm, whole tiles of 128 x 128 one wave after the other, and no bytes."""
    found = constants_of(partial=1e9) | {f"cost {name}": 1e9 for name in COSTS[1:]}
    return found | {f"cost {COSTS[0]}": 1.0, "scattered": 1e9} | {f"tail {family}": 1.0 for family in FAMILIES}


def model_of(name, sd, **changes):
    """A model by hand, which knows CARD and its kin."""
    scales = {"card": (1.0, 1.0), "v100-pcie-16gb": (1.0, 1.0)}
    facts = {"scales": scales, "trees": None, "unseen_sd": 0.2, "transforms": "tensor" not in name}
    return Fitted(name, tiles_alone(), sd=sd, **(facts | changes))


def half_width(step):
    """Standard deviations of the logarithm on either side, from the interval of 90 in 100."""
    assert_within(step.low * step.high, step.seconds**2, SUM * step.seconds**2)
    return np.log(step.high / step.seconds) / 1.6448536269514722


def codes(step):
    """Return the codes of a prediction's notes."""
    return [note.code for note in step.notes]
