"""`predict()`: the rule of its answer, and how sure it is."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.errors import InvalidArgument
from cubatch.estimate import expected
from cubatch.estimate.predictions import ModelNote, StepPrediction
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.network import models
from cubatch.tuning.answer import answer
from cubatch.tuning.candidate_layers import explain
from cubatch.tuning.explain import forecast_notes
from cubatch.tuning.ladder import candidates
from cubatch.tuning.prediction import predict
from cubatch.tuning.results import TuningResult
from tests.thorough import examples
from tests.unit.tuned import measurement, tuned
from tests.unit.tuning.forecasts import GO, SAW, SIZES, V100, ask, rates

# --- the rule ------------------------------------------------------------------------------------------------


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

        patch.setattr(expected, "predict_step", step)
        found = ask(tolerance=tolerance)
    shown = found.samples_per_second
    assert found.batch_size == min(n for n in SIZES if shown[n] >= (1 - tolerance) * max(shown.values()))
    assert shown[found.fastest_batch_size] == max(shown.values())


@pytest.mark.parametrize(
    ("seconds", "options", "decided"),
    [
        (rates(n8=100, n16=150, n32=198.5, n64=200, n128=150), {}, "peak"),
        (SAW, {}, "plateau"),
        (rates(n8=100, n16=150, n32=199, n64=200, n128=199), {}, "plateau"),
        (rates(n8=100, n16=150, n32=200, n64=300, n128=400), {}, "batch_sizes"),
        (rates(n8=100, n32=200, n48=190), {"batch_sizes": [8, 32, 48]}, "batch_sizes"),
        (rates(n8=100, n32=200, n64=150), {"batch_sizes": [8, 32, 64]}, "peak"),
        (rates(n8=100, n16=150, n32=200, n64=300, n128=400), {"latency_limit": 0.2134}, "batch_sizes"),
        (
            rates(n8=100, n16=150, n32=200, n64=300, n65=300),
            {"latency_limit": 0.2134, "batch_sizes": [8, 16, 32, 64, 65]},
            "latency_limit",
        ),
        (rates(n8=100), {"batch_sizes": [8, 10**9]}, "batch_sizes"),
        ({8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03, 128: 1.04}, {"objective": "latency", "tolerance": 0.0}, "peak"),
    ],
)
def test_what_decided_is_named(planted, seconds, options, decided):
    """What kept the answer from being larger, by the same words as in a tuning result."""
    planted(seconds)
    found = ask(**options)
    assert found.decided_by == decided


def test_memory_decides_only_where_the_list_leaves_out_nothing_that_fits():
    """
    Of 8 and too many, the list decided; with the largest that fits in it, or without a list, memory.

    By latency too, where the largest that fits is as fast as smaller ones: nobody knows whether a larger one is.
    """
    largest = predict("mlp", device=V100, memory_limit="3MiB", batch_sizes=[8]).largest_batch_size
    assert largest > 8
    options: dict[str, Any] = {"device": V100, "memory_limit": "3MiB", "tolerance": 0.0}
    few = predict("mlp", batch_sizes=[8, 10**9], **options)
    assert (few.batch_size, few.decided_by) == (8, "batch_sizes")
    fewer = predict("mlp", batch_sizes=[8], objective="latency", **options)
    assert fewer.decided_by == "batch_sizes"
    assert predict("mlp", batch_sizes=[8, largest, 10**9], **options).decided_by == "memory"
    quick = predict("mlp", batch_sizes=[largest, 10**9], objective="latency", **options)
    assert quick.decided_by == "memory"
    assert any(f"nothing larger than {largest} fits" in reason for reason in quick.reasons)
    options |= {"objective": "latency", "tolerance": 0.9}
    flat = predict("mlp", **options | {"memory_limit": few.peak_bytes[8]})
    assert (flat.batch_size, flat.fastest_batch_size < 8, flat.decided_by) == (flat.largest_batch_size, True, "memory")
    one = predict("mlp", batch_sizes=[1], device=V100).peak_bytes[1]
    sole = predict("mlp", **options | {"memory_limit": one})
    assert (sole.batch_size, sole.decided_by) == (1, "memory")


@pytest.mark.parametrize(
    ("options", "rank"),
    [
        ({"batch_sizes": [8]}, "the only size requested."),
        ({"batch_sizes": [8, 2**20], "memory_limit": "1MiB"}, "the only size within the limits."),
        ({"max_batch_size": 1}, "the only size within the limits."),
    ],
)
def test_a_size_that_is_alone_is_called_so_for_its_reason(options, rank):
    """A list of one size is no limit."""
    assert predict("mlp", device="v100-sxm2-16gb", **options).reasons[0].endswith(rank)


def test_the_ladder_ends_at_memory_or_at_what_is_allowed():
    """Without a list of sizes: the plan's limit, or max_batch_size below it; where they are one, what was asked."""
    growing = predict("mlp", device=V100, max_batch_size=64, tolerance=0.0)
    assert (growing.batch_size, growing.decided_by) == (64, "max_batch_size")
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
    assert f"nothing larger than {largest} fits" in " ".join(found.reasons)


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
    assert "gain at most 3 % (predicted up to 64)" in " ".join(flat.reasons)
    planted({8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03, 128: 2.0})
    flat = ask(objective="latency", tolerance=0.0, latency_limit=1.5)
    assert (flat.batch_size, flat.decided_by) == (8, "peak")
    assert "up to 64, are as fast within the model's error" in " ".join(flat.reasons)


