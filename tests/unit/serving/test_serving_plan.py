"""Serving plans from a measured latency curve."""

from __future__ import annotations

import json
import re

import attrs
import numpy as np
import pytest

import cubatch as cb
from cubatch.serving import serving_plan
from cubatch.serving.batching_queue import simulate
from tests.unit.tuned import measurement, tuned

SIZES = (1, 8, 64)


def result_of(seconds, *, mode="inference", spread=(1.0,), sizes=SIZES):
    """Return a tuning result with the latency of each size, and timings that vary by the factors."""
    sizes = [measurement(n, seconds(n), timings_seconds=[seconds(n) * each for each in spread]) for n in sizes]
    return cb.TuningResult.from_mapping(tuned(mode=mode, measurements=sizes))


def saturating(n):
    """Return the time of a step that has a fixed part: 4 ms, and 0.5 ms for each sample."""
    return 0.004 + 0.0005 * n


def test_the_plan_has_the_fewest_instances_that_keep_the_limit():
    """With one instance fewer no setting keeps it, and the error gives the rate that they can take."""
    plan = cb.serving_plan(result_of(saturating), arrival_rate=5000.0, p99=0.05)
    assert plan.instances > 1
    assert plan.load.worst_p99 <= 0.05
    with pytest.raises(cb.InvalidArgument, match="instances") as refused:
        cb.serving_plan(result_of(saturating), arrival_rate=5000.0, p99=0.05, instances=plan.instances - 1)
    assert refused.value.value == plan.instances - 1


def test_the_highest_rate_is_the_last_that_keeps_the_limit():
    """A little below it two instances are enough; five percent above it no setting of them keeps the limit."""
    plan = cb.serving_plan(result_of(saturating), arrival_rate=100.0, p99=0.05, instances=2)
    highest = plan.chosen.highest_rate
    assert cb.serving_plan(result_of(saturating), arrival_rate=0.97 * highest, p99=0.05).instances <= 2
    with pytest.raises(cb.InvalidArgument):
        cb.serving_plan(result_of(saturating), arrival_rate=1.05 * highest, p99=0.05, instances=2)


def test_no_batch_where_batching_gains_nothing():
    """If the time is proportional to the batch, requests are served one by one."""
    plan = cb.serving_plan(result_of(lambda n: 0.002 * n), arrival_rate=200.0, p99=0.1)
    assert (plan.max_batch_size, plan.queue_delay, plan.instances) == (1, 0.0, 1)


def test_what_was_not_timed_is_named():
    """Neither larger batches nor single requests are known of a lone size of 16; of 1 and 8 both are."""
    lone, pair = (
        " ".join(cb.serving_plan(result_of(lambda n: 0.002 * n, sizes=sizes), arrival_rate=9.0, p99=0.1).reasons)
        for sizes in ((16,), (1, 8))
    )
    assert "The result has no larger batch within the limit. Fewer requests count as a step of 16, the" in lone
    assert "Larger batches do not raise that rate." in pair
    assert "Fewer requests" not in pair


def test_seconds_and_the_overhead_are_named():
    """A limit as text is of no unit; an overhead above the limit is the cause, not the device."""
    with pytest.raises(cb.InvalidArgument, match=r"p99 must be a finite number of seconds above 0, got '10ms'"):
        cb.serving_plan(result_of(saturating), arrival_rate=10.0, p99="10ms")
    with pytest.raises(cb.InvalidArgument, match=r"which 200 ms are `overhead`, got 0.1\. .* lower the overhead, or"):
        cb.serving_plan(result_of(saturating), arrival_rate=10.0, p99=0.1, overhead=0.2)
    with pytest.raises(cb.InvalidArgument, match="Raise the limit, or use"):
        cb.serving_plan(result_of(saturating), arrival_rate=10.0, p99=0.004)


