"""`cubatch bench`: what is called, whether it is right, how it is timed, what is reported."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from cubatch.bench import cases, check, contest, figure, measure, records, rivals, tables, target, training_calls
from cubatch.bench.contest import Contest, Entrant
from cubatch.engine import functional, pointwise
from cubatch.errors import DeviceFailed, DeviceNotAvailable, InvalidArgument, OutOfMemory, UnknownName, UnsupportedLayer
from cubatch.hardware import catalogue, probe
from cubatch.hardware.facts import Device
from cubatch.measure.clocks import HEAD_START, MAX_QUEUED, KernelClock
from cubatch.network import layers, models
from cubatch.network.passes import Pass
from cubatch.report.grid import grid
from tests.cpusim import building
from tests.cpusim.simulator import Simulator
from tests.unit import bench_fakes
from tests.unit.bench_fakes import DEVICE, World, enter
from tests.unit.commands import in_process

LAYERS = [
    layers.Conv2d(h=9, w=7, c=6, k=10, r=3, s=2, stride=2, pad=[1, 0, 1, 1]),
    layers.Conv2d(h=9, w=7, c=6, k=12, r=3, s=3, groups=3, pad=1),
    layers.Conv2d(h=9, w=7, c=6, k=6, r=3, s=3, groups=6, pad=1, stride=2),
    layers.Linear(c=13, k=7),
    layers.MaxPool2d(h=7, w=6, c=5, r=3, s=3, stride=2, pad=1),
    layers.Concat(h=4, w=5, c=7, channels=[3, 4]),
    layers.Dropout(h=7, w=6, c=5, p=0.3),
    layers.Softmax(h=2, w=3, c=11),
    layers.AvgPool2d(h=7, w=6, c=5, r=3, s=3, stride=2, pad=1),
    *(
        kind(h=7, w=6, c=5)
        for kind in (
            layers.GlobalAvgPool, layers.BatchNorm2d, layers.Add, layers.Scale, layers.ReLU, layers.ReLU6,
            layers.Sigmoid, layers.SiLU, layers.HardSigmoid, layers.HardSwish,
        )
    ),
]  # fmt: skip
EVERY = [
    *(cases.of_layer(layer, pass_, 4) for layer in LAYERS for pass_ in Pass if cases.has_case(layer, pass_)),
    *(cases.of_layer(layer, pass_, 4, with_bias=True) for layer in LAYERS[:4] for pass_ in (Pass.FPROP, Pass.WGRAD)),
    *(training_calls.optimizer_step(name, 1000) for name in ("sgd", "momentum", "adam")),
    training_calls.cross_entropy(37, 11),
]
GEMM = cases.gemm(70, 50, 30)


@pytest.fixture
def world(monkeypatch):
    """A world of NumPy kernels in the place of ours."""
    return enter(World(), monkeypatch)


def filled(case, seed=1):
    """The arrays of a case, and an Expected of all its results."""
    arrays = target.fill(np, case, seed)
    return arrays, check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)


# --- cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "product"),
    [
        ("nt", lambda a: a["x"] @ a["w"].T),
        ("nn", lambda a: a["dy"] @ a["w"]),
        ("tn", lambda a: a["dy"].T @ a["x"]),
    ],
)
def test_a_gemm_is_the_product_of_its_layout(layout, product):
    """(m, k) x (k, n) with the operands stored as the letters say; a multiply-add is two FLOP."""
    case = cases.gemm(5, 3, 7, layout=layout)
    arrays = target.fill(np, case, 0)
    case.call(functional, arrays)
    result = arrays[case.results[0]]
    assert result.shape == (5, 3)
    assert case.flops == 2 * 5 * 3 * 7
    np.testing.assert_allclose(result, product(arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet-v3-large", "go-net"])
def test_the_cases_of_a_network_hold_all_its_flops(name):
    """Forward, each distinct layer times how often it occurs gives the network's own count."""
    network = models.build(name)
    found = cases.of_network(network, [Pass.FPROP], 2)
    assert sum(case.multiplicity * case.flops for case in found) == 2 * network.flops()
    assert len({case.name for case in found}) == len(found)


def test_the_cases_of_a_training_step_hold_its_flops():
    """All passes of a network with an unpadded convolution: rates are of what is counted, not of zeros multiplied."""
    network = models.build("lenet5")
    found = cases.of_network(network, list(Pass), 2, only_products=True)
    assert sum(case.multiplicity * case.flops for case in found) == 2 * network.flops("training")


def test_a_network_does_no_gradient_of_its_input():
    """The first convolution has no dgrad; every layer with a filter has a wgrad."""
    found = cases.of_network(models.build("mnist-cnn"), list(Pass), 4, only_products=True)
    by_pass = {pass_: [name for case in found if case.pass_ is pass_ for name in case.layers] for pass_ in Pass}
    assert len(by_pass[Pass.FPROP]) == len(by_pass[Pass.WGRAD]) == 4
    assert set(by_pass[Pass.WGRAD]) - set(by_pass[Pass.DGRAD]) == {by_pass[Pass.FPROP][0]}


