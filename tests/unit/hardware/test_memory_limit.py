"""How much memory may be taken: on the CPU, on a GPU, and on one that is elsewhere."""

from __future__ import annotations

import os

import attrs
import pynvml
import pytest

from cubatch.errors import InvalidArgument
from cubatch.hardware import catalogue, driver, memory_limit as hardware_memory, nvml as nvml_module, probe
from cubatch.hardware.facts import Device
from cubatch.hardware.nvml import Monitor, Process
from tests.nvml import Gpu, Library
from tests.unit.hardware.gpus import GIB, V100

pytestmark = pytest.mark.usefixtures("gpus")  # whatever this machine has


def test_the_cpu_keeps_a_fifth_of_the_tighter_memory(memory):
    """0.8 x the smaller of available memory and the cgroup's room, which the note names."""
    memory(10 * GIB, 5 * GIB)
    by_cgroup = hardware_memory.memory_limit(probe.device("cpu"))
    memory(10 * GIB, 50 * GIB)
    by_memory = hardware_memory.memory_limit(probe.device("cpu"))
    memory(10 * GIB, None)
    without = hardware_memory.memory_limit(probe.device("cpu"))

    assert (by_cgroup.bytes, by_cgroup.free_bytes) == (4 * GIB, 5 * GIB)
    assert "cgroup" in by_cgroup.note
    assert (by_memory.bytes, by_memory.free_bytes) == (8 * GIB, 10 * GIB)
    assert "cgroup" not in by_memory.note
    assert without == by_memory


def test_what_the_run_holds_already_is_as_good_as_free(memory, gpus):
    """It is no longer free when it is asked: 1 GiB of its own beside 0.8 of 10, or beside what a context leaves."""
    memory(10 * GIB, None)
    found = hardware_memory.memory_limit(probe.device("cpu"), held=GIB)
    assert (found.bytes, found.free_bytes) == (9 * GIB, 11 * GIB)
    assert "1.00 GiB that are held already" in found.note
    assert hardware_memory.memory_limit(probe.device("cpu"), "100%", held=GIB).bytes == 9 * GIB
    gpus(V100, free_bytes=10 * GIB)
    without, held = (hardware_memory.memory_limit(probe.device(), held=size) for size in (0, 3 * GIB))
    assert held.bytes == without.bytes + 3 * GIB
    gpus(V100, nvml=False)
    unread = [hardware_memory.memory_limit(probe.device(), held=size).bytes for size in (0, 3 * GIB)]
    assert unread[0] == unread[1], "it is a part of the capacity"


@pytest.mark.parametrize(
    ("requested", "limit"),
    [("4GiB", 4 * GIB), (GIB, GIB), ("50%", 5 * GIB), ("100%", 8 * GIB), ("64GiB", 8 * GIB)],
)
def test_an_explicit_limit_holds_up_to_what_is_there(memory, requested, limit):
    """A percentage is one of free memory; nothing above what may be taken is promised."""
    memory(10 * GIB, None)

    found = hardware_memory.memory_limit(probe.device("cpu"), requested)

    assert (found.bytes, found.free_bytes) == (limit, 10 * GIB)
    assert repr(requested) in found.note


@pytest.mark.parametrize("requested", [-1, 1.5, "lots", "0%", True])
def test_a_limit_that_is_no_size_is_refused(memory, requested):
    """Field, value and what is allowed, from the one parser of sizes."""
    memory(10 * GIB, None)

    with pytest.raises(InvalidArgument) as caught:
        hardware_memory.memory_limit(probe.device("cpu"), requested)

    assert caught.value.field == "memory_limit"
    assert caught.value.value is requested


def test_a_gpu_keeps_what_a_context_will_take(gpus):
    """Free memory by NVML less 2 KiB for each resident thread (80 SMs x 2048) and 128 MiB for libraries."""
    gpus(V100, free_bytes=10 * GIB)

    found = hardware_memory.memory_limit(probe.device())

    assert found.free_bytes == 10 * GIB
    assert found.bytes == 10 * GIB - (80 * 2048 * 2048 + 128 * 2**20)


@pytest.mark.parametrize(
    ("num_sms", "compute_capability", "measured_mib"),
    [(34, (8, 9), 107), (82, (8, 6), 256), (142, (8, 9), 426), (188, (12, 0), 555)],
)
def test_the_reserve_covers_contexts_that_others_measured(num_sms, compute_capability, measured_mib):
    """RTX 4060 Ti, 3090, 6000 Ada, PRO 6000: a bare context, beside the 128 MiB that libraries may take."""
    empty = Device(name="x", num_sms=num_sms, compute_capability=compute_capability, memory_bytes=48 * GIB)

    found = hardware_memory.memory_limit(empty)

    reserved_mib = (found.free_bytes - found.bytes) / 2**20
    assert measured_mib <= reserved_mib <= 1.1 * measured_mib + 128


