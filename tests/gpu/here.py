"""The GPU of this machine, and the marks of tests that need one."""

from __future__ import annotations

import pytest

from cubatch.errors import CubatchError
from cubatch.hardware import probe
from cubatch.hardware.facts import Device


def first_gpu() -> Device | None:
    """Return the first GPU, or None."""
    try:
        return next((device for device in probe.devices() if device.kind == "cuda"), None)
    except CubatchError:
        return None


GPU = first_gpu()
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(GPU is None, reason="no GPU in this machine")]
