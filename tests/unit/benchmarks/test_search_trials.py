"""The harness of the search benchmark: what one trial says, and what the figures, tables and files make of them."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from benchmarks import bench_search
from benchmarks.pages import search
from benchmarks.search import summary
from benchmarks.search.cases import Case
from benchmarks.search.fake_devices import make, numbers
from benchmarks.search.sessions import Session
from benchmarks.search.trials import FINDERS, OURS, Trial, try_rival

DONE = Trial(
    kind="plateau", device=0, finder="ludwig", budget=None, batch_size=8, best_batch_size=16, knee=4,
    largest=16, regret=0.02, usable=True, over_maximum=False, never_ran=False, gap=None, beyond=None,
    trials=3, seconds=1.0, stationary=True,
)  # fmt: skip
OWN = attrs.evolve(DONE, finder=OURS, budget=10.0, intervals=10, held=9, answer_held=True, fastest_held=False)
NONE = attrs.evolve(OWN, batch_size=None, usable=False, regret=1.0, intervals=0, held=0)


def case_of(kind: str) -> Case:
    """Make the first device of a class."""
    return make(0, numbers(1, [kind])[0])


@pytest.mark.parametrize(
    ("kind", "batch_size", "usable", "over_maximum", "never_ran"),
    [
        ("plateau", 2, True, False, False),
        ("plateau", 3, True, False, True),  # a fair answer that was never tried
        ("plateau", 401, True, True, True),  # above the maximum of 400, below the limit of memory
        ("plateau", 10**6, False, True, True),
        ("plateau", None, False, False, False),
        ("latency limit", 700, False, False, True),  # fits, but takes too long
    ],
)
def test_a_trial_says_what_is_wrong_with_an_answer(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    batch_size: int | None,
    *,
    usable: bool,
    over_maximum: bool,
    never_ran: bool,
) -> None:
    """What cannot be used has a regret of 1; what is above the maximum or never ran is marked; trials are counted."""

    def finder(runner: Session, _: object) -> int | None:
        for size in (1, 2):
            runner.prepare(size)
            runner.step()
        return batch_size

    monkeypatch.setitem(FINDERS, "test", finder)
    trial = try_rival("test", case_of(kind), 0)
    assert trial.usable == usable
    assert (trial.regret < 1.0) == usable
    assert (trial.over_maximum, trial.never_ran) == (over_maximum, never_ran)
    assert (trial.batch_size, trial.trials) == (batch_size, 2)
    assert trial.seconds > 0


def test_figures_count_a_missing_answer_and_are_apart_for_stationary_devices() -> None:
    """A missing answer loses all.  Nine of ten intervals hold; devices that change their speed count among all only."""
    row = summary.figures([OWN] * 19 + [NONE])
    assert row["regret"] == {"mean": pytest.approx(0.069), "median": 0.02, "p95": 0.02}
    row = summary.figures([OWN, attrs.evolve(OWN, stationary=False, held=0, answer_held=False), NONE])
    assert row["coverage"]["stationary"]["intervals"] == {"share": 0.9, "of": 10}
    assert row["coverage"]["every"]["intervals"] == {"share": 0.45, "of": 20}
    assert row["coverage"]["every"]["answer"] == {"share": pytest.approx(2 / 3), "of": 3}
    assert summary.figures([DONE])["coverage"]["every"]["intervals"] is None


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
