"""What the commands lay out from records: figures with their units, in their own columns."""

from __future__ import annotations

import math

import pytest

from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.memory.step_footprint import Footprint
from cubatch.report.tables import candidates, common, devices, footprint, store


def test_plain_gives_what_json_can_hold():
    """JSON knows no tuple, no record, no NaN and no infinity."""
    record = Candidate(8, ("power of two",))
    unknown = dict.fromkeys(("predicted_peak_bytes", "predicted_seconds"))
    assert common.plain({"c": (record, math.nan, math.inf, 1.5, None)}) == {
        "c": [{"batch_size": 8, "reasons": ["power of two"], **unknown, "over_limit": False}, None, None, 1.5, None]
    }


def test_where_nothing_can_be_explained_there_is_no_table():
    """On a CPU, or a GPU whose number of SMs is unknown, there is a sentence instead."""
    assert (candidates.explained([]).columns, len(candidates.explained([]).notes)) == ((), 1)


PLAN = Footprint(
    weights=2**20, gradients=0, optimizer=0, activations=2**21, activation_gradients=0, workspace=0,
    total=3 * 2**20, elements_per_sample=1820, peak_layer="fc", batch_size=4,
    layers=(
        {"name": "fc", "type": "linear", "output_shape": (7, 7, 64), "parameters": 1000, "weights": 4000,
         "activations": 2**21, "activation_gradients": 0, "workspace": 0},
    ),
)  # fmt: skip


def of_submodules(by_submodule):
    """Return the footprint of a module with these activations."""
    return ModuleFootprint(
        name="Net", mode="training", batch_size=4, weights=0, inputs=0, gradients=0, optimizer=0,
        activations=sum(by_submodule.values()), workspace=0, allocator=0, expandable_segments=None, overhead=0,
        overhead_source="", total=sum(by_submodule.values()), by_submodule=by_submodule, recurrent=(),
    )  # fmt: skip


def test_equal_parts_of_numbered_blocks_share_a_row():
    """So do the blocks themselves, but not the layers of a sequence without parts, which may be of any type."""
    sizes = {"layers.0": 8, "layers.1": 8, "layers.0.mlp.up": 4, "layers.1.mlp.up": 4, "head.0": 2, "head.1": 1}
    _, grid = footprint.of_module(of_submodules(sizes))
    counts = {"layers.*": "2", "layers.*.mlp.up": "2", "head.0": "1", "head.1": "1"}
    assert {row[0]: row[1] for row in grid.rows} == counts


def test_the_row_of_the_module_itself_is_explained_where_it_is_shown():
    """Among many submodules it may be one of the others."""
    largest = {f"part{n}": 100 for n in range(10)}
    for own, is_shown in ((200, True), (1, False)):
        _, grid = footprint.of_module(of_submodules(largest | {"": own}))
        assert any(row[0] == "(Net)" for row in grid.rows) is is_shown
        assert bool(grid.notes) is is_shown


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
    found = {
        mode: footprint.ModeMemory(footprint=PLAN, fits=PLAN.batch_size <= n, max_batch_size=n)
        for mode, n in largest.items()
    }
    assert said in footprint.modes(found, title="t", limit=2**30)[0].notes[0]


def test_one_mode_has_one_count():
    """A footprint by itself knows only the count of its own mode."""
    (count,) = [note for note in footprint.footprint(PLAN, title="t")[0].notes if "Textbook" in note]
    assert "forward" not in count
    assert "1 820 elements per sample; times 4 is 7 280" in count


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
