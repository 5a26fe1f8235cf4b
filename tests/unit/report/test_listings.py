"""What the commands print from records: figures with their units, in their own columns."""

from __future__ import annotations

import math

from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.report import grid
from cubatch.report.tables import candidates, common, devices, footprint, store, training


def line_of(content, first):
    """Find the line of a grid that begins with a cell."""
    return next(line for line in grid.grid(content).split("\n") if line.split()[:1] == [first])


def test_plain_gives_what_json_can_hold():
    """JSON knows no tuple, no record, no NaN and no infinity."""
    record = Candidate(8, ("power of two",), predicted_seconds=math.nan)

    assert common.plain({"c": (record, math.inf, 1.5, None)}) == {
        "c": [
            {
                "batch_size": 8,
                "reasons": ["power of two"],
                "predicted_peak_bytes": None,
                "predicted_seconds": None,
                "over_limit": False,
            },
            None,
            1.5,
            None,
        ]
    }


def test_candidates_show_plan_prediction_limit_and_every_reason():
    """A size over the limit is listed and says so."""
    content = candidates.candidates(
        [
            Candidate(8, ("coulom n=1", "power of two"), 2**20, 0.002),
            Candidate(512, ("asked for",), 2**31, over_limit=True),
        ],
        title="t",
    )

    assert line_of(content, "8").split("  ")[-1] == "coulom n=1, power of two"
    assert "1.00 MiB" in line_of(content, "8")
    assert "2.00 ms" in line_of(content, "8")
    assert "over the limit" in line_of(content, "512")


def test_explain_names_the_channels_to_pad_once():
    """3 channels where 8 are wanted is one sentence, however many candidates there are."""
    row = {
        "layer": "conv1", "layers": 4, "pass": "fprop", "tile": "128x128", "slices": 1, "blocks": 98,
        "waves": 1, "last_wave": 0.61, "busiest_sm_blocks": 2, "fill": 0.61, "predicted_seconds": 2.15e-6,
    }  # fmt: skip
    content = candidates.explained(
        [row | {"batch_size": n, "padding": {"c": 8}} for n in (1, 2)]
        + [row | {"batch_size": 2, "layer": "fc", "padding": {}}]
    )
    text = grid.grid(content)

    assert text.count("conv1 (c to 8)") == 1
    assert "fc (" not in text
    assert line_of(content, "1").split() == [
        "1",
        "conv1",
        "4",
        "fprop",
        "128x128",
        "98",
        "1",
        "61.0",
        "%",
        "2",
        "61.0",
        "%",
        "2.15",
        "µs",
    ]


def test_rules_of_thumb_stand_beside_the_plan_with_their_error():
    """100 MiB where the plan says 400 MiB is 75 % too little."""
    rule = {
        "name": "2x the file", "formula": "twice the weights", "value": 100 * 2**20, "computed": 400 * 2**20,
        "unit": "bytes", "error": -0.75,
    }  # fmt: skip
    content = footprint.rules([rule], largest=77, limit=2**30)
    line = next(line for line in grid.grid(content).split("\n") if line.startswith("2x the file"))

    assert "100.00 MiB" in line
    assert "400.00 MiB" in line
    assert "-75.0 %" in line
    assert "fits in 1.00 GiB, by the plan: 77" in grid.grid(content)


def test_an_unknown_fact_of_a_device_stays_unknown():
    """A dash beside devices that have the fact; no column where none has."""
    known = Device(name="A", slug="a", num_sms=80, memory_bytes=2**34, compute_capability=(7, 0))
    content = devices.devices([known, Device(name="B", slug="b")], title="t")

    assert line_of(content, "a").split() == ["a", "7.0", "80", "16.00", "GiB", "A"]
    assert line_of(content, "b").split() == ["b", *["\N{EN DASH}"] * 3, "B"]
    assert "threads" not in grid.grid(content)


def test_a_kept_run_shows_how_each_size_ended_and_what_is_unfinished():
    """Timings without an outcome were cut off; a size without timings never ran."""
    facts = {
        "id": 3, "identity": {"spec": {"name": "mlp"}, "mode": "training"}, "conditions": {"numpy": "2.0"},
        "state": "open", "updated": "2026-11-20T08:00:00Z", "notes": ["said before"],
    }  # fmt: skip
    measured = {
        "timings": [{"batch_size": 8, "seconds": 0.002}, {"batch_size": 8, "seconds": 0.001}],
        "outcomes": [{"batch_size": 64, "status": "out_of_memory", "stop_reason": "needs 2 GiB"}],
    }
    asked, conditions, timings = store.run(facts, measured)

    assert "Run 3: mlp, open" in grid.grid(asked)
    assert "numpy" in grid.grid(conditions)
    assert line_of(timings, "8").split() == ["8", "2", "1.00", "ms", "2.00", "ms", "unfinished", "\N{EN DASH}"]
    assert "out of memory  needs 2 GiB" in line_of(timings, "64")
    assert "said before" in grid.grid(timings)


def test_a_diverged_epoch_is_shown_and_explained():
    """The loss that left the numbers is a dash."""
    done = {"number": 1, "loss": None, "test_accuracy": 0.098, "seconds": 2.0, "samples_per_second": 30_000.0}
    content = training.epochs([done, done | {"number": 2, "loss": 0.5}], title="t", diverged=True)

    assert line_of(content, "1").split() == ["1", "\N{EN DASH}", "9.80", "%", "2.00", "s", "30", "000"]
    assert "smaller learning rate" in grid.grid(content)
