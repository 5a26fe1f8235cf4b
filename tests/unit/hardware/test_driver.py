"""The list of GPUs from a made-up CUDA driver library."""

from __future__ import annotations

import ctypes
from uuid import UUID

import pytest

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.hardware import driver as cuda_driver

H200 = {
    "name": "NVIDIA H200",
    "uuid": "8932f937-d72c-4106-c12f-20bd9faed9f6",
    "memory": 150_000_000_000,
    # By CUdevice_attribute of cuda.h: clock in kHz, SMs, integrated, memory's clock in kHz and bits, L2, major, minor.
    13: 1_980_000,
    16: 132,
    18: 0,
    36: 3_201_000,
    37: 6144,
    38: 62_914_560,
    75: 9,
    76: 0,
}
SLICE = H200 | {"name": "NVIDIA H200 MIG 1g.18gb", 16: 16, "memory": 17_000_000_000}


class FakeDriver:
    """libcuda with the functions that the list needs; each returns a CUresult and fills in its first argument."""

    def __init__(self, *gpus, init=0):
        self.gpus, self.init = gpus, init

    def cuInit(self, flags):
        assert flags == 0
        return self.init

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, handle, index):
        handle._obj.value = 100 + index
        return 0

    def cuDeviceGetName(self, text, size, handle):
        text.value = self._gpu(handle)["name"].encode()[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, size, handle):
        size._obj.value = self._gpu(handle)["memory"]
        return 0

    def cuDeviceGetUuid_v2(self, octets, handle):
        ctypes.memmove(octets._obj, UUID(self._gpu(handle)["uuid"]).bytes, 16)
        return 0

    def cuDeviceGetAttribute(self, value, number, handle):
        value._obj.value = self._gpu(handle)[number]
        return 0

    def _gpu(self, handle):
        return self.gpus[handle.value - 100]


@pytest.fixture
def install(monkeypatch):
    """Put a driver in the place of libcuda: an object, or an error of loading it."""

    def put(driver):
        def load(name):
            assert name == "libcuda.so.1"
            if isinstance(driver, Exception):
                raise driver
            return driver

        monkeypatch.setattr(cuda_driver.ctypes, "CDLL", load)

    return put


def test_a_gpu_is_described_by_the_driver(install):
    """Every fact comes from its own query, in CUDA's order."""
    install(FakeDriver(H200, H200 | {"name": "Tesla T4", 16: 40, 75: 7, 76: 5}))

    first, second = cuda_driver.visible_gpus()

    assert (first.index, first.name, first.mig) == (0, "NVIDIA H200", None)
    assert first.uuid == "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    assert (first.compute_capability, first.num_sms) == ((9, 0), 132)
    assert (first.memory_bytes, first.l2_bytes, first.clock_hz) == (150_000_000_000, 62_914_560, 1.98e9)
    assert first.bytes_per_second == pytest.approx(4.917e12, rel=1e-3)  # 4.9 TB/s: a bit more than the data sheet's
    assert (second.index, second.name, second.compute_capability, second.num_sms) == (1, "Tesla T4", (7, 5), 40)
    install(FakeDriver(H200, H200 | {18: 1}))
    assert [gpu.integrated for gpu in cuda_driver.visible_gpus()] == [False, True]


def test_a_mig_slice_says_so(install):
    """The driver names the profile in a slice's name; its uuid is spelled as NVML spells it."""
    install(FakeDriver(SLICE))

    (gpu,) = cuda_driver.visible_gpus()

    assert (gpu.mig, gpu.num_sms, gpu.memory_bytes) == ("1g.18gb", 16, 17_000_000_000)
    assert gpu.uuid == "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"


def test_zero_from_the_driver_is_unknown(install):
    """A virtual GPU may hide its clock and cache; zero is no fact."""
    install(FakeDriver(H200 | {13: 0, 38: 0, 36: 0}, H200 | {37: 0}))

    gpu, other = cuda_driver.visible_gpus()

    assert (gpu.clock_hz, gpu.l2_bytes) == (None, None)
    assert (gpu.bytes_per_second, other.bytes_per_second) == (None, None)


@pytest.mark.parametrize("number", [13, 36, 37, 38])
def test_what_may_be_unknown_may_be_refused(install, number):
    """Clocks, bus and cache are facts that a GPU can do without: a driver that refuses one is no broken driver."""
    driver = FakeDriver(H200)
    answer = driver.cuDeviceGetAttribute
    driver.cuDeviceGetAttribute = lambda value, asked, handle: 1 if asked == number else answer(value, asked, handle)
    install(driver)

    (gpu,) = cuda_driver.visible_gpus()

    unknown = {name for name in ("clock_hz", "l2_bytes", "bytes_per_second") if getattr(gpu, name) is None}
    assert unknown == {{13: "clock_hz", 38: "l2_bytes"}.get(number, "bytes_per_second")}


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (OSError("cannot open"), "not installed"),
        (FakeDriver(init=100), "no GPU"),
        (FakeDriver(), "no GPU"),
        (FakeDriver(init=34), "stub"),
    ],
)
def test_without_a_gpu_there_is_none_available(install, driver, words):
    """No driver, no GPU, all masked, or only the toolkit's stub: the same error, each with its reason."""
    install(driver)

    with pytest.raises(DeviceNotAvailable) as caught:
        cuda_driver.visible_gpus()

    assert words in caught.value.reason
    assert "cpu" in caught.value.remedy


def test_a_broken_driver_is_reported_not_hidden(install):
    """A driver that does not fit its kernel module (803) must not look like a machine without a GPU."""
    install(FakeDriver(init=803))

    with pytest.raises(DeviceFailed) as caught:
        cuda_driver.visible_gpus()

    assert caught.value.operation == "cuInit"
    assert "803" in caught.value.status


def test_a_failing_query_names_itself(install):
    """Each status is checked."""
    driver = FakeDriver(H200)
    driver.cuDeviceGetAttribute = lambda *_: 999
    install(driver)

    with pytest.raises(DeviceFailed) as caught:
        cuda_driver.visible_gpus()

    assert caught.value.operation == "cuDeviceGetAttribute"