def test_a_batch_is_worth_what_the_steps_say():
    """Between a rate that single requests saturate and one that batches of 32 do, only batches keep the limit."""
    rate = 0.5 * (1 / saturating(1) + 32 / saturating(32))
    plan = cb.serving_plan(result_of(saturating), arrival_rate=rate, p99=0.1, instances=1)
    single, *_ = plan.options
    assert single.load is None
    assert plan.max_batch_size > 1
    assert single.highest_rate < 1 / saturating(1) < rate <= plan.chosen.highest_rate < 64 / saturating(64)


def test_steps_that_vary_have_a_longer_tail():
    """Requests do not wait at a low rate. One step in five takes three times as long: so does the 95th percentile."""
    steady, varying = (
        cb.serving_plan(result_of(saturating, spread=spread, sizes=(1,)), arrival_rate=1.0, p99=0.1).load.p95
        for spread in ((1.0,) * 5, (1.0, 1.0, 1.0, 1.0, 3.0))
    )
    assert (steady, varying) == pytest.approx((saturating(1), 3 * saturating(1)))


def test_the_overhead_of_the_server_counts():
    """Twenty milliseconds more for each request are added to each percentile."""
    bare, served = (
        cb.serving_plan(result_of(saturating, sizes=(1,)), arrival_rate=10.0, p99=0.1, overhead=each).load
        for each in (0.0, 0.02)
    )
    assert served.p50 == pytest.approx(bare.p50 + 0.02)


def test_the_cost_is_that_of_all_instances():
    """At 3.6 an hour, an instance costs 0.001 a second."""
    plan = cb.serving_plan(result_of(saturating), arrival_rate=5000.0, p99=0.05, price_per_hour=3.6)
    assert plan.cost_per_million_requests == pytest.approx(plan.instances * 0.001 / 5000.0 * 1e6)
    assert json.loads(json.dumps(plan.to_mapping()))["cost_per_million_requests"] == plan.cost_per_million_requests


def test_a_forecast_is_planned_with_too():
    """The plan of a prediction states that nothing was measured."""
    forecast = cb.predict("resnet18", device="t4", batch_sizes=[1, 2, 4, 8])
    plan = cb.serving_plan(forecast, arrival_rate=20.0, p99=1.0)
    assert plan.predicted
    assert set(forecast.seconds) >= {option.max_batch_size for option in plan.options}


def test_batches_of_millions_are_no_options():
    """Their simulation would take gigabytes; with such sizes alone nothing can be planned."""
    small = result_of(saturating)
    with_millions = result_of(saturating, sizes=(*SIZES, 30_000_000))
    wanted = {"arrival_rate": 100.0, "p99": 1.0}
    assert cb.serving_plan(with_millions, **wanted).options == cb.serving_plan(small, **wanted).options
    with pytest.raises(cb.InvalidArgument, match="at most 4096 samples"):
        cb.serving_plan(result_of(saturating, sizes=(30_000_000,)), arrival_rate=100.0, p99=1e6)


def test_a_file_that_is_no_prediction_is_refused(tmp_path):
    """Its rows are no list: the error names the file, as for a tuning result."""
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"schema": 1, "predicted": True, "measurements": 5}))
    with pytest.raises(cb.InvalidData, match=r"wrong\.json"):
        cb.serving_plan(str(path), arrival_rate=1.0, p99=1.0)


def test_slow_first_calls_are_named_with_their_size():
    """A first call of 0.2 s misses the limit. One as fast as later ones, or of a larger batch, does not count."""
    firsts = {1: saturating(1), 8: 0.2, 64: 3.0}
    sizes = [measurement(n, saturating(n), first_seconds=first) for n, first in firsts.items()]
    result = cb.TuningResult.from_mapping(tuned(mode="inference", measurements=sizes))
    plan = cb.serving_plan(result, arrival_rate=500.0, p99=0.03, instances=1)
    assert plan.max_batch_size == 8
    assert plan.first_calls == {8: 0.2}
    assert any("200 ms (batch 8), longer than the limit" in reason for reason in plan.reasons)
    without = cb.serving_plan(result_of(saturating), arrival_rate=500.0, p99=0.03, instances=1)
    assert not any("first call" in reason for reason in without.reasons)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"arrival_rate": 0.0}, "arrival_rate"),
        ({"arrival_rate": 1e-9}, "arrival_rate"),  # in 600 000 years a float resolves no millisecond
        ({"p99": 0.0}, "p99"),
        ({"p99": 0.004}, "p99"),  # a step of one sample takes 4.5 ms
        ({"overhead": -1.0}, "overhead"),
        ({"overhead": 0.05}, "p99"),
        ({"instances": 0}, "instances"),
        ({"price_per_hour": 0.0}, "price_per_hour"),
        ({"arrival_rate": 1e9}, "arrival_rate"),
    ],
)
def test_an_argument_out_of_range_is_named(options, field):
    """Each error names the argument and comes before any plan."""
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.serving_plan(result_of(saturating), **{"arrival_rate": 10.0, "p99": 0.05} | options)
    assert refused.value.field == field