def test_batch_norm_moves_its_input_again_for_its_statistics():
    """Forward two reads and a write of n h w c; backward two reads of both, and a write."""
    layer, elements = layers.BatchNorm2d(h=4, w=4, c=8), 3 * 4 * 4 * 8
    forward, backward = (cases.of_layer(layer, pass_, 3) for pass_ in (Pass.FPROP, Pass.DGRAD))
    parameters = layer.parameters
    assert forward.moved_bytes == 4 * (3 * elements + parameters)
    assert backward.moved_bytes == 4 * (5 * elements + parameters)


def test_a_roofline_is_the_larger_of_arithmetic_and_bytes():
    """A square product of 1000 is bound by arithmetic, one of k = 1 by its bytes; without rates nothing is said."""
    large, flat = cases.gemm(1000, 1000, 1000), cases.gemm(1000, 1000, 1)
    assert large.roofline_seconds(DEVICE) == pytest.approx(2e9 / 1e12)
    assert flat.roofline_seconds(DEVICE) == pytest.approx(4 * (1000 + 1000 + 10**6) / 1e11)
    assert (large.bound(DEVICE), flat.bound(DEVICE)) == ("compute", "memory")
    assert large.roofline_seconds(Device(name="unknown")) is large.bound(Device(name="unknown")) is None


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: cases.gemm(0, 1, 1), InvalidArgument, "m must be"),
        (lambda: cases.gemm(1, 1, 1, layout="tt"), InvalidArgument, "nn, nt, tn"),
        (lambda: cases.gemm(1, 1, 1, dtype="float64"), UnknownName, "float64"),
        (lambda: cases.of_layer(LAYERS[0], Pass.FPROP, True), InvalidArgument, "batch_size"),
        (lambda: cases.of_layer(layers.Flatten(h=1, w=1, c=1), Pass.FPROP, 1), InvalidArgument, "flatten"),
        (lambda: training_calls.optimizer_step("lion", 3), UnknownName, "lion"),
    ],
)
def test_a_case_that_makes_no_sense_says_so(make, error, named):
    """Each error names what was wrong with it."""
    with pytest.raises(error, match=named):
        make()


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_mapping_of_a_case_is_json(case):
    """Also where options are tuples."""
    assert json.loads(json.dumps(case.to_mapping(), allow_nan=False))["name"] == case.name


# --- arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_hold_random_data_of_their_kind(dtype):
    """Never zeros: signed data has mean 0 and mean square 1/3, positive lies in [0.5, 1.5], counts are whole."""
    arrays = target.fill(np, cases.of_layer(layers.BatchNorm2d(h=16, w=16, c=32), Pass.FPROP, 4, dtype), 3)
    x, gamma = check._values(arrays["x"]), check._values(arrays["gamma"])
    assert abs(x.mean()) < 0.05
    assert (x**2).mean() == pytest.approx(1 / 3, rel=0.05)
    assert gamma.min() >= 0.5
    assert gamma.max() <= 1.5
    assert np.unique(x).size > 100
    pool = target.fill(np, cases.of_layer(LAYERS[4], Pass.DGRAD, 4), 3)["argmax"]
    assert set(np.unique(pool)) == set(range(10))


@pytest.fixture
def generators(monkeypatch):
    """NumPy's generators behave as CuPy's; gives those that are made."""
    made = []

    def generator(_, seed):
        made.append(bench_fakes.CupysGenerator(seed))
        return made[-1]

    monkeypatch.setattr(target.backend, "random_generator", generator)
    return made


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_no_array_is_one_constant_on_a_gpu(case, generators):
    """Where CuPy is handed an array and no size it fills it with one number, which passes any permutation."""
    for name, array in target.fill(np, case, 0).items():
        assert array.size == 1 or np.unique(array).size > 1, name


def test_dropout_draws_a_number_for_each_element_on_a_gpu(generators, monkeypatch):
    """As above; a mask of one number keeps all or nothing."""
    monkeypatch.setattr(pointwise, "random_generator", target.backend.random_generator)
    _, mask = functional.dropout(np.ones(1000, np.float32), p=0.5, seed=0)
    assert 400 < np.count_nonzero(mask) < 600


def test_a_copy_is_timed_on_random_data(generators, world, monkeypatch):
    """As is everything else: a GPU runs constants at clocks that real data never sees."""
    copied = []
    monkeypatch.setattr(np, "copyto", lambda _, source: copied.append(source))
    measure.copy_bandwidth(world.target(attrs.evolve(DEVICE, memory_bytes=1 << 20)), Contest(world))
    assert np.unique(copied[0]).size > 1000


def test_the_sets_of_a_case_differ_and_come_from_one_generator(generators, world):
    """A generator's states take a GPU longer to make than the data of a small case, and there are up to 128 sets."""
    sets = list(itertools.islice(target.filled(np, GEMM, 0), 3))
    assert len({array.tobytes() for arrays in sets for array in arrays.values()}) == 3 * len(GEMM.operands)
    assert len(generators) == 1
    measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    assert len(generators) == 2


