"""Runners: a network from what JSON can hold, and anything that can be called."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
import types
import weakref

import pytest

from cubatch import autotune_callable
from cubatch.errors import DeviceNotAvailable, InvalidArgument, OutOfMemory, UnsupportedLayer
from cubatch.hardware import context_overhead, probe
from cubatch.measure import clocks, kernel_context, stopwatch
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.network_runner import NetworkRunner, network_runner
from cubatch.measure.runner import FactoryRef
from cubatch.network import models
from cubatch.network.layers import Conv2d
from cubatch.tuning import step_memory
from tests.unit.measure.network_options import OPTIONS

# --- networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [models.build("mlp"), Conv2d(h=6, w=6, c=2, k=3, r=3, s=3, pad=1)], ids=["net", "layer"]
)
def test_a_network_is_built_from_json_and_takes_what_is_planned(spec):
    """The factory's arguments survive JSON; peak bytes are the plan's, for the batch that is prepared."""
    arguments = json.loads(json.dumps({"spec": spec.to_mapping(), **OPTIONS}))
    runner = FactoryRef("cubatch.measure.network_runner:network_runner", arguments)()
    held = {}
    for n in (4, 64):
        runner.prepare(n)
        runner.step()
        held[n] = runner.peak_bytes
        planned = step_memory.footprint(spec, batch_size=n, mode="training", optimizer="adam", device="cpu").total
        assert held[n] == pytest.approx(planned, abs=1024)  # but for rounding up
    assert held[64] > held[4]
    assert runner.peak_device_bytes > 0  # less than was taken, where this process had memory to spare
    runner.prepare(4)
    assert runner.peak_bytes == held[4]
    runner.release()
    assert runner.peak_bytes < held[4]
    assert runner.clock.time(runner.release, 1).seconds >= 0
    runner.close()
    assert runner.peak_bytes == 0


def test_steps_are_taken_on_random_data():
    """Inputs are normal random numbers, not zeros, and the same for the same seed."""
    runner = network_runner(spec=models.build("mlp").to_mapping(), **OPTIONS)
    runner.prepare(8)
    place = runner.model._places[0][0]
    plan = runner.model.plan
    (number,) = [n for n in plan.schedule.given if plan.schedule.buffers[n].name == "input"]
    x = place.arena[number].copy()
    assert abs(float(x.mean())) < 0.1
    assert 0.9 < float(x.std()) < 1.1
    runner.prepare(8)
    assert (runner.model._places[0][0].arena[number] == x).all()
    runner.close()


def test_what_cannot_be_run_is_refused_when_the_runner_is_built():
    """A layer without code, a GPU that is not here: errors of ours, not of a step."""
    with pytest.raises(UnsupportedLayer):
        network_runner(spec={"input_shape": [4, 4, 3], "layers": [{"type": "opaque"}]}, **OPTIONS)
    if not [device for device in probe.devices() if device.kind == "cuda"]:
        with pytest.raises(DeviceNotAvailable):
            network_runner(spec=models.build("mlp").to_mapping(), **OPTIONS | {"device": "cuda:7"})


@pytest.mark.parametrize("learns", [False, True])
def test_what_a_gpu_gave_beside_a_batch_is_kept_whenever_the_batch_goes(monkeypatch, learns):
    """700 bytes by NVML, 100 of them the model's: for the next size and at the end, not only after a failure."""
    kept = []
    monkeypatch.setattr(context_overhead, "record", lambda device, size: kept.append((device, size)))
    model = types.SimpleNamespace(
        device="the GPU", plan=None, held_bytes=100, launch=None, load_random=lambda: None, release=lambda: None,
        close=lambda: None, prepare=lambda n: setattr(model, "plan", n),
    )  # fmt: skip
    runner = NetworkRunner(model, clocks.HostClock(), types.SimpleNamespace(process_bytes=lambda: 700), learns=learns)
    runner.prepare(4)
    assert kept == []
    runner.prepare(8)
    runner.close()
    assert kept == [("the GPU", 600)] * 2 * learns


