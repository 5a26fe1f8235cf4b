"""
Live figures of a GPU through NVML: memory, clocks, power, energy, processes.

This is the only module that calls NVML. A GPU is named by its uuid, never by an index: NVML numbers all boards in PCI
order, while CUDA's numbers follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. A figure that the GPU or the driver does
not report is None.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import attrs

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.units import format_bytes

# Clock event reasons (nvml.h) after which the next timing may find another clock. Left out are idleness and settings
# that hold throughout a run (application clocks, sync boost, display clock). The power cap is left out too: a busy GPU
# at its power limit always reports it, and the few timings taken while it had rested would count against all others.
_THROTTLE_REASONS = {
    "HW slowdown": 0x08,
    "HW thermal slowdown": 0x40,
    "HW power brake": 0x80,
    "SW thermal slowdown": 0x20,
}
# NVML's function for each figure of a board, its further argument, and what its unit is divided by.
_BOARD_FIGURES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",), 1),
    "max_sm_clock_mhz": ("nvmlDeviceGetMaxClockInfo", ("NVML_CLOCK_SM",), 1),
    "power_watts": ("nvmlDeviceGetPowerUsage", (), 1000),
    "power_limit_watts": ("nvmlDeviceGetEnforcedPowerLimit", (), 1000),
    "temperature_celsius": ("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), 1),
    "utilization_percent": ("nvmlDeviceGetUtilizationRates", (), 1),
}
_SIZES = ("free_bytes", "used_bytes", "total_bytes")
_CLOCK = ("sm_clock_mhz", "event_reasons")
_VITALS = ("temperature_celsius", "power_watts", "utilization_percent", "used_bytes")
_ALL_PERCENT = 100
_MOST_NAMED = 3


@attrs.frozen(kw_only=True)
class Snapshot:
    """State of a GPU at one moment; a value is None if the GPU or driver does not report it, or it was not read."""

    free_bytes: int | None = None  # free_bytes, used_bytes, total_bytes: device memory; of the slice for a MIG device
    used_bytes: int | None = None
    total_bytes: int | None = None
    sm_clock_mhz: float | None = None  # SM clock now
    max_sm_clock_mhz: float | None = None  # the highest SM clock that can be set
    event_reasons: int | None = None  # all reasons for the clock, including the power cap and settings: bits of nvml.h
    # names of the reasons that are heat or a power brake; empty where the clock is not lowered
    throttle_reasons: tuple[str, ...] | None = None
    # power of the board; from Ampere on (except the A100) its mean over the last second
    power_watts: float | None = None
    power_limit_watts: float | None = None  # power limit in force
    temperature_celsius: float | None = None  # temperature of the GPU's die
    utilization_percent: float | None = None  # share of the last sample period in which a kernel ran

    @property
    def throttled(self) -> bool | None:
        """Whether the GPU lowers its clock because of heat or power; None where it is not known."""
        return None if self.throttle_reasons is None else bool(self.throttle_reasons)


@attrs.frozen
class Process:
    """A process that holds memory of a GPU."""

    pid: int  # process number as NVML sees it, which is the host's
    # name of the program without its folder; None where NVML does not know it, as in a container
    name: str | None = None
    used_bytes: int | None = None  # device memory, including the CUDA context; None where NVML does not know it

    def __str__(self) -> str:
        held = "" if self.used_bytes is None else f" holds {format_bytes(self.used_bytes)}"
        return f"{self.name or 'a process'} (pid {self.pid}){held}"


@attrs.frozen(kw_only=True)
class Listed:
    """A GPU of this machine, or a MIG slice, as NVML lists it."""

    index: int  # number of the board, in the order of the PCI bus
    name: str  # the driver's name for it
    uuid: str | None = None  # argument for `Monitor`; None where NVML gives no access to the GPU
    problem: str = ""  # why there is no access


def name_processes(processes: Sequence[Process]) -> str:
    """
    Return a phrase with name, number and memory of the first three processes, and the count of the others.

    Example:
        >>> name_processes([Process(7, "python", 2**31), Process(9)])
        'python (pid 7) holds 2.00 GiB, a process (pid 9)'
    """
    more = len(processes) - _MOST_NAMED
    return ", ".join(map(str, processes[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


class Monitor:
    """
    Reads the state of one GPU or MIG device from NVML.

    Clocks, power, energy, temperature and utilization belong to a whole board. For a MIG device they are None, since
    other slices share in them. `snapshot` and `driver_version` raise DeviceFailed if NVML reports an error. All other
    methods are called while something is measured, and return None, an empty tuple or a Snapshot of None instead.

    Args:
        uuid: "GPU-..." or "MIG-..." as nvidia-smi -L prints it.

    Raises:
        DeviceNotAvailable: If NVML or its driver is missing, or knows no such uuid.
        DeviceFailed: If NVML reports any other error.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._nvml = _start(uuid)
        self._handle = self._find(uuid)
        self.is_mig = uuid.startswith("MIG-")

    def snapshot(self) -> Snapshot:
        """Read and return all fields; raise DeviceFailed if NVML reports an error."""
        return self._figures((*_SIZES, *_BOARD_FIGURES, "event_reasons"), self._ask)

    def memory(self) -> Snapshot:
        """Return free, used and total bytes of device memory; the other values are None."""
        return self._figures(_SIZES, self._try)

    def free_bytes(self) -> int | None:
        """Return the free bytes of device memory; None if unknown."""
        return self.memory().free_bytes

    def power_limit_watts(self) -> float | None:
        """Return the power limit in force in watts; None if unknown."""
        return self._figures(["power_limit_watts"], self._try).power_limit_watts

    def pace(self) -> Snapshot:
        """Return only the SM clock in MHz and its reasons: reading all fields may last as long as a timing."""
        return self._figures(_CLOCK, self._try)

    def vitals(self) -> Snapshot:
        """Return only temperature, power, utilization and used memory; for a MIG device, used memory alone."""
        return self._figures(_VITALS, self._try)

    def energy_joules(self) -> float | None:
        """Return the joules that the board used since the driver was loaded; None for a MIG device or before Volta."""
        if self.is_mig:
            return None
        millijoules = self._try(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else millijoules / 1000

    def process_bytes(self, pid: int | None = None) -> int | None:
        """
        Return the bytes of device memory that a process holds, with its CUDA context; None as in some containers.

        `pid` is the host's number of the process; None is this process.
        """
        wanted = os.getpid() if pid is None else pid
        # For the handle of a MIG device NVML lists only the processes of its GPU instance.
        processes = self._try(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        sizes = [process.usedGpuMemory for process in processes or () if process.pid == wanted]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    def processes(self) -> tuple[Process, ...]:
        """Return the processes that hold memory of the GPU, including this one, by descending memory."""
        nvml, held = self._nvml, {}
        for query in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            # A process of both kinds is in both lists, each time with all that it holds.
            for process in self._try(query, self._handle) or ():
                held[process.pid] = process.usedGpuMemory
        processes = (Process(pid, self._program(pid), size) for pid, size in held.items())
        return tuple(sorted(processes, key=lambda process: (-(process.used_bytes or 0), process.pid)))

    def driver_version(self) -> str | None:
        """Return the version of the display driver, "550.54.15"; None if NVML does not report it."""
        version = self._ask(self._nvml.nvmlSystemGetDriverVersion)
        return None if version is None else str(version)

    def _figures(self, fields: Collection[str], ask: Callable[..., Any]) -> Snapshot:
        """Return a snapshot with these fields, each read by `ask`; the other fields are None."""
        nvml, figures = self._nvml, dict[str, Any]()
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, self._handle) if {*fields} & {*_SIZES} else None
        if memory is not None:
            sizes = zip(_SIZES, (memory.free, memory.used, memory.total), strict=True)
            figures = {field: int(size) for field, size in sizes if field in fields}
            if memory.used > memory.total:  # NVML's sign for an unknown size is the largest number of its type
                figures.pop("used_bytes", None)
        if self.is_mig:
            return Snapshot(**figures)
        for field, (function, arguments, divisor) in _BOARD_FIGURES.items():
            if field in fields:
                value = ask(getattr(nvml, function), self._handle, *(getattr(nvml, name) for name in arguments))
                if field == "utilization_percent" and value is not None:
                    value = value.gpu if value.gpu <= _ALL_PERCENT else None
                figures[field] = None if value is None else value / divisor
        if "event_reasons" in fields:
            mask = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle)
            if mask is None:  # drivers before 535 know the older name only
                mask = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
            if mask is not None:
                figures["event_reasons"] = int(mask)
                figures["throttle_reasons"] = tuple(name for name, bit in _THROTTLE_REASONS.items() if mask & bit)
        return Snapshot(**figures)

    def _program(self, pid: int) -> str | None:
        name = None
        with contextlib.suppress(UnicodeDecodeError):  # of the bindings: a file's name is any bytes
            name = self._try(self._nvml.nvmlSystemGetProcessName, pid)
        # Another user chose the name: none of its control sequences may reach the terminal.
        return name and "".join(letter if letter.isprintable() else "?" for letter in Path(name).name)

    def _find(self, uuid: str) -> object:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument) as error:
            raise DeviceNotAvailable(uuid, "NVML knows no GPU of this uuid", "See nvidia-smi -L.") from error
        except nvml.NVMLError as error:
            raise _failure("nvmlDeviceGetHandleByUUID", error) from error

    def _ask(self, query: Callable[..., Any], *arguments: object) -> Any:
        return _ask(self._nvml, query, *arguments)

    def _try(self, query: Callable[..., Any], *arguments: object) -> Any:
        try:
            return self._ask(query, *arguments)
        except DeviceFailed:  # a GPU that is really lost fails at the next launch, with a better message
            return None


