"""What only a GPU shows of the kernels: that they are what was compiled, and right and timed on it; else skipped."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cubatch.bench import cases, check, measure, rivals, target
from cubatch.bench.contest import Contest
from cubatch.hardware import driver as cuda_driver, waves
from cubatch.kernels import variant
from cubatch.kernels.launch import set_shared_memory
from cubatch.kernels.toolchain import compile as compiler
from cubatch.network.layers import BatchNorm2d, Conv2d
from cubatch.network.passes import Pass
from tests.gpu.here import GPU, NEEDS_GPU
from tests.simulated import IS_SIMULATED

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def here():
    """The GPU as a place for cases."""
    return target.on_gpu(GPU)


def compiled_here():
    """Every kernel for this GPU, with its function as CuPy loads it."""
    import cupy

    for found in variant.kernels():
        if found.runs_on(variant.arch_number(GPU.arch)):
            cubin = compiler.compile_kernel(found, GPU.arch)
            yield found, cubin.resources[found.entry], cupy.RawModule(path=str(cubin.path)).get_function(found.entry)


MADE_UP = pytest.mark.skipif(IS_SIMULATED, reason="the simulated driver makes up registers and occupancy")


@MADE_UP
def test_resources_are_the_drivers(here):
    """Registers, static shared memory and local memory read from the compiler's log are those of the function."""
    for found, resources, function in compiled_here():
        theirs = function.attributes
        assert resources.registers == theirs["num_regs"], found.name
        assert resources.shared_bytes == theirs["shared_size_bytes"], found.name
        assert resources.stack_bytes == theirs["local_size_bytes"], found.name


@MADE_UP
def test_occupancy_is_the_drivers(here):
    """Blocks per SM by the calculator are those of cuOccupancyMaxActiveBlocksPerMultiprocessor, for every kernel."""
    driver = cuda_driver.load()
    for found, resources, function in compiled_here():
        set_shared_memory(function, found, resources, GPU.compute_capability)
        blocks = ctypes.c_int()
        status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks), ctypes.c_void_p(int(function.kernel.ptr)), found.threads,
            ctypes.c_size_t(found.dynamic_shared_bytes),
        )  # fmt: skip
        computed = waves.occupancy(
            compute_capability=GPU.compute_capability,
            threads_per_block=found.threads,
            registers_per_thread=resources.registers,
            shared_bytes_per_block=resources.shared_bytes + found.dynamic_shared_bytes,
        )
        assert status == 0, found.name
        assert computed.blocks_per_sm == blocks.value, found.name


@pytest.mark.parametrize(
    "case",
    [
        cases.gemm(515, 259, 131),
        cases.of_layer(Conv2d(h=29, w=31, c=20, k=68, r=3, s=3, stride=2, pad=1), Pass.DGRAD, 5),
        cases.of_layer(Conv2d(h=29, w=31, c=24, k=24, r=5, s=5, pad=2, groups=24), Pass.WGRAD, 5),
        cases.of_layer(BatchNorm2d(h=29, w=31, c=24), Pass.FPROP, 9),
        cases.gemm(520, 264, 136, layout="tn", dtype="float16"),
        cases.of_layer(Conv2d(h=29, w=31, c=64, k=72, r=3, s=3, stride=2, pad=1), Pass.DGRAD, 5, "bfloat16"),
        cases.of_layer(
            Conv2d(h=29, w=31, c=64, k=72, r=3, s=3, pad=1), Pass.FPROP, 5, "float16", ending=["folded", "residual"],
            relu=True,
        ),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_a_measurement_is_checked_timed_and_compared(here, case):
    """Every variant is right, the fastest is timed by events, in the same rounds as the vendor where there is one."""
    result = measure.time_case(case, here, Contest(here.clock), variants="all", seconds=0.3)
    assert result.wrong == ()
    assert result.best.seconds > 0
    assert result.best.worst_error <= 1
    assert (result.best.ratio is None) == bool(result.no_rival)


@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_the_vendor_computes_in_the_precision_of_the_case(here, dtype):
    """One product after the other, in either order: within its own bound, and a tf32 one is no float32 one."""
    if GPU.compute_capability < (8, 0) or rivals.torch_of(here.module) is None:
        pytest.skip("tf32 needs sm_80 and PyTorch")
    for each in ("tf32", "float32", dtype):
        case = cases.gemm(256, 256, 256, dtype=each)
        arrays = target.fill(here.module, case, 0)
        expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
        exact = check.Expected(
            cases.gemm(256, 256, 256), arrays, np.random.default_rng(0), images=None, channels=None
        )  # fmt: skip
        rivals.rivals(case, here.module)[0].bind(arrays)()
        assert expected.check(arrays).passed
        assert exact.check(arrays).passed == (each == "float32")


def test_float32_products_of_the_vendor_are_float32(here):
    """TF32 would miss by a thousandth: cuBLAS's result is within the rounding of float32."""
    case = cases.gemm(256, 256, 256)
    arrays = target.fill(here.module, case, 0)
    rivals.rivals(case, here.module)[0].bind(arrays)()
    x, w = (arrays[name].get().astype(np.float64) for name in ("x", "w"))
    error = np.abs(arrays["out"].get() - x @ w.T)
    assert (error <= 256 * 2.0**-24 * (np.abs(x) @ np.abs(w.T))).all()
