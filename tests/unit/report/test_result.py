"""The table of a tuning result."""

from __future__ import annotations

import re

import pytest

from cubatch.report import answer as words
from cubatch.report.tables.result import legend, table, tuning_grid
from tests.unit.tables import row_of, rows_of
from tests.unit.tuned import about, measurement, tuned


def test_the_row_of_the_answer_is_marked_and_says_time_rate_and_share():
    """64 samples at 3000 per second take 21.3 ms, and 3000 is 99.3 % of 3020; memory comes from the plan."""
    grid = tuning_grid(tuned())
    assert row_of(grid, 64) == {
        "": "→", "batch": "64", "time": "21.3 ms", "samples/s": "3 000", "±": "± 2.0 %", "of best": "99.3 %",
        "samples/J": None, "memory plan": "64.00 MiB", "memory real": None, "roofline": None, "status": "",
        "reasons": "coulom n=1, crest 2 of conv3_2",
    }  # fmt: skip
    assert grid.marked == {rows_of(grid).index(row_of(grid, 64))}
    assert [row["batch"] for row in rows_of(grid)] == ["16", "32", "64", "128", "256"]


def test_a_size_that_did_not_run_says_why_and_shows_no_figures():
    """What was not measured is not known, never a zero."""
    row = row_of(tuning_grid(tuned()), 256)
    assert row["status"] == "out of memory"
    assert [row[name] for name in ("time", "samples/s", "±", "of best")] == [None] * 4


def test_what_the_engine_measured_of_memory_and_roofline_is_shown():
    """Beside the plan what was really taken; and the share of the roofline."""
    row = row_of(tuning_grid(tuned(measurements=[measurement(8, 0.1, peak_bytes=2**20, roofline_fraction=0.4)])), 8)
    assert (row["memory plan"], row["memory real"], row["roofline"]) == ("8.00 MiB", "1.00 MiB", "40.0 %")


def test_a_sole_size_that_happened_to_be_measured_is_not_called_the_answer():
    """The arrow says what it is: the only one."""
    others = [measurement(n, status="error") for n in (2, 4, 8, 16)]
    result = tuned(measurements=[measurement(1, 11.5), *others], batch_size=1, fastest_batch_size=1, tied_with=[],
                   decided_by="budget")  # fmt: skip
    assert legend(result) == ["→ compared with none."]


def test_a_tie_far_behind_and_hardly_known_is_too_noisy_to_tell():
    """128 at 65 % and ± 30 % is no equal of 96; at 65 % and ± 0.1 % or at 91 % it keeps its mark."""
    noisy = about({48: 500.0, 96: 1000.0, 128: 650.0}, wide=[128], tied_with=[128])
    assert row_of(tuning_grid(noisy), 128)[""] == "~"
    assert legend(noisy) == ["→ answer, ~ too noisy to tell."]
    assert "128 is too noisy to tell" in words.answer(noisy)

    unknown = about({48: 500.0, 96: 1000.0, 128: 650.0}, few=[128], tied_with=[128])
    assert row_of(tuning_grid(unknown), 128)[""] == "~"  # too few timings for an interval

    for rate, wide in ((650.0, []), (910.0, [128])):
        known = about({48: 500.0, 96: 1000.0, 128: rate}, wide=wide, tied_with=[128])
        assert row_of(tuning_grid(known), 128)[""] == "≈"
        assert "96 and 128 are about equally fast" in words.answer(known)


def test_by_latency_the_share_is_that_of_the_lowest():
    """16 ms against 21.3 ms."""
    grid = tuning_grid(tuned(objective="latency", batch_size=32, fastest_batch_size=16, tied_with=[]))
    assert [row_of(grid, n)["of best"] for n in (16, 64)] == ["100 %", "75.0 %"]


def test_energy_shows_samples_per_joule_and_ranks_by_it():
    """0.5 J per sample is 2 samples per joule, half of what 0.25 J gives."""
    result = tuned(
        objective="energy", batch_size=64, fastest_batch_size=64, tied_with=[],
        measurements=[measurement(32, 0.1, joules_per_sample=0.5), measurement(64, 0.1, joules_per_sample=0.25)],
    )  # fmt: skip
    row = row_of(tuning_grid(result), 32)
    assert (row["samples/J"], row["of best"]) == ("2", "50.0 %")
    assert ", 2 samples/J." in words.answer(tuned(**result | {"batch_size": 32}))


def test_reasons_ties_and_the_largest_batch_stand_beneath():
    """The answer, every reason a point of its own, and the marks, of which a tied size carries one."""
    result = tuned(tied_with=[32])
    said, points, marks = tuning_grid(result).notes
    assert said == words.answer(result)
    assert points[:-1] == tuple(result["reasons"])
    assert re.findall(r"\d+", points[-1]) == ["200", "128"]  # the largest that fits, and that ran
    assert row_of(tuning_grid(result), 32)[""] == "≈"
    assert marks == "→ answer, ▲ fastest, ≈ tied with the fastest."


