"""The campaign of faults in small: nothing is lost."""

from __future__ import annotations

import pytest

from benchmarks.faults import devices
from tests.thorough import THOROUGH


@pytest.mark.parametrize("kind", devices.KINDS)
@pytest.mark.parametrize("seed", range(100 if THOROUGH else 1))
def test_nothing_is_lost_on_a_device_that_misbehaves(kind, seed):
    """Every reading that was kept is there once, the answer is the rule's, and deadlines hold."""
    trial = devices.try_once(kind, seed)
    assert trial.is_good, trial
