"""NVML figures through a made-up NVML: what is read, what is None, which errors are translated."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import attrs
import pynvml
import pytest

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.hardware.nvml import Monitor
from cubatch.hardware.nvml_records import Pace, Snapshot, Vitals
from cubatch.measure.records import Timing

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
BOARD_ONLY = (
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetUtilizationRates",
)


class FakeNvml(ModuleType):
    """A module with NVML's names: `answers` by function, errors that are raised, and the calls that were made."""

    def __init__(self):
        super().__init__("pynvml")
        for name in dir(pynvml):
            if name.startswith(("NVML_", "NVMLError", "NVMLLibrary")):
                setattr(self, name, getattr(pynvml, name))
        self.calls = []
        self.answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(free=6, used=4, total=10),
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": 12_345_678,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlSystemGetDriverVersion": "550.54.15",
        }
        for name in (*self.answers, "nvmlDeviceGetCurrentClocksThrottleReasons"):
            assert callable(getattr(pynvml, name))  # the fake has no function that NVML does not have
            setattr(self, name, self._function(name))

    def _function(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            answer = self.answers[name]
            if isinstance(answer, type) and issubclass(answer, Exception):
                raise answer
            return answer

        call.__name__ = name
        return call


@pytest.fixture(autouse=True)
def nvml(monkeypatch):
    """Put a fake in NVML's place."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def process(pid, size):
    """One entry of NVML's list of processes."""
    return SimpleNamespace(pid=pid, usedGpuMemory=size)


def test_a_snapshot_is_in_the_units_it_names(nvml):
    """NVML gives milliwatts; the rest is taken as it is."""
    seen = Monitor(GPU).snapshot()

    assert (seen.free_bytes, seen.used_bytes, seen.total_bytes) == (6, 4, 10)
    assert (seen.sm_clock_mhz, seen.max_sm_clock_mhz) == (1755.0, 1980.0)
    assert (seen.power_watts, seen.power_limit_watts) == (412.5, 700.0)
    assert (seen.temperature_celsius, seen.utilization_percent) == (61.0, 97.0)
    assert ("nvmlDeviceGetHandleByUUID", (GPU,)) in nvml.calls
    assert ("nvmlDeviceGetClockInfo", ("handle", pynvml.NVML_CLOCK_SM)) in nvml.calls


def test_one_fact_takes_one_call(nvml):
    """Of a snapshot's eight any may fail for reasons of its own: the limit in watts, and the memory, are read alone."""
    monitor = Monitor(GPU)
    nvml.calls.clear()

    assert monitor.power_limit_watts() == 700.0
    assert monitor.memory() == Snapshot(free_bytes=6, used_bytes=4, total_bytes=10)
    assert [name for name, _ in nvml.calls] == ["nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetMemoryInfo"]
    assert Monitor(MIG).power_limit_watts() is None


def test_energy_is_in_joules():
    """The counter is in millijoules since the driver was loaded."""
    assert Monitor(GPU).energy_joules() == 12_345.678


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (pynvml.nvmlClocksEventReasonNone, ()),
        (pynvml.nvmlClocksEventReasonGpuIdle, ()),
        (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, ()),
        (pynvml.nvmlClocksEventReasonSyncBoost, ()),
        (pynvml.nvmlClocksEventReasonDisplayClockSetting, ()),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ()),
        (pynvml.nvmlClocksEventReasonHwSlowdown, ("HW slowdown",)),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, ("SW thermal slowdown",)),
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown, ("HW thermal slowdown",)),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ("HW power brake",)),
        (
            pynvml.nvmlClocksEventReasonGpuIdle
            | pynvml.nvmlClocksEventReasonSwPowerCap
            | pynvml.nvmlClocksEventReasonHwSlowdown,
            ("HW slowdown",),
        ),
    ],
)
def test_heat_and_power_throttle_settings_do_not(nvml, mask, reasons):
    """Each of NVML's reasons by its own constant: only those that change from timing to timing count."""
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = mask

    seen = Monitor(GPU).snapshot()

    assert set(seen.throttle_reasons) == set(reasons)
    assert seen.throttled is bool(reasons)


