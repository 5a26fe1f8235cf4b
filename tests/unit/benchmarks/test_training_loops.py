"""Rates and gains of training loops are computed from turns in the same rounds."""

from __future__ import annotations

import pytest

from benchmarks.pages.training_loops import summarize, training_loops

ROW = {
    "loop": "mlp", "error": "", "recommended": 16, "reported": 109.0, "wall_seconds": 17.6, "lightning": 64,
    "timed_once": 16,
    "turns": {
        "16": [[200, 2.0], [100, 2.0], [300, 2.0]],  # 100, 50 and 150 samples/s: a host that changes its speed
        "32": [[107, 1.0], [53.5, 1.0], [160.5, 1.0]],  # 7 % faster in each round
        "64": [[60, 1.0]],  # left out after the first round
    },
}  # fmt: skip


def test_a_gain_is_a_median_of_ratios_within_rounds():
    each = summarize(ROW)
    assert (each.plain, each.ratio, each.best) == (100.0, pytest.approx(1.09), 32)
    assert each.gains == {32: pytest.approx(0.07), 64: pytest.approx(-0.4)}


def test_a_table_counts_the_loops_that_meet_a_goal_and_shows_failures():
    failed = {"loop": "gan", "error": "tune: ValueError: a | b"}
    more = {**ROW, "loop": "lstm", "reported": 111.0, "wall_seconds": 17.4}
    result = {
        "device": "CPU", "threads": 2, "date": "2026-01-01", "commit": "abc", "environment": {"torch": "2.0"},
        "budget_seconds": 5.0, "rounds": 3, "turn_seconds": 1.0, "loops": [ROW, more, failed],
    }  # fmt: skip
    text = training_loops(result)
    for goal in ("within 10 %: 1 of 3", "more than 5 % faster: 0 of 3", "at most 17.5 s: 1 of 3"):
        assert goal in text
    assert "ValueError: a / b" in text
    assert "| `mlp` | 16 | 109 | 100 | 1.09 | 32: +7.0 % | 17.6 | 64: -40.0 % | 16: +0.0 % |" in text
