"""The search benchmark writes what its table is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_search
from benchmarks.pages import search
from benchmarks.search.fake_devices import make, numbers
from benchmarks.search.trials import FINDERS, OURS


def test_the_command_writes_every_trial_and_the_summary(tmp_path: Path) -> None:
    """A run over two classes gives a picture, and JSON that the README's table is made of."""
    path, figure = tmp_path / "search.json", tmp_path / "search.png"
    bench_search.main([
        "--devices", "2", "--kinds", "plateau;latency limit", "--budgets", "2,10", "--worst", "1",
        "--json", str(path), "--figure", str(figure),
    ])  # fmt: skip
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    found = [dict(zip(content["columns"], row, strict=True)) for row in content["trials"]]
    own = [(trial["kind"], trial["budget"]) for trial in found if trial["finder"] == OURS]
    assert content["schema"] == 2
    assert sorted(own) == [("latency limit", 2.0), ("latency limit", 10.0), ("plateau", 2.0), ("plateau", 10.0)]
    assert {trial["finder"] for trial in found} == {OURS, *FINDERS}
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert search.search(content).count("\n| ") == 2 + 2 + len(FINDERS)  # two lines of head, two budgets


def test_regret_is_the_share_that_is_lost_beyond_the_tolerance() -> None:
    """A size at x of the best throughput loses 1 - x / 0.99, one within the tolerance nothing, no answer all of it."""
    case = make(0, numbers(1, ["plateau"])[0])
    share = case.best_cost / case.cost(1)
    assert case.regret(1) == pytest.approx(1.0 - share / 0.99)
    assert (case.regret(case.best_batch_size), case.regret(case.knee), case.regret(None)) == (0.0, 0.0, 1.0)