def test_buffers_rotate_over_twice_the_l2():
    """As many sets as pass twice the L2, one where a set alone does, and never more than the cap."""
    small = cases.gemm(64, 64, 64)
    assert target.count_sets(small, 10 * small.num_bytes) == 20
    assert target.count_sets(small, small.num_bytes // 2) == 1
    assert target.count_sets(small, None) == 1
    assert target.count_sets(small, 10**4 * small.num_bytes) == target.MAX_SETS


def test_reserved_arrays_have_extents_and_take_no_memory():
    """A hundred gigabytes of them are there at once on a machine of less."""
    case = cases.of_layer(layers.Conv2d(h=224, w=224, c=64, k=64, r=3, s=3, pad=1), Pass.FPROP, 4096)
    arrays = target.reserve(case)
    assert case.num_bytes > 100e9
    assert {name: array.shape for name, array in arrays.items()} == {n: o.shape for n, o in case.operands.items()}


# --- checks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_right_results_pass_and_unwritten_ones_do_not(case):
    """The engine in float32 is right by the bound, whole or by sample; what nobody wrote is not."""
    arrays = target.fill(np, case, 1)
    whole = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    sample = check.Expected(case, arrays, np.random.default_rng(0))
    check.poison(case, arrays)
    assert not whole.check(arrays).passed
    assert not sample.check(arrays).passed
    case.call(functional, arrays)
    assert whole.check(arrays).worst < 0.7
    assert sample.check(arrays).worst <= 1.001 * whole.check(arrays).worst
    assert not case.cuts or sample.check(arrays).compared < whole.check(arrays).compared


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_one_result_that_is_off_by_a_thousandth_fails(case):
    """Of the largest result, in every array that is written; the message says where and what."""
    arrays, expected = filled(case)
    case.call(functional, arrays)
    for name in case.results:
        if arrays[name].dtype.kind != "f":
            continue
        flat = arrays[name].reshape(-1)
        index = int(np.argmax(np.abs(flat)))
        kept = flat[index]
        flat[index] *= 1.001
        found = expected.check(arrays)
        assert not found.passed, name
        assert found.where.startswith(f"{name}[")
        flat[index] = kept
    assert expected.check(arrays).passed


def test_a_long_sum_has_a_bound_that_zeros_do_not_pass():
    """Over 200 000 terms the certain bound holds for anything; what random data practically never exceed does not."""
    case = cases.of_layer(layers.Linear(c=4, k=3), Pass.WGRAD, 200_000)
    arrays, expected = filled(case)
    case.call(functional, arrays)
    assert expected.check(arrays).passed
    arrays["dw"][...] = 0
    assert expected.check(arrays).worst > 3


def test_a_sample_holds_the_last_of_everything():
    """Residues of tiles lie at the ends: an error in the last image's last channel is in every sample."""
    case = cases.of_layer(LAYERS[0], Pass.FPROP, 7)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(5))
    case.call(functional, arrays)
    arrays["out"][-1, -1, -1, -1] += 0.01
    assert not expected.check(arrays).passed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_storage_is_allowed_one_more_rounding_and_not_two(dtype):
    """The right result rounded once passes; moved by two units of the storage it does not."""
    case = cases.of_layer(LAYERS[3], Pass.FPROP, 4, dtype)
    arrays, expected = filled(case)
    right = check._values(arrays["x"]) @ check._values(arrays["w"]).T
    if dtype == "float16":
        arrays["out"][...] = right
        assert expected.check(arrays).passed
        arrays["out"][...] = right * (1 + 2.0**-9)
    else:
        bits = right.astype(np.float32).view(np.uint32)
        arrays["out"][...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert expected.check(arrays).passed
        arrays["out"][...] += 2
    assert not expected.check(arrays).passed


# --- time ----------------------------------------------------------------------------------------------------------


def clock_of(durations, host, occupied):
    """A KernelClock whose events and host clock read as listed."""
    event, elapsed = bench_fakes.events(durations)
    host_times = iter(host)
    return KernelClock(event, elapsed, occupied.append, None, lambda: next(host_times))


def test_a_reading_that_waited_for_the_host_is_taken_again_behind_other_work():
    """Enqueueing ten steps took 9 of 10 ms: the second reading begins with 1.5 times as long of something else."""
    occupied, done = [], []
    clock = clock_of([0.010, 0.002], [0.0, 0.009, 0.0, 0.009], occupied)
    reading = clock.time(lambda: done.append(1), 10)
    assert reading.seconds == pytest.approx(0.0002)
    assert occupied == [pytest.approx(HEAD_START * 0.009)]
    assert len(done) == 20


def test_a_reading_of_long_kernels_is_taken_once():
    """Enqueueing took a tenth of the time: nothing waited."""
    occupied = []
    assert clock_of([0.010], [0.0, 0.001], occupied).time(lambda: None, 10).seconds == pytest.approx(0.001)
    assert occupied == []


def test_no_more_is_queued_than_a_stream_holds():
    """Of 2000 tiny steps an eighth is enqueued behind the other work, which is as much shorter."""
    occupied, done = [], []
    clock = clock_of([0.010, 0.0005], [0.0, 0.010, 0.0, 0.003], occupied)
    reading = clock.time(lambda: done.append(1), 2000)
    assert reading.seconds == pytest.approx(0.0005 / MAX_QUEUED)
    assert len(done) == 2000 + MAX_QUEUED
    assert occupied == [pytest.approx(HEAD_START * 0.010 * MAX_QUEUED / 2000)]


class Paced:
    """A clock for steps that return their own seconds through a list."""

    def __init__(self):
        self.clock, self.order, self.mhz = 0.0, [], None

    def now(self):
        return self.clock

    def sleep(self, seconds):
        self.clock += seconds

    def time(self, step, repeats):
        seconds = step()
        self.clock += seconds * repeats
        self.order.append((step.name, repeats))
        return bench_fakes.Reading(seconds=seconds, sm_clock_mhz=self.mhz and self.mhz(len(self.order)))


class Step:
    """A step of known length, with some noise."""

    def __init__(self, name, seconds, noise=0.0, seed=0):
        self.name, self.seconds, self.noise = name, seconds, noise
        self.random = np.random.default_rng(seed)

    def __call__(self):
        return self.seconds * (1 + self.noise * self.random.uniform(-1, 1))


def entrants(**seconds):
    """Entrants by name and length; those named v... are the vendor's."""
    return [Entrant(name, "vendor" if name[0] == "v" else "ours", Step(name, each)) for name, each in seconds.items()]


def test_rounds_take_turns_and_end_when_all_is_known():
    """Steps without noise are known after the five timings that a 90 % interval needs; each round has each once."""
    clock, found = Paced(), entrants(a=0.001, b=0.0011, v=0.002)
    Contest(clock).run(found, 100.0)
    # b is a tenth slower than a: dropped after three rounds
    assert [len(entrant.timings) for entrant in found] == [5, 3, 5]
    assert [timing.round for timing in found[0].timings] == [0, 1, 2, 3, 4]
    assert found[1].status == "dropped"
    assert "a" in found[1].reason
    rounds = [name for name, _ in clock.order][-13:]
    assert sorted(rounds[:3]) == ["a", "b", "v"]


def test_the_vendor_is_never_dropped_nor_drops_ours():
    """Sides are compared, not thinned against each other."""
    found = entrants(a=0.001, v=0.1)
    Contest(Paced()).run(found, 100.0)
    assert [entrant.status for entrant in found] == ["ok", "ok"]
    assert [len(entrant.timings) for entrant in found] == [5, 5]


def test_noise_takes_more_rounds_and_time_bounds_them():
    """At 5 % noise five rounds do not do; with no time there is one."""
    noisy = [Entrant("a", "ours", Step("a", 0.001, noise=0.05))]
    Contest(Paced()).run(noisy, 100.0)
    assert len(noisy[0].timings) > 5
    hurried = entrants(a=0.001, v=0.001)
    Contest(Paced()).run(hurried, 0.0)
    assert [len(entrant.timings) for entrant in hurried] == [1, 1]


def test_a_timing_spans_two_milliseconds():
    """Steps of 2^-20 s are repeated 2098 times, one of a second once."""
    clock, found = Paced(), entrants(a=2.0**-20, v=1.0)
    Contest(clock).run(found, 0.0)
    assert {entrant.name: entrant.timings[0].repeats for entrant in found} == {"a": 2098, "v": 1}


def test_clocks_are_warmed_once():
    """Half a second of work before the first timing of a process, none before the next contest's."""
    clock = Paced()
    contest_ = Contest(clock)
    contest_.run(entrants(a=0.001), 0.0)
    assert clock.now() > contest.WARM_SECONDS
    before = clock.now()
    contest_.run(entrants(a=0.001), 0.0)
    assert clock.now() - before < 0.02


def test_a_sunken_clock_is_flagged_and_its_timing_not_used():
    """Half of the highest clock that was seen: the timing is kept and does not count."""
    clock = Paced()
    contest_ = Contest(clock)
    contest_.run(entrants(a=0.001), 0.0)
    start = len(clock.order)
    clock.mhz = lambda number: 900.0 if number == start + 3 else 1800.0
    contest_._highest_clock = 1800.0
    found = entrants(a=0.001)
    contest_.run(found, 100.0)
    assert [timing.throttled for timing in found[0].timings] == [True, False, False, False, False, False]
    assert len(found[0].used) == 5


# --- measuring -----------------------------------------------------------------------------------------------------


def test_ours_and_the_vendors_are_compared_in_the_same_rounds(world):
    """Ours takes 1 ms, the vendor 0.9 ms: the ratio is 0.9, its interval too, where nothing varies."""
    world.seconds = {"gemm_nt_a": 1e-3, "gemm_nt_b": 2e-3, "vendor": 0.9e-3}
    result = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", seconds=10.0)
    a, b, vendor = result.entries
    assert [entry.status for entry in result.entries] == ["ok", "dropped", "ok"]
    assert result.best is a
    assert result.times == {"ours": a, "vendor": vendor}
    assert vendor.name == "numpy.matmul"
    assert a.ratio == pytest.approx(0.9)
    assert a.ratio_interval == pytest.approx((0.9, 0.9))
    assert b.ratio == pytest.approx(0.45)
    assert a.flops_per_second == pytest.approx(2 * 70 * 50 * 30 / 1e-3)
    assert a.roofline_fraction == pytest.approx(GEMM.roofline_seconds(DEVICE) / 1e-3)
    assert a.worst_error <= 1
    assert len(a.timings) == len(vendor.timings) == 5


def test_a_wrong_kernel_is_reported_and_never_timed(world):
    """Even where it would be the fastest."""
    world.seconds, world.wrong = {"gemm_nt_a": 1e-6}, {"gemm_nt_a"}
    result = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", with_rivals=False)
    a, b = result.entries
    assert (a.status, a.seconds, a.timings) == ("wrong", None, ())
    assert "the rounding bound at out[" in a.reason
    assert result.best is b
    assert result.wrong == (a,)
    assert world.launched.count("gemm_nt_a") == 1


def test_a_variant_that_the_driver_refuses_does_not_end_the_others(world, monkeypatch):
    """Its error is its result, as that of a variant that does not compile; what breaks the context ends them all."""
    bind = World.bind

    def refused(self, found, grid, arguments):
        if found.name == "gemm_nt_a":
            raise DeviceFailed.by_driver("launching gemm_nt_a", status)
        return bind(self, found, grid, arguments)

    monkeypatch.setattr(World, "bind", refused)
    status = 701
    timed = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", with_rivals=False)
    checked = measure.verify(GEMM, world.target())
    for result in (timed, checked):
        assert [entry.status for entry in result.entries] == ["error", "ok"]
        assert "status 701" in result.entries[0].reason
    status = 700
    with pytest.raises(DeviceFailed, match="status 700"):
        measure.verify(GEMM, world.target())


def test_the_place_is_told_of_each_variant_before_its_first_launch_and_after(world):
    """So that whoever watches a process knows which kernel ended it; what it refuses is the result of that variant."""
    seen = []

    @contextlib.contextmanager
    def trying(found):
        seen.append((found.name, len(world.launched)))
        if found.name == "gemm_nt_b":
            raise DeviceFailed(f"kernel {found.name}", "the end of an earlier process")
        yield
        seen.append((found.name, len(world.launched)))

    result = measure.verify(GEMM, attrs.evolve(world.target(), trying=trying))
    assert seen == [("gemm_nt_a", 0), ("gemm_nt_a", 1), ("gemm_nt_b", 1)]
    assert [entry.status for entry in result.entries] == ["ok", "error"]
    assert "an earlier process" in result.entries[1].reason


def test_a_vendor_that_refuses_a_case_does_not_end_ours(world, monkeypatch):
    """Its error is its result; ours is timed, without a ratio."""

    def refuse(_):
        raise RuntimeError("no algorithm")

    monkeypatch.setitem(rivals.RIVALS, "vendor", lambda *_, **__: rivals.Rival("vendor", "library", refuse))
    result = measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    ours, vendor = result.entries
    assert (ours.status, ours.ratio) == ("ok", None)
    assert (vendor.status, vendor.reason, vendor.seconds) == ("error", "no algorithm", None)
    assert result.wrong == ()


def test_only_what_is_asked_for_runs(world):
    """The first of the ranking, and no vendor."""
    result = measure.time_case(GEMM, world.target(), Contest(world), with_rivals=False)
    assert [entry.name for entry in result.entries] == ["gemm_nt_a"]
    assert set(world.launched) == {"gemm_nt_a"}
    assert result.no_rival == "not asked for"


def test_buffers_are_taken_in_turn(world):
    """Sets that together pass twice the L2, each with data of its own."""
    device = attrs.evolve(DEVICE, l2_bytes=GEMM.num_bytes * 2)
    result = measure.time_case(GEMM, world.target(device), Contest(world), with_rivals=False)
    assert (result.sets, result.l2) == (4, "cold")
    counts = [world.data.count(which) for which in set(world.data)]
    assert len(counts) == 4
    assert max(counts) - min(counts) <= 1


def test_buffers_that_the_cap_leaves_in_the_l2_are_called_warm(world):
    """128 sets of a tiny product are less than a large L2."""
    tiny = cases.gemm(2, 2, 2)
    device = attrs.evolve(DEVICE, l2_bytes=1 << 20)
    result = measure.time_case(tiny, world.target(device), Contest(world), with_rivals=False)
    assert (result.sets, result.l2) == (target.MAX_SETS, "warm")


def test_what_a_kernel_writes_over_is_put_back_for_the_next(world, monkeypatch):
    """An optimiser changes its parameters: a second variant's check begins with those of the first."""
    case = training_calls.optimizer_step("adam", 500)
    way = measure.ways(case, DEVICE)[0]
    monkeypatch.setattr(measure, "ways", lambda *_: [way, way])
    result = measure.time_case(case, world.target(), Contest(world), seconds=0.0)
    assert [entry.status for entry in result.entries] == ["ok", "ok"]
    assert result.no_rival == "compared with the bandwidth of a copy"


def test_bandwidth_stands_against_the_copy_of_the_same_run(world):
    """Batch norm that moves its bytes in 1 ms, where a copy moves twice as many."""
    case = cases.of_layer(layers.BatchNorm2d(h=8, w=8, c=16), Pass.FPROP, 4)
    copy = 2 * case.moved_bytes / 1e-3
    result = measure.time_case(case, world.target(), Contest(world), copy_bytes_per_second=copy)
    assert result.best.bytes_per_second == pytest.approx(case.moved_bytes / 1e-3)
    assert result.best.copy_fraction == pytest.approx(0.5)
    assert result.best.flops_per_second is None


def test_arrays_that_do_not_fit_are_a_status_and_no_crash(world, monkeypatch):
    """CuPy's out of memory is a MemoryError."""

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(measure, "filled", refuse)
    result = measure.time_case(GEMM, world.target(), Contest(world))
    assert result.status == "out_of_memory"
    assert result.best is not None
    assert result.best.seconds is None


def test_verify_compares_everything_and_times_nothing(world):
    """Every way is checked on all results; the wrong one says where."""
    world.wrong = {"gemm_nt_b"}
    result = measure.verify(GEMM, world.target(), seed=3)
    assert [entry.status for entry in result.entries] == ["ok", "wrong"]
    assert world.readings == []


def test_a_copy_counts_what_it_reads_and_writes(world):
    """A copy of a mebibyte in a millisecond moves two."""
    device = attrs.evolve(DEVICE, memory_bytes=8 << 20)
    assert measure.copy_bandwidth(world.target(device), Contest(world)) == pytest.approx(2 * 2**20 / 1e-3)


def test_an_operation_without_a_kernel_says_so(monkeypatch):
    """Naming the case and what is missing."""
    monkeypatch.setattr("cubatch.bench.implementations.operations", lambda _: SimpleNamespace())
    with pytest.raises(UnsupportedLayer, match="there is no kernel for linear"):
        measure.plan(GEMM, DEVICE)


@pytest.mark.parametrize(
    "case",
    [
        cases.gemm(7, 5, 9),
        cases.of_layer(layers.BatchNorm2d(h=3, w=5, c=6), Pass.FPROP, 2),
        cases.of_layer(layers.Conv2d(h=7, w=6, c=5, k=5, r=3, s=3, pad=1, groups=5), Pass.DGRAD, 2, with_bias=True),
    ],
    ids=lambda case: case.name,
)
def test_the_kernels_themselves_are_planned_and_verified(case):
    """Executed on the CPU from their own source: every variant that the plan names is right."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    device = catalogue.find("a100-sxm4-40gb")
    here = target.Target(device, Simulator(80), np, Paced())
    planned = measure.plan(case, device, variants="all", compiled=False)
    result = measure.verify(case, here)
    assert [entry.name for entry in result.entries] == [entry.name for entry in planned.entries]
    assert {entry.status for entry in result.entries} == {"ok"}, result.wrong
    assert all(launch.fill for entry in planned.entries for launch in entry.launches)


# --- rivals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("layer", [layers.Linear(c=13, k=7), layers.Conv2d(h=5, w=4, c=6, k=8, r=1, s=1)], ids=str)
def test_the_vendors_product_is_the_same_product(layer, pass_, monkeypatch):
    """matmul on the very arrays gives what the layer's pass gives; a 1x1 convolution is one where there is no cuDNN."""
    monkeypatch.setattr(rivals, "_torch", lambda: None)
    case = cases.of_layer(layer, pass_, 3)
    arrays, expected = filled(case)
    check.poison(case, arrays)
    rivals.rivals(case, np)[0].bind(arrays)()
    assert expected.check(arrays).passed


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (cases.of_layer(LAYERS[0], Pass.FPROP, 2), "not installed"),
        (cases.of_layer(LAYERS[3], Pass.FPROP, 2, "bfloat16"), "not installed"),
        (cases.of_layer(LAYERS[3], Pass.FPROP, 2, "tf32"), "not installed"),
        (training_calls.cross_entropy(3, 4), "copy"),
    ],
)
def test_where_there_is_no_vendor_the_reason_is_given(case, reason, monkeypatch):
    """No PyTorch, other arithmetic, or nothing that a library would be timed for."""
    monkeypatch.setattr(rivals, "_torch", lambda: None)
    assert reason in rivals.rivals(case, np)[0].reason