def test_a_full_gpu_leaves_nothing(gpus):
    """A limit is never negative."""
    gpus(V100, free_bytes=GIB // 8)

    assert hardware_memory.memory_limit(probe.device()).bytes == 0


@pytest.mark.parametrize("nvml", [{"free_bytes": None}, {"nvml": False}])
def test_without_a_reading_the_capacity_is_taken_and_said(gpus, nvml):
    """Jetsons and some containers have no NVML reading; the note says what stands in for it."""
    gpus(V100, **nvml)

    found = hardware_memory.memory_limit(probe.device())

    assert found.free_bytes == V100.memory_bytes
    assert "not known" in found.note


@pytest.mark.parametrize("nvml", [{"free_bytes": None}, {"nvml": False}])
def test_a_gpu_that_shares_the_cpus_memory_leaves_it_a_fifth_of_what_is_available(gpus, memory, nvml):
    """NVML tells nothing of a DGX Spark or a Jetson: 40 GiB available are not the 119 of the chip, nor all to take."""
    memory(40 * GIB, None)
    spark = attrs.evolve(V100, name="NVIDIA GB10", memory_bytes=119 * GIB, integrated=True)
    gpus(spark, **nvml)

    found, held = (hardware_memory.memory_limit(probe.device(), held=size) for size in (0, 3 * GIB))

    assert (found.free_bytes, held.free_bytes) == (32 * GIB, 35 * GIB)
    assert 31 * GIB < found.bytes < 32 * GIB
    assert held.bytes == found.bytes + 3 * GIB
    assert "shared with the CPU" in found.note
    gpus(spark, free_bytes=10 * GIB)
    assert hardware_memory.memory_limit(probe.device()).free_bytes == 10 * GIB, "where NVML does tell, it holds"


STARTS = {"nvmlInitWithFlags", "nvmlDeviceGetHandleByUUID"}


@pytest.mark.parametrize(
    "function",
    sorted(STARTS | {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTemperature"}),
)
def test_a_query_that_nvml_fails_at_costs_what_it_tells_and_no_more(monkeypatch, function):
    """By a status that nobody expects: the GPU is a device, and what is free of it is known by all other queries."""
    monkeypatch.setattr(driver, "visible_gpus", lambda: (V100,))
    monkeypatch.setattr(nvml_module, "Monitor", Monitor)
    library = Library(Gpu(uuid=V100.uuid, total=16 * GIB, used=6 * GIB, limit=250_000)).install(monkeypatch)
    library.failing[function] = pynvml.NVML_ERROR_UNKNOWN

    gpu = probe.device()
    found = hardware_memory.memory_limit(gpu)

    assert gpu.power_limit_watts == (None if function in STARTS | {"nvmlDeviceGetEnforcedPowerLimit"} else 250.0)
    is_unknown = function in STARTS | {"nvmlDeviceGetMemoryInfo"}
    assert found.free_bytes == (V100.memory_bytes if is_unknown else 10 * GIB)


def test_a_gpu_that_is_elsewhere_is_taken_to_be_empty():
    """A prediction asks what would fit on the card."""
    found = hardware_memory.memory_limit(catalogue.find("titan-x-pascal"), "80%")

    assert found.free_bytes == 12 * GIB
    assert found.bytes == int(0.8 * 12 * GIB)


def test_a_gpu_of_unknown_memory_has_no_limit_to_give():
    """There is nothing to be a default."""
    with pytest.raises(InvalidArgument) as caught:
        hardware_memory.memory_limit(Device(name="made up"))

    assert caught.value.value == "made up"


HOG, OF = Process(7, "train", 6 * GIB), " of the GPU's 16.00 GiB"
PERHAPS = "Processes, this one perhaps among them, hold"


@pytest.mark.parametrize(
    ("free", "processes", "sentence"),
    [
        (10 * GIB, (HOG, Process(8, None, None)), "6.00 GiB{of}: train (pid 7) holds 6.00 GiB, a process (pid 8)."),
        (9 * GIB, (HOG, Process(os.getpid(), "python", GIB)), "6.00 GiB{of}: train (pid 7) holds 6.00 GiB."),
        (15.5 * GIB, (Process(7, "Xorg", GIB // 2),), None),  # 3 %
        (10 * GIB, (Process(os.getpid(), "python", 6 * GIB),), None),
    ],
)  # fmt: skip
def test_who_holds_much_of_a_gpu_is_named(gpus, free, processes, sentence):
    """From 5 % of it on, this process left out; also where nothing is asked for that is not there."""
    gpus(V100, free_bytes=int(free), total_bytes=16 * GIB, processes=processes)
    others = hardware_memory.memory_limit(probe.device()).others
    assert others == ("" if sentence is None else f"Other processes hold {sentence.format(of=OF)}")
    assert hardware_memory.memory_limit(probe.device(), "1GiB").others == others


@pytest.mark.parametrize(
    ("processes", "held", "sentence"),
    [
        ((), 0, f"{PERHAPS} 6.00 GiB{OF}, and NVML does not say which."),
        ((), 2 * GIB, f"{PERHAPS} 4.00 GiB{OF}, and NVML does not say which."),
        ((HOG,), 2 * GIB, f"{PERHAPS} 4.00 GiB{OF}: train (pid 7) holds 6.00 GiB."),  # 7 may be this one, by the host
        ((Process(os.getpid(), "python", GIB),), 2 * GIB, f"Other processes hold 4.00 GiB{OF}, and NVML does not say"),
        ((), 6 * GIB, None),
    ],
)
def test_what_this_process_holds_is_not_told_as_that_of_others(gpus, processes, held, sentence):
    """In a container NVML lists nobody, or numbers of the host: at least what this process knows of is its own."""
    gpus(V100, free_bytes=10 * GIB, total_bytes=16 * GIB, processes=processes)
    others = hardware_memory.memory_limit(probe.device(), held=held).others
    assert bool(others) == (sentence is not None)
    assert others.startswith(sentence or "")