@pytest.mark.parametrize(
    ("mode", "exchange", "overlaps"),
    [("training", None, False), ("inference", None, True), ("training", object(), True)],
)
def test_launches_overlap_but_in_graphs_of_training(monkeypatch, mode, exchange, overlaps):
    """A rank of several launches one by one, which takes less time when they do."""
    asked = []

    def make_context(*_, **how):
        asked.append(how["overlaps"])
        raise DeviceNotAvailable("cuda:0", "of this test")

    monkeypatch.setattr(kernel_context, "kernel_context", make_context)
    facts = {"device": "cpu", "dtype": "float32", "optimizer": "sgd", "recompute": False, "seed": 0}
    with pytest.raises(DeviceNotAvailable):
        network_runner(
            spec=models.build("lenet5").to_mapping(), library="cubatch", mode=mode, exchange=exchange, **facts
        )
    assert asked == [overlaps]


# --- callables -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch):
    """Neither PyTorch nor CuPy is loaded, unless a test puts a fake there."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_callable_is_made_anew_for_each_size():
    """make_step is called once a size, the step as often as asked; the one before is gone by then."""
    made, stepped, alive = [], [], []

    class Step:
        def __init__(self, n):
            self.n, self.itself = n, self  # a cycle, which only the collector finds

        def __call__(self):
            stepped.append(self.n)

    def make_step(n):
        alive.append([step() is not None for step in made])
        step = Step(n)
        made.append(weakref.ref(step))
        return step

    runner = CallableRunner(make_step)
    runner.prepare(3)
    runner.step()
    runner.prepare(5)
    runner.clock.time(runner.step, 2)
    assert stepped == [3, 5, 5]
    assert alive == [[], [False]]
    runner.close()
    assert [step() for step in made] == [None, None]
    assert (runner.peak_bytes, runner.peak_device_bytes) == (None, None)


class Pending:
    """What a step enqueued: 20 ms of work of a thread, which `block_until_ready` waits for."""

    def __init__(self):
        self.thread = threading.Thread(target=time.sleep, args=(0.02,))
        self.thread.start()

    def block_until_ready(self):
        self.thread.join()


class Pytree:
    """A class that only JAX knows how to look into."""

    def __init__(self, leaf):
        self.leaf = leaf


@pytest.mark.parametrize(
    "returned",
    [lambda x: x, lambda x: (1, [x]), lambda x: {"loss": x}, lambda x: ([*map(float, range(20_000))], x), Pytree],
    ids=["alone", "in a list", "in a dict", "behind many numbers", "in a tree of JAX's"],
)  # fmt: skip
@pytest.mark.parametrize("has_events", [False, True])
def test_work_that_a_step_only_enqueues_is_waited_for(monkeypatch, returned, has_events):
    """A step that returns at once, its 20 ms of work still to be done, takes at least 20 ms, by either clock."""
    leaves = lambda tree: [tree.leaf] if isinstance(tree, Pytree) else list(clocks._leaves(tree))  # noqa: E731
    jax = types.SimpleNamespace(tree_util=types.SimpleNamespace(tree_leaves=leaves))
    monkeypatch.setitem(sys.modules, "jax", jax if isinstance(returned(None), Pytree) else None)
    if has_events:  # of another library: they tell when they were recorded
        monkeypatch.setattr(clocks, "callable_clock", lambda: clocks.EventClock(Event, Event.since, None))
    runner = CallableRunner(lambda n: lambda: returned(Pending()))
    runner.prepare(1)
    assert runner.clock.time(runner.step, 1).seconds >= 0.02


def _endless():
    found = []
    found.append(found)
    return found


class Fields:
    """Whose class knows no attribute that is not a field."""

    def __getattr__(self, name):
        return {}[name]


DEEP = functools.reduce(lambda inner, _: (inner,), range(5000), 1)


@pytest.mark.parametrize(
    "returned", [_endless(), Fields(), {1: 2.0, "loss": [Fields()]}, DEEP, [0.5] * 100_000],
    ids=["in itself", "odd class", "keys that do not sort", "deep", "long"],
)  # fmt: skip
@pytest.mark.parametrize("has_jax", [False, True])
def test_whatever_a_step_returns_it_is_timed(monkeypatch, returned, has_jax):
    """What cannot be looked into is nothing to wait for."""

    def refuse(tree):
        raise ValueError("Comparator raised exception while sorting pytree dictionary keys.")

    jax = types.SimpleNamespace(tree_util=types.SimpleNamespace(tree_leaves=refuse))
    monkeypatch.setitem(sys.modules, "jax", jax if has_jax else None)
    runner = CallableRunner(lambda n: lambda: returned)
    runner.prepare(1)
    assert runner.clock.time(runner.step, 1).seconds > 0


class Event:
    """An event of a stream in which nothing runs."""

    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass

    def since(self, end):
        return end.seconds - self.seconds


def test_what_a_step_returned_is_gone_before_the_next(monkeypatch):
    """Two results never live at once: memory is that of a step whose result nobody keeps."""
    alive = weakref.WeakSet()

    class Result:
        def __init__(self):
            assert not alive
            alive.add(self)

    runner = CallableRunner(lambda n: Result)
    runner.prepare(1)
    runner.clock.time(runner.step, 3)
    runner.clock.time(runner.step, 2)
    assert not alive


def test_a_library_that_make_step_loads_gives_the_clock(monkeypatch):
    """The first prepare may import what can time it; the runner then changes over from the host's clock."""
    event_clock = clocks.EventClock(object, lambda start, end: 0.0, None)
    answers = iter([clocks.HostClock(), event_clock])
    monkeypatch.setattr(clocks, "callable_clock", lambda: next(answers))
    runner = CallableRunner(lambda n: lambda: None)
    assert type(runner.clock) is clocks.HostClock
    runner.prepare(1)
    assert runner.clock is event_clock
    runner.prepare(2)  # the answers are used up: it is not asked again
    assert runner.clock is event_clock