def test_tf32_is_off_for_cupy(monkeypatch):
    """Whatever the environment says."""
    monkeypatch.setenv("CUPY_TF32", "1")
    rivals.rivals(GEMM, np)
    assert os.environ["CUPY_TF32"] == "0"


# --- what is reported ----------------------------------------------------------------------------------------------


def test_a_result_is_json_with_every_timing(world):
    """The raw timings, the launches and what identifies the case."""
    result = measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    facts = json.loads(json.dumps(result.to_mapping(), allow_nan=False))
    assert facts["case"]["flops"] == GEMM.flops
    assert facts["entries"][0]["launches"][0]["grid"] == [30, 1, 1]
    assert facts["entries"][0]["launches"][0]["busiest_sm_blocks"] == 3
    assert [t["seconds"] for t in facts["entries"][0]["timings"]] == [1e-3] * 5


def test_the_table_of_one_case_has_a_line_for_each_way(world):
    """Ours and the vendor's, with blocks, fill, rate and ratio."""
    world.seconds = {"vendor": 0.5e-3}
    world.wrong = {"gemm_nt_b"}
    result = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", seconds=10.0)
    text = grid(tables.entries([result], title="bench"))
    assert "bench: gemm nt 70 x 50 x 30" in text
    assert "0.50 (0.50 to 0.50)" in text
    assert "wrong:" in text
    assert "cost model" not in text
    assert "numpy.matmul" in text
    assert "100 %" in text  # 30 blocks on 10 SMs


