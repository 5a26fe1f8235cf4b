"""predict(): the rule of the answer on predicted times, what it says with them, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.errors import DoesNotFit, InvalidArgument, InvalidData, UnknownName, UnsupportedDtype
from cubatch.estimate import roofline
from cubatch.estimate.blocks import fused_winograd_blocks, num_blocks, winograd_blocks
from cubatch.estimate.parts import PassPrediction, Scales, StepPrediction
from cubatch.estimate.step import predict_step
from cubatch.hardware import catalogue, room
from cubatch.hardware.facts import Device
from cubatch.memory import fit, parts
from cubatch.network import graph, models
from cubatch.network.graph import Network
from cubatch.network.layers import Attention, Conv2d, Linear, ReLU
from cubatch.network.passes import Pass
from cubatch.tuning import anchors, forecast_wording, ladder
from cubatch.tuning.forecast import predict
from cubatch.tuning.results import TuningResult
from tests.thorough import examples
from tests.unit.tuned import measurement, tuned

V100 = catalogue.find("v100-sxm2-16gb")
GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1, name="go")
SCALE_SD = 0.2
SIZES = (8, 16, 32, 64, 128)


@pytest.fixture
def planted(monkeypatch):
    """Replace the model: give seconds by batch size and how unsure it is."""

    def plant(seconds: dict[int, float], sd: float = 0.1, notes: tuple[str, ...] = ()) -> None:
        def step(spec, sizes, device, *, mode, dtype, library, scales):
            times = scales.compute * np.array([seconds[n] for n in sizes])
            half = np.exp(1.6448536269514722 * math.hypot(sd, SCALE_SD))
            blocks = np.array([num_blocks(GO, Pass.FPROP, n) for n in sizes], float)
            one = PassPrediction("go", Pass.FPROP, times, ("128x128",) * len(times), blocks)
            return StepPrediction(tuple(sizes), times, times / half, times * half, (one,), notes, SCALE_SD)

        monkeypatch.setattr(anchors, "predict_step", step)

    return plant


def rates(**by_size: float) -> dict[int, float]:
    """Seconds of a step from samples per second: rates(n8=100)."""
    return {int(name[1:]): int(name[1:]) / rate for name, rate in by_size.items()}


SAW = rates(n8=100, n16=150, n32=198.5, n64=200, n128=190)


def ask(**options: Any):
    return predict(GO, **{"device": V100, "batch_sizes": list(SIZES)} | options)


# --- the rule ------------------------------------------------------------------------------------------------


@pytest.mark.case("titan-x-test-batch")
def test_the_answer_is_the_smallest_size_within_tolerance_of_the_best(planted):
    """198.5 of 200 samples/s is within 1 %, 150 is not; with no tolerance the best itself."""
    planted(SAW)
    assert (ask().batch_size, ask().fastest_batch_size) == (32, 64)
    assert ask(tolerance=0.0).batch_size == 64
    assert ask(tolerance=0.3).batch_size == 16


def test_by_latency_it_is_the_largest_size_within_tolerance_of_the_lowest(planted):
    """8 and 16 samples take as long; the largest of them is the answer."""
    planted({8: 1.0, 16: 1.005, 32: 1.5, 64: 3.0, 128: 6.0})
    found = ask(objective="latency")
    assert (found.batch_size, found.fastest_batch_size, found.decided_by) == (16, 8, "plateau")


@settings(max_examples=examples(40), deadline=None)
@given(values=st.lists(st.floats(1.0, 2.0), min_size=5, max_size=5), tolerance=st.floats(0.0, 0.5))
def test_the_answer_can_be_repeated_with_a_pocket_calculator(values, tolerance):
    """From the very figures that the forecast shows, for any curve."""
    with pytest.MonkeyPatch.context() as patch:
        seconds = {n: n / value for n, value in zip(SIZES, values, strict=True)}

        def step(spec, sizes, *_, **__):
            times = np.array([seconds[n] for n in sizes])
            return StepPrediction(tuple(sizes), times, times / 2, times * 2, (), (), 0.2)

        patch.setattr(anchors, "predict_step", step)
        found = ask(tolerance=tolerance)
    shown = found.samples_per_second
    assert found.batch_size == min(n for n in SIZES if shown[n] >= (1 - tolerance) * max(shown.values()))
    assert shown[found.fastest_batch_size] == max(shown.values())


@pytest.mark.parametrize(
    ("seconds", "options", "decided"),
    [
        (rates(n8=100, n16=150, n32=198.5, n64=200, n128=150), {}, "peak"),
        (SAW, {}, "plateau"),
        (rates(n8=100, n16=150, n32=199, n64=200, n128=180), {"tolerance": 0.3}, "plateau"),
        (rates(n8=100, n16=150, n32=199, n64=200, n128=199), {}, "plateau"),
        (rates(n8=100, n16=150, n32=200, n64=300, n128=400), {}, "batch_sizes"),
        (rates(n8=100, n16=150, n32=200, n64=300, n128=400), {"max_batch_size": 128}, "batch_sizes"),
        (rates(n8=100, n32=200, n48=190), {"batch_sizes": [8, 32, 48]}, "batch_sizes"),
        (rates(n8=100, n32=200, n64=150), {"batch_sizes": [8, 32, 64]}, "peak"),
        (rates(n8=100, n16=150, n32=200, n64=300, n128=400), {"latency_limit": 0.2134}, "latency_limit"),
        (rates(n8=100, n16=150, n32=200, n64=300, n128=400), {"memory_limit": "60MiB"}, "batch_sizes"),
        (rates(n8=100), {"batch_sizes": [8, 10**9]}, "batch_sizes"),
        (rates(n8=100), {"batch_sizes": [8, 10**9], "objective": "latency"}, "batch_sizes"),
        ({8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03, 128: 1.04}, {"objective": "latency", "tolerance": 0.0}, "plateau"),
        ({8: 1.0, 16: 1.5, 32: 2, 64: 3, 128: 4}, {"objective": "latency"}, "peak"),
    ],
)
def test_what_decided_is_named(planted, seconds, options, decided):
    """What kept the answer from being larger, by the same words as in a tuning result."""
    planted(seconds)
    found = ask(**options)
    assert found.decided_by == decided
    words = (
        "lies inside",
        "plateau",
        "decided",
        "predicted to take longer than 8.",
        "by no more than the model's error",
    )
    assert any(word in " ".join(found.reasons) for word in words)


def test_memory_decides_only_where_the_list_leaves_out_nothing_that_fits():
    """
    Of 8 and too many, the list decided; with the largest that fits in it, memory, but never by latency.

    There no time is saved by more memory: the curve is flat up to 8 samples, or the sole size that fits is its lowest.
    """
    largest = predict("mlp", device=V100, memory_limit="3MiB", batch_sizes=[8]).largest_batch_size
    assert largest > 8
    options: dict[str, Any] = {"device": V100, "memory_limit": "3MiB", "tolerance": 0.0}
    few = predict("mlp", batch_sizes=[8, 10**9], **options)
    assert (few.batch_size, few.decided_by) == (8, "batch_sizes")
    assert f"sizes up to {largest} would fit too, which might be better." in " ".join(few.reasons)
    fewer = predict("mlp", batch_sizes=[8], objective="latency", **options)
    assert f"sizes up to {largest} would fit too, which might take no longer." in " ".join(fewer.reasons)
    assert predict("mlp", batch_sizes=[8, largest, 10**9], **options).decided_by == "memory"
    quick = predict("mlp", batch_sizes=[largest, 10**9], objective="latency", **options)
    assert quick.decided_by == "batch_sizes"
    assert f"{largest} is the largest in it that fits." in " ".join(quick.reasons)
    options |= {"objective": "latency", "tolerance": 0.9}
    flat = predict("mlp", **options | {"memory_limit": few.peak_bytes[8]})
    assert (flat.batch_size, flat.fastest_batch_size < 8, flat.decided_by) == (flat.largest_batch_size, True, "plateau")
    assert f"{flat.batch_size} is the largest batch that fits." in flat.reasons
    one = predict("mlp", batch_sizes=[1], device=V100).peak_bytes[1]
    sole = predict("mlp", **options | {"memory_limit": one})
    assert (sole.batch_size, sole.decided_by) == (1, "peak")


def test_a_sole_size_is_not_called_the_fastest(planted):
    """There is nothing that it was compared with."""
    planted({8: 1.0})
    assert ask(batch_sizes=[8]).reasons[0] == "8 is the only batch size that was asked for: 8 samples/s."
    assert "the only batch size asked for that fits" in ask(batch_sizes=[8, 10**9]).reasons[0]
    planted({1: 1.0})
    assert "the only batch size that could be looked at" in ask(batch_sizes=None, max_batch_size=1).reasons[0]


def test_the_ladder_ends_at_memory_or_at_what_is_allowed():
    """Without a list of sizes: the plan's limit, or max_batch_size below it; where they are one, what was asked."""
    growing = predict("mlp", device=V100, max_batch_size=64, tolerance=0.0)
    assert (growing.batch_size, growing.decided_by) == (64, "max_batch_size")
    assert "nothing larger than 64 was allowed" in " ".join(growing.reasons)
    assert growing.limits["max_batch_size"] == 64
    tight = predict("mlp", device=V100, memory_limit="3MiB", tolerance=0.0)
    largest = tight.largest_batch_size
    assert (tight.batch_size, tight.decided_by) == (largest, "memory")
    for allowed, decided in ((largest, "max_batch_size"), (largest + 1, "memory")):
        found = predict("mlp", device=V100, memory_limit="3MiB", tolerance=0.0, max_batch_size=allowed)
        assert (found.batch_size, found.decided_by) == (largest, decided)