def test_a_latency_limit_is_met_between_the_sizes_of_the_ladder(planted):
    """A step of 1 ms and 0.1 ms a sample: 12 ms hold 110 samples, which no ladder has, to 2 % or 1."""

    class Line(dict):
        def __missing__(self, n: int) -> float:
            return 1e-3 + 1e-4 * n

    planted(Line())
    found = ask(batch_sizes=None, tolerance=0.01, latency_limit=0.012)
    assert 0.98 * 110 <= found.batch_size <= 110
    assert found.decided_by == "latency_limit"
    added = next(rung for rung in found.candidates if rung.batch_size == found.batch_size)
    assert added.reasons[0].startswith("between ")
    assert found.peak_bytes[found.batch_size] > 0
    exact = ask(batch_sizes=None, latency_limit=1e-3 + 1e-4 * 64, tolerance=0.01)
    assert (exact.batch_size, exact.decided_by) == (64, "latency_limit")


@settings(max_examples=examples(40), deadline=None)
@given(
    values=st.lists(st.floats(1.0, 2.0), min_size=5, max_size=5),
    limit=st.one_of(st.none(), st.floats(8.0, 160.0)),
    objective=st.sampled_from(["throughput", "latency"]),
    tolerance=st.floats(0.0, 0.5),
)
def test_a_forecast_and_a_run_that_read_the_same_seconds_name_the_same_limit(values, limit, objective, tolerance):
    """Five timings of just what was predicted: the same answer, decided by the same."""
    seconds = {n: n / value for n, value in zip(SIZES, values, strict=True)}
    limit = None if limit is None else max(limit, min(seconds.values()))
    with pytest.MonkeyPatch.context() as patch:

        def step(spec, sizes, *_, **__):
            times = np.array([seconds[n] for n in sizes])
            return StepPrediction(tuple(sizes), times, times * 0.9999, times * 1.0001, (), (), 0.0)

        patch.setattr(expected, "predict_step", step)
        found = ask(tolerance=tolerance, latency_limit=limit, objective=objective)
    goal = Goal(objective=objective, tolerance=tolerance, latency_limit=limit)
    late = {n for n, took in seconds.items() if limit is not None and took > limit}
    ends = [Outcome(n, "over_limit", "", {"limit": "latency"}) if n in late else Outcome(n, "ok") for n in SIZES]
    timings = [Timing(batch_size=n, round=r, seconds=took) for n, took in seconds.items() for r in range(5)]
    run = answer(
        [Candidate(n) for n in SIZES],
        Measured(timings=tuple(timings), outcomes=tuple(ends)),
        goal=goal,
        setting={},
        largest_batch_size=found.largest_batch_size,
        is_listed=True,
    )
    able = {n: n / took if objective == "throughput" else took for n, took in seconds.items() if n not in late}
    best = max(able.values()) if objective == "throughput" else min(able.values())
    bound = best * (1 - tolerance) if objective == "throughput" else best * (1 + tolerance)
    others = [value for value in able.values() if value != best] or [2 * best]
    near = min(min(abs(math.log(value / to)) for to in (best, bound)) for value in others)
    if near < 0.02 or len(set(able.values())) < len(able):  # a run of five timings does not tell those apart
        return
    assert (found.batch_size, found.fastest_batch_size) == (run.batch_size, run.fastest_batch_size)
    if found.tied_with == run.tied_with:
        assert found.decided_by == run.decided_by


