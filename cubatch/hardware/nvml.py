"""
What a GPU is doing right now: memory, clocks, power, energy, processes, through NVML.

This is the only module that talks to NVML.  A GPU is named by its uuid, never by an index:
NVML counts every board in PCI order, while CUDA's numbers follow CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER.  A figure that the GPU or driver does not give is None.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.hardware.nvml_records import Listed, Pace, Process, Snapshot, Vitals

_THROTTLE_REASONS = {
    "HW slowdown": 0x08,
    "HW thermal slowdown": 0x40,
    "HW power brake": 0x80,
    "SW thermal slowdown": 0x20,
}
"""
Clock event reasons (nvml.h) under which a timing says more about heat and power than about the kernel:
the next timing may find another clock.  Left out are idleness, what was set and therefore holds throughout
a run (application clocks, sync boost, display clock), and the power cap: a GPU at its power limit reports it
for as long as it is busy, and a few timings taken while it had rested would count against all others.
"""

_ALL_PERCENT = 100


class Monitor:
    """
    Live figures of one GPU or MIG device.

    Clocks, power, energy, temperature and utilisation belong to a whole board.  A MIG device gives
    only its memory and processes; the rest is None, since other slices share in it.

    Args:
        uuid: "GPU-..." or "MIG-..." as nvidia-smi -L prints it.

    Raises:
        DeviceNotAvailable: If NVML or its driver is not there, or knows no such uuid.
        DeviceFailed: If NVML reports any other error.

    Example:
        >>> Monitor("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6").snapshot()  # doctest: +SKIP
        Snapshot(free_bytes=..., sm_clock_mhz=1980.0, throttle_reasons=(), ...)
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._nvml = _start(uuid)
        self._handle = self._find(uuid)
        self.is_mig = uuid.startswith("MIG-")

    def snapshot(self) -> Snapshot:
        """
        Read everything that a measurement is judged by.

        Raises:
            DeviceFailed: If NVML reports an error other than "not supported".
        """
        nvml, handle = self._nvml, self._handle
        memory = self._read(nvml.nvmlDeviceGetMemoryInfo, handle)
        board: dict[str, Any] = {}
        if not self.is_mig:
            power = self._read(nvml.nvmlDeviceGetPowerUsage, handle)
            limit = self._read(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
            load = self._read(nvml.nvmlDeviceGetUtilizationRates, handle)
            reasons = self._event_reasons(self._read)
            board = {
                "sm_clock_mhz": _float(self._read(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
                "max_sm_clock_mhz": _float(self._read(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)),
                "throttle_reasons": None if reasons is None else _throttling(reasons),
                "power_watts": None if power is None else power / 1000,
                "power_limit_watts": None if limit is None else limit / 1000,
                "temperature_celsius": _float(
                    self._read(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
                ),
                "utilization_percent": None if load is None else float(load.gpu),
            }
        return Snapshot(**board, **_sizes(memory))

    def memory(self) -> Snapshot:
        """Read the device memory alone; None of each where NVML fails: a GPU is of use without it."""
        return Snapshot(**_sizes(self._told(self._nvml.nvmlDeviceGetMemoryInfo, self._handle)))

    def free_bytes(self) -> int | None:
        """Read how much device memory nobody holds; None where NVML fails: it is read in the middle of a visit."""
        return self.memory().free_bytes

    def power_limit_watts(self) -> float | None:
        """Read the limit in force; None on a MIG device, and where NVML fails: a GPU is of use without it."""
        if self.is_mig:
            return None
        limit = self._told(self._nvml.nvmlDeviceGetEnforcedPowerLimit, self._handle)
        return None if limit is None else limit / 1000

    def pace(self) -> Pace:
        """
        Read what every timing is judged by, in two calls: a snapshot's eight may last as long as what is timed.

        Returns:
            Pace: None for what was not told, for whatever reason: a timing is worth having without it.

        Example:
            >>> Monitor("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6").pace()  # doctest: +SKIP
            Pace(sm_clock_mhz=1980.0, throttled=False, event_reasons=4)
        """
        if self.is_mig:
            return Pace()
        nvml = self._nvml
        clock = self._told(nvml.nvmlDeviceGetClockInfo, self._handle, nvml.NVML_CLOCK_SM)
        reasons = self._event_reasons(self._told)
        return Pace(_float(clock), None if reasons is None else bool(_throttling(reasons)), reasons)

    def vitals(self) -> Vitals:
        """
        Read what is told beside every timing, in four calls, on a MIG device in one.

        Returns:
            Vitals: None for what was not told, for whatever reason, or cannot be.

        Example:
            >>> Monitor("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6").vitals()  # doctest: +SKIP
            Vitals(temperature_celsius=61.0, power_watts=412.5, utilization_percent=97.0, used_bytes=42949672960)
        """
        nvml, handle = self._nvml, self._handle
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, handle)
        # Where it tells nothing NVML may give the largest number that there is, as of processes.
        used = memory.used if memory is not None and memory.used <= memory.total else None
        if self.is_mig:
            return Vitals(used_bytes=used)
        power = self._told(nvml.nvmlDeviceGetPowerUsage, handle)
        load = self._told(nvml.nvmlDeviceGetUtilizationRates, handle)
        return Vitals(
            temperature_celsius=_float(self._told(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)),
            power_watts=None if power is None else power / 1000,
            utilization_percent=None if load is None or load.gpu > _ALL_PERCENT else float(load.gpu),
            used_bytes=used,
        )

    def energy_joules(self) -> float | None:
        """
        Read the board's energy counter; the difference of two readings is what was used between them.

        Returns:
            float | None: Joules since the driver was loaded; None on MIG devices, GPUs before Volta, and where NVML
            fails: it is read around every timing, which is worth having without it.
        """
        if self.is_mig:
            return None
        millijoules = self._told(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else millijoules / 1000

    def process_bytes(self, pid: int | None = None) -> int | None:
        """
        Read how much device memory a process holds, its CUDA context included.

        Args:
            pid: As NVML sees it, which is the host's number; None: this process.

        Returns:
            int | None: Bytes; None where NVML does not list the process (a container with its own
            process numbers), does not know its memory, or fails: it is read in the middle of what is measured.
        """
        wanted = os.getpid() if pid is None else pid
        # Asked of a MIG device's own handle, NVML lists the processes of its GPU instance only.
        processes = self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        sizes = [process.usedGpuMemory for process in processes or () if process.pid == wanted]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    def processes(self) -> tuple[Process, ...]:
        """
        List who holds memory of the GPU, with CUDA or graphics, this process too; the most memory first.

        Empty where NVML does not see into a container, does not tell, or fails.
        """
        nvml, held = self._nvml, {}
        for query in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for one in self._told(query, self._handle) or ():  # who does both is in both lists, with all it holds
                held[one.pid] = one.usedGpuMemory
        found = (Process(pid, self._program(pid), size) for pid, size in held.items())
        return tuple(sorted(found, key=lambda process: (-(process.used_bytes or 0), process.pid)))

    def _program(self, pid: int) -> str | None:
        name = None
        with contextlib.suppress(UnicodeDecodeError):  # of the bindings: a file's name is any bytes
            name = self._told(self._nvml.nvmlSystemGetProcessName, pid)
        # Whoever runs a program chose its name: no control sequence of theirs reaches the terminal.
        return name and "".join(letter if letter.isprintable() else "?" for letter in Path(name).name)

    def driver_version(self) -> str | None:
        """Return the version of the display driver: "550.54.15"."""
        version = self._read(self._nvml.nvmlSystemGetDriverVersion)
        return None if version is None else str(version)

    def _event_reasons(self, ask: Callable[..., Any]) -> int | None:
        mask = ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle)
        if mask is None:  # drivers before 535 know the older name only
            mask = ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        return None if mask is None else int(mask)

    def _find(self, uuid: str) -> object:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument) as error:
            raise DeviceNotAvailable(uuid, "NVML knows no GPU of this uuid", "See nvidia-smi -L.") from error
        except nvml.NVMLError as error:
            raise _failure("nvmlDeviceGetHandleByUUID", error) from error

    def _read(self, query: Callable[..., Any], *arguments: object) -> Any:
        """Ask NVML of this GPU, as `_asked` does."""
        return _asked(self._nvml, query, *arguments)

    def _told(self, query: Callable[..., Any], *arguments: object) -> Any:
        """Ask NVML while something is measured; None where there is no answer, whatever the reason."""
        try:
            return self._read(query, *arguments)
        except DeviceFailed:  # a GPU that is really lost fails at the next launch, with more to say
            return None


def listed() -> list[Listed]:
    """
    List all GPUs of this machine, whether CUDA shows them to this process or not, each followed by its MIG slices.

    Raises:
        DeviceNotAvailable: If NVML or its driver is not there, or lists no GPU.
        DeviceFailed: If NVML does not count them.

    Example:
        >>> listed()                                                                            # doctest: +SKIP
        [Listed(index=0, name='NVIDIA H200', uuid='GPU-8932f937-d72c-4106-c12f-20bd9faed9f6', problem='')]
    """
    nvml = _start("cuda", "Install or load the NVIDIA driver.")
    found: list[Listed] = []
    for index in range(_asked(nvml, nvml.nvmlDeviceGetCount) or 0):
        try:
            found += _board(nvml, index)
        except DeviceFailed as error:  # a board that is lost hides no other
            found.append(Listed(index=index, name=f"GPU {index}", problem=str(error)))
    if not found:
        raise DeviceNotAvailable("cuda", "NVML lists no GPU in this machine", "See nvidia-smi -L.")
    return found


def _board(nvml: Any, index: int) -> list[Listed]:
    """List a board and its slices."""
    board = _asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if board is None:
        return [Listed(index=index, name=f"GPU {index}", problem="NVML does not let this user look at it.")]
    handles = [board]
    for slot in range(_asked(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, board) or 0):
        with contextlib.suppress(nvml.NVMLError):  # a slot without a slice
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, slot))
    return [
        Listed(
            index=index,
            name=_asked(nvml, nvml.nvmlDeviceGetName, handle) or f"GPU {index}",
            uuid=_asked(nvml, nvml.nvmlDeviceGetUUID, handle),
        )
        for handle in handles
    ]