@pytest.mark.parametrize("result", [result_of(saturating, mode="training"), 3])
def test_only_a_result_of_inference_is_planned_with(result):
    """The steps of training, and a number, have no latency of a request."""
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.serving_plan(result, arrival_rate=10.0, p99=0.05)
    assert refused.value.field == "result"


@pytest.mark.parametrize("spread", [(1.0, 1.0, 0.25), (1.0, 1.0, 2.0)])
def test_no_rate_is_above_the_measured_one(spread):
    """Neither timings that were faster for a while nor slow ones make a batch faster than its measured time."""
    plan = cb.serving_plan(result_of(saturating, spread=spread), arrival_rate=1.0, p99=10.0, instances=2)
    for option in plan.options:
        n = option.max_batch_size
        assert option.highest_rate <= 2 * n / saturating(n)


@pytest.mark.parametrize(
    "facts",
    [
        {"timings_seconds": [0.01] * 3, "timings_steps": [1000] * 3, "longest_steps": [500.0] * 3},
        {"timings_seconds": [0.005, 0.02, 0.02], "timings_steps": [100, 1, 1], "longest_steps": [1.0] * 3},
    ],
    ids=["rare slow steps", "fast timings of many steps"],
)
def test_no_rate_is_above_the_measured_one_whatever_the_single_steps(facts):
    """Half of the time is spent in one step of 1000, or a fast timing has most of the steps: the rate stays below."""
    sizes = [measurement(1, 0.01, **facts)]
    result = cb.TuningResult.from_mapping(tuned(mode="inference", measurements=sizes))
    plan = cb.serving_plan(result, arrival_rate=1.0, p99=100.0, instances=1)
    assert plan.options[0].highest_rate <= 1 / 0.01


def result_with_slow_steps(longest, steps=10):
    """Return a result whose timings are equal: 10 ms for any size, as the mean of some steps."""
    facts = {"timings_seconds": [0.01] * 3, "timings_steps": [steps] * 3, "longest_steps": longest}
    sizes = [measurement(n, 0.01, **facts) for n in (1, 8)]
    return cb.TuningResult.from_mapping(tuned(mode="inference", measurements=sizes))


def test_a_slow_step_within_a_timing_shows_in_the_latency():
    """One of ten steps takes 55 ms, the others 5: hardly any request waits, and one in ten takes 55 ms."""
    load, plain = (
        cb.serving_plan(result_with_slow_steps(longest), arrival_rate=0.01, p99=1.0, instances=1).load
        for longest in ([5.5] * 3, None)
    )
    assert (load.p50, load.p99) == pytest.approx((0.005, 0.055))
    assert (plain.p50, plain.p99) == pytest.approx((0.01, 0.01))


def test_of_many_steps_the_slow_ones_keep_their_share():
    """Ten times 1000 steps with one slow step each: one request in a thousand is slow, by 500 times."""
    facts = {"timings_seconds": [0.01] * 10, "timings_steps": [1000] * 10, "longest_steps": [500.0] * 9 + [1.0]}
    sizes = [measurement(1, 0.01, **facts)]
    result = cb.TuningResult.from_mapping(tuned(mode="inference", measurements=sizes))
    load = cb.serving_plan(result, arrival_rate=1e-3, p99=100.0, instances=1).load
    assert load.p99 < 0.02


