"""Figures of a GPU through NVML's real bindings over a made-up library: values, None, and translated errors."""

from __future__ import annotations

import os

import attrs
import pynvml
import pytest

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.hardware.nvml import Monitor, Snapshot
from cubatch.measure.records import Timing
from tests.nvml import GIB, NO_MEMORY_TOLD, SLICE, STATUSES, UNTOLD, UUID, Gpu, Library, a_slice

BOARD_ONLY = {
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates",
}  # fmt: skip
VITALS = {
    "nvmlDeviceGetMemoryInfo": "used_bytes", "nvmlDeviceGetPowerUsage": "power_watts",
    "nvmlDeviceGetTemperature": "temperature_celsius", "nvmlDeviceGetUtilizationRates": "utilization_percent",
}  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    """Install a library with one GPU, which has one slice."""
    return Library(Gpu(slices=(a_slice(used=4 * GIB),))).install(monkeypatch)


def calls_of(library, read):
    """Return what a method returns, and the names of NVML's functions that it calls."""
    library.calls.clear()
    return read(), list(library.calls)


def test_figures_are_in_the_units_of_their_names(library):
    """NVML has milliwatts and millijoules; a part of the figures takes only the calls that it needs."""
    monitor = Monitor(UUID)
    vitals = Snapshot(temperature_celsius=61.0, power_watts=412.5, utilization_percent=97.0, used_bytes=40 * GIB)
    memory = Snapshot(free_bytes=100 * GIB, used_bytes=40 * GIB, total_bytes=140 * GIB)
    pace = Snapshot(sm_clock_mhz=1755.0, event_reasons=0, throttle_reasons=())
    parts = [attrs.asdict(part).items() for part in (vitals, memory, pace)]
    figures = {name: value for items in parts for name, value in items if value is not None}
    assert monitor.snapshot() == Snapshot(**figures, max_sm_clock_mhz=1980.0, power_limit_watts=700.0)
    for read, expected, count in (
        (monitor.vitals, vitals, 4),
        (monitor.memory, memory, 1),
        (monitor.pace, pace, 2),
        (monitor.free_bytes, 100 * GIB, 1),
        (monitor.power_limit_watts, 700.0, 1),
        (monitor.energy_joules, 12_345.678, 1),
        (monitor.driver_version, "580.95.05", 1),
    ):
        found, calls = calls_of(library, read)
        assert (found, len(calls)) == (expected, count)


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (pynvml.nvmlClocksEventReasonNone, ()),
        (pynvml.nvmlClocksEventReasonGpuIdle, ()),
        (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, ()),
        (pynvml.nvmlClocksEventReasonSyncBoost, ()),
        (pynvml.nvmlClocksEventReasonDisplayClockSetting, ()),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ()),
        (pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap, ("HW slowdown",)),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, ("SW thermal slowdown",)),
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown, ("HW thermal slowdown",)),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ("HW power brake",)),
    ],
)
def test_heat_and_power_throttle_settings_do_not(library, mask, reasons):
    """Only reasons that change from timing to timing count; drivers before 535 know the older name of the call."""
    library.gpus[0].reasons = mask
    for failing in ({}, {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}):
        library.failing = failing
        pace = Monitor(UUID).pace()
        assert (pace.throttle_reasons, pace.throttled, pace.event_reasons) == (reasons, bool(reasons), mask)


@pytest.mark.parametrize("status", STATUSES)
def test_no_status_ends_a_measurement(library, status):
    """Figures are None, and only a full snapshot of a GPU that fails is an error."""
    monitor = Monitor(UUID)
    library.failing = dict.fromkeys(
        [*BOARD_ONLY, "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses_v3"], status
    )
    assert monitor.pace() == monitor.vitals() == monitor.memory() == Snapshot()
    assert (monitor.energy_joules(), monitor.process_bytes(7), monitor.power_limit_watts()) == (None, None, None)
    if status in UNTOLD:  # a board without sensors, or a user without rights
        assert monitor.snapshot() == Snapshot()
        return
    with pytest.raises(DeviceFailed) as caught:
        monitor.snapshot()
    assert caught.value.operation == "nvmlDeviceGetMemoryInfo"
    assert str(status) in caught.value.status


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("name", VITALS)
def test_every_status_of_a_vital_costs_that_one(library, name, status):
    """The others are read, and the timing is recorded without it."""
    monitor = Monitor(UUID)
    whole = {field: getattr(monitor.vitals(), field) for field in VITALS.values()}
    library.failing = {name: status}
    vitals = {field: getattr(monitor.vitals(), field) for field in VITALS.values()}
    assert vitals == whole | {VITALS[name]: None}
    assert None not in whole.values()
    assert Timing(batch_size=1, round=0, seconds=1.0, **vitals)


@pytest.mark.parametrize(
    ("fact", "field"), [({"used": 2**64 - 1}, "used_bytes"), ({"load": 2**32 - 1}, "utilization_percent")]
)
def test_an_impossible_figure_is_none(library, fact, field):
    """NVML's sign for an unknown value is the largest number of its type."""
    for name, value in fact.items():
        setattr(library.gpus[0], name, value)
    vitals = Monitor(UUID).vitals()
    assert (getattr(vitals, field), vitals.power_watts) == (None, 412.5)


def test_a_mig_device_has_its_own_memory_and_no_figure_of_its_board(library):
    """Clocks and power are shared with other slices: they are not even read."""
    monitor = Monitor(SLICE)
    memory = Snapshot(free_bytes=12 * GIB, used_bytes=4 * GIB, total_bytes=16 * GIB)
    assert monitor.snapshot() == monitor.memory() == memory
    assert (monitor.vitals(), monitor.pace()) == (Snapshot(used_bytes=4 * GIB), Snapshot())
    assert (monitor.energy_joules(), monitor.power_limit_watts()) == (None, None)
    assert not BOARD_ONLY & set(library.calls)


def test_memory_of_a_process_is_that_of_its_pid(library, monkeypatch):
    """All its entries count; a pid that is not listed, or without its memory, is None and not zero."""
    library.gpus[0].compute = ((7, 100), (8, 50), (7, 1), (9, NO_MEMORY_TOLD))
    monkeypatch.setattr(os, "getpid", lambda: 8)
    monitor = Monitor(UUID)
    assert [monitor.process_bytes(pid) for pid in (7, None, 9, 10)] == [101, 50, None, None]


@pytest.mark.parametrize("status", STATUSES)
def test_a_monitor_starts_or_the_error_names_its_gpu(library, status):
    """Without NVML or its driver, and for an unknown uuid, the device is not available; other statuses fail."""
    for function, absent in (
        ("nvmlInitWithFlags", {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}),
        ("nvmlDeviceGetHandleByUUID", {pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT}),
    ):
        library.failing = {function: status}
        with pytest.raises(DeviceNotAvailable if status in absent else DeviceFailed) as caught:
            Monitor(UUID)
        if status in absent:
            assert caught.value.device == UUID
        else:
            assert str(status) in caught.value.status


def test_a_driver_that_is_too_old_for_the_list_of_processes_has_none(library, monkeypatch):
    """The bindings then raise an error that is none of NVML's own."""
    assert not issubclass(pynvml.NVMLLibraryMismatchError, pynvml.NVMLError)

    def mismatch(_):
        raise pynvml.NVMLLibraryMismatchError

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", mismatch)
    assert Monitor(UUID).process_bytes(7) is None
