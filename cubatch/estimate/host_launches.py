"""The host of a framework: the time to launch operators, while the GPU computes those launched before."""

from __future__ import annotations

import numpy as np

from cubatch.estimate.predictions import Z90
from cubatch.estimate.vendor.algorithms import Array

HOST_SECONDS = {"forward": 40e-6, "backward": 30e-6, "optimizer": 30e-6}
"""
Time that the host takes to launch an operator of PyTorch, by phase: the forward pass in Python, the others in C++.

Chosen on published and own steps of networks on 13 boards; see `benchmarks/predictor/score_modules.py`.
"""
HOST_SD = 0.35
"""
Standard deviation of the logarithm of HOST_SECONDS, since hosts differ, and so do modules.

Chosen among 0.3, 0.35 and 0.4 on half of the networks, with the result of the others known.  With it, 90 % intervals
hold 86 to 94 % of published steps.
"""


def launched(kernels: Array, host: Array, kernels_sd: Array) -> tuple[Array, Array, Array]:
    """
    Return the seconds of steps whose kernels a host launches, with a 90 % interval: (seconds, low, high).

    Parts of a step wait for the host, others for the GPU.  The step takes the root of the sum of both squares, which
    fits published steps better than the maximum. Errors of kernels and host are independent. `kernels_sd` is the
    standard deviation of the logarithm of `kernels`.
    """
    seconds = np.hypot(kernels, host)
    share = (host / np.where(seconds > 0, seconds, 1.0)) ** 2  # derivative of log seconds by log host
    factor = np.exp(Z90 * np.hypot((1 - share) * kernels_sd, share * HOST_SD))
    return seconds, seconds / factor, seconds * factor
