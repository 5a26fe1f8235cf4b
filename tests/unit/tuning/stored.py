"""Runs and timings that tests of the store share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from hypothesis import strategies as st

import cubatch
from cubatch.measure.records import Outcome, Timing
from cubatch.tuning.store import Run

ROOT = Path(cubatch.__file__).parents[1]


ASKED = {"spec": {"name": "mlp"}, "mode": "training", "seed": 0}


GIVEN = {"driver": "550", "numpy": "2.0.1", "threads": 4}


def begin(path, **changes):
    arguments = {"identity": ASKED, "conditions": GIVEN, "budget": 60.0} | changes
    return Run(path, **arguments)


def timing(batch_size=32, number=0, seconds=0.25, **facts):
    return Timing(batch_size=batch_size, round=number, seconds=seconds, **facts)


def run_child(script, *arguments, **options):
    """Start a Python that has `begin`, `timing`, os, sys and warnings."""
    prelude = "import os, sys, warnings; from tests.unit.tuning.stored import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


sizes = st.integers(1, 2**31 - 1)


amounts = st.none() | st.floats(1e-12, 1e12)


timings = st.builds(
    Timing,
    batch_size=sizes,
    round=st.integers(0, 10**6),
    seconds=st.floats(1e-30, 1e30),
    repeats=st.integers(1, 10**9),
    throttled=st.booleans(),
    sm_clock_mhz=amounts,
    joules=amounts,
    peak_bytes=st.none() | st.integers(0, 2**62),
    peak_device_bytes=st.none() | st.integers(0, 2**62),
    event_reasons=st.none() | st.integers(0, 2**62),
    temperature_celsius=amounts,
    power_watts=amounts,
    utilization_percent=amounts,
    used_bytes=st.none() | st.integers(0, 2**62),
    reference_batch_size=st.none() | sizes,
    reference_before_seconds=amounts,
    reference_after_seconds=amounts,
)


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


# Hypothesis also draws strings of the source, such as names of facts, whose values have types of their own.
facts = st.dictionaries(st.text().map("{}?".format), st.none() | st.text() | numbers | st.booleans())


outcomes = st.builds(
    Outcome,
    batch_size=sizes,
    status=st.sampled_from(["dropped", "error", "timeout"]),
    stop_reason=st.text(),
    facts=facts,
)
