"""The README's table of what was measured: each figure comes from the file that it is said to come from."""

from __future__ import annotations

import pytest

from benchmarks.pages.trust import trust

MACHINE = {"name": "a CPU", "threads": 2}


def results():
    """Six small files with figures that can be told apart."""
    search = {"devices": 7, "summary": [
        {"kind": kind, "budget": budget, "regret": {"mean": mean, "p95": 5 * mean}, "seconds": {"mean": 6.5}}
        for kind, budget, mean in (("all classes", 60.0, 0.011), ("all classes", 2.0, 0.5), ("plateau", 60.0, 0.3))
    ]}  # fmt: skip
    tune = {"budget_seconds": 30.0, "device": "a CPU", "rows": [{"tuned": [{"lost": 0.01}, {"lost": -0.02}]},
                                                              {"tuned": [{"lost": 0.04}]}]}  # fmt: skip
    sizes = [{"peak_bytes": 100, "predicted_peak_bytes": 101}, {"peak_bytes": 200, "predicted_peak_bytes": 195},
             {"peak_bytes": None, "predicted_peak_bytes": 9}]  # fmt: skip
    memory = {"measurements": sizes, "spec": {"name": "net"}, "mode": "training", "device": MACHINE}
    scores = {"scores": {
        "neusight, unseen GPU": {"median": 6.3}, "deepbench conv, unseen GPU": {"median": 13.0},
        "networks, a": {"inside_interval": 90, "mean_error": 16.0},
        "networks, b": {"inside_interval": 80, "mean_error": 47.0},
    }}  # fmt: skip
    ratios = [{"mean_ratio": 0.76}, {"mean_ratio": 1.72}, {"mean_ratio": 1.0}]
    engine = {"networks": ratios, "device": MACHINE, "environment": {"torch": "2.0"}}
    epochs = [{"number": 1, "test_accuracy": 0.9}, {"number": 2, "test_accuracy": 0.9888}]
    training = {"epochs": epochs, "model": "net", "batch_size": 64, "device": MACHINE}
    return [search, tune, memory, scores, engine, training]


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        (0, ["1.1 %", "5.5 %", "6.5 s", "7 fake devices"]),
        (1, ["30 s", "1.0 % in the median", "4.0 % at worst", "of 3 runs"]),
        (2, ["2.50 %", "of 2 batch sizes"]),
        (3, ["6.3 % (NeuSight)", "13.0 %", "16 to 47 %"]),
        (4, ["0.76 to 1.72"]),
        (5, ["98.88 %", "after 2 epochs"]),
    ],
)
def test_each_line_has_the_figures_of_its_file(line, figures):
    """Worked out by hand; the largest error of memory is 195 / 200 - 1."""
    rows = trust(*results()).splitlines()[2:]
    assert len(rows) == 6
    assert [figure for figure in figures if figure not in rows[line]] == []


def test_a_file_too_few_is_noticed():
    """A line is never left out."""
    with pytest.raises(ValueError, match="shorter"):
        trust(*results()[:-1])
