"""`predict()`: what a forecast rests on, its record, and input that is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import numpy as np
import pytest

from cubatch.errors import DoesNotFit, InvalidArgument, InvalidData
from cubatch.estimate import expected, roofline
from cubatch.estimate.predictions import PassPrediction, Scales, StepPrediction
from cubatch.estimate.step import predict_step
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.hardware.facts import Device
from cubatch.network import graph, models
from cubatch.network.graph import Network
from cubatch.network.layers import Linear, Sigmoid
from cubatch.network.passes import Pass
from cubatch.tuning import ladder, step_memory
from cubatch.tuning.explain import forecast_notes
from cubatch.tuning.prediction import predict
from cubatch.tuning.results import TuningResult
from tests.unit.tuning.forecasts import GO, SAW, V100, ask

# --- what it rests on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
def test_times_are_those_of_the_model(library):
    """For the whole ladder at once, by the library that was asked for."""
    found = predict("mnist-cnn", device=V100, mode="training", library=library)
    step = predict_step(
        models.build("mnist-cnn"), list(found.seconds), V100, mode="training", library=library, scales=Scales()
    )
    assert list(found.seconds.values()) == pytest.approx(list(step.seconds))
    assert [c.predicted_seconds for c in found.candidates] == list(found.seconds.values())
    assert set(forecast_notes(V100, step.notes, (), ())) <= set(found.notes)


def test_experimental_kernels_count_in_time_and_memory_and_a_note_names_them():
    """Attention without stored weights is faster and smaller; without the option nothing names it."""
    usual, found = (
        predict(
            "deit-tiny", device="h200-sxm", mode="training", dtype="float16", library="cubatch", batch_sizes=[8],
            experimental=names,
        )
        for names in ([], ["flash_attention"])
    )  # fmt: skip
    step = predict_step(
        models.build("deit-tiny"), [8], found.device, mode="training", dtype="float16", library="cubatch",
        experimental=["flash_attention"],
    )  # fmt: skip
    assert found.seconds[8] == pytest.approx(float(step.seconds[0]))
    assert found.seconds[8] < usual.seconds[8]
    assert found.peak_bytes[8] < usual.peak_bytes[8]
    assert (usual.to_mapping()["experimental"], found.to_mapping()["experimental"]) == ([], ["flash_attention"])
    assert ["flash_attention" in " ".join(each.notes) for each in (usual, found)] == [False, True]


def test_candidates_and_limits_are_those_of_the_ladder_and_the_plan():
    """The sizes that `candidates` gives for our kernels, the largest by `max_batch_size`, the plan's bytes and roof."""
    options: dict[str, Any] = {"mode": "training", "dtype": "float16", "optimizer": "adam"}
    found = predict("mnist-cnn", device=V100, library="cubatch", **options)
    listed = ladder.candidates("mnist-cnn", device=V100, **options)
    assert [(c.batch_size, c.reasons) for c in found.candidates] == [(c.batch_size, c.reasons) for c in listed]
    assert found.largest_batch_size == step_memory.max_batch_size(
        "mnist-cnn", memory=hardware_memory.memory_limit(V100).bytes, device=V100, **options
    )
    assert found.optimizer == "adam"
    net = models.build("mnist-cnn")
    for n in (1, found.largest_batch_size):
        assert found.roofline_seconds[n] == roofline.roofline_seconds(net, n, V100, "training", "float16")
        assert found.peak_bytes[n] == step_memory.footprint("mnist-cnn", batch_size=n, device=V100, **options).total


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_passes_of_the_answer_are_the_whole_step(dtype):
    """Each with its share and the roof it lies under at the answer, the longest first."""
    found = predict("mnist-cnn", device=V100, mode="training", library="cubatch", dtype=dtype)
    assert sum(share.share for share in found.passes) == pytest.approx(1)
    assert sum(share.seconds for share in found.passes) == pytest.approx(found.seconds[found.batch_size])
    assert [share.seconds for share in found.passes] == sorted((s.seconds for s in found.passes), reverse=True)
    nodes = {
        (node.name, pass_.value): node for node, pass_ in graph.layer_passes(models.build("mnist-cnn"), "training")
    }
    assert {(share.layer, share.pass_) for share in found.passes} <= set(nodes)
    for share in found.passes:
        place = nodes[share.layer, share.pass_].layer, Pass(share.pass_), found.batch_size, V100, dtype
        assert share.bound == roofline.bound(*place)


