"""cubatch on simulated GPUs: tuning in its worker while something goes wrong, and the commands that ask a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cudasim.simulation import NEEDS, cubatch, python

pytestmark = NEEDS

TUNE = ("tune", "mnist-cnn", "--no-store", "--json", "-", "--budget", "30")


def tuned(*options: str, sizes: str = "2,4", device: str = "cuda", **simulated: str | bool) -> dict[str, Any]:
    done = cubatch(*TUNE, "--device", device, "--batch-sizes", sizes, *options, **simulated)
    return json.loads(done.stdout)


def statuses(result: dict[str, Any]) -> dict[int, str]:
    return {m["batch_size"]: m["status"] for m in result["measurements"]}


@pytest.mark.parametrize("late", [False, True])
def test_tuning_measures_the_sizes_asked_for(late):
    """By our kernels in a worker, with clocks by NVML and memory by CuPy's pool; also where work comes late."""
    result = tuned(late=late)
    assert result["device"]["name"] == "NVIDIA H100 80GB HBM3"
    assert set(statuses(result)) == {2, 4}
    for m in result["measurements"]:
        assert m["timings_seconds"]
        assert m["sm_clock_mhz"] == 1980
        assert m["peak_bytes"] > 0


def test_the_second_gpu_is_a_device_of_its_own():
    """Its name and facts stand in the result, and its kernels are those for its architecture."""
    result = tuned(device="cuda:1", devices="a100,v100")
    assert result["device"]["name"] == "Tesla V100-SXM2-16GB"
    assert result["device"]["num_sms"] == 80


def test_without_nvml_everything_but_the_clocks_is_there():
    """Queries that are not supported leave their figures out."""
    result = tuned(faults="nvml:none")
    assert result["batch_size"] in (2, 4)
    assert all(m["sm_clock_mhz"] is None for m in result["measurements"])


def test_a_slow_nvml_leaves_every_size_its_timings():
    """At 20 ms a query fewer readings are made, and none is lost."""
    result = tuned(faults="nvml:slow")
    assert all(m["timings_seconds"] for m in result["measurements"])


def test_an_nvml_that_fails_is_named():
    """How much memory is free is not known then: the command says which query failed."""
    done = cubatch(*TUNE, "--device", "cuda", "--batch-sizes", "2", faults="nvml:unknown", check=False)
    assert done.returncode == 1
    assert "nvmlDeviceGetMemoryInfo failed with NVML status 999" in done.stderr


def test_a_refused_tensor_map_leaves_other_variants():
    """A driver that takes no tensor map costs the kernels that need one, not the answer."""
    assert tuned("--dtype", "float16", faults="tensor-map")["batch_size"] in (2, 4)


@pytest.mark.parametrize("fault", ["trap:max_pool", "die:max_pool"])
def test_a_faulting_or_killing_kernel_costs_the_sizes_that_need_it(fault):
    """No size can be measured; the command says how each ended, and does not hang or fall over."""
    done = cubatch(*TUNE, "--device", "cuda", "--batch-sizes", "2,4", faults=fault, check=False)
    assert done.returncode == 1
    assert "no batch size could be measured: error: 2 and 4" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hanging_kernel_is_ended_and_named():
    """A step that never comes back is a timeout of its size."""
    done = cubatch(*TUNE, "--device", "cuda", "--batch-sizes", "2", faults="hang:max_pool", check=False)
    assert done.returncode == 1
    assert "timeout: 2" in done.stderr


def test_a_dead_gpu_is_said_to_be_one():
    """No traceback, and no answer."""
    done = cubatch(*TUNE, "--device", "cuda", "--batch-sizes", "2,4", faults="dead", check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_one_failed_allocation_is_made_good_by_giving_up_the_pool():
    """CuPy frees what it holds and asks again."""
    assert statuses(tuned(faults="oom:9")) == statuses(tuned())


CALLABLE = """
    import cupy, cubatch

    def make_step(batch_size):
        kept = cupy.empty((batch_size, 1 << 20), dtype=cupy.uint8)
        def step():
            kept[:1, :16] += 1
            cupy.cuda.Device().synchronize()
        return step

    if __name__ == "__main__":
        result = cubatch.autotune_callable(make_step, max_batch_size=4096, device="cuda", budget=15)
        ran = [m.batch_size for m in result.measurements if m.timings_seconds]
        failed = [m.batch_size for m in result.measurements if m.status == "out_of_memory"]
        print(max(ran), min(failed))
"""


def test_where_memory_ends_is_found_without_a_plan():
    """
    A mebibyte a sample on a GPU with 1 536 MiB, of which 512 go to the context: 1 024 samples at most.

    The limit is met to 2 %: the largest that ran and the smallest that did not are no farther apart.
    """
    ran, failed = map(int, python(CALLABLE, faults=f"memory:{1536 << 20}").split()[-2:])
    assert ran <= 1024 < 1.025 * failed
    assert ran < failed <= 1.021 * ran


def test_the_bench_checks_its_kernels_before_it_times_them():
    """One convolution, all variants that the GPU can run; PyTorch is not here, so there is no vendor."""
    done = cubatch(
        "bench", "conv", "--h", "8", "--w", "8", "--c", "16", "--k", "16", "--pad", "1", "--batch-size", "2",
        "--dtype", "float16", "--json", "-", devices="a100",
    )  # fmt: skip
    checked = [
        one for result in json.loads(done.stdout)["results"] for one in result["entries"] if one["side"] == "ours"
    ]
    assert checked
    for entry in checked:
        assert entry["status"] in ("ok", "dropped")
        assert 0 < entry["worst_error"] <= 1  # of its rounding bound


def test_devices_shows_the_live_gpu_and_its_row_of_the_catalogue():
    """The name that the driver gives leads to it."""
    done = cubatch("devices", "--json", "-", devices="titan-x")
    assert "NVIDIA TITAN X (Pascal)" in done.stdout