def test_a_size_that_varies_does_not_disturb_the_others():
    """One timing of the single request took ten times as long; batches of 64 are as steady as they were."""
    sizes = [
        measurement(n, saturating(n), timings_seconds=[saturating(n) * each for each in factors])
        for n, factors in ((1, (1.0, 1.0, 10.0)), (64, (1.0, 1.0, 1.0)))
    ]
    result = cb.TuningResult.from_mapping(tuned(mode="inference", measurements=sizes))
    plan = cb.serving_plan(result, arrival_rate=1400.0, p99=0.3, instances=1)  # 64 of 36 ms allow 1778
    assert plan.max_batch_size == 64


def test_a_batch_that_is_slower_than_smaller_ones_is_not_credited_with_their_rate():
    """Batches of 8 take 1000 requests/s. A queue of more than 64 is served by 64, at 640 requests/s."""
    seconds = {1: 0.005, 4: 0.006, 8: 0.008, 64: 0.1}
    plan = cb.serving_plan(
        result_of(seconds.__getitem__, sizes=tuple(seconds)), arrival_rate=500.0, p99=5.0, instances=1
    )
    rates = {option.max_batch_size: option.highest_rate for option in plan.options}
    assert rates[64] < 640 < rates[8] < 1000
    assert plan.max_batch_size == 8


def test_the_delay_of_the_plan_keeps_the_limit():
    """A plan without a number of instances is not refused for its instances at any of these rates."""
    seconds = {1: 0.018979, 2: 0.019079, 4: 0.019279}
    for rate in (300.0, 500.0, 760.2):
        plan = cb.serving_plan(result_of(seconds.__getitem__, sizes=tuple(seconds)), arrival_rate=rate, p99=0.0535)
        assert plan.load.worst_p99 <= 0.0535


def test_a_queue_delay_pays_where_idle_instances_would_take_single_requests():
    """With two instances and a tight limit, the planned delay keeps it at a rate at which no delay does not."""
    result = result_of(saturating, sizes=(1, 8, 32))
    chosen = cb.serving_plan(result, arrival_rate=10.0, p99=0.012, instances=2).chosen
    assert chosen.queue_delay > 0
    gaps = np.random.default_rng(7).exponential(1 / (0.97 * chosen.highest_rate), size=50_000)
    steps = [[saturating(n)] for n in range(1, chosen.max_batch_size + 1)]
    delayed, direct = (
        simulate(np.cumsum(gaps).tolist(), steps, instances=2, delay=delay).p99 for delay in (chosen.queue_delay, 0.0)
    )
    assert delayed <= 0.012 < direct


def test_the_number_of_instances_goes_up_to_a_thousand():
    """60 000 requests/s of single steps of 10 ms need more than 600 of them."""
    result = result_of(lambda n: 0.01 * n, sizes=(1,))
    plan = cb.serving_plan(result, arrival_rate=60_000.0, p99=0.0101)
    assert 600 < plan.instances <= 1000


def test_large_pools_are_simulated_in_part(monkeypatch):
    """Eighty million requests would take minutes; the rate of an instance is that of a smaller pool of them."""
    result, limits = result_of(saturating, sizes=(1, 4096)), {"arrival_rate": 1000.0, "p99": 10.0}
    counts, simulated = [], serving_plan.simulate

    def counted(arrivals, *arguments, **options):
        counts.append(len(arrivals))
        assert counts[-1] <= 200_000
        return simulated(arrivals, *arguments, **options)

    monkeypatch.setattr(serving_plan, "simulate", counted)
    small, large = (cb.serving_plan(result, instances=count, **limits) for count in (2, 1000))
    assert counts
    for few, many in zip(small.options, large.options, strict=True):
        assert many.highest_rate >= 0.99 * 500 * few.highest_rate
        assert many.highest_rate <= 1000 * few.max_batch_size / saturating(few.max_batch_size)


