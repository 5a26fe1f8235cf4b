"""Launches through a made-up CUDA driver and a made-up CuPy."""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from cubatch.errors import DeviceFailed, InvalidArgument, MissingDependency, OutOfMemory
from cubatch.hardware import catalogue, driver as cuda_driver
from cubatch.hardware.facts import Device
from cubatch.kernels import launch, variant as variants
from cubatch.kernels.tensor_map import TensorMap, Window
from cubatch.kernels.toolchain.cubins import Cubin, Resources
from cubatch.kernels.variant import Kernel

V100, H100 = catalogue.find("v100-sxm2-16gb"), catalogue.find("h100-sxm")
HANDLE, STREAM, ADDRESS = 0xF00, 0xABC, 0x1000


def kernel(**changes):
    """A kernel of one entry."""
    facts = {
        "name": "demo_f32_misc", "family": "misc", "source": "misc/demo.cu", "operation": "demo", "entry": "demo",
        "dtype": "float32", "threads": 96, "defines": (),
    }  # fmt: skip
    return Kernel(**facts | changes)


class FakeDriver:
    """libcuda with a cuLaunchKernel that reads its arguments as the real one does."""

    def __init__(self, status=0):
        self.status, self.launches, self.sizes = status, [], ()
        self.knows, self.attributes = 13000, []

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert extra is None
        data = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, self.sizes, strict=True)]
        self.launches.append((function.value, (gx, gy, gz), (bx, by, bz), shared, stream.value, data))
        return self.status

    def cuDriverGetVersion(self, number):
        number._obj.value = self.knows
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        """Read CUlaunchConfig at the offsets that a C compiler gives its fields, and its attribute."""
        at = ctypes.addressof(config._obj)
        *shape, shared = struct.unpack("7I", ctypes.string_at(at, 28))
        stream, attributes, count = struct.unpack("QQI", ctypes.string_at(at + 32, 20))
        assert count == 1
        self.attributes.append((*struct.unpack("i4xi", ctypes.string_at(attributes, 12)),))
        return self.cuLaunchKernel(function, *shape, shared, ctypes.c_void_p(stream), pointers, extra)


class FakeFunction:
    """What CuPy's modules give for an entry."""

    def __init__(self):
        self.kernel = SimpleNamespace(ptr=HANDLE)
        self.max_dynamic_shared_size_bytes = self.preferred_shared_memory_carveout = None


class FakeCupy:
    """CuPy with modules and a current stream."""

    __version__ = "14.0.1"

    def __init__(self):
        self.loaded, self.functions, self.stream = [], {}, STREAM
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            runtime=SimpleNamespace(runtimeGetVersion=lambda: 12090),
        )

    def RawModule(self, *, path):
        self.loaded.append(path)
        return SimpleNamespace(get_function=lambda name: self.functions.setdefault(name, FakeFunction()))


@pytest.fixture
def gpu(monkeypatch, request):
    """A launcher on made-up libraries, of a V100 or of the device given: (launcher, driver, cupy, resources)."""
    device, knows = getattr(request, "param", (V100, 13000))
    driver, cupy, compiled = FakeDriver(), FakeCupy(), []
    resources = SimpleNamespace(shared_bytes=0, registers=128)

    def compile_kernel(wanted, arch):
        compiled.append((wanted.name, arch))
        found = Resources(resources.registers, 0, resources.shared_bytes, wanted.threads)
        return Cubin("/cache/demo.cubin", "12.9.86", {wanted.entry: found}, "")

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(launch.compiler, "compile_kernel", compile_kernel)
    driver.knows = knows
    launcher = launch.CudaLauncher(device)
    return SimpleNamespace(launcher=launcher, driver=driver, cupy=cupy, resources=resources, compiled=compiled)


