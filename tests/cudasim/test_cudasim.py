"""The simulated driver itself: what it lets pass, what it catches, what its planted faults cost."""

from __future__ import annotations

import pytest

from tests.cudasim.simulation import NEEDS, python

pytestmark = NEEDS


FACTS = """
    from cubatch.hardware import probe
    device = probe.resolve("cuda:{index}")
    print(device.slug, device.num_sms, device.compute_capability, device.memory_bytes >> 30)
"""


@pytest.mark.parametrize(
    ("index", "facts"),
    [(0, "titan-x-pascal 28 (6, 1) 12"), (1, "v100-sxm2-16gb 80 (7, 0) 16"), (3, "h100-sxm 132 (9, 0) 80")],
)
def test_cubatch_knows_each_simulated_gpu_by_what_its_driver_says(index, facts):
    """Name, SMs and capability of NVIDIA's published tables lead to the row of the catalogue."""
    assert python(FACTS.format(index=index), devices="titan-x,v100,a100,h100") == facts


STREAMS = """
    import cupy, numpy as np
    stream = cupy.cuda.Stream(non_blocking=True)
    ones = cupy.ones(1000, dtype=np.float32)
    pinned = cupy.cuda.alloc_pinned_memory(4000)
    host = np.frombuffer(pinned, np.float32, 1000)
    cupy.cuda.Device().synchronize()
    host[:] = 7
"""


def test_a_host_that_reads_before_it_waits_reads_old_numbers():
    """An early read: right by luck where work is done at once, wrong where it is late, and right after the wait."""
    code = (
        STREAMS
        + """
    with stream:
        (ones * 3).get(out=host, blocking=False)
    early = float(host[0])
    stream.synchronize()
    print(early, float(host[0]))
"""
    )
    assert python(code) == "3.0 3.0"
    assert python(code, late=True) == "7.0 3.0"


def test_work_in_another_stream_than_what_it_needs_comes_too_early():
    """A missing stream: the sum in the default stream does not wait for a stream that does not block."""
    code = (
        STREAMS
        + """
    out = cupy.zeros(1000, dtype=np.float32)
    cupy.cuda.Device().synchronize()
    with stream:
        cupy.multiply(ones, 3, out=out)
    total = float(out.sum().get())
    stream.synchronize()
    print(total, float(out.sum().get()))
"""
    )
    assert python(code) == "3000.0 3000.0"
    assert python(code, late=True) == "0.0 3000.0"


def test_after_a_fault_everything_fails():
    """A trapping kernel is launched without an error; the next synchronisation says so, and all that follows."""
    code = """
        import cupy
        kernel = cupy.RawKernel('extern "C" __global__ void trapping(float* x) { x[0] = 1; }', "trapping")
        array = cupy.zeros(4, dtype="f4")
        kernel((1,), (1,), (array,))
        said = []
        for call in (cupy.cuda.runtime.deviceSynchronize, lambda: cupy.cuda.runtime.malloc(8)):
            try:
                call()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                said.append(error.status)
        print(said)
        import os; os._exit(0)  # CuPy's own clearing up would fail
    """
    assert python(code, faults="trap:trapping") == "[700, 700]"


@pytest.mark.parametrize(
    ("fault", "said"), [("", "True"), ("nvml:none", "False"), ("nvml:unknown", "False"), ("nvml:slow", "True")]
)
def test_nvml_answers_or_does_not(fault, said):
    """Where it does not, a clock is None, and nothing raises."""
    code = """
    import uuid, pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=bytes(range(1, 17)))}")
    try:
        print(pynvml.nvmlDeviceGetClockInfo(handle, 1) == 1980)
    except pynvml.NVMLError:
        print(False)
"""
    assert python(code, faults=fault) == said