def test_memory_is_blamed_at_the_largest_that_fits_not_at_the_answer(planted):
    """Three quarters of it are as good, and a smaller answer: nothing shows what beyond the whole would be."""
    largest = predict(GO, device=V100, memory_limit="1GiB", max_batch_size=8).largest_batch_size

    class Rising(dict):
        def __missing__(self, n: int) -> float:
            return n / min(n, largest * 3 // 4)

    planted(Rising())
    found = ask(batch_sizes=None, memory_limit="1GiB")
    assert (found.batch_size, found.decided_by) == (largest * 3 // 4, "memory")
    assert f"Memory decided: nothing larger than {largest} fits" in " ".join(found.reasons)


def test_the_reasons_give_the_answer_and_the_best(planted):
    """With their figures and the share that the answer has of the best, by throughput and by latency."""
    planted(SAW)
    assert "within 1 % of the best: 198 samples/s, 99.2 % of it" in ask().reasons[0]
    assert ask().reasons[1] == "The best is predicted at 64: 200 samples/s."
    assert "no smaller size is within 0 %" in ask(tolerance=0.0).reasons[0]
    planted({8: 1.0, 16: 1.25, 32: 1.5, 64: 3.0, 128: 6.0})
    latency = ask(objective="latency", tolerance=0.3)
    assert "16 is the largest batch size" in latency.reasons[0]
    assert "within 30 % of the lowest: 1.25 s, 80.0 % of it" in latency.reasons[0]
    assert latency.reasons[1] == "The lowest is predicted at 8: 1.00 s."


def test_sizes_over_the_latency_limit_are_shown_and_never_the_answer(planted):
    """Their times stay, their status says why."""
    planted(SAW)
    found = ask(latency_limit=32 / 198.5)
    assert (found.batch_size, found.fastest_batch_size) == (32, 32)
    assert found.tied_with == ()  # 64, which is over it, is within the model's error
    assert sorted(found.seconds) == list(SIZES)
    assert "latency limit of 161 ms" in found.why_not(64)
    statuses = [m["status"] for m in found.to_mapping()["measurements"]]
    assert statuses == ["predicted"] * 3 + ["over_limit"] * 2


def test_sizes_over_the_latency_limit_say_nothing_of_what_lies_beyond_the_answer(planted):
    """Larger batches are those within it: up to 64 a plateau, by throughput and, as far as can be told, by latency."""
    planted({8: 0.08, 16: 0.1, 32: 0.2, 64: 0.4, 128: 2.0})
    flat = ask(latency_limit=0.5)
    assert (flat.batch_size, flat.decided_by) == (16, "plateau")
    assert "predicted up to 64, gain no more" in " ".join(flat.reasons)
    planted({8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03, 128: 2.0})
    flat = ask(objective="latency", tolerance=0.0, latency_limit=1.5)
    assert (flat.batch_size, flat.decided_by) == (8, "plateau")
    assert "predicted up to 64, take longer by no more than the model's error" in " ".join(flat.reasons)


# --- how sure it is ------------------------------------------------------------------------------------------


def test_sizes_within_the_models_error_of_the_fastest_are_named(planted):
    """
    What is wrong with a network is wrong at all its sizes but for a fifth of the variance, 1/e of it an octave away.

    With 0.1 in the logarithm, 64 and 32 may differ by 1.645 x 0.1 x sqrt(0.4 x (1 - 1/e)) = 8.3 %.
    """
    planted(rates(n8=100, n16=150, n32=200 * math.exp(-0.082), n64=200, n128=200 * math.exp(-0.084)))
    assert ask().tied_with == tuple(ask().to_mapping()["tied_with"]) == (32,)
    assert any("cannot tell whether 64 differs from 32: " in reason for reason in ask().reasons)
    assert any("so that 32 may do as well" in reason for reason in ask(tolerance=0.01).reasons)
    assert not any("may do as well" in reason for reason in ask(tolerance=0.1).reasons)
    planted(rates(n8=100, n16=199, n32=199, n64=200, n128=199))
    assert any("so that 16 may do as well; measuring" in reason for reason in ask(tolerance=0.0).reasons)


def test_the_interval_is_the_models(planted):
    """Low and high of each size, in seconds and, exchanged, in samples per second."""
    planted(SAW, sd=0.15)
    found, factor = ask(), math.exp(1.6448536269514722 * 0.25)
    for n, seconds in found.seconds.items():
        assert found.interval[n] == pytest.approx((seconds / factor, seconds * factor))
        assert found.throughput_interval[n] == pytest.approx((n / seconds / factor, n / seconds * factor))


def test_anchors_pull_and_are_said(planted, tmp_path):
    """
    The same layer measured at one size, 1.5 times as slow: given as measured there, and named in the reasons.

    All of its time is arithmetic, whose scale takes log 1.5 x 0.04 / (0.04 + 0.01 + 0.0004) of it, that of bytes 0.8 of
    that.
    """
    planted(SAW)
    path = tmp_path / "mine.json"
    device = {"name": V100.name, "kind": "cuda", "num_sms": 80, "uuid": None, "mig": None}
    more = {"spec": GO.to_mapping(), "mode": "inference", "device": device, "library": "cubatch"}
    path.write_text(json.dumps(tuned(**more, measurements=[measurement(64, 1.5 * SAW[64])])))
    found = ask(library="cubatch", anchors=[path])
    assert found.seconds[64] == pytest.approx(1.5 * SAW[64], rel=0.01)
    assert found.seconds[8] > SAW[8]
    assert found.interval[64][1] / found.interval[64][0] < 1.1
    assert found.anchors == tuple(found.to_mapping()["anchors"]) == (str(path),)
    assert any("1.50 (" in reason and str(path) in reason for reason in found.reasons)
    arithmetic = math.log(1.5) * 0.04 / 0.0504
    said = f"arithmetic is taken to need {math.exp(arithmetic):.2f} times as long as by its data sheet, bytes"
    assert any(f"{said} {math.exp(0.8 * arithmetic):.2f} times." in reason for reason in found.reasons)
    measured = TuningResult.from_json(path.read_text())
    found = ask(library="cubatch", anchors=[measured])
    assert found.seconds[64] == pytest.approx(1.5 * SAW[64], rel=0.01)
    other = TuningResult.from_json(json.dumps(tuned(**more, measurements=[measurement(8, 2 * SAW[8])])))
    both = ask(library="cubatch", anchors=[measured, other])
    assert any("1.50 (anchors[0]), 2.00 (anchors[1])." in reason for reason in both.reasons)


def test_what_was_measured_of_our_kernels_is_not_said_to_be_missing():
    """Anchors of ours are named in the place of that note; those of the vendor's libraries measured nothing of ours."""
    device = {"name": V100.name, "kind": "cuda", "num_sms": 80, "uuid": None, "mig": None}
    more = {"mode": "inference", "device": device, "measurements": [measurement(64, 1.0)]}
    ours, theirs = (
        TuningResult.from_json(json.dumps(tuned(**more, spec=models.build(net).to_mapping(), library=library)))
        for net, library in (("mnist-cnn", "cubatch"), ("mlp", "im2col"))
    )
    missing = "No time of our kernels was measured yet: theirs are clocks counted in the compiled code."
    for measured, said in (([], None), ([theirs], None), ([theirs, ours, ours], "anchors[1], anchors[2]")):
        notes = predict("mlp", device=V100, library="cubatch", batch_sizes=[64], anchors=measured).notes
        assert (missing in notes) == (said is None)
        assert any(f"mended by measurements of them: {said}." in note for note in notes) == (said is not None)


def test_a_forecast_goes_by_the_name_or_the_kind_of_what_it_is_of():
    """A layer has a kind at least."""
    for name, said in (("go", "go"), (None, "conv2d")):
        assert predict(attrs.evolve(GO, name=name), device=V100, batch_sizes=[8]).spec_name == said


def test_an_anchor_of_another_schema_is_an_error(tmp_path):
    """Named by its file."""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(tuned(schema=0)))
    with pytest.raises(InvalidData, match=r"old\.json"):
        ask(anchors=[path])


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
    assert set(step.notes) <= set(found.notes)


def test_candidates_and_limits_are_those_of_the_ladder_and_the_plan():
    """The sizes that `candidates` gives for our kernels, the largest by `max_batch_size`, the plan's bytes and roof."""
    options: dict[str, Any] = {"mode": "training", "dtype": "float16", "optimizer": "adam"}
    found = predict("mnist-cnn", device=V100, library="cubatch", **options)
    listed = ladder.candidates("mnist-cnn", device=V100, **options)
    assert [(c.batch_size, c.reasons) for c in found.candidates] == [(c.batch_size, c.reasons) for c in listed]
    assert found.largest_batch_size == fit.max_batch_size(
        "mnist-cnn", room.memory_limit(V100).bytes, device=V100, **options
    )
    assert found.optimizer == "adam"
    net = models.build("mnist-cnn")
    for n in (1, found.largest_batch_size):
        assert found.roofline_seconds[n] == roofline.roofline_seconds(net, n, V100, "training", "float16")
        assert found.peak_bytes[n] == parts.footprint("mnist-cnn", batch_size=n, device=V100, **options).total


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

    monkeypatch.setattr(anchors, "predict_step", step)
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


def test_the_wave_of_the_longest_product_is_worked_out(planted):
    """28 boards are 79 blocks of 128 x 128: one each for 79 of 80 SMs; up to 28 that stays so, as in the rule."""
    planted({28: 1.0})
    found = ask(batch_sizes=[28])
    assert any("in 79 blocks: 1 on the busiest of 80 SMs" in reason for reason in found.reasons)
    assert any("98.8 % filled; beyond batch 28 it has more" in reason for reason in found.reasons)


def test_what_takes_longest_is_named_with_what_is_like_it_and_its_roof(monkeypatch):
    """
    Three lines of equal passes, the longest together first, and the share of all that is bound by arithmetic.

    Of a step of 100 ms, two convolutions take 25 ms each, a third like them 14 ms, one of 1x1 30 ms and a ReLU 6 ms.
    """
    conv, names = Conv2d(k=128, r=3, s=3, pad=1), ("a", "b", "longer", "narrow", "relu")
    layers = [attrs.evolve(conv, name="a"), attrs.evolve(conv, name="b"), attrs.evolve(conv, name="longer"),
              Conv2d(k=128, r=1, s=1, name="narrow"), ReLU(name="relu")]  # fmt: skip
    net = Network(input_shape=(19, 19, 128), layers=layers)

    def step(spec, sizes, *_, **__):
        whole = np.array([0.1 for _ in sizes])
        kinds = [("128x128", 181.0)] * 3 + [("64x64", 362.0), ("bytes", 0.0)]
        passes = tuple(
            PassPrediction(name, Pass.FPROP, share * whole, (algorithm,) * len(sizes), np.full(len(sizes), blocks))
            for name, share, (algorithm, blocks) in zip(names, (0.25, 0.25, 0.14, 0.3, 0.06), kinds, strict=True)
        )
        return StepPrediction(tuple(sizes), whole, whole / 2, whole * 2, passes, (), SCALE_SD)

    monkeypatch.setattr(anchors, "predict_step", step)
    found = predict(net, device=V100, batch_sizes=[64])
    bounds = {share.layer: share.bound for share in found.passes}
    assert bounds == dict.fromkeys(names[:4], "compute") | {"relu": "memory"}
    assert (
        "Longest by prediction at batch 64: a and 1 like it (50.0 %, compute), narrow (30.0 %, compute), "
        "longer (14.0 %, compute)."
    ) in found.reasons
    assert any(
        reason.startswith("94.0 % of the predicted time goes to passes bound by arith") for reason in found.reasons
    )


def test_nothing_is_said_of_roofs_that_nobody_knows():
    """Our kernels are counted in clocks, which need no rate: without one no product has a bound, though a ReLU has."""
    found = predict("mlp", device=attrs.evolve(V100, peak_flops_per_second={}), library="cubatch", batch_sizes=[32])
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


def test_layers_that_no_kernel_runs_are_predicted_too():
    """Prediction works for every layer."""
    for library in ("vendor", "cubatch"):
        found = predict(Attention(h=14, w=14, c=192, heads=3), device=V100, batch_sizes=[8], library=library)
        assert found.seconds[8] > 0


def test_storage_without_tensor_cores_is_said():
    """A Titan X (Pascal) stores float16 and computes in float32."""
    found = predict("mlp", device="titan-x-pascal", dtype="float16", batch_sizes=[64])
    assert sum("without Tensor Cores" in note or "no Tensor Cores" in note for note in found.notes) == 1


@pytest.mark.parametrize("model", models.names())
def test_no_algorithm_fails_the_sentence_of_its_wave(model):
    """Of every pass, whichever is heaviest, by GPU, mode and dtype: Winograd's gradients of filters have no rule."""
    net = models.build(model)
    layers = {node.name: node.layer for node in net.nodes}
    for slug, mode, dtype in itertools.product(
        ("t4", "titan-x-pascal", "a100-sxm4-80gb"), ("inference", "training"), ("float32", "float16")
    ):
        for item in predict_step(net, [64], catalogue.find(slug), mode=mode, dtype=dtype).passes:
            blocks = int(item.blocks[0])
            grid = forecast_wording._grid(layers[item.layer], item.pass_, item.algorithms[0], 64, blocks)
            assert grid is None or grid(64) == blocks


def test_a_prediction_whose_heaviest_product_is_a_winograd_wgrad_has_its_sentences():
    """ResNet-50 in training on a T4: the wave is said, and no crest of it."""
    found = predict("resnet50", device="t4", mode="training", batch_sizes=[16, 64])
    (wave,) = (reason for reason in found.reasons if "busiest of 40 SMs" in reason)
    assert "wgrad is predicted to run as winograd 4x4" in wave
    assert wave.endswith("filled.")


NARROW = attrs.evolve(GO, k=80)  # three tiles of 32 columns, one of 128


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        ("128x32", partial(num_blocks, NARROW, Pass.FPROP, tile=(128, 32))),
        ("conv2d_fprop_implicit_gemm_f32_simt_32x128x8_v4", partial(num_blocks, NARROW, Pass.FPROP, tile=(32, 128))),
        ("winograd 4x4 32x128", partial(winograd_blocks, NARROW, Pass.FPROP, tile=(32, 128))),
        ("winograd 2x2", partial(fused_winograd_blocks, NARROW, Pass.FPROP, pixels=(2, 8, 8))),
    ],
)
def test_the_grid_of_what_runs_is_the_rule_of_its_tile(algorithm, rule):
    """Rows and columns as the name has them, at the batch that was predicted and at any other."""
    grid = forecast_wording._grid(NARROW, Pass.FPROP, algorithm, 28, rule(28))
    assert grid is not None
    assert [grid(n) for n in (1, 28, 29, 4096)] == [rule(n) for n in (1, 28, 29, 4096)]
    assert forecast_wording._grid(NARROW, Pass.FPROP, algorithm, 28, rule(28) + 1) is None


