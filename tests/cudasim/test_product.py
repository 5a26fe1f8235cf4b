"""cubatch on simulated GPUs: tuning in its worker while something goes wrong, and the commands that ask a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cudasim.simulation import NEEDS, cubatch, python

pytestmark = NEEDS

TUNE = ("tune", "mnist-cnn", "--no-store", "--json", "-", "--budget", "600")


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


HELD = """
    from cubatch.hardware import probe
    from cubatch.measure.network_runner import network_runner
    from cubatch.tuning import step_memory
    from cubatch.network import models

    device, network = probe.resolve("cuda"), models.build("mnist-cnn")
    for library in ("cubatch", "im2col"):
        for mode in ("training", "inference"):
            optimizer = "momentum" if mode == "training" else "sgd"
            options = dict(mode=mode, dtype="float32", optimizer=optimizer, library=library)
            runner = network_runner(spec=network.to_mapping(), device="cuda:0", recompute=False, seed=0, **options)
            runner.prepare(8)
            runner.clock.time(runner.step, 1)
            print(runner.peak_bytes - step_memory.footprint(network, batch_size=8, device=device, **options).total)
            runner.close()
"""


def test_the_engine_holds_what_the_plan_says():
    """Of both libraries and modes: to the pool's 512 bytes an array, and a page for what CuPy takes for a reduction."""
    arrays = 6  # parameters, their gradients and state, the arena, the loss and its scale
    assert all(0 <= int(line) <= 512 * arrays + 4096 for line in python(HELD).split())


CALLABLE = """
    import time
    import cupy, cubatch

    def make_step(batch_size):
        kept = cupy.empty((batch_size, 1 << 20), dtype=cupy.uint8)
        def step():
            kept[:1, :16] += 1
            time.sleep(0.05)  # of any size, far beyond what a busy machine adds: what fits more is faster beyond doubt
            cupy.cuda.Device().synchronize()
        return step

    if __name__ == "__main__":
        result = cubatch.autotune_callable(make_step, max_batch_size=4096, device="cuda", budget=120)
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
        "--dtype", "float16", "--seconds", "0.05", "--json", "-", devices="a100", late=True, faults=f"memory:{2 << 30}",
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
