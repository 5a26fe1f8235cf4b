"""How answers for modules are judged: by as many processes as it takes to tell them from 3 %."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import bench_module

JUDGES = 3


@pytest.fixture
def judged(monkeypatch):
    """Judge answers by given ratios, one list for each process and answer; tells the rows and what was asked."""

    def judge(ratios):
        asked = []

        def alone(_function, _name, _mode, _best, answers, _options):
            asked.append(list(answers))
            return {n: ratios[n] for n in answers}

        monkeypatch.setattr(bench_module, "alone", alone)
        rows = [{"batch_size": n} for n in ratios]
        case = {"module": "m", "mode": "inference", "best_batch_size": 32, "finders": rows}
        bench_module.judge(case, Namespace(judges=JUDGES))
        return rows, asked

    return judge


def test_answers_that_are_told_from_three_percent_need_no_more_judges(judged):
    """One that loses nothing and one that loses a tenth are judged three times, and their median is what they lost."""
    rows, asked = judged({32: [1.0, 1.0, 1.0], 16: [0.88, 0.9, 0.91]})
    assert asked == [[16, 32]] * JUDGES
    assert [row["lost"] for row in rows] == [0.0, pytest.approx(0.1)]
    assert [row["turns"] for row in rows] == [9, 9]


def test_an_answer_whose_interval_holds_three_percent_is_judged_again_alone(judged):
    """It is asked up to nine times, the others three times, and its interval says what is not known."""
    rows, asked = judged({32: [1.0, 1.0, 1.0], 24: [0.93, 0.97, 1.02]})
    assert asked == [[24, 32]] * JUDGES + [[24]] * (bench_module.MOST_JUDGES - JUDGES)
    assert rows[1]["turns"] == 3 * bench_module.MOST_JUDGES
    low, high = rows[1]["lost_interval"]
    assert low <= 0.03 <= high


def test_an_answer_that_does_not_run_has_lost_all(judged):
    """Neither a size without a single turn nor no answer at all is judged again."""
    rows, asked = judged({32: [1.0, 1.0, 1.0], 28: [], None: []})
    assert asked == [[28, 32]] * JUDGES
    assert [(row["lost"], row["turns"]) for row in rows] == [(0.0, 9), (1.0, 0), (1.0, 0)]