# --- how sure it is ------------------------------------------------------------------------------------------


def test_sizes_within_the_models_error_of_the_fastest_are_named(planted):
    """
    What is wrong with a network is wrong at all its sizes but for a fifth of the variance, 1/e of it an octave away.

    With 0.1 in the logarithm, 64 and 32 may differ by 1.645 x 0.1 x sqrt(0.4 x (1 - 1/e)) = 8.3 %.
    """
    planted(rates(n8=100, n16=150, n32=200 * math.exp(-0.082), n64=200, n128=200 * math.exp(-0.084)))
    assert ask().tied_with == tuple(ask().to_mapping()["tied_with"]) == (32,)
    error = "Within the model's error, "
    assert f"{error}32 may be as fast as 64: it is predicted at 92.1 % of that speed." in ask().reasons
    why = "32 is not recommended because it is predicted at 92.1 % of that speed, less than 99 %: "
    assert any(reason.startswith(why) for reason in ask(tolerance=0.01).reasons)
    assert not any("is not recommended" in reason for reason in ask(tolerance=0.1).reasons)
    shares = ask(tolerance=0.01).to_mapping()["shares"]
    assert shares["32"] == pytest.approx(math.exp(-0.082))
    assert shares["64"] == 1.0
    planted(rates(n8=100, n16=199, n32=198, n64=200, n128=199))
    tied = f"{error}16, 32 and 128 may be as fast as 64: they are predicted at 99.0 % to 99.5 % of that speed."
    assert tied in ask(tolerance=0.0).reasons
    assert any("16 is not recommended" in reason for reason in ask(tolerance=0.0).reasons)


def test_by_latency_the_largest_tie_is_named_that_is_too_slow(planted):
    """A batch of 16 takes 5 % longer than one of 8, within the model's error, but not within 1 %."""
    planted({8: 1.0, 16: 1.05, 32: 1.5, 64: 3.0, 128: 6.0})
    found = ask(objective="latency", tolerance=0.01)
    assert (found.batch_size, found.tied_with) == (8, (16,))
    assert any("16 is not recommended because it is predicted at 95.2 %" in each for each in found.reasons)


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
    said = f"arithmetic takes {math.exp(arithmetic):.2f} times and memory {math.exp(0.8 * arithmetic):.2f} times"
    assert any(said in reason for reason in found.reasons)
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
    (missing,) = forecast_notes(V100, [ModelNote("counted_clocks")], (), ())[:1]
    for measured, said in (([], None), ([theirs], None), ([theirs, ours, ours], "anchors[1], anchors[2]")):
        notes = predict("mlp", device=V100, library="cubatch", batch_sizes=[64], anchors=measured).notes
        assert (missing in notes) == (said is None)
        assert any(f"corrected by measurements: {said}." in note for note in notes) == (said is not None)


def test_a_forecast_goes_by_the_name_or_the_kind_of_what_it_is_of():
    """A layer has a kind at least."""
    for name, said in (("go", "go"), (None, "conv2d")):
        assert predict(attrs.evolve(GO, name=name), device=V100, batch_sizes=[8]).spec_name == said


@pytest.mark.parametrize("kind", ["flatten", "dropout"])
@pytest.mark.parametrize("options", [{}, {"library": "cubatch"}, {"mode": "training", "recompute": True}], ids=str)
def test_what_does_nothing_has_no_best_batch_size(kind, options):
    """A flatten, or dropout in inference, takes no time, by which nothing can be divided: refused, and listed."""
    spec = {"input_shape": [1, 1, 16], "layers": [{"type": kind}]}
    if kind == "dropout" and options.get("mode") == "training":
        assert predict(spec, device="t4", **options).batch_size > 0  # there it draws and multiplies
        return
    with pytest.raises(InvalidArgument, match="computes or moves data"):
        predict(spec, device="t4", **options)
    assert candidates(spec, device="t4")
    assert explain(spec, device="t4") == []