def listed() -> list[Listed]:
    """
    Return all GPUs of this machine, including those hidden from CUDA, each followed by its MIG slices.

    Raises:
        DeviceNotAvailable: If there is no GPU, or no NVIDIA driver.
        DeviceFailed: If NVML cannot be started, or cannot count the GPUs. A GPU that cannot be read is listed with its
            `problem`.
    """
    nvml = _start("cuda", "Install or load the NVIDIA driver.")
    gpus: list[Listed] = []
    for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
        try:
            gpus += _board(nvml, index)
        except DeviceFailed as error:  # a board that is lost hides no other
            gpus.append(Listed(index=index, name=f"GPU {index}", problem=str(error)))
    if not gpus:
        raise DeviceNotAvailable("cuda", "NVML lists no GPU in this machine", "See nvidia-smi -L.")
    return gpus


def _board(nvml: Any, index: int) -> list[Listed]:
    board = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if board is None:
        return [Listed(index=index, name=f"GPU {index}", problem="NVML does not let this user access the GPU.")]
    handles = [board]
    for slot in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, board) or 0):
        with contextlib.suppress(nvml.NVMLError):  # a slot without a slice
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, slot))
    return [
        Listed(
            index=index,
            name=_ask(nvml, nvml.nvmlDeviceGetName, handle) or f"GPU {index}",
            uuid=_ask(nvml, nvml.nvmlDeviceGetUUID, handle),
        )
        for handle in handles
    ]


