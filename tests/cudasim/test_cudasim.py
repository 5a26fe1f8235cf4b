"""The simulated driver itself: what it lets pass, what it catches, what its planted faults cost."""

from __future__ import annotations

import signal
import textwrap

import pytest

from tests.cudasim.simulation import NEEDS, python, run

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


def test_a_host_that_waits_sees_what_was_computed():
    """Late or not: copies to the host after a wait hold the kernel's result."""
    code = STREAMS + "    print(float((ones * 3).sum().get()))"
    assert python(code) == python(code, late=True) == "3000.0"


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


def test_pinned_memory_that_is_written_again_too_early_is_what_arrives():
    """An early reuse: the copy to the device takes what lies there when it is carried out."""
    code = (
        STREAMS
        + """
    with stream:
        ones.set(host)
    host[:] = 9
    stream.synchronize()
    print(float(ones[0].get()))
"""
    )
    assert python(code) == "7.0"
    assert python(code, late=True) == "9.0"


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


def test_an_event_orders_streams():
    """The same with an event between them waits, as it has to."""
    code = (
        STREAMS
        + """
    out, event = cupy.zeros(1000, dtype=np.float32), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    with stream:
        cupy.multiply(ones, 3, out=out)
        event.record()
    cupy.cuda.Stream.null.wait_event(event)
    print(float(out.sum().get()))
"""
    )
    assert python(code, late=True) == "3000.0"


def test_device_memory_is_not_the_hosts():
    """Host code that follows a device pointer dies, as it does with a GPU: by SIGSEGV."""
    code = """
        import ctypes, cupy
        print(ctypes.c_float.from_address(cupy.ones(4, dtype="f4").data.ptr).value)
    """
    assert run("-c", textwrap.dedent(code), check=False).returncode == -signal.SIGSEGV


def test_a_copy_beyond_an_allocation_is_refused():
    """cudaMemcpy with more bytes than there are is cudaErrorInvalidValue."""
    code = """
        import cupy, numpy as np
        array, host = cupy.cuda.alloc(4096), np.zeros(1 << 20, np.uint8)
        try:
            cupy.cuda.runtime.memcpy(array.ptr, host.ctypes.data, host.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            print(error.status)
    """
    assert python(code) == "1"


def test_new_memory_is_poisoned():
    """What nobody wrote is no zero."""
    assert python("import cupy; print(cupy.empty(8, dtype='u1').get().tolist())") == str([0xA5] * 8)


@pytest.mark.parametrize(
    ("device", "bytes_", "accepted"),
    [
        ("titan-x", 49152, True),
        ("titan-x", 49153, False),
        ("v100", 98304, True),
        ("h100", 232448, True),
        ("h100", 232449, False),
    ],
)
def test_dynamic_shared_memory_ends_where_the_programming_guide_says(device, bytes_, accepted):
    """The most of a block is 48, 96 and 227 KiB."""
    code = f"""
        import cupy
        kernel = cupy.RawKernel('extern "C" __global__ void k(float* x) {{ x[0] = 1; }}', "k")
        try:
            kernel.max_dynamic_shared_size_bytes = {bytes_}
            print(True)
        except Exception as error:
            print(False)
    """
    assert python(code, devices=device) == str(accepted)


def test_the_nth_allocation_fails_and_no_other():
    """Out of memory once: CuPy gives up its pool and tries again, as it would."""
    code = """
        import cupy
        arrays = [cupy.empty(1 << 20, dtype="u1") for _ in range(4)]
        print(len(arrays))
    """
    assert python(code, faults="oom:2") == "4"


def test_a_device_has_the_memory_that_it_is_given():
    """More than that is an out-of-memory error, which is a MemoryError."""
    code = """
        import cupy
        try:
            cupy.empty(1 << 30, dtype="u1")
        except MemoryError as error:
            print(type(error).__name__)
    """
    assert python(code, faults=f"memory:{1 << 30}") == "OutOfMemoryError"


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