def test_the_table_of_a_network_weighs_each_case_by_how_often_it_occurs(world):
    """Two cases of 1 ms, one of them three times: 4 ms on ours, 2 on the vendor's; the mean ratio is 0.5."""
    world.seconds = {"vendor": 0.5e-3}
    found = [attrs.evolve(cases.gemm(8, 8, 8), multiplicity=3), cases.gemm(16, 8, 8)]
    results = [measure.time_case(case, world.target(), Contest(world), seconds=10.0) for case in found]
    text = grid(tables.summary(results, title="net"))
    assert "Those that were timed take 4.00 ms on our kernels." in text
    assert "4.00 ms on ours, 2.00 ms on the vendor's" in " ".join(text.split())
    assert "geometric mean over 2 cases is 0.500" in " ".join(text.split())


def test_geometric_means_are_those_of_the_ratios():
    """2 and 1/2 are even."""
    assert records.geometric_mean([2.0, 0.5]) == pytest.approx(1)
    assert records.geometric_mean([]) is None


def test_a_figure_is_drawn_of_what_was_timed(world, tmp_path):
    """And refused, with the reason, where nothing was."""
    pytest.importorskip("matplotlib")
    result = measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    figure.rates([result], tmp_path / "f.png", title="bench")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument, match="times were taken"):
        figure.rates([measure.plan(GEMM, DEVICE)], tmp_path / "g.png", title="bench")
    assert math.isfinite(result.best.roofline_fraction)


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command line in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd, "bench")