def _start(uuid: str, remedy: str = "Install or load the NVIDIA driver, or pass device='cpu'.") -> Any:
    """
    Load NVML and return its module; a second call is cheap, since NVML counts how often it was started.

    Raises DeviceNotAvailable, with `uuid` and `remedy`, without a driver, and DeviceFailed if NVML fails.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        reason = f"NVML cannot be used ({type(error).__name__}), so the GPU's memory and clocks cannot be read"
        raise DeviceNotAvailable(uuid, reason, remedy) from error
    except pynvml.NVMLError as error:
        raise _failure("nvmlInit", error) from error
    return pynvml


def _ask(nvml: Any, query: Callable[..., Any], *arguments: object) -> Any:
    """
    Return the result of an NVML query; None if this GPU, MIG slice, driver or user has no access to the value.

    Other errors of NVML are raised as DeviceFailed.
    """
    try:
        return query(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_NoData,
        nvml.NVMLLibraryMismatchError,  # no NVMLError: the driver lacks a version of the call that pynvml uses
    ):
        return None
    except nvml.NVMLError as error:
        raise _failure(query.__name__, error) from error


def _failure(operation: str, error: Any) -> DeviceFailed:
    return DeviceFailed(operation, f"NVML status {error.value} ({type(error).__name__})", "See nvidia-smi.")