def an_array(address=ADDRESS):
    """A CuPy array, as far as a launch looks at it."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def test_arguments_reach_the_driver_as_pointers_and_by_value(gpu):
    """An array is passed by its address, None as a null pointer, and scalars and records by their own bytes."""
    record = np.array([(7, 2.5)], dtype=np.dtype([("a", np.int64), ("b", np.float32)], align=True))[0]
    gpu.driver.sizes = (8, 8, 4, 8, record.itemsize)
    work = gpu.launcher.bind(kernel(), (5, 2, 3), [an_array(), None, np.int32(-9), np.int64(1 << 40), record])
    assert gpu.driver.launches == []
    work()
    ((function, grid, block, shared, stream, data),) = gpu.driver.launches
    assert (function, grid, block, shared, stream) == (HANDLE, (5, 2, 3), (96, 1, 1), 0, STREAM)
    assert [int.from_bytes(part, "little", signed=True) for part in data[:4]] == [ADDRESS, 0, -9, 1 << 40]
    assert data[4] == record.tobytes()


@pytest.mark.parametrize(
    ("gpu", "attributes"), [((H100, 12030), [(6, 1)] * 2), ((H100, 12020), []), ((V100, 13000), [])], indirect=["gpu"]
)
def test_from_hopper_on_a_launch_may_overlap_the_one_before(gpu, attributes):
    """Programmatic stream serialization (6) is allowed where kernels wait and graphs hold it; nothing else differs."""
    gpu.driver.sizes = (4,)
    work = gpu.launcher.bind(kernel(dynamic_shared_bytes=1 << 10), (5, 2, 3), [np.int32(-9)])
    work()
    gpu.cupy.stream = STREAM + 1
    work()
    assert gpu.driver.launches == [
        (HANDLE, (5, 2, 3), (96, 1, 1), 1 << 10, stream, [np.int32(-9).tobytes()]) for stream in (STREAM, STREAM + 1)
    ]
    assert gpu.driver.attributes == attributes
    assert gpu.launcher.overlaps == bool(attributes)


@pytest.mark.parametrize("gpu", [(H100, 13000)], indirect=True)
def test_threads_that_share_a_prepared_launch_keep_their_streams(gpu):
    """The driver reads the stream of each launch only after both threads have passed theirs to it."""
    both, current, read = threading.Barrier(2, timeout=10), threading.local(), gpu.driver.cuLaunchKernelEx

    def read_when_both_have_called(*arguments):
        both.wait()
        return read(*arguments)

    gpu.driver.cuLaunchKernelEx = read_when_both_have_called
    gpu.cupy.cuda.get_current_stream = lambda: current
    work = gpu.launcher.bind(kernel(), (5, 2, 3), [])

    def launch_on(stream):
        current.ptr = stream
        work()

    streams = [STREAM, STREAM + 1]
    for _ in range(2):  # new streams, then streams that the launch knows
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(launch_on, streams))
    assert sorted(stream for *_, stream, _ in gpu.driver.launches) == sorted(2 * streams)


@pytest.mark.parametrize("gpu", [(H100, 13000)], indirect=True)
def test_a_launcher_that_is_told_so_overlaps_nothing(gpu):
    """Where kernels, GPU and driver could: each launch then begins when the one before has ended."""
    launcher = launch.CudaLauncher(H100, overlaps=False)
    launcher.bind(kernel(), (5, 2, 3), [])()
    assert not launcher.overlaps
    assert len(gpu.driver.launches) == 1
    assert gpu.driver.attributes == []


@pytest.mark.parametrize(
    ("family", "has_tile", "registers", "blocks", "is_early"),
    [
        ("simt", True, 255, 132, False), ("simt", True, 255, 263, False), ("simt", True, 255, 264, True),
        ("hopper", True, 168, 30, True), ("attention", False, 255, 132, False), ("misc", False, 255, 132, True),
        ("simt", False, 255, 32, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gpu", [(H100, 13000)], indirect=True)
def test_blocks_that_would_crowd_on_a_few_sms_do_not_come_early(gpu, family, has_tile, registers, blocks, is_early):
    """Of 128 threads of 255 registers an SM holds two blocks: 264 fill an H100, and 132 could crowd on 66 SMs."""
    gpu.resources.registers = registers
    threads = 384 if family == "hopper" else 128
    tile = variants.find("gemm_nt", "float32", tile="128x128x8", vector=4).tile if has_tile else None
    gpu.launcher.bind(kernel(family=family, tile=tile, threads=threads), (blocks // 2, 1, 2), [])()
    assert len(gpu.driver.launches) == 1
    assert bool(gpu.driver.attributes) == is_early


def test_an_array_of_the_hosts_is_refused(gpu):
    """NumPy's arrays have an address too, which a kernel would read from the GPU's memory."""
    described = TensorMap(np.zeros((64, 64), np.float16), "float16", (64, 64), (64, 64))
    for argument in (np.zeros(4, np.float32), described):
        with pytest.raises(InvalidArgument, match="in the GPU's memory"):
            gpu.launcher.bind(kernel(), (1, 1, 1), [argument])


def test_tensor_maps_are_encoded_by_the_driver_and_passed_by_value(gpu):
    """Extents, strides, corners and steps go to the driver in its order; its 128 bytes go to the kernel."""
    calls = []

    def encode_tiled(room, dtype, rank, address, dims, strides, box, steps, *ends):
        calls.append((dtype.value, address.value, list(dims), list(strides), list(box), list(steps),
                      [end.value for end in ends], room.value % 64, rank.value))  # fmt: skip
        ctypes.memset(room, 0xA5, 128)
        return 0

    def encode_im2col(room, dtype, rank, address, dims, strides, lower, upper, channels, pixels, steps, *ends):
        calls.append((dtype.value, list(dims), list(strides), list(lower), list(upper), channels.value, pixels.value,
                      list(steps), [end.value for end in ends]))  # fmt: skip
        ctypes.memset(room, 0x5A, 128)
        return 0

    gpu.driver.cuTensorMapEncodeTiled, gpu.driver.cuTensorMapEncodeIm2col = encode_tiled, encode_im2col
    gpu.driver.sizes = (128, 128)
    window = Window(steps=(2, 1), lower=(-1, -3), upper=(-2, 1))
    image = TensorMap(an_array(), "tf32", (64, 9, 7, 2), (32, 128), window)
    tiled = TensorMap(an_array(), "bfloat16", (72, 9, 40), (64, 1, 128))
    gpu.launcher.bind(kernel(), (1, 1, 1), [tiled, image])()
    assert calls == [
        (9, ADDRESS, [72, 9, 40], [144, 1296], [64, 1, 128], [1, 1, 1], [0, 3, 2, 0], 0, 3),
        (11, [64, 9, 7, 2], [256, 2304, 16128], [-1, -3], [-2, 1], 32, 128, [1, 2, 1, 1], [0, 3, 2, 0]),
    ]
    assert gpu.driver.launches[0][-1] == [b"\xa5" * 128, b"\x5a" * 128]


def test_a_tensor_map_that_the_driver_refuses_is_an_error(gpu):
    """With its extents; a misaligned array is refused before the driver sees it."""
    gpu.driver.cuTensorMapEncodeTiled = lambda *_: 1
    with pytest.raises(DeviceFailed, match=r"\(64, 30\).*status 1") as caught:
        gpu.launcher.bind(kernel(), (1, 1, 1), [TensorMap(an_array(), "float16", (64, 30), (64, 128))])
    assert not caught.value.is_fatal
    with pytest.raises(InvalidArgument, match="a multiple of 16"):
        gpu.launcher.bind(kernel(), (1, 1, 1), [TensorMap(an_array(ADDRESS + 8), "float16", (64, 30), (64, 128))])


def test_a_launch_is_repeated_without_loading_again(gpu):
    """Binding twice loads the cubin once, and what was bound can be called again and again."""
    gpu.driver.sizes = (8,)
    works = [gpu.launcher.bind(kernel(), (1, 1, 1), [an_array()]) for _ in range(2)]
    for work in (*works, *works):
        work()
    assert len(gpu.driver.launches) == 4
    assert gpu.cupy.loaded == ["/cache/demo.cubin"]
    assert gpu.compiled == [("demo_f32_misc", "sm_70")]


def test_the_bound_arguments_stay_alive(gpu):
    """The driver reads arguments at every call, so a launch holds the arrays and values it was bound to."""
    gpu.driver.sizes = (4,)
    work = gpu.launcher.bind(kernel(), (1, 1, 1), [np.float32(0.5)])
    for _ in range(100):  # whatever was freed would be overwritten
        np.float32(1.5).tobytes()
        ctypes.create_string_buffer(b"\xff" * 4, 4)
    work()
    assert np.frombuffer(gpu.driver.launches[0][-1][0], np.float32) == [0.5]


def test_shared_memory_beyond_the_default_is_asked_for(gpu):
    """Above 48 KiB the driver must be told before the launch; below it is left alone."""
    gpu.launcher.bind(kernel(dynamic_shared_bytes=40 << 10), (1, 1, 1), [])
    assert gpu.cupy.functions["demo"].max_dynamic_shared_size_bytes is None
    gpu.launcher.bind(kernel(entry="big", dynamic_shared_bytes=64 << 10), (1, 1, 1), [])
    assert gpu.cupy.functions["big"].max_dynamic_shared_size_bytes == 64 << 10


def test_as_much_shared_memory_is_wished_for_as_the_blocks_of_an_sm_take(gpu):
    """5 blocks of 96 threads of 128 registers by their registers, 4 by 20 KiB each: 80 of the 96 KiB of a V100."""
    gpu.launcher.bind(kernel(), (1, 1, 1), [])
    assert gpu.cupy.functions["demo"].preferred_shared_memory_carveout is None
    gpu.launcher.bind(kernel(entry="small", dynamic_shared_bytes=1 << 10), (1, 1, 1), [])
    assert gpu.cupy.functions["small"].preferred_shared_memory_carveout == 6
    gpu.resources.shared_bytes = 12 << 10
    gpu.launcher.bind(kernel(entry="big", dynamic_shared_bytes=8 << 10), (1, 1, 1), [])
    assert gpu.cupy.functions["big"].preferred_shared_memory_carveout == 84


def test_shared_memory_beyond_the_gpu_is_refused(gpu):
    """A block that needs more than the GPU has is an error with the kernel, the need and the limit."""
    gpu.resources.shared_bytes = 40 << 10
    with pytest.raises(InvalidArgument) as caught:
        gpu.launcher.bind(kernel(dynamic_shared_bytes=60 << 10), (1, 1, 1), [])
    assert "demo_f32_misc" in str(caught.value)
    assert str(100 << 10) in str(caught.value)
    assert str(96 << 10) in str(caught.value)


@pytest.mark.parametrize(("status", "error"), [(2, OutOfMemory), (701, DeviceFailed)])
def test_a_refused_launch_names_the_kernel(gpu, status, error):
    """The driver's status becomes an error by its number: memory, or a failed device."""
    gpu.driver.status = status
    with pytest.raises(error) as caught:
        gpu.launcher.bind(kernel(), (4, 1, 1), [])()
    assert "demo_f32_misc" in str(caught.value)


@pytest.mark.parametrize(("status", "is_fatal"), [(1, False), (701, False), (700, True), (719, True), (999, True)])
def test_only_what_breaks_the_context_is_fatal(gpu, status, is_fatal):
    """A refused launch breaks nothing: other kernels still run in this process, and the error's copies say so too."""
    gpu.driver.status = status
    with pytest.raises(DeviceFailed) as caught:
        gpu.launcher.bind(kernel(), (4, 1, 1), [])()
    assert (caught.value.cuda_status, caught.value.is_fatal) == (status, is_fatal)
    assert pickle.loads(pickle.dumps(caught.value)).is_fatal == is_fatal
    assert not DeviceFailed("reading the clock", "NVML status 9").is_fatal


def test_without_cupy_the_remedy_is_named(monkeypatch):
    """Launching needs CuPy; its absence is an error with the install line."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependency) as caught:
        launch.CudaLauncher(V100)
    assert ".[cuda12x]" in str(caught.value)


def test_a_cpu_launches_no_kernels():
    """A device without a compute capability cannot be launched on."""
    with pytest.raises(InvalidArgument) as caught:
        launch.CudaLauncher(Device(name="a CPU", kind="cpu"))
    assert caught.value.field == "device"
