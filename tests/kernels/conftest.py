"""Where kernels run in tests: on the CPU for two architectures, and on a GPU where there is one."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import settings

from cubatch.engine.native.context import Context
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from tests.cpusim import building
from tests.cpusim.simulator import SCHEDULES, Simulator
from tests.gate import is_drawn
from tests.gpu.here import first_gpu

CPUSIM_DEVICES = {52: "titan-x-maxwell", 70: "v100-sxm2-16gb", 75: "t4", 80: "a100-sxm4-40gb"}
BUILD = os.environ.get("CUBATCH_CPUSIM", "plain")

if BUILD != "plain":  # sanitizers look at every access, so that few shapes will do
    settings.register_profile("sanitizer", settings(), max_examples=8, derandomize=True)
    settings.load_profile("sanitizer")


@attrs.define
class Target:
    """
    Where a test's kernels run, and how arrays get there.

    Attributes:
        device: The device that grids and variants are chosen for.
        launcher: Runs kernels.
        options: Further arguments of each context.
    """

    device: Device
    launcher: Any
    options: dict[str, Any] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        """Say what a failing test ran on: short, or hypothesis would print every fact of the device."""
        return f"{type(self).__name__}({self.device}, {self.launcher})"

    @property
    def arch(self) -> int:
        """Compute capability times ten."""
        major, minor = self.device.compute_capability
        return 10 * major + minor

    def context(self, **changes: Any) -> Context:
        """Give the context that operations take first; `chooser=` chooses tiles by hand."""
        return Context(**{"device": self.device, "launcher": self.launcher, **self.options, **changes})

    def put(self, array: Any) -> Any:
        """Bring an array to the device: a copy, so that a test sees what a kernel wrote to its inputs."""
        return array.copy()

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        """Bring an array back."""
        return array

    def unwritten(self, shape: Any, dtype: Any) -> Any:
        """Give an array whose every element is NaN (-1 for integers): what is left of it was not written."""
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = 0xFF
        return self.put(array)

    def begin(self, test: str) -> None:
        """Draw the schedule of a test by its name, so that it is always the same."""
        draw = zlib.crc32(test.encode())
        self.launcher = Simulator(
            self.arch,
            BUILD,
            schedule=SCHEDULES[draw % len(SCHEDULES)],
            copies=("late", "early")[draw // len(SCHEDULES) % 2],
            seed=draw,
        )


class CudaTarget(Target):
    """A GPU of this machine."""

    def put(self, array: Any) -> Any:
        """Copy to the GPU."""
        import cupy

        return cupy.asarray(array)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy to the host, when all launches are through."""
        return array.get()

    def begin(self, test: str) -> None:
        """Nothing is drawn: the GPU schedules as it does."""


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def target(name: str) -> Target:
    """Give "cuda" or the simulator of an architecture, "cpusim-80"; skip the test where there is none."""
    if name == "cuda":
        gpu = first_gpu()
        if gpu is None:
            pytest.skip("no GPU in this machine")
        from cubatch.kernels.launch import CudaLauncher

        return CudaTarget(gpu, CudaLauncher(gpu))
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    arch = int(name.split("-")[1])
    return Target(catalogue.find(CPUSIM_DEVICES[arch]), Simulator(arch, BUILD))


# Session scope, so that hypothesis may draw many examples for one of them.
@pytest.fixture(scope="session", params=["cpusim-52", "cpusim-80", CUDA])
def launcher(request):
    """Give each target in turn."""
    return target(request.param)


def pytest_configure(config):
    """Make the mark known by which a test stays out of the sanitizers' runs."""
    config.addinivalue_line("markers", "heavy: adds nothing to the smaller tests of its kernels under a sanitizer")


def pytest_collection_modifyitems(config, items):
    """Skip what a sanitizer would take minutes for; of a sample of these tests, leave out what is not drawn."""
    if commit := os.environ.get("CUBATCH_SAMPLE"):
        here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
        left_out = {item for item in here if not is_drawn(item.nodeid, commit)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if BUILD != "plain" and item.get_closest_marker("heavy"):
            item.add_marker(pytest.mark.skip(reason="heavy, and nothing new to a sanitizer"))


def pytest_runtest_call(item):
    """Tell the target which test begins."""
    target = getattr(item, "funcargs", {}).get("launcher")
    if isinstance(target, Target):
        target.begin(item.nodeid)