@pytest.fixture
def on_a_gpu(world, monkeypatch):
    """Let the commands find a GPU of this world."""
    gpu = attrs.evolve(DEVICE, live=True, memory_bytes=1 << 24)
    monkeypatch.setattr(probe, "resolve", lambda name, *, live=True: gpu)
    monkeypatch.setattr(target, "on_gpu", world.target)
    return world


GEMM_OPTIONS = ("gemm", "--m", 70, "--n", 50, "--k", 30)


@pytest.mark.usefixtures("world")
def test_a_dry_run_says_what_would_run_on_a_gpu_that_is_not_here(run):
    """Variants, blocks, fill and the roofline, in the model's order, and that it is no more; nothing from measuring."""
    code, out, err = run(*GEMM_OPTIONS, "--dry-run", "--device", "v100-sxm2-16gb", "--variants", "all")
    assert (code, err) == (0, "")
    assert "planned for" in out
    assert "V100" in out
    assert out.count("fake 64x64x16") == 0
    assert out.count("fake") == 2
    assert "order of the cost model" in " ".join(out.split())
    assert "ratio" not in out


def test_layers_without_kernels_are_named(run):
    """A transformer's attention is nothing that kernels compute: the table is of the rest, and says so."""
    code, _, err = run("model", "deit-tiny", "--dry-run", "--device", "h200-sxm", "--pass", "fprop")

    assert code == 0
    assert "Left out" in err
    assert "attention" in err