def test_a_pass_without_time_is_no_pass_and_one_without_blocks_has_none(monkeypatch):
    """What moves nothing is left out; what only moves has no grid."""

    def step(spec, sizes, *_, **__):
        times, none = np.ones(len(sizes)), np.zeros(len(sizes))
        words = ("bytes",) * len(sizes)
        passes = tuple(
            PassPrediction("go", pass_, t, words, none) for pass_, t in zip(Pass, (times, none), strict=False)
        )
        return StepPrediction(tuple(sizes), times, times / 2, times * 2, passes, (), 0.2)

    monkeypatch.setattr(expected, "predict_step", step)
    (only,) = ask().passes
    assert (only.pass_, only.share, only.blocks, only.algorithm) == (Pass.FPROP.value, 1.0, None, "bytes")
    assert not any("busiest" in reason for reason in ask().reasons)


@pytest.mark.parametrize(("library", "tiles_of"), [("vendor", "im2col"), ("cubatch", "cubatch")])
def test_crests_are_those_of_the_librarys_tiles(library, tiles_of):
    """The vendor's usual 128 x 128, or the tile of our kernel that is ranked first."""

    def crests(found):
        return {c.batch_size: r for c in found for r in c.reasons if r.startswith(("crest", "past"))}

    found = predict(GO, device=V100, library=library, max_batch_size=256)
    assert crests(found.candidates) == crests(ladder.candidates(GO, device=V100, library=tiles_of, max_batch_size=256))


def test_nothing_is_said_of_roofs_that_nobody_knows():
    """Our kernels are counted in clocks, which need no rate: without one no product has a bound, a sigmoid has."""
    net = Network(input_shape=(1, 1, 64), layers=[Linear(k=500), Sigmoid(), Linear(k=10)])
    found = predict(net, device=attrs.evolve(V100, peak_flops_per_second={}), library="cubatch", batch_sizes=[32])
    assert {share.bound for share in found.passes} == {None, "memory"}
    assert not any("bound by arithmetic" in reason for reason in found.reasons)


def test_computing_again_costs_the_forward_passes_that_are_repeated():
    """Of nine equal layers the fifth is kept: the four before it run forward twice, and memory shrinks."""
    net = Network(input_shape=(1, 1, 2048), layers=[Linear(k=2048) for _ in range(9)])
    options: dict[str, Any] = {"device": V100, "mode": "training", "batch_sizes": [4096], "library": "cubatch"}
    plain, again = predict(net, **options), predict(net, recompute=True, **options)
    more = again.seconds[4096] - plain.seconds[4096]
    forward = [share.seconds for share in plain.passes if share.pass_ == Pass.FPROP.value]
    assert len(forward) == 9
    assert more == pytest.approx(4 * forward[0], rel=1e-9)
    for side in (0, 1):
        factor = plain.interval[4096][side] / plain.seconds[4096]
        assert again.interval[4096][side] / again.seconds[4096] == pytest.approx(factor)
    assert again.peak_bytes[4096] < plain.peak_bytes[4096]


# --- the record ----------------------------------------------------------------------------------------------


def test_the_json_says_that_it_is_predicted_and_cannot_be_taken_for_a_measurement():
    """It has the form of a tuning result, which does not read it."""
    found = predict("mlp", device=V100, batch_sizes=[32, 10**9])
    mapping = json.loads(found.to_json())
    assert mapping == found.to_mapping()
    assert (mapping["schema"], mapping["predicted"]) == (1, True)
    assert [m["status"] for m in mapping["measurements"]] == ["predicted", "over_limit"]
    first, second = mapping["measurements"]
    assert [m["reasons"] for m in (first, second)] == [["asked for"], ["asked for"]]
    assert first["predicted_seconds"] == first["latency_seconds"] == found.seconds[32]
    assert (first["latency_interval"], first["throughput_interval"]) == (
        list(found.interval[32]), list(found.throughput_interval[32])
    )  # fmt: skip
    assert first["samples_per_second"] == 32 / found.seconds[32]
    assert first["roofline_fraction"] == roofline.roofline_seconds(models.build("mlp"), 32, V100) / found.seconds[32]
    assert (first["stop_reason"], second["stop_reason"]) == ("", "planned above the memory limit")
    assert mapping["device"] == {
        "name": V100.name, "kind": "cuda", "slug": V100.slug, "compute_capability": [7, 0], "num_sms": 80,
        "memory_bytes": V100.memory_bytes,
    }  # fmt: skip
    assert second["latency_seconds"] is None
    assert [m["predicted_peak_bytes"] for m in mapping["measurements"]] == [found.peak_bytes[n] for n in (32, 10**9)]
    one = found.passes[0]
    assert mapping["passes"][0] == {
        "layer": one.layer, "pass": one.pass_, "seconds": one.seconds, "share": one.share,
        "algorithm": one.algorithm, "bound": one.bound, "blocks": one.blocks,
    }  # fmt: skip
    with pytest.raises(InvalidData):
        TuningResult.from_json(found.to_json())


