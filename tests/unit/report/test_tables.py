"""What the commands lay out from records: figures with their units, in their own columns."""

from __future__ import annotations

import math

import attrs
import pytest

from cubatch.engine.training_run import Epoch
from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.memory.step_footprint import Footprint
from cubatch.memory.thumb_rules import Rule
from cubatch.report.tables import candidates, common, devices, footprint, store, training
from tests.unit.tables import row_of


def test_plain_gives_what_json_can_hold():
    """JSON knows no tuple, no record, no NaN and no infinity."""
    record = Candidate(8, ("power of two",))
    unknown = dict.fromkeys(("predicted_peak_bytes", "predicted_seconds"))
    assert common.plain({"c": (record, math.nan, math.inf, 1.5, None)}) == {
        "c": [{"batch_size": 8, "reasons": ["power of two"], **unknown, "over_limit": False}, None, None, 1.5, None]
    }


def test_candidates_show_plan_prediction_limit_and_every_reason():
    """A size over the limit is listed and says so."""
    found = [
        Candidate(8, ("coulom n=1", "power of two"), 2**20, 0.002),
        Candidate(512, ("asked for",), 2**31, over_limit=True),
    ]
    content = candidates.candidates(found, title="t")
    assert row_of(content, 8) == {
        "batch": 8, "predicted time": "2.00 ms", "memory plan": "1.00 MiB", "status": "",
        "reasons": "coulom n=1, power of two",
    }  # fmt: skip
    assert row_of(content, 512)["predicted time"] is None
    assert row_of(content, 512)["status"] == "over the limit"
    assert content.notes
    assert not candidates.candidates(found[1:], title="t").notes  # about a column that is not there


def test_explain_shows_a_layer_at_a_size_and_names_the_channels_to_pad_once():
    """3 channels where 8 are wanted is one sentence, however many candidates there are."""
    row = {
        "layer": "conv1", "layers": 4, "pass": "fprop", "tile": "128x128", "slices": 1, "blocks": 98,
        "waves": 1, "last_wave": 0.61, "busiest_sm_blocks": 2, "fill": 0.61, "predicted_seconds": 2.15e-6,
    }  # fmt: skip
    asked = [row | {"batch_size": n, "padding": {"c": 8}} for n in (1, 2)]
    content = candidates.explained([*asked, row | {"batch_size": 3, "layer": "fc", "padding": {}, "slices": 4}])
    assert content.text().count("conv1 (c to 8)") == 1
    assert "fc (" not in content.text()
    assert row_of(content, 3)["tile"] == "128x128 / 4"
    assert row_of(content, 1) == {
        "batch": 1, "layer": "conv1", "alike": 4, "pass": "fprop", "tile": "128x128", "blocks": 98, "waves": 1,
        "last wave": "61.0 %", "busiest SM": 2, "fill": "61.0 %", "time at best": "2.15 µs",
    }  # fmt: skip


def test_where_nothing_can_be_explained_there_is_no_table():
    """Of a CPU, or of a GPU whose SMs are not known, a sentence is all."""
    assert (candidates.explained([]).columns, len(candidates.explained([]).notes)) == ((), 1)


PLAN = Footprint(
    weights=2**20, gradients=0, optimizer=0, activations=2**21, activation_gradients=0, workspace=0,
    total=3 * 2**20, elements_per_sample=1820, peak_layer="fc", batch_size=4,
    layers=(
        {"name": "fc", "type": "linear", "output_shape": (7, 7, 64), "parameters": 1000, "weights": 4000,
         "activations": 2**21, "activation_gradients": 0, "workspace": 0},
    ),
)  # fmt: skip


def test_a_footprint_lists_the_parts_that_take_anything_and_marks_the_peak():
    """In inference there are no gradients; the peak is less than the sum, which a note says."""
    parts, layers = footprint.footprint(PLAN, title="t")
    assert parts.rows == (("weights", "1.00 MiB"), ("activations", "2.00 MiB"), ("peak", "3.00 MiB"))
    assert parts.marked == {2}
    assert row_of(layers, "fc", "layer") == {
        "layer": "fc", "type": "linear", "output": "7 x 7 x 64", "parameters": "1 000", "weights": "3.91 KiB",
        "activations": "2.00 MiB", "gradients": None, "workspace": None,
    }  # fmt: skip


def test_both_modes_stand_side_by_side():
    """A column each, a dash where one has no such part, and the textbook's two counts."""
    forward = attrs.evolve(PLAN, elements_per_sample=1410)
    training = attrs.evolve(PLAN, gradients=2**20, total=4 * 2**20, peak_layer="relu")
    found = {
        mode: footprint.ModeMemory(plan, [], largest)
        for mode, plan, largest in (("inference", forward, 9), ("training", training, 7))
    }
    parts, layers, *rules = footprint.modes(found, title="t", limit=2**30, why="2.00 GiB less 1.00 GiB")
    assert row_of(parts, "gradients", "part") == {"part": "gradients", "inference": None, "training": "1.00 MiB"}
    assert row_of(parts, "peak", "part") == {"part": "peak", "inference": "3.00 MiB", "training": "4.00 MiB"}
    fits, peaks, count = parts.notes
    assert fits.endswith("fits in 1.00 GiB (2.00 GiB less 1.00 GiB), by the plan: 9 in inference and 7 in training.")
    assert "3.00 MiB, in fc (inference), 4.00 MiB, in relu (training)" in peaks
    assert "1 410 elements per sample forward, 1 820 with gradients; times 4 is 7 280" in count
    assert layers.title == "By layer, training"
    assert [rule.title.split()[-1] for rule in rules] == ["inference", "training"]