def test_a_grid_that_no_batch_makes_larger_has_no_crest(monkeypatch):
    """The filter's gradient of 128 x 1152 are 9 tiles of 128 x 128, whatever the batch."""

    def step(spec, sizes, *_, **__):
        times = np.ones(len(sizes))
        one = PassPrediction("go", Pass.WGRAD, times, ("128x128",) * len(sizes), 9 * times)
        return StepPrediction(tuple(sizes), times, times / 2, times * 2, (one,), (), SCALE_SD)

    monkeypatch.setattr(anchors, "predict_step", step)
    (wave,) = (reason for reason in ask(mode="training").reasons if "busiest of 80 SMs" in reason)
    assert wave == (
        "go wgrad is predicted to run as 128x128 in 9 blocks: 1 on the busiest of 80 SMs, whose time is 11.2 % filled."
    )


@pytest.mark.parametrize(
    ("layer", "pass_", "algorithm"),
    [
        (GO, Pass.WGRAD, "winograd 4x4 128x128"),
        (GO, Pass.WGRAD, "winograd 2x2"),
        (Conv2d(h=19, w=19, c=128, k=128, r=5, s=5, pad=2), Pass.FPROP, "winograd 2x2 of 5x5 128x128"),
    ],
)
def test_winograd_without_a_rule_of_blocks_has_no_crest(layer, pass_, algorithm):
    """Its grid is not a function of the batch that the rule knows, so that nothing is said of it."""
    assert forecast_wording._grid(layer, pass_, algorithm, 28, 100) is None


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
    with pytest.raises(ValueError, match="JSON"):
        attrs.evolve(found, seconds={32: math.inf}).to_json()


