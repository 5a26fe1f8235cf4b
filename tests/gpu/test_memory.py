"""Memory that somebody else takes, and a context that an error broke: both are survived."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import pytest

import cubatch
from cubatch.errors import DeviceFailed
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef
from tests.gpu.here import NEEDS_GPU
from tests.simulated import IS_SIMULATED

pytestmark = NEEDS_GPU

HOG = """
import sys, cupy
free, _ = cupy.cuda.runtime.memGetInfo()
taken = cupy.cuda.alloc(int(0.8 * free))
print("holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hog():
    """Run a process that holds 80 % of what was free until the block ends."""
    with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"holds\n"
        try:
            yield process
        finally:
            process.kill()


class Faulty:
    """A runner whose step writes where there is nothing, after which its context answers nothing any more."""

    def __init__(self):
        import cupy

        from cubatch.measure.clocks import cupy_clock

        source = 'extern "C" __global__ void fault(float* x) { *x = 1; }'
        self._cupy, self._fault = cupy, cupy.RawKernel(source, "fault")
        self.clock = cupy_clock(None)
        self.peak_bytes = self.peak_device_bytes = None

    def prepare(self, batch_size):
        """Take nothing."""

    def step(self):
        """Fault."""
        self._fault((1,), (1,), (self._cupy.uint64(8),))

    def release(self):
        """Give nothing back."""

    def close(self):
        """Do nothing."""


@pytest.mark.skipif(IS_SIMULATED, reason="a simulated GPU's memory is its process's own")
def test_a_process_that_takes_most_of_the_memory_is_survived_and_named():
    """The limit follows what is left; the next run, when it is gone, has all of it again."""
    here = probe.device("cuda")
    before = hardware_memory.memory_limit(here)
    with hog():
        limit = hardware_memory.memory_limit(here)
        result = cubatch.autotune("mnist-cnn", mode="training", device="cuda", budget=10, store=False)
    assert limit.bytes < 0.5 * before.bytes
    held = re.compile("(Other processes|Processes, this one perhaps among them,) hold")  # where NVML lists nobody
    assert held.match(limit.others)
    assert result.batch_size
    assert any(held.match(reason) for reason in result.reasons)
    assert hardware_memory.memory_limit(here).bytes == pytest.approx(before.bytes, rel=0.05)


@pytest.mark.skipif(IS_SIMULATED, reason="tests/cudasim/test_faults.py plants such errors there")
def test_a_sticky_error_costs_its_worker_and_nothing_else():
    """The process that asked tunes on in another one."""
    runner = RemoteRunner(FactoryRef("tests.gpu.test_memory:Faulty"))
    try:
        runner.prepare(1)
        with pytest.raises(DeviceFailed, match="IllegalAddress"):
            runner.time(1)
    finally:
        runner.close()
    assert cubatch.autotune("mlp", device="cuda", batch_sizes=[8], budget=10, store=False).batch_size == 8