def test_a_server_that_closes_batches_while_busy_has_a_delay():
    """Without one it would serve single requests, at 222/s; Ray Serve takes no other plan."""
    result = result_of(saturating)
    ahead, idle = (
        cb.serving_plan(result, arrival_rate=800.0, p99=0.1, instances=1, closes_while_busy=each)
        for each in (True, False)
    )
    assert ahead.queue_delay > 0 == idle.queue_delay
    assert ahead.load.worst_p99 <= 0.1
    with pytest.raises(cb.InvalidArgument, match="closes_while_busy"):
        idle.to_ray_serve()


def test_settings_of_servers_hold_the_plan():
    """Batch size, delay in the unit of the server, and instances are in each text."""
    plan = cb.serving_plan(result_of(saturating), arrival_rate=5000.0, p99=0.05, closes_while_busy=True)
    size, instances, delay = plan.max_batch_size, plan.instances, plan.queue_delay
    triton = plan.to_triton().splitlines()
    assert "instance_group [ { count: 1 } ]" in triton  # on each GPU
    assert f"count: {instances} kind: KIND_CPU" in attrs.evolve(plan, on_cpu=True).to_triton()
    assert f"max_batch_size: {size}" in triton
    assert f"dynamic_batching {{ max_queue_delay_microseconds: {round(1e6 * delay)} }}" in triton
    ray = dict(re.findall(r"(\w+): (\S+)", plan.to_ray_serve("Classifier")))
    assert (ray["name"], int(ray["num_replicas"]), int(ray["max_batch_size"])) == ("Classifier", instances, size)
    assert float(ray["batch_wait_timeout_s"]) == pytest.approx(delay)
    assert int(ray["max_ongoing_requests"]) >= size  # fewer would never fill a batch
    assert f"max_batch_size={size}" in plan.to_bentoml()
    assert f"workers={instances}" in plan.to_bentoml()
    with pytest.raises(cb.InvalidArgument, match="deployment"):
        plan.to_ray_serve("a: b")


def test_a_size_that_was_timed_once_varies_as_others_do():
    """Of single requests one timing is known; one step in five of 8 takes three times as long: so does theirs."""
    sizes = [
        measurement(n, saturating(n), timings_seconds=[saturating(n) * each for each in factors])
        for n, factors in ((1, (1.0,)), (8, (1.0, 1.0, 1.0, 1.0, 3.0)))
    ]
    result = cb.TuningResult.from_mapping(tuned(mode="inference", measurements=sizes))
    plan = cb.serving_plan(result, arrival_rate=1.0, p99=0.06)
    assert plan.load.p95 == pytest.approx(3 * saturating(1))
    assert (plan.max_batch_size, plan.timed_once) == (8, (1,))
    assert any("1 of the 2 up to 8" in reason for reason in plan.reasons)
    often = cb.serving_plan(result_of(saturating, spread=(1.0, 1.0)), arrival_rate=1.0, p99=0.1)
    assert often.timed_once == ()


@pytest.mark.parametrize(("delay", "milliseconds"), [(0.0, 1), (0.0004, 1), (0.0021, 3)])
def test_torchserve_reads_each_value_as_it_was_planned(delay, milliseconds):
    """
    TorchServe 0.12 takes 100 ms instead of a delay of 0, and rejects requests above 100 that wait.

    ModelConfig.java has its keys, ModelManager.java its defaults.  At 5000 requests/s, 250 fit into a limit of 50 ms.
    """
    plan = cb.serving_plan(result_of(saturating), arrival_rate=5000.0, p99=0.05)
    delayed = attrs.evolve(plan, options=[attrs.evolve(plan.chosen, queue_delay=delay)], on_cpu=True)
    settings = dict(re.findall(r"(\w+): (\w+)", delayed.to_torchserve()))
    assert settings.pop("deviceType") == "cpu"
    whole = {key: int(value) for key, value in settings.items()}
    assert whole.pop("jobQueueSize") >= max(250, plan.instances * plan.max_batch_size)
    assert whole == {
        "minWorkers": plan.instances, "maxWorkers": plan.instances, "batchSize": plan.max_batch_size,
        "maxBatchDelay": milliseconds,
    }  # fmt: skip
    assert "deviceType: gpu" in plan.to_torchserve()