def test_the_json_holds_names_as_they_are_and_no_figure_that_is_none():
    """On one line or on many; what JSON cannot say is an error, not a file that no reader takes."""
    found = attrs.evolve(predict("mlp", device=V100, batch_sizes=[32]), spec_name="größer")
    assert "größer" in found.to_json()
    assert "\n" not in found.to_json()
    assert found.to_json(indent=2).splitlines()[1].startswith('  "schema"')
    with pytest.raises(ValueError, match="finite"):
        attrs.evolve(found, seconds={32: math.inf}).to_json()


# --- bad input -----------------------------------------------------------------------------------------------


def test_ten_to_the_ninth_samples_do_not_fit_and_that_is_said():
    """Beside sizes that do they are marked; alone they are an error with the largest that fits."""
    found = predict("mlp", device=V100, batch_sizes=[32, 10**9])
    assert found.why_not(10**9) == "planned above the memory limit"
    assert found.batch_size == 32
    with pytest.raises(InvalidArgument, match=f"at most {found.largest_batch_size}"):
        predict("mlp", device=V100, batch_sizes=[10**9])


@pytest.mark.parametrize("device", ["cpu", Device(name="cpu", kind="cpu")])
def test_the_cpu_is_measured_not_predicted(device):
    """The model knows GPUs only."""
    with pytest.raises(InvalidArgument, match="knows GPUs only"):
        ask(device=device)


@pytest.mark.parametrize(
    ("library", "lost", "named"),
    [
        ("vendor", {"num_sms": None, "peak_bytes_per_second": None}, "num_sms, peak_bytes_per_second"),
        ("vendor", {"peak_flops_per_second": {}}, "peak_flops_per_second"),
        ("cubatch", {"clock_hz": None}, "clock_hz"),
        ("vendor", {"memory_bytes": None}, "memory is known"),
    ],
)
def test_a_gpu_without_the_facts_has_them_named(library, lost, named):
    """All of those that are missing, at once."""
    with pytest.raises(InvalidArgument) as caught:
        ask(device=attrs.evolve(V100, **lost), library=library)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"library": "cudnn"}, "library"),
        ({"objective": "energy"}, "objective"),
        ({"latency_limit": 1e-9}, "latency_limit"),
        ({"batch_sizes": [2**31]}, "batch_sizes"),
        ({"batch_sizes": [64], "max_batch_size": 32}, "batch_sizes"),
        ({"anchors": "one.json"}, "anchors"),
        ({"experimental": ["norm_sums"]}, "experimental"),
        ({"experimental": ["norm_sum"], "library": "cubatch"}, "experimental"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(options, field):
    """With what was given."""
    with pytest.raises(InvalidArgument) as caught:
        ask(**options)
    assert caught.value.field == field


def test_a_latency_limit_that_no_size_keeps_names_the_least_that_one_would(planted):
    """The shortest step of all, which is that of 8 samples."""
    planted(SAW)
    with pytest.raises(InvalidArgument, match=r"at least 80\.0 ms, the shortest step predicted"):
        ask(latency_limit=0.01)


def test_what_does_not_fit_at_all_says_so():
    """Not even one sample."""
    with pytest.raises(DoesNotFit):
        predict("vgg16", device=V100, memory_limit="1MiB")
    with pytest.raises(DoesNotFit):
        predict("mlp", device=attrs.evolve(V100, memory_bytes=2**20))  # less than its libraries take