@pytest.mark.parametrize(
    ("largest", "said"),
    [
        (
            {"inference": 3, "training": 0},
            ": 3 in inference and no batch in training; 4 does not fit in inference and ",
        ),
        ({"inference": 9, "training": 3}, ": 9 in inference and 3 in training; 4 does not fit in training."),
        ({"training": 3}, ": 3; 4 does not fit."),
        ({"training": 4}, "by the plan: 4."),
    ],
)
def test_the_batch_that_was_asked_for_is_said_not_to_fit_right_under_the_parts(largest, said):
    """Above the layers, of which there may be hundreds; 4 samples were asked for."""
    found = {mode: footprint.ModeMemory(PLAN, [], n) for mode, n in largest.items()}
    assert said in footprint.modes(found, title="t", limit=2**30)[0].notes[0]


def test_one_mode_has_one_count():
    """A footprint by itself knows only the count of its own mode."""
    (count,) = [note for note in footprint.footprint(PLAN, title="t")[0].notes if "Textbook" in note]
    assert "forward" not in count
    assert "1 820 elements per sample; times 4 is 7 280" in count


def test_rules_of_thumb_stand_beside_the_plan_with_their_error():
    """100 MiB where the plan says 400 MiB is 75 % too little."""
    rule = Rule(name="2x the file", formula="twice the weights", value=100 * 2**20, computed=400 * 2**20, unit="bytes")
    content = footprint.rules([rule], mode="training")
    row = row_of(content, "2x the file", "rule")
    assert (row["gives"], row["plan"], row["off by"]) == ("100.00 MiB", "400.00 MiB", "-75.0 %")


def test_an_unknown_fact_of_a_device_stays_unknown():
    """None beside devices that have the fact; a column that none has is not printed."""
    known = Device(name="A", slug="a", num_sms=80, memory_bytes=2**34, compute_capability=(7, 0))
    content = devices.devices([known, Device(name="B", slug="b")], title="t")
    found = [row_of(content, name, "--device") for name in "ab"]
    assert [(row["capability"], row["SMs"], row["memory"]) for row in found] == [
        ("7.0", 80, "16.00 GiB"), (None, None, None),
    ]  # fmt: skip
    assert "threads" not in content.text()


def test_a_gpu_of_this_machine_is_listed_under_what_means_it():
    """Two boards of one kind have one name in the catalogue, and each its place here."""
    here = [Device(name="Tesla T4", slug="t4", kind="cuda", live=True, index=index) for index in (0, 1)]
    rows = devices.devices([*here, Device(name="A CPU", kind="cpu", live=True)], title="t").rows
    assert [row[0] for row in rows] == ["cuda:0", "cuda:1", "cpu"]


def test_kept_runs_are_told_apart_by_what_goes_in():
    """A network has a shape, a layer its extents; of a module only its name is kept, and a name may be all there is."""
    kept = {"id": 3, "state": "open", "updated": "2026-11-20T08:00:00Z", "num_timings": 2, "seconds_spent": 1.5}
    specs = (
        {"name": "mlp", "input_shape": [28, 28, 1]},
        {"type": "relu", "h": 7, "w": 5, "c": 3},
        {"name": "p.m:build"},
        "mlp",
    )
    rows = store.runs([kept | {"identity": {"spec": spec}, "disturbed": []} for spec in specs], "store.db").rows
    assert [row[2:4] for row in rows] == [("mlp", "28x28x1"), ("relu", "7x5x3"), ("p.m:build", None), ("mlp", None)]


def test_a_kept_run_shows_how_each_size_ended_and_what_is_unfinished():
    """Timings without an outcome were cut off; a size without timings never ran."""
    facts = {
        "id": 3, "identity": {"spec": {"name": "mlp"}, "mode": "training"}, "conditions": {"numpy": "2.0"},
        "state": "open", "updated": "2026-11-20T08:00:00Z", "notes": ["said before"], "disturbed": ["others were busy"],
    }  # fmt: skip
    measured = {
        "timings": [{"batch_size": 8, "seconds": 0.002}, {"batch_size": 8, "seconds": 0.001}],
        "outcomes": [{"batch_size": 64, "status": "out_of_memory", "stop_reason": "needs 2 GiB"}],
    }
    asked, conditions, timings = store.run(facts, measured)
    assert all(part in asked.title for part in ("3", "mlp", "open"))
    assert asked.rows == (("mode", "training"),)
    assert conditions.rows == (("numpy", "2.0"),)
    assert timings.rows == (
        (8, 2, "1.00 ms", "2.00 ms", "unfinished", None), (64, 0, None, None, "out of memory", "needs 2 GiB"),
    )  # fmt: skip
    assert timings.notes == ("others were busy", "said before")


def test_a_diverged_epoch_is_shown_and_explained():
    """The loss that left the numbers is not known."""
    done = Epoch(number=1, loss=math.nan, test_accuracy=0.098, seconds=2.0, samples_per_second=30_000.0)
    content = training.epochs([done, attrs.evolve(done, number=2, loss=0.5)], title="t", diverged=True)
    assert content.rows == ((1, None, "9.80 %", "2.00 s", "30 000"), (2, "0.5000", "9.80 %", "2.00 s", "30 000"))
    assert len(content.notes) == 1
    assert not training.epochs([done], title="t").notes