def test_an_old_driver_is_asked_for_throttle_reasons_by_their_old_name(nvml):
    """Drivers before 535 have no "event reasons"."""
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.NVMLError_FunctionNotFound
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = pynvml.nvmlClocksThrottleReasonHwSlowdown

    assert Monitor(GPU).snapshot().throttle_reasons == ("HW slowdown",)


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoData,
    ],
)
def test_what_the_gpu_does_not_tell_is_none(nvml, error):
    """A board without sensors gives None for each figure, never zero and never an error."""
    for name in (*BOARD_ONLY, "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
        nvml.answers[name] = error
    monitor = Monitor(GPU)

    seen = monitor.snapshot()

    assert seen == type(seen)()
    assert seen.throttled is None
    assert monitor.energy_joules() is None
    assert monitor.process_bytes(1) is None


def test_a_mig_device_gives_its_own_memory_and_no_board_figures(nvml):
    """Clocks and power are the board's and shared with other slices: they are not even asked for."""
    monitor = Monitor(MIG)

    seen = monitor.snapshot()

    assert (seen.free_bytes, seen.total_bytes) == (6, 10)
    assert (seen.sm_clock_mhz, seen.power_watts, seen.throttled, monitor.energy_joules()) == (None, None, None, None)
    assert not {name for name, _ in nvml.calls} & set(BOARD_ONLY)


def test_process_memory_is_that_of_the_pid(nvml, monkeypatch):
    """All entries of the process count, those of others do not; without a pid it is this process."""
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = [process(7, 100), process(8, 50), process(7, 1)]
    monkeypatch.setattr("os.getpid", lambda: 8)
    monitor = Monitor(GPU)

    assert monitor.process_bytes(7) == 101
    assert monitor.process_bytes() == 50


@pytest.mark.parametrize("listed", [[], [process(8, 50)], [process(7, None)]])
def test_process_memory_is_none_where_nvml_does_not_know_it(nvml, listed):
    """In a container NVML may list other pids, or the pid without its memory: that is not zero."""
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = listed

    assert Monitor(GPU).process_bytes(7) is None


@pytest.mark.parametrize("error", [pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded])
def test_without_nvml_the_monitor_is_not_available(nvml, error):
    """The one error says which GPU was wanted and what NVML answered."""
    nvml.answers["nvmlInit"] = error

    with pytest.raises(DeviceNotAvailable) as caught:
        Monitor(GPU)

    assert caught.value.device == GPU
    assert error.__name__ in caught.value.reason


@pytest.mark.parametrize("error", [pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument])
def test_an_unknown_uuid_is_not_available(nvml, error):
    """NVML knows every board; a uuid that it does not know is a mistake."""
    nvml.answers["nvmlDeviceGetHandleByUUID"] = error

    with pytest.raises(DeviceNotAvailable) as caught:
        Monitor(GPU)

    assert caught.value.device == GPU


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetClockInfo"])
def test_any_other_nvml_error_is_a_failed_device(nvml, function):
    """A lost GPU is reported with NVML's status code; no foreign exception gets out."""
    nvml.answers[function] = pynvml.NVMLError_GpuIsLost

    with pytest.raises(DeviceFailed) as caught:
        Monitor(GPU).snapshot()

    assert caught.value.operation == function
    assert str(pynvml.NVML_ERROR_GPU_IS_LOST) in caught.value.status


def test_a_pace_takes_two_calls(nvml):
    """It is read with every timing, which may last as long as NVML's answers."""
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.nvmlClocksEventReasonHwSlowdown
    monitor = Monitor(GPU)
    nvml.calls.clear()

    assert monitor.pace() == Pace(1755.0, throttled=True, event_reasons=pynvml.nvmlClocksEventReasonHwSlowdown)
    assert len(nvml.calls) == 2


@pytest.mark.parametrize("error", [pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_Unknown, pynvml.NVMLError_Timeout])
def test_no_nvml_error_ends_a_measurement(nvml, error):
    """Clock, energy and memory are what a timing can do without; a GPU that is lost fails at the next launch."""
    for name in (*BOARD_ONLY, "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
        nvml.answers[name] = error
    monitor = Monitor(GPU)

    assert monitor.pace() == Pace()
    assert monitor.vitals() == Vitals()
    assert monitor.energy_joules() is None
    assert monitor.process_bytes(7) is None
    assert monitor.free_bytes() is None
    assert monitor.memory() == Snapshot()
    assert monitor.power_limit_watts() is None


def test_vitals_take_four_calls_and_are_in_the_units_they_name(nvml):
    """They are read after every timing, of which NVML's answers are to be a small part."""
    monitor = Monitor(GPU)
    nvml.calls.clear()

    assert monitor.vitals() == Vitals(
        temperature_celsius=61.0, power_watts=412.5, utilization_percent=97.0, used_bytes=4
    )
    assert len(nvml.calls) == 4


def test_a_mig_device_tells_the_memory_in_use_of_its_own(nvml):
    """Heat, power and load are the board's, which other slices share: they are not asked for."""
    monitor = Monitor(MIG)
    nvml.calls.clear()

    assert monitor.vitals() == Vitals(used_bytes=4)
    assert [name for name, _ in nvml.calls] == ["nvmlDeviceGetMemoryInfo"]


@pytest.mark.parametrize(
    ("function", "answer", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", SimpleNamespace(free=1, used=2**64 - 1, total=10), "used_bytes"),
        ("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=2**32 - 1, memory=0), "utilization_percent"),
    ],
)
def test_a_vital_that_cannot_be_is_none(nvml, function, answer, field):
    """NVML's sign for "not known" is the largest number of its type: a record would refuse it, and a timing be lost."""
    nvml.answers[function] = answer
    seen = Monitor(GPU).vitals()
    assert getattr(seen, field) is None
    assert Timing(batch_size=1, round=0, seconds=1.0, **attrs.asdict(seen)).power_watts == 412.5


def test_a_mig_device_is_not_asked_for_its_boards_pace(nvml):
    """Other slices share the clock, and may be what holds it down."""
    assert Monitor(MIG).pace() == Pace()
    assert not {name for name, _ in nvml.calls} & set(BOARD_ONLY)


def test_a_driver_that_is_too_old_for_the_list_of_processes_gives_none(nvml):
    """The bindings then raise an error that is none of NVML's own."""
    assert not issubclass(pynvml.NVMLLibraryMismatchError, pynvml.NVMLError)
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = pynvml.NVMLLibraryMismatchError

    assert Monitor(GPU).process_bytes(7) is None


def test_driver_and_board_are_named():
    """For the environment that is kept beside every result."""
    monitor = Monitor(GPU)

    assert monitor.driver_version() == "550.54.15"