def test_a_plot_of_nothing_that_was_timed_is_refused_at_once(run, tmp_path):
    """Rates need timings: with --dry-run there are none, and nothing is planned first."""
    code, out, err = run(*GEMM_OPTIONS, "--dry-run", "--device", "h200-sxm", "--plot", tmp_path / "rates.png")

    assert (code, out) == (2, "")
    assert "--dry-run" in err


@pytest.mark.usefixtures("world")
def test_a_dry_run_of_a_network_has_a_line_for_each_distinct_layer(run):
    """With how often each occurs, and the sum of the roofline."""
    code, out, _ = run("model", "go-net", "--dry-run", "--device", "h200-sxm", "--pass", "all", "--batch-size", 8)
    assert code == 0
    assert "80  conv2d 19x19x128 to 128" in out
    assert "79  conv2d 19x19x128 to 128" in out  # no gradient of the network's input
    assert "All layers take" in out


@pytest.mark.usefixtures("world")
def test_fused_cases_are_listed_beside_the_plain_ones(run):
    """Three passes, and the forward pass with bias and ReLU, without and with a residual."""
    options = ("conv", "--h", 6, "--w", 5, "--c", 4, "--k", 3, "--dry-run", "--device", "h200-sxm")
    plain, whole = (run(*options, *more)[1] for more in ((), ("--fused", "--dtype", "float16")))
    assert "then relu" not in plain
    assert plain.count("conv2d 6x5x4 to 3") == 3
    assert whole.count("conv2d 6x5x4 to 3") == 5
    assert "bias, n=32, fprop, float16, then relu" in whole
    assert "bias, n=32, fprop, float16, then residual, relu" in whole


