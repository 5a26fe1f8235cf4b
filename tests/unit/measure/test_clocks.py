"""Clocks: what is timed, in which order events and readings happen, and which clock a callable gets."""

from __future__ import annotations

import contextlib
import sys
import time
import types

import pytest

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.hardware import host, nvml
from cubatch.hardware.nvml import Snapshot
from cubatch.measure import clocks
from cubatch.measure.clocks import EventClock, GpuHostClock, HostClock
from tests.nvml import SLICE, UUID, Gpu, Library, a_slice


class Ticks:
    """A perf_counter_ns that stands still unless it is moved."""

    def __init__(self, monkeypatch):
        self.now = 10**9
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now)

    def step(self):
        self.now += 3_000


def test_the_host_clock_gives_the_mean_of_back_to_back_steps(monkeypatch):
    """Four steps of 3 us and one take 3 us a step."""
    ticks = Ticks(monkeypatch)
    reading = HostClock().time(ticks.step, 4)
    assert reading.seconds == pytest.approx(3e-6)
    assert (reading.sm_clock_mhz, reading.joules, reading.throttled) == (None, None, False)
    assert HostClock().time(ticks.step, 1).seconds == pytest.approx(3e-6)


def test_the_host_clock_knows_the_longest_step_of_a_timing(monkeypatch):
    """Steps of 3, 9, 3 and 3 us take 4.5 us on average, the longest twice as long; that of other blocks is not its."""
    ticks, clock = Ticks(monkeypatch), HostClock()
    steps = iter([3_000, 9_000, 3_000, 3_000])

    def step():
        ticks.now += next(steps)

    assert clock.time(step, 4).longest_step == pytest.approx(2.0)
    assert clock.time(ticks.step, 1).longest_step == 1.0
    slow = iter([50_000] * 20)
    clock.hold_reference(lambda: setattr(ticks, "now", ticks.now + next(slow)), 2)
    assert clock.time(ticks.step, 4).longest_step == pytest.approx(1.0)


def test_steps_that_are_only_enqueued_have_no_longest_one(monkeypatch):
    """A result that is waited for ends all steps of the timing, not its own one."""
    ticks = Ticks(monkeypatch)
    result = types.SimpleNamespace(block_until_ready=ticks.step)
    reading = HostClock().time(lambda: result, 4)
    assert (reading.seconds, reading.longest_step) == (pytest.approx(3e-6 / 4), None)


def test_the_host_clock_never_goes_back():
    """Budgets are told by a monotone clock that sleeping moves on."""
    clock = HostClock()
    before = clock.now()
    clock.sleep(0.001)
    assert clock.now() >= before + 0.001


class FakeGpu:
    """Events, NVML readings and steps of a virtual GPU, all noted in one diary."""

    def __init__(self, joules=(5.0, 8.0), *, throttled=False):
        self.diary = []
        self._joules = iter(joules)
        self._throttled = throttled

    def event(self):
        number = sum(entry.startswith("event") for entry in self.diary)
        self.diary.append(f"event {number}")
        return types.SimpleNamespace(
            number=number,
            record=lambda: self.diary.append(f"record {number}"),
            synchronize=lambda: self.diary.append(f"wait {number}"),
        )

    def elapsed(self, start, end):
        assert (start.number, end.number) == (0, 1)
        return 0.25

    def pace(self):
        self.diary.append("pace")
        return types.SimpleNamespace(sm_clock_mhz=1380.0, throttled=self._throttled, event_reasons=4)

    def vitals(self):
        self.diary.append("vitals")
        return Snapshot(temperature_celsius=61.0, power_watts=412.5, used_bytes=9)

    def energy_joules(self):
        self.diary.append("energy")
        return next(self._joules)

    def step(self):
        self.diary.append("step")


def test_events_stand_around_the_steps_and_the_gpu_is_read_while_it_works():
    """Nothing but the steps lies between the events; the clock is read before the wait, all else around it."""
    gpu = FakeGpu(throttled=True)
    reading = EventClock(gpu.event, gpu.elapsed, gpu).time(gpu.step, 2)
    assert gpu.diary == [
        "energy", "event 0", "event 1", "record 0", "step", "step", "record 1", "pace", "wait 1", "energy",
        "vitals",
    ]  # fmt: skip
    assert reading.seconds == 0.125
    assert reading.sm_clock_mhz == 1380.0
    assert reading.event_reasons == 4  # the power cap too, which is no throttling
    assert reading.joules == 1.5
    told = reading.temperature_celsius, reading.power_watts, reading.utilization_percent, reading.used_bytes
    assert told == (61.0, 412.5, None, 9)
    assert reading.throttled


@pytest.mark.parametrize("joules", [(5.0, 5.0), (None, 8.0), (5.0, None), (8.0, 5.0)])
def test_energy_that_was_not_read_is_none(joules):
    """A counter that stood still, is missing, or started over gives no reading rather than a wrong one."""
    gpu = FakeGpu(joules)
    assert EventClock(gpu.event, gpu.elapsed, gpu).time(gpu.step, 1).joules is None


def test_a_reading_asks_nvml_eight_times_and_of_a_slice_once(monkeypatch):
    """What it costs is known: two calls while the steps run, two of energy and four of vitals around them."""
    library = Library(Gpu(slices=(a_slice(),))).install(monkeypatch)
    for uuid, num_calls in ((UUID, 8), (SLICE, 1)):
        gpu, monitor = FakeGpu(), nvml.Monitor(uuid)
        library.calls.clear()
        EventClock(gpu.event, gpu.elapsed, monitor).time(gpu.step, 2)
        assert len(library.calls) == num_calls


