"""What the tests of kernels/hopper share: where they run, which tile each type is tested with, bounds of tf32."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import numpy as np
import pytest

from cubatch.engine.native.context import Context
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel, of_phases
from cubatch.kernels.transposing import part_of
from tests.cpusim import building
from tests.cpusim.simulator import Simulator
from tests.gpu.here import first_gpu
from tests.kernels import cases
from tests.kernels.conftest import BUILD, CudaTarget, Target

# Two SMs, so that a block computes several tiles, one after another around its ring of stages.
H200 = attrs.evolve(catalogue.find("h200-sxm"), num_sms=2)

# Each storage type is tested with one tile, so that there are few units to compile; float32 as tf32 by operation.
TILES = {"float16": "256x128x64", "bfloat16": "128x256x64"}
TF32_TILES = {
    "gemm_nn": "128x256x32", "gemm_nt": "128x128x32_h", "conv2d_fprop": "256x128x32_h", "conv2d_dgrad": "128x128x32_h",
}  # fmt: skip
SWAPPED = {"float16": "256x64x64", "bfloat16": "256x64x64", "tf32": "256x64x32"}
"""The tiles that are computed as their transpose; a filter's gradient has none."""


@pytest.fixture(scope="session", params=["cpusim-90", pytest.param("cuda", marks=pytest.mark.gpu)])
def launcher(request):
    """Give the simulator of an H200 of two SMs, or the Hopper GPU of this machine."""
    if request.param == "cuda":
        gpu = first_gpu()
        if gpu is None or gpu.compute_capability != (9, 0):
            pytest.skip("no Hopper GPU in this machine")
        from cubatch.kernels.launch import CudaLauncher

        return CudaTarget(gpu, CudaLauncher(gpu))
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    return Target(H200, Simulator(90, BUILD))


class Recording:
    """A launcher that records the operations of the kernels that it prepares."""

    def __init__(self, launcher: Any) -> None:
        self.launcher, self.module, self.operations = launcher, launcher.module, list[str]()

    def bind(self, kernel: Any, grid: Any, arguments: Any) -> Any:
        """Prepare a launch."""
        self.operations.append(kernel.operation)
        return self.launcher.bind(kernel, grid, arguments)


def chooser(
    problem: Any, device: Any, prepare: Any = None, *,
    tile: str | None = None, swapped: bool = False, slices: int | None = None, phased: bool = False,
) -> SplitKernel:  # fmt: skip
    """
    Choose the tile that a type is tested with, the swapped one, or another; its slices, None: by the model.

    `phased` is whether the phases of a stride are finished in registers. Both operands of "tn" are transposed in tf32.
    """
    if (problem.operation, problem.dtype) == ("gemm_tn", "tf32"):
        problem = part_of(problem)
    usual = TF32_TILES[problem.operation] if problem.dtype == "tf32" else TILES[problem.dtype]
    if swapped:
        usual = SWAPPED[problem.dtype]
    found = variant.find(problem.operation, problem.dtype, family="hopper", tile=tile or usual)
    if phased and (other := of_phases(problem, found)):
        return SplitKernel(other)
    return SplitKernel.modelled(problem, found, device) if slices is None else SplitKernel(found, slices)


def context(launcher: Target, **how: Any) -> Context:
    """Give the context in which products of every type are by kernels/hopper; `how` is that of `chooser`."""
    return launcher.context(chooser=functools.partial(chooser, **how), tf32=True)


def element(dtype: str) -> np.dtype[Any]:
    """Name the type of the arrays in which a dtype is stored."""
    return cases.encoded(0, dtype).dtype


def bound(operations: int, magnitude: Any, want: Any, dtype: str) -> Any:
    """As cases.bound; operands of tf32 lose what lies beyond 10 bits after the point, cut off or rounded."""
    lost = 2 * 2.0**-10 + 2.0**-20 if dtype == "float32" else 0
    return cases.bound(operations, (1 + lost) * magnitude, want, dtype) + lost * magnitude
