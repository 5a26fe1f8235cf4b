"""Whether this very process runs on GPUs that are simulated: see tests/cudasim."""

from __future__ import annotations

import os

IS_SIMULATED = "CUDASIM_HOME" in os.environ
"""Registers and occupancy are made up then."""
