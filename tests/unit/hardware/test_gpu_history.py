"""All GPUs of a machine, their processes and peaks, through NVML's real bindings over a library that is made up."""

from __future__ import annotations

import json

import attrs
import pynvml
import pytest

from cubatch.errors import DeviceFailed, DeviceNotAvailable
from cubatch.hardware import nvml
from cubatch.hardware.gpu_history import GpuHistory
from cubatch.hardware.nvml import Listed, Monitor, Process, Snapshot, name_processes
from tests.nvml import GIB, NO_MEMORY_TOLD, OTHER, SLICE, STATUSES, UNTOLD, UUID, Gpu, Library, a_slice


@pytest.fixture
def library(monkeypatch):
    """Put a library with one GPU in the place of NVML's."""
    return Library().install(monkeypatch)


def asked(library):
    """Give the C functions that a look calls, each once."""
    GpuHistory().read()
    return sorted(set(library.calls) - {"nvmlInitWithFlags"})


# --- which GPUs there are ------------------------------------------------------------------------------------


def test_every_gpu_is_listed_with_its_slices(library):
    """In the order of the bus, slots without a slice left out; a slice says what it is by its uuid."""
    library.gpus = [Gpu(slices=(None, a_slice(), None)), Gpu(uuid=OTHER, name="Tesla V100")]

    assert nvml.listed() == [
        Listed(index=0, name="NVIDIA H200", uuid=UUID),
        Listed(index=0, name="NVIDIA H200 MIG 1g.18gb", uuid=SLICE),
        Listed(index=1, name="Tesla V100", uuid=OTHER),
    ]


@pytest.mark.parametrize("status", STATUSES)
def test_a_gpu_that_cannot_be_reached_hides_no_other(library, status):
    """Whatever NVML answers for it: it is listed, and says why nothing is known of it."""
    library.failing["nvmlDeviceGetHandleByIndex_v2"] = status

    (found,) = nvml.listed()

    assert (found.index, found.name, found.uuid) == (0, "GPU 0", None)
    assert ("does not let" if status in UNTOLD else f"status {status}") in found.problem


def test_a_machine_without_gpus_is_an_error(library):
    """An empty list would be taken for a quiet machine."""
    library.gpus = []
    with pytest.raises(DeviceNotAvailable, match="lists no GPU"):
        nvml.listed()


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_of_nvmls_start_is_one_of_our_errors(library, status):
    """No driver is a GPU that is not there, all else a failed one; neither remedy speaks of another device."""
    library.failing["nvmlInitWithFlags"] = status
    absent = status in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    with pytest.raises(DeviceNotAvailable if absent else DeviceFailed) as caught:
        nvml.listed()

    assert "cpu" not in str(caught.value)


# --- who holds memory ----------------------------------------------------------------------------------------


def test_processes_are_named_and_the_largest_comes_first(library):
    """Who computes and draws is in both of NVML's lists and counts once; a name is that of the file."""
    library.gpus[0].compute = ((7, GIB), (8, 3 * GIB), (9, NO_MEMORY_TOLD))
    library.gpus[0].graphics = ((8, 3 * GIB), (10, 2 * GIB))
    library.programs = {7: "/usr/bin/python3", 8: "train", 10: "Xorg"}

    found = Monitor(UUID).processes()

    assert found == (Process(8, "train", 3 * GIB), Process(10, "Xorg", 2 * GIB), Process(7, "python3", GIB), Process(9))
    assert name_processes(found) == (
        "train (pid 8) holds 3.00 GiB, Xorg (pid 10) holds 2.00 GiB, python3 (pid 7) holds 1.00 GiB and 1 more"
    )


@pytest.mark.parametrize(("name", "shown"), [("a\x1b[2Jb", "a?[2Jb"), (b"\xff\xfe", None), ("", "")])
def test_a_programs_name_reaches_no_terminal_raw(library, name, shown):
    """Whoever starts a program chooses its name: control characters are replaced, what is no text is left out."""
    library.gpus[0].compute, library.programs = ((7, GIB),), {7: name}
    assert Monitor(UUID).processes()[0].name == shown


@pytest.mark.parametrize("status", STATUSES)
def test_no_status_of_a_list_of_processes_is_an_error(library, status):
    """Who else is there is worth knowing, and nothing that a measurement cannot do without."""
    library.failing["nvmlDeviceGetComputeRunningProcesses_v3"] = status
    library.gpus[0].graphics = ((7, GIB),)
    assert [process.pid for process in Monitor(UUID).processes()] == [7]


# --- looking again and again ---------------------------------------------------------------------------------


def test_peaks_are_of_all_looks_and_the_rest_is_of_the_last(library):
    """Memory rises and falls, the counter of energy runs from the first look on."""
    gpu = library.gpus[0]
    looked = GpuHistory()
    for used, millijoules in ((10, 5000), (70, 6500), (35, 9000)):
        gpu.used, gpu.millijoules = used * GIB, millijoules
        (seen,) = looked.read()

    assert (seen.now.used_bytes, seen.peaks["used_bytes"]) == (35 * GIB, 70 * GIB)
    assert seen.joules == 4.0
    assert json.loads(json.dumps(seen.to_mapping()))["joules"] == 4.0


def test_a_slice_has_memory_and_nothing_of_its_board(library):
    """Its board's clock and power are not even asked for."""
    library.gpus = [Gpu(slices=(a_slice(used=4 * GIB),))]
    board, part = GpuHistory().read()
    assert part.now == Snapshot(free_bytes=12 * GIB, used_bytes=4 * GIB, total_bytes=16 * GIB)
    assert (part.joules, part.peaks) == (None, {"used_bytes": 4 * GIB})
    assert board.now.power_watts == 412.5


def test_a_look_asks_what_the_cases_below_fail(library):
    """Or they would fail what nobody asks."""
    assert set(CALLS) <= {*asked(library), "nvmlDeviceGetCurrentClocksThrottleReasons"}


CALLS = (
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetName",
    "nvmlDeviceGetUUID", "nvmlDeviceGetMaxMigDeviceCount",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_status_of_every_call_ends_in_a_look(library, name):
    """A figure that is missing, or a GPU that says why: never an exception, and the other GPU is seen in full."""
    library.gpus.append(Gpu(uuid=OTHER))
    whole = GpuHistory().read()[1].now
    for status in STATUSES:
        library.failing = {name: status}
        found = GpuHistory().read()
        assert len(found) == 2
        for seen in found:
            assert (
                seen.problem
                or seen.gpu.uuid is None
                or attrs.asdict(whole).items()
                >= {key: value for key, value in attrs.asdict(seen.now).items() if value is not None}.items()
            )


def test_a_gpu_that_is_lost_and_comes_back_is_seen_again(library):
    """A look that failed is of the past."""
    looked = GpuHistory()
    library.failing["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    (lost,) = looked.read()
    assert (lost.now, "status 15" in lost.problem) == (Snapshot(), True)
    library.failing.clear()
    (back,) = looked.read()
    assert (back.problem, back.now.used_bytes) == ("", 40 * GIB)