def _start(uuid: str, remedy: str = "Install or load the NVIDIA driver, or pass device='cpu'.") -> Any:
    """Load NVML; calling it again is cheap, since NVML counts how often it was started."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        reason = f"NVML cannot be used ({type(error).__name__}), so its memory and clocks cannot be read"
        raise DeviceNotAvailable(uuid, reason, remedy) from error
    except pynvml.NVMLError as error:
        raise _failure("nvmlInit", error) from error
    return pynvml


def _asked(nvml: Any, query: Callable[..., Any], *arguments: object) -> Any:
    """Ask NVML; None where this GPU, slice, driver or user is not given the answer."""
    try:
        return query(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_NoData,
        nvml.NVMLLibraryMismatchError,  # no NVMLError: the driver lacks a version of the call that pynvml wants
    ):
        return None
    except nvml.NVMLError as error:
        raise _failure(query.__name__, error) from error


def _failure(operation: str, error: Any) -> DeviceFailed:
    return DeviceFailed(operation, f"NVML status {error.value} ({type(error).__name__})", "See nvidia-smi.")


def _sizes(memory: Any) -> dict[str, Any]:
    """Return what NVML's record of memory says; nothing of none."""
    return {} if memory is None else {f"{name}_bytes": int(getattr(memory, name)) for name in ("free", "used", "total")}


def _throttling(event_reasons: int) -> tuple[str, ...]:
    return tuple(name for name, bit in _THROTTLE_REASONS.items() if event_reasons & bit)


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