def test_free_memory_is_the_devices_own(monkeypatch):
    """NVML's free bytes of a GPU, nothing where it is not there; of a host what could be taken without swapping."""
    gpu = FakeGpu()
    Library(Gpu(total=80, used=17)).install(monkeypatch)
    for monitor, free in ((nvml.Monitor(UUID), 63), (None, None)):
        assert EventClock(gpu.event, gpu.elapsed, monitor).free_bytes() == free
        assert GpuHostClock(monitor).free_bytes() == free
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 12345)
    assert HostClock().free_bytes() == 12345


def test_without_nvml_the_time_is_still_told():
    """Where NVML does not know the GPU, only its facts are missing."""
    gpu = FakeGpu()
    reading = EventClock(gpu.event, gpu.elapsed, None).time(gpu.step, 1)
    assert (reading.seconds, reading.sm_clock_mhz, reading.joules, reading.throttled) == (0.25, None, None, False)


# --- which clock ---------------------------------------------------------------------------------------------


@pytest.fixture
def libraries(monkeypatch):
    """Neither CuPy nor PyTorch is loaded; NVML's monitors are noted by their uuid."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    asked = []
    monkeypatch.setattr(nvml, "Monitor", lambda uuid: asked.append(uuid) or types.SimpleNamespace())
    return asked


def fake_torch(available):
    events = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            events.append(self)

        def elapsed_time(self, end):
            return 8.0  # milliseconds

        def record(self):
            pass

        synchronize = record

    cuda = types.SimpleNamespace(
        is_available=lambda: available,
        current_device=lambda: 1,
        Event=Event,
    )
    return types.SimpleNamespace(cuda=cuda)


def fake_cupy(available):
    event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    cuda = types.SimpleNamespace(
        is_available=lambda: available,
        Device=lambda: types.SimpleNamespace(id=0),
        Event=lambda: event,
        get_elapsed_time=lambda start, end: 4.0,
        runtime=types.SimpleNamespace(runtimeGetVersion=lambda: 13000),
    )
    cupy = types.ModuleType("cupy")  # as sys.modules holds it: hashable
    cupy.cuda, cupy.__version__ = cuda, "14.2.0"
    return cupy


def test_a_callable_is_timed_by_the_host_where_no_library_has_a_gpu(libraries, monkeypatch):
    """Neither loaded, or loaded on a machine without GPU."""
    assert type(clocks.callable_clock()) is HostClock
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=False))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(available=False))
    assert type(clocks.callable_clock()) is HostClock
    assert libraries == []


def test_a_callable_is_timed_by_pytorchs_events(libraries, monkeypatch):
    """Milliseconds become seconds; NVML is asked for PyTorch's current GPU, a MIG slice by its own name."""
    gpus = [types.SimpleNamespace(index=index, uuid=f"MIG-{index}") for index in (0, 1)]
    monkeypatch.setattr(clocks.driver, "visible_gpus", lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=True))
    clock = clocks.callable_clock()
    assert isinstance(clock, EventClock)
    assert libraries == ["MIG-1"]
    clock._monitor = None
    assert clock.time(lambda: None, 4).seconds == pytest.approx(0.002)


def test_a_callable_is_timed_by_cupys_events(libraries, monkeypatch):
    """The current device's uuid, by which NVML knows it, comes from the driver."""
    gpus = [types.SimpleNamespace(index=0, uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")]
    monkeypatch.setattr(clocks.driver, "visible_gpus", lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=False))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(available=True))
    clock = clocks.callable_clock()
    assert isinstance(clock, EventClock)
    assert libraries == ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"]
    clock._monitor = None
    assert clock.time(lambda: None, 2).seconds == pytest.approx(0.002)


def test_the_other_work_lies_outside_cupys_pool(libraries, monkeypatch):
    """What a model holds of the pool is compared with its plan, which knows no clock."""
    allocators, made_by = ["pool"], []

    @contextlib.contextmanager
    def using_allocator(allocator):
        allocators.append(allocator)
        yield
        allocators.pop()

    cupy = fake_cupy(available=True)
    cupy.cuda.using_allocator = using_allocator
    cupy.zeros = lambda size, dtype: made_by.append((size, allocators[-1]))
    cupy.uint8, cupy.copyto = None, lambda target, source: None
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    clocks.cupy_kernel_clock(None, 1 << 20)
    assert made_by == [(1 << 20, None)] * 2


def test_a_gpu_that_no_driver_of_nvidias_lists_is_timed_all_the_same(libraries, monkeypatch):
    """PyTorch says that CUDA is there on other makers' GPUs too."""

    def refuse():
        raise DeviceNotAvailable("cuda", "the CUDA driver is not installed")

    monkeypatch.setattr(clocks.driver, "visible_gpus", refuse)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=True))
    assert isinstance(clocks.callable_clock(), EventClock)
    assert libraries == []


def test_a_gpu_that_nvml_does_not_list_has_no_monitor(monkeypatch):
    """No uuid, no NVML, or one that fails: timing goes on without it."""
    assert clocks.monitor_of(None) is None
    for error in (DeviceNotAvailable("GPU-1", "NVML does not list it"), DeviceFailed("nvmlInit", "NVML status 999")):

        def refuse(uuid, error=error):
            raise error

        monkeypatch.setattr(nvml, "Monitor", refuse)
        assert clocks.monitor_of("GPU-1") is None