def fake_torch(held):
    calls = []
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        max_memory_reserved=lambda: held[0],
        reset_peak_memory_stats=lambda: calls.append("reset"),
        empty_cache=lambda: calls.append("empty"),
    )
    return types.SimpleNamespace(cuda=cuda, calls=calls)


def test_a_memory_limit_holds_for_a_callable(monkeypatch):
    """A step that makes PyTorch hold more than the limit is out of memory, with both numbers; pools are emptied."""
    held = [0]
    torch = fake_torch(held)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(clocks, "callable_clock", clocks.HostClock)

    def make_step(n):
        def step():
            held[0] = 100 * n

        return step

    runner = CallableRunner(make_step, memory_limit=500)
    runner.prepare(5)
    assert runner.peak_bytes == 500
    assert torch.calls[-1] == "reset"
    with pytest.raises(OutOfMemory) as caught:
        runner.prepare(6)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (600, 500)
    runner.release()
    assert torch.calls[-2:] == ["empty", "reset"]


def test_cupys_pool_is_read_and_emptied(monkeypatch):
    """CuPy's default pool tells the peak, and is emptied on release."""
    freed = []
    pool = types.SimpleNamespace(total_bytes=lambda: 77, free_all_blocks=lambda: freed.append(True))
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: True), get_default_memory_pool=lambda: pool
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(clocks, "callable_clock", clocks.HostClock)
    runner = CallableRunner(lambda n: lambda: None)
    runner.prepare(1)
    assert runner.peak_bytes == 77
    runner.release()
    assert freed


def test_what_both_libraries_hold_counts(monkeypatch):
    """A step of CuPy's is over the limit though PyTorch, which is loaded too, holds next to nothing."""
    held, freed = [0], []
    pool = types.SimpleNamespace(total_bytes=lambda: held[0], free_all_blocks=lambda: freed.append(True))
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: True), get_default_memory_pool=lambda: pool
    )
    monkeypatch.setitem(sys.modules, "torch", fake_torch([20]))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(clocks, "callable_clock", clocks.HostClock)
    runner = CallableRunner(lambda n: lambda: held.__setitem__(0, 400 * n), memory_limit=1000)
    runner.prepare(2)
    assert runner.peak_bytes == 820
    with pytest.raises(OutOfMemory) as caught:
        runner.prepare(3)
    assert caught.value.needed_bytes == 1220


@pytest.fixture
def current(monkeypatch):
    """Give the current GPU of PyTorch and of CuPy, which share it, as the driver's, where `shared` says so."""
    now, shared = {"torch": 0, "cupy": 0}, []

    def use(name, index):
        now.update(dict.fromkeys(now, index) if shared else {name: index})

    class Device:
        def __init__(self, index=None):
            self.id = now["cupy"] if index is None else index

        def use(self):
            use("cupy", self.id)

    torch, pool = fake_torch([0]), types.SimpleNamespace(total_bytes=lambda: 0, free_all_blocks=lambda: None)
    torch.cuda.current_device, torch.cuda.set_device = lambda: now["torch"], functools.partial(use, "torch")
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: True, Device=Device), get_default_memory_pool=lambda: pool
    )
    return types.SimpleNamespace(now=now, shared=shared, torch=torch, cupy=cupy)