@pytest.mark.parametrize(("device", "code"), [("v100-sxm2-16gb", 1), ("t4", 1), ("a100-sxm4-40gb", 0)])
@pytest.mark.usefixtures("world")
def test_tf32_is_refused_where_a_gpu_has_none(run, device, code):
    """From sm_80 on it is there; before, the error says so."""
    found, out, err = run(*GEMM_OPTIONS, "--dtype", "tf32", "--dry-run", "--device", device)
    assert found == code
    assert "gemm nt 70 x 50 x 30, tf32" in out if code == 0 else "compute capability 8.0" in err


@pytest.mark.usefixtures("on_a_gpu")
def test_a_measured_command_gives_table_json_and_figure(run, tmp_path):
    """The JSON holds device, environment, the copy's bandwidth and every timing."""
    pytest.importorskip("matplotlib")
    files = tmp_path / "r.json", tmp_path / "f.svg"
    code, out, err = run(*GEMM_OPTIONS, "--json", files[0], "--plot", files[1], "--seconds", 5)
    assert code == 0
    assert "ratio" in out
    facts = json.loads(files[0].read_text())
    assert (facts["schema"], facts["measured"]) == (1, True)
    assert facts["device"]["name"] == "Test GPU"
    assert "torch" in facts["environment"]
    assert facts["copy_bytes_per_second"] == pytest.approx(2 * 2**21 / 1e-3)
    assert len(facts["results"][0]["entries"][0]["timings"]) == 5
    assert files[1].read_text().startswith("<?xml")
    assert f"wrote {files[1]}" in err


@pytest.mark.usefixtures("on_a_gpu")
def test_json_on_stdout_is_all_of_stdout(run):
    """Three passes of a convolution, each with a result."""
    options = ("conv", "--h", 6, "--w", 5, "--c", 4, "--k", 3, "--pad", 1, "--batch-size", 2, "--no-rival")
    code, out, err = run(*options, "--json", "-", "--seconds", 0.01)
    assert (code, err) == (0, "")
    passes = [result["case"]["pass"] for result in json.loads(out)["results"]]
    assert passes == ["fprop", "dgrad", "wgrad"]


@pytest.mark.parametrize("options", [(), ("--device", "cuda:3"), ("--device", "h200-sxm")])
def test_without_a_gpu_the_error_says_so_and_what_works(run, options, monkeypatch):
    """One message, no traceback, exit code 1."""

    def refuse():
        raise DeviceNotAvailable("cuda", "the CUDA driver is not installed")

    monkeypatch.setattr("cubatch.hardware.driver.visible_gpus", refuse)
    code, out, err = run(*GEMM_OPTIONS, *options)
    assert (code, out) == (1, "")
    assert "the CUDA driver is not installed" in err
    assert "--dry-run --device NAME" in err


def test_a_cpu_is_refused(run):
    """There are no kernels for it."""
    code, _, err = run(*GEMM_OPTIONS, "--device", "cpu")
    assert code == 1
    assert "--device must be a GPU" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("gemm", "--m", 3), ("gemm", "--m", 0, "--n", 1, "--k", 1), ("conv", "--h", 3), ("model",), ("dream",),
        (*GEMM_OPTIONS, "--layout", "tt"), (*GEMM_OPTIONS, "--dtype", "float64"), ("model", "resnet50", "--pass", "x"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_exit_with_two(run, arguments):
    """A script can tell its own mistakes from failures."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err


def test_a_figure_that_cannot_be_drawn_is_refused_before_measuring(run, tmp_path):
    """By its ending."""
    code, _, err = run(*GEMM_OPTIONS, "--plot", tmp_path / "f.txt")
    assert code == 1
    assert ".png" in err


def test_what_the_memory_cannot_hold_is_refused_before_anything_is_reserved():
    """Operands of 112 GiB on a GPU of 16 GiB: an error with both numbers, for planning as for timing."""
    v100 = catalogue.find("v100-sxm2-16gb")
    with pytest.raises(OutOfMemory) as caught:
        measure.plan(cases.gemm(10**5, 10**5, 10**5), v100)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (3 * 4 * 10**10, v100.memory_bytes)


def test_the_blocks_shown_are_those_of_the_main_kernel():
    """A split product launches a sum of its slices after it, with a grid of its own, which is not what is asked."""
    v100 = catalogue.find("v100-sxm2-16gb")
    planned = measure.plan(cases.gemm(128, 128, 1 << 16), v100, compiled=False)
    (entry,) = planned.entries
    main = [launch for launch in entry.launches if launch.kernel == entry.name]
    assert len(entry.launches) > len(main) == 1
    shown = grid(tables.entries([planned], title="t"))
    assert f" {math.prod(main[0].grid)} " in shown
