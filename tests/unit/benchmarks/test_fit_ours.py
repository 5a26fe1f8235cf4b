"""What products on Hopper take over what is counted, as it is fitted and as it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fit_ours
from cubatch.bench.implementations import OTHER_WAYS
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


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_kernels_in_other_launches_are_left_out(way: str):
    """An entry ten times as fast as the fastest, whose label says so, changes no fitted time."""
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    device = catalogue.find("h200-sxm")
    before = list(fit_ours.passes(result, device))
    for item in (item for stage in result["stages"] for item in stage["items"] if item["status"] == "ok"):
        ours = [e for e in item.get("result", {}).get("entries", ()) if e["side"] == "ours" and e.get("seconds")]
        if ours:
            fast = min(e["seconds"] for e in ours) / 10
            item["result"]["entries"].append(ours[0] | {"seconds": fast, "label": f"hopper 128x128 {way}"})
    assert list(fit_ours.passes(result, device)) == before