@pytest.mark.parametrize("shared", [False, True])
def test_steps_are_made_taken_and_timed_on_the_gpu_that_is_named(monkeypatch, current, shared):
    """Both libraries have GPU 1 while make_step, the step and the clock run, and GPU 0 again once all is closed."""
    monkeypatch.setitem(sys.modules, "torch", current.torch)
    monkeypatch.setitem(sys.modules, "cupy", current.cupy)
    current.shared.extend([True] * shared)
    seen = []
    monkeypatch.setattr(clocks, "callable_clock", lambda: seen.append(dict(current.now)) or clocks.HostClock())

    def make_step(n):
        seen.append(dict(current.now))
        return lambda: seen.append(dict(current.now))

    runner = CallableRunner(make_step, index=1)
    runner.prepare(4)
    runner.clock.time(runner.step, 1)
    assert seen == [{"torch": 1, "cupy": 1}] * len(seen)
    assert len(seen) >= 3
    runner.close()
    assert current.now == {"torch": 0, "cupy": 0}
    CallableRunner(make_step).prepare(4)
    assert seen[-1] == current.now == {"torch": 0, "cupy": 0}


def test_a_step_of_a_library_that_make_step_loads_is_made_anew_on_the_gpu(monkeypatch, current):
    """What it made while it imported PyTorch lies on GPU 0; the step that counts was made once GPU 1 was current."""
    made = []
    monkeypatch.setattr(clocks, "callable_clock", clocks.HostClock)

    def make_step(n):
        monkeypatch.setitem(sys.modules, "torch", current.torch)
        place = current.now["torch"]
        made.append(place)
        return lambda: made.append(f"step on {place}")

    runner = CallableRunner(make_step, index=1)
    runner.prepare(4)
    runner.step()
    runner.prepare(8)
    assert made == [0, 1, "step on 1", 1]


def test_release_survives_a_broken_gpu(monkeypatch):
    """After a failed GPU even emptying a pool fails; the error that matters has been seen already."""
    torch = fake_torch([0])

    def broken():
        raise RuntimeError("unspecified launch failure")

    torch.cuda.empty_cache = broken
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(clocks, "callable_clock", clocks.HostClock)
    runner = CallableRunner(lambda n: lambda: None)
    runner.release()


def test_what_make_step_raises_is_not_touched():
    """The profiler judges errors by their type, so they come as they are."""

    def make_step(n):
        raise MemoryError(n)

    with pytest.raises(MemoryError, match="7"):
        CallableRunner(make_step).prepare(7)


@pytest.mark.parametrize("where", ["step", "make_step"])
def test_a_callable_that_hangs_is_told(monkeypatch, where):
    """The one that does not come back, while it does not; nothing ends it, and once it is back the run goes on."""
    told, messages, before = threading.Event(), [], threading.active_count()
    what = "a step of" if where == "step" else "preparing"

    def warn(text, *values):
        messages.append(text % values)
        if messages[-1].startswith(f"{what} batch size 4"):
            told.set()

    monkeypatch.setattr(stopwatch, "HANG_SECONDS", 0.01)
    monkeypatch.setattr(stopwatch._log, "warning", warn)

    def make_step(n):
        if n == 4 and where == "make_step":
            assert told.wait(60)
        return (lambda: told.wait(60)) if n == 4 and where == "step" else lambda: sum(range(100 * n))

    result = autotune_callable(make_step, max_batch_size=8, batch_sizes=[1, 4, 8], device="cpu", budget=5.0)
    assert any(
        message.startswith(f"{what} batch size 4 has not returned for ") and "Ctrl-C" in message for message in messages
    )
    assert result.batch_size in {1, 4, 8}
    assert threading.active_count() <= before + 1  # a timer that was canceled may still be ending


def test_make_step_must_give_something_to_call():
    """A make_step that returns nothing is an error that says what was wanted, not a step of no time."""
    with pytest.raises(InvalidArgument, match="make_step"):
        CallableRunner(lambda n: None).prepare(4)


def test_measured_steps_do_not_change_the_parameters():
    """Steps do all the work of training, but random data must not drive the parameters to infinity."""
    runner = network_runner(spec=models.build("mlp").to_mapping(), **OPTIONS)
    runner.prepare(4)
    before = runner.model.parameters["fc1"]["w"].copy()
    runner.step()
    runner.step()
    assert (runner.model.parameters["fc1"]["w"] == before).all()
    assert runner.model.gradients["fc1"]["w"].any()
    runner.close()