def test_table_and_picture_say_predicted(tmp_path):
    """In the title, and in each line with a figure."""
    found = predict("mlp", device=V100, batch_sizes=[32, 64])
    lines = found.table().splitlines()
    assert lines[0].startswith("Predicted: mlp")
    assert all("predicted" in line for line in lines if line.split()[:1] in (["32"], ["64"]))
    found.plot(tmp_path / "curve.svg")
    assert "redicted" in (tmp_path / "curve.svg").read_text()


def test_the_record_is_frozen():
    """What was predicted stays."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        predict("mlp", device=V100, batch_sizes=[32]).batch_size = 1  # type: ignore[misc]


# --- bad input -----------------------------------------------------------------------------------------------


def test_ten_to_the_ninth_samples_do_not_fit_and_that_is_said():
    """Beside sizes that do they are marked; alone they are an error with the largest that fits."""
    found = predict("mlp", device=V100, batch_sizes=[32, 10**9])
    assert found.why_not(10**9) == "planned above the memory limit"
    assert found.batch_size == 32
    with pytest.raises(InvalidArgument, match=f"at most {found.largest_batch_size}"):
        predict("mlp", device=V100, batch_sizes=[10**9])


def test_an_unknown_gpu_lists_near_names():
    """As everywhere."""
    with pytest.raises(UnknownName) as caught:
        ask(device="v100-sxm2-16")
    assert "v100-sxm2-16gb" in caught.value.near


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


def test_a_dtype_that_the_gpu_lacks_is_refused():
    """tf32 came with sm_80."""
    with pytest.raises(UnsupportedDtype, match="tf32"):
        ask(dtype="tf32")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"library": "cudnn"}, "library"),
        ({"library": None}, "library"),
        ({"objective": "energy"}, "objective"),
        ({"objective": "speed"}, "objective"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": "1%"}, "tolerance"),
        ({"tolerance": None}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"latency_limit": "1s"}, "latency_limit"),
        ({"latency_limit": 0.0}, "latency_limit"),
        ({"latency_limit": 1e-9}, "latency_limit"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": [2**31]}, "batch_sizes"),
        ({"batch_sizes": "32"}, "batch_sizes"),
        ({"batch_sizes": [64], "max_batch_size": 32}, "batch_sizes"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"memory_limit": "much"}, "memory_limit"),
        ({"mode": "test"}, "mode"),
        ({"dtype": "int8"}, "dtype"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"recompute": "yes"}, "recompute"),
        ({"anchors": "one.json"}, "anchors"),
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
