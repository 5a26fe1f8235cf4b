"""
NVML as a library under its real bindings: GPUs that fill NVML's own structures, and every status that it knows.

nvidia-ml-py runs as it is; only the C functions that it would find in libnvidia-ml.so.1 are made here.
"""

from __future__ import annotations

import ctypes

import attrs
import pynvml

GIB = 2**30
UUID, OTHER, SLICE = (
    f"{kind}-00000000-0000-0000-0000-00000000000{n}" for kind, n in (("GPU", 1), ("GPU", 2), ("MIG", 3))
)

STATUSES = tuple(sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}))
UNTOLD = (  # what a GPU, driver or user is not given
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NO_DATA,
)  # fmt: skip
NO_MEMORY_TOLD = 2**64 - 1


@attrs.define(eq=False, kw_only=True)
class Gpu:
    """A board or a slice of one; None is what it does not support."""

    uuid: str = UUID
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    used: int = 40 * GIB
    clock: int | None = 1755
    max_clock: int | None = 1980
    reasons: int | None = 0
    milliwatts: int | None = 412_500
    limit: int | None = 700_000
    millijoules: int | None = 12_345_678
    celsius: int | None = 61
    load: int | None = 97
    compute: tuple[tuple[int, int], ...] | None = ()
    graphics: tuple[tuple[int, int], ...] | None = ()
    slices: tuple[Gpu | None, ...] | None = None
    handle: ctypes.Structure = attrs.field(factory=pynvml.struct_c_nvmlDevice_t, init=False)


def a_slice(**facts):
    """A MIG slice: it has memory and processes, and nothing of the board's."""
    board = dict.fromkeys(("clock", "max_clock", "reasons", "milliwatts", "limit", "millijoules", "celsius", "load"))
    return Gpu(**{"uuid": SLICE, "name": "NVIDIA H200 MIG 1g.18gb", "total": 16 * GIB, **board, **facts})


class Library:
    """
    What stands for libnvidia-ml.so.1.

    Attributes:
        gpus: Of the machine.
        programs: Names by pid.
        failing: Status by C function, in the place of an answer.
        calls: C functions that were called.
    """

    def __init__(self, *gpus):
        self.gpus, self.programs, self.failing, self.calls = list(gpus or [Gpu()]), {}, {}, []

    def install(self, monkeypatch):
        """Have the bindings find these functions."""
        monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", self._function)
        return self

    def _function(self, name):
        if self.failing.get(name) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        def call(*arguments):
            self.calls.append(name)
            return self.failing.get(name) or getattr(self, f"_{name}")(*arguments)

        return call

    def _gpu(self, handle):
        place = ctypes.addressof(handle.contents)
        known = [*self.gpus, *(one for gpu in self.gpus for one in gpu.slices or () if one)]
        return next(gpu for gpu in known if ctypes.addressof(gpu.handle) == place)

    def _nvmlInitWithFlags(self, _flags):
        return pynvml.NVML_SUCCESS

    def _nvmlSystemGetDriverVersion(self, text, _size):
        return _write(text, "580.95.05")

    def _nvmlSystemGetProcessName(self, pid, text, _size):
        name = self.programs.get(pid.value)
        return pynvml.NVML_ERROR_NOT_FOUND if name is None else _write(text, name)

    def _nvmlDeviceGetCount_v2(self, count):
        return _put(count, len(self.gpus))

    def _nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return _point(device, self.gpus[index.value])

    def _nvmlDeviceGetHandleByUUID(self, uuid, device):
        known = [*self.gpus, *(one for gpu in self.gpus for one in gpu.slices or () if one)]
        return _point(device, next((gpu for gpu in known if gpu.uuid == uuid.value.decode()), None))

    def _nvmlDeviceGetMaxMigDeviceCount(self, device, count):
        slices = self._gpu(device).slices
        return _put(count, None if slices is None else len(slices))

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device, index, found):
        return _point(found, self._gpu(device).slices[index.value])

    def _nvmlDeviceGetName(self, device, text, _size):
        return _write(text, self._gpu(device).name)

    def _nvmlDeviceGetUUID(self, device, text, _size):
        return _write(text, self._gpu(device).uuid)

    def _nvmlDeviceGetMemoryInfo(self, device, memory):
        gpu, found = self._gpu(device), memory._obj
        found.total, found.used, found.free = gpu.total, gpu.used, gpu.total - gpu.used
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetClockInfo(self, device, _kind, megahertz):
        return _put(megahertz, self._gpu(device).clock)

    def _nvmlDeviceGetMaxClockInfo(self, device, _kind, megahertz):
        return _put(megahertz, self._gpu(device).max_clock)

    def _nvmlDeviceGetCurrentClocksEventReasons(self, device, reasons):
        return _put(reasons, self._gpu(device).reasons)

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, device, reasons):
        return _put(reasons, self._gpu(device).reasons)

    def _nvmlDeviceGetPowerUsage(self, device, milliwatts):
        return _put(milliwatts, self._gpu(device).milliwatts)

    def _nvmlDeviceGetEnforcedPowerLimit(self, device, milliwatts):
        return _put(milliwatts, self._gpu(device).limit)

    def _nvmlDeviceGetTotalEnergyConsumption(self, device, millijoules):
        return _put(millijoules, self._gpu(device).millijoules)

    def _nvmlDeviceGetTemperature(self, device, _sensor, celsius):
        return _put(celsius, self._gpu(device).celsius)

    def _nvmlDeviceGetUtilizationRates(self, device, rates):
        load = self._gpu(device).load
        if load is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = load, 40
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, processes):
        return _list(count, processes, self._gpu(device).compute)

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, device, count, processes):
        return _list(count, processes, self._gpu(device).graphics)


def _put(to, value):
    if value is None:
        return pynvml.NVML_ERROR_NOT_SUPPORTED
    to._obj.value = value
    return pynvml.NVML_SUCCESS


def _write(text, name):
    text.value = name if isinstance(name, bytes) else name.encode()
    return pynvml.NVML_SUCCESS


def _point(device, gpu):
    if gpu is None:
        return pynvml.NVML_ERROR_NOT_FOUND
    device._obj.contents = gpu.handle
    return pynvml.NVML_SUCCESS


def _list(count, to, processes):
    if processes is None:
        return pynvml.NVML_ERROR_NOT_SUPPORTED
    room, count._obj.value = count._obj.value, len(processes)
    if room < len(processes):
        return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    for place, (pid, size) in enumerate(processes):
        to[place].pid, to[place].usedGpuMemory = pid, size
    return pynvml.NVML_SUCCESS
