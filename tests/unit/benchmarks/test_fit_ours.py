"""What products on Hopper take over what is counted, as it is fitted and as it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fit_ours
from cubatch.estimate import cubatch_kernels
from cubatch.hardware import catalogue

MEASURED = Path(fit_ours.__file__).parent / "results" / "h200-sxm" / "2026-11-26-2572091.json"


def test_the_constants_are_what_the_program_gives():
    """Of the pass that an H200 ran."""
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    found = list(fit_ours.passes(result, catalogue.find("h200-sxm")))
    share, times, _ = fit_ours.fit(found)
    assert times == pytest.approx(cubatch_kernels._TIMES_COUNTED)
    assert share == pytest.approx(cubatch_kernels.MOVED_SHARE)
