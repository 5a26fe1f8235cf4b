"""The table of a tuning result."""

from __future__ import annotations

import re

import pytest

from cubatch.report.tables.result import legend, tuning_grid
from cubatch.tuning.results import TuningResult
from tests.unit.tables import row_of, rows_of
from tests.unit.tuned import about, measurement, result_of, tuned


def of(rates, **more):
    """A result with these samples per second."""
    return TuningResult.from_mapping(about(rates, **more))


def test_a_sole_size_that_happened_to_be_measured_is_not_called_the_answer():
    """It has no mark: there is no recommendation."""
    others = [measurement(n, status="error") for n in (2, 4, 8, 16)]
    result = result_of(measurements=[measurement(1, 11.5), *others], batch_size=None, fastest_batch_size=1,
                   tied_with=[], decided_by="budget")  # fmt: skip
    assert legend(result) == []
    assert row_of(tuning_grid(result), 1)[""] == ""


def test_a_tie_far_behind_and_hardly_known_is_too_noisy_to_tell():
    """128 at 65 % and ± 30 % is no equal of 96; at 65 % and ± 0.1 % or at 91 % it keeps its mark."""
    noisy = of({48: 500.0, 96: 1000.0, 128: 650.0}, wide=[128], tied_with=[128])
    assert row_of(tuning_grid(noisy), 128)[""] == "~"
    assert legend(noisy) == ["→ recommended, ~ too noisy to tell."]

    unknown = of({48: 500.0, 96: 1000.0, 128: 650.0}, few=[128], tied_with=[128])
    assert row_of(tuning_grid(unknown), 128)[""] == "~"  # too few timings for an interval

    for rate, wide in ((650.0, []), (910.0, [128])):
        known = of({48: 500.0, 96: 1000.0, 128: rate}, wide=wide, tied_with=[128])
        assert row_of(tuning_grid(known), 128)[""] == "≈"


def test_by_latency_the_share_is_that_of_the_lowest():
    """16 ms against 21.3 ms."""
    grid = tuning_grid(result_of(objective="latency", batch_size=32, fastest_batch_size=16, tied_with=[]))
    assert [row_of(grid, n)["of best"] for n in (16, 64)] == ["100 %", "75.0 %"]


def test_energy_shows_samples_per_joule_and_ranks_by_it():
    """0.5 J per sample is 2 samples per joule, half of what 0.25 J gives."""
    result = result_of(
        objective="energy", batch_size=64, fastest_batch_size=64, tied_with=[],
        measurements=[measurement(32, 0.1, joules_per_sample=0.5), measurement(64, 0.1, joules_per_sample=0.25)],
    )  # fmt: skip
    row = row_of(tuning_grid(result), 32)
    assert (row["samples/J"], row["of best"]) == ("2", "50.0 %")


@pytest.mark.parametrize("width", [70, 80, 95, 110])
def test_the_table_keeps_to_its_width_with_one_line_for_each_size(width):
    """On a narrow terminal columns give way, lines do not break."""
    reasons = [f"crest {n} of layer{n}.0.very_long_name_of_a_convolution" for n in range(1, 9)]
    measurements = [measurement(2**k, 2**k / 1e6, peak_bytes=k * 10**9, reasons=reasons) for k in range(3, 21)]
    text = tuning_grid(result_of(measurements=measurements, batch_size=64)).text(width)

    assert max(len(line) for line in text.split("\n")) <= width
    rows = [line for line in text.split("\n\n")[1].split("\n") if re.match(r"[→▲≈]?\s*\d+ ", line)]
    assert len(rows) == len(measurements)
    assert all(row.endswith("+7") for row in rows)
    head = text.split("\n\n")[1].split("\n")[0]
    assert ("memory real" in head) == (width > 70)
    assert ("memory plan" in head) == (width > 80)


def test_sizes_that_were_never_tried_have_no_row():
    """A sentence tells of them: what was ruled out or not reached, and of more than three what the budget left out."""
    gone = [measurement(n, status=status) for n, status in ((1, "dropped"), (2, "interrupted"))]
    for count in (3, 4):
        untried = [measurement(2**k, status="not_run") for k in range(9, 9 + count)]
        rows = rows_of(tuning_grid(result_of(measurements=[*gone, *tuned()["measurements"], *untried])))
        assert [row["batch"] for row in rows][:5] == ["16", "32", "64", "128", "256"]
        assert len(rows) == 5 + (count if count == 3 else 0)
        assert rows[0]["status"] == "dropped"  # it was measured


def test_over_limit_says_which_limit():
    """One was refused by the plan, one measured and too slow, one ran once and might take too much memory."""
    refused = [(512, None), (1024, 2.0), (1500, 0.5)]
    measurements = [*tuned()["measurements"], *(measurement(n, took, status="over_limit") for n, took in refused)]
    limits = {"max_batch_size": None, "memory_bytes": 2**30, "latency_seconds": 1.0}
    grid = tuning_grid(result_of(measurements=measurements, limits=limits))
    assert [row_of(grid, n)["status"] for n, _ in refused] == ["over memory", "over latency", "over memory"]


def test_a_partial_result_has_a_table_and_no_answer():
    """After Ctrl-C there may be timings and no answer; before the first timing not even those."""
    nothing = {"batch_size": None, "fastest_batch_size": None, "tied_with": [], "decided_by": None, "reasons": []}
    ends = [measurement(32, 0.016), measurement(64, status="interrupted")]
    grid = tuning_grid(result_of(measurements=ends, **nothing))
    assert [(row["batch"], row[""]) for row in rows_of(grid)] == [("32", "")]
    assert (grid.marked, grid.notes) == (frozenset(), ())
    assert "tiny-net" in result_of(measurements=[], **nothing).table()
