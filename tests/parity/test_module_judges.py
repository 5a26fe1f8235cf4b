"""How answers for modules are judged: ours by as many processes as it takes to tell it from 3 %."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("torch")

from benchmarks import bench_module

JUDGES = 3


@pytest.fixture
def judged(monkeypatch):
    """
    Judge answers by the ratios of each process, the first one ours; tells the rows and what was asked.

    In the first processes the best size is out of memory.
    """

    def judge(ratios, without=0, best=32):
        asked = []

        def alone(_function, _name, _mode, _best, answers, _options):
            asked.append(list(answers))
            return {n: ratios[n] if len(asked) > without else [] for n in answers}

        monkeypatch.setattr(bench_module, "alone", alone)
        rows = [{"finder": "another" if i else bench_module.OURS, "batch_size": n} for i, n in enumerate(ratios)]
        case = {"module": "m", "mode": "inference", "best_batch_size": best, "finders": rows}
        bench_module.judge(case, Namespace(judges=JUDGES))
        return rows, asked

    return judge


def test_ours_is_judged_again_alone_where_its_interval_holds_three_percent(judged):
    """It is asked up to nine times, the others three times, and its interval says what is not known."""
    rows, asked = judged({24: [0.93, 0.97, 1.02], 32: [1.0, 1.0, 1.0]})
    assert asked == [[24, 32]] * JUDGES + [[24]] * (bench_module.MOST_JUDGES - JUDGES)
    assert rows[0]["turns"] == 3 * bench_module.MOST_JUDGES
    low, high = rows[0]["lost_interval"]
    assert low <= 0.03 <= high


def test_an_answer_that_does_not_run_has_lost_all(judged):
    """Neither a size without a single turn nor no answer at all is judged again."""
    rows, asked = judged({32: [1.0, 1.0, 1.0], 28: [], None: []})
    assert asked == [[28, 32]] * JUDGES
    assert [(row["lost"], row["turns"]) for row in rows] == [(0.0, 9), (1.0, 0), (1.0, 0)]