@pytest.mark.parametrize("width", [70, 80, 95, 110])
def test_the_table_keeps_to_its_width_with_one_line_for_each_size(width):
    """On a narrow terminal columns give way, lines do not break."""
    reasons = [f"crest {n} of layer{n}.0.very_long_name_of_a_convolution" for n in range(1, 9)]
    measurements = [measurement(2**k, 2**k / 1e6, peak_bytes=k * 10**9, reasons=reasons) for k in range(3, 21)]
    text = table(tuned(measurements=measurements, batch_size=64), width=width)

    assert max(len(line) for line in text.split("\n")) <= width
    rows = [line for line in text.split("\n\n")[1].split("\n") if re.match(r"[→▲≈]?\s*\d+ ", line)]
    assert len(rows) == len(measurements)
    assert all(row.endswith("+7") for row in rows)
    head = text.split("\n\n")[1].split("\n")[0]
    assert ("memory real" in head) == (width > 70)
    assert ("memory plan" in head) == (width > 80)


def test_sizes_ruled_out_without_a_timing_share_a_line_beneath_the_table():
    """What tells nothing takes no row; the JSON keeps it all."""
    gone = [measurement(n, status="dropped", stop_reason="by 16 and 64") for n in (1, 2, 3)]
    grid = tuning_grid(tuned(measurements=[*gone, *tuned()["measurements"]]))
    assert [row["batch"] for row in rows_of(grid)] == ["16", "32", "64", "128", "256"]
    assert row_of(grid, 16)["status"] == "dropped"  # it was measured
    assert grid.beneath == ("3 sizes are not expected to be better: 1, 2, 3, by their neighbours' readings.",)
    one = tuning_grid(tuned(measurements=[gone[0], *tuned()["measurements"]]))
    assert one.beneath == ("1 size is not expected to be better: 1, by its neighbours' readings.",)


@pytest.mark.parametrize(("count", "is_folded"), [(3, False), (4, True)])
def test_more_than_three_sizes_that_were_not_tried_share_a_line(count, is_folded):
    """Three rows can be read; of more the reasons are long and alike."""
    sizes = [2**k for k in range(9, 9 + count)]
    untried = [measurement(n, status="not_run", stop_reason=f"{n} would take too long") for n in sizes]
    grid = tuning_grid(tuned(measurements=[*tuned()["measurements"], *untried]))
    line = f"{count} sizes not tried, for lack of time: {', '.join(map(str, sizes))}."
    assert grid.beneath == ((line,) if is_folded else ())
    assert len(grid.rows) == 5 + (0 if is_folded else count)


def test_many_sizes_in_a_line_are_cut_off_with_their_number():
    """Twelve are shown; of thirteen the last takes no more room than the words for it."""
    for count, end in ((13, "13, by"), (14, "12 and 2 more, by")):
        gone = [measurement(n, status="dropped") for n in range(1, count + 1)]
        (line,) = tuning_grid(tuned(measurements=[*gone, measurement(64, 0.02)])).beneath
        assert end in line


def test_over_limit_says_which_limit():
    """One was refused by the plan, one measured and too slow, one ran once and might take too much memory."""
    refused = [(512, None), (1024, 2.0), (1500, 0.5)]
    measurements = [*tuned()["measurements"], *(measurement(n, took, status="over_limit") for n, took in refused)]
    limits = {"max_batch_size": None, "memory_bytes": 2**30, "latency_seconds": 1.0}
    grid = tuning_grid(tuned(measurements=measurements, limits=limits))
    assert [row_of(grid, n)["status"] for n, _ in refused] == ["over memory", "over latency", "over memory"]


def test_a_prediction_says_so_in_every_line():
    """Nobody may take a predicted figure for a measured one."""
    result = tuned(predicted=True, measurements=[measurement(32, 0.01), measurement(64, 0.02)], fastest_batch_size=64)
    grid = tuning_grid(result)
    assert grid.title.startswith("Predicted: ")
    assert {row["status"] for row in rows_of(grid)} == {"predicted"}
    assert words.answer(result).startswith("Predicted, not measured: use batch size 64")


def test_a_partial_result_has_a_table_and_no_answer():
    """After Ctrl-C there may be timings and no answer; both are shown as they are."""
    result = tuned(batch_size=None, fastest_batch_size=None, tied_with=[], decided_by=None, largest_measured=32,
                   measurements=[measurement(32, 0.016), measurement(64, status="interrupted")])  # fmt: skip
    grid = tuning_grid(result)
    assert "Interrupted; best so far: 32 (2 000 samples/s, " in grid.text()
    assert "1 size not reached before the interruption: 64." in grid.text()
    assert {row[""] for row in rows_of(grid)} == {""}
    assert (grid.marked, legend(result)) == (frozenset(), [])


@pytest.mark.parametrize(
    ("sizes", "allowed", "said"),
    [
        ((64, 128), 128, "max_batch_size allows none above 128"),
        ((32, 64), 64, "max_batch_size allows no larger one"),
        ((32, 64), 512, "what lies above 64, up to the 512 that max_batch_size allows, was judged by smaller sizes"),
    ],
)
def test_max_batch_size_is_said_to_rule_out_only_what_it_rules_out(sizes, allowed, said):
    """The answer may be the limit itself, or far below it where larger sizes were never run."""
    low, high = sizes
    result = tuned(batch_size=64, fastest_batch_size=64, tied_with=[], decided_by="max_batch_size",
                   limits={"max_batch_size": allowed}, largest_measured=high,
                   measurements=[measurement(low, low / 1000), measurement(high, high / 1001)])  # fmt: skip
    assert said in words.answer(result)
    assert "much larger batches" not in words.answer(result)


def test_an_empty_result_can_be_shown():
    """Interrupted before the first timing: nothing to show is no reason to fail."""
    text = table(tuned(batch_size=None, fastest_batch_size=None, measurements=[], tied_with=[], decided_by=None))
    assert "There is no answer yet" in text
