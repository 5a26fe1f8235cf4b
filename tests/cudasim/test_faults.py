"""
What a fault costs and what survives it, one row a fault, for tuning (in a worker) and the bench (in one process).

The GPU pass, which has processes of its own, is rehearsed by `python -m tests.cudasim.rehearsal`.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from typing import Any

import attrs
import pytest

from tests.cudasim.simulation import NEEDS, cubatch, python, run

pytestmark = NEEDS

MEMORY = f"memory:{2 << 30}"  # the bench copies an eighth of the memory first of all
TUNE = ("tune", "mnist-cnn", "--device", "cuda", "--no-store", "--json", "-")
BENCH = (
    "bench", "conv", "--h", "8", "--w", "8", "--c", "16", "--k", "16", "--pad", "1", "--batch-size", "2", "--dtype",
    "float16", "--seconds", "0.05", "--device", "cuda", "--json", "-",
)  # fmt: skip
GEMM = ("bench", "gemm", "--m", "64", "--n", "48", "--k", "32", "--dtype", "float16", *BENCH[-6:])
VARIANT = "conv2d_dgrad_implicit_gemm_f16_mma_128x128x32_v8"


@attrs.frozen
class Row:
    """
    A fault while sizes 2 and 4 are tuned.

    Attributes:
        fault: As src/faults.cpp has it.
        survives: Whether there is an answer.
        says: Of the statuses of 2 and 4 if it survives, else of the message.
        sizes, options: Of the command.
    """

    fault: str
    survives: bool
    says: tuple[str, ...] = ("ok", "ok")
    sizes: str = "2,4"
    options: tuple[str, ...] = ()


TUNED = (
    Row("trap:max_pool", survives=False, says=("error at 2 sizes: 2 and 4", "status 700. A kernel that was launched")),
    Row("die:max_pool", survives=False, says=("error at 2 sizes: 2 and 4",)),
    Row("hang:max_pool", survives=False, says=("timeout: 2",)),
    Row("dead", survives=False, says=("the measuring process failed",)),
    Row("oom:9", survives=True),  # CuPy gives up its pool and asks again
    Row(f"memory:{3 << 30}", survives=True, says=("ok", "over_limit"), sizes="2,100000"),
    Row("tensor-map", survives=True, options=("--dtype", "float16")),  # other variants take their place
    Row("nvml:none", survives=True),
    Row("nvml:slow", survives=True),
    Row("nvml:unknown", survives=True),
    Row("mig", survives=True),
)


@pytest.mark.parametrize("row", TUNED, ids=lambda row: row.fault)
def test_tuning_loses_what_a_fault_must_cost(row):
    """The sizes that need it or nothing; the user's process ends in a sentence, never in a traceback."""
    # A deadline follows the budget; what survives ends by itself, however slow a simulated kernel is here.
    budget = "600" if row.survives else "30"
    done = cubatch(*TUNE, "--budget", budget, "--batch-sizes", row.sizes, *row.options, faults=row.fault, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if row.survives else 1), done.stderr
    if not row.survives:
        assert all(part in done.stderr for part in row.says), done.stderr
        return
    found = {m["batch_size"]: m for m in json.loads(done.stdout)["measurements"]}
    # "dropped" is measured, too, and clearly slower.
    said = sorted("ok" if m["status"] == "dropped" else m["status"] for m in found.values())
    assert said == sorted(row.says)
    has_clock = row.fault not in ("nvml:none", "nvml:unknown", "mig")
    assert all((m["sm_clock_mhz"] is not None) == has_clock for m in found.values() if m["timings_seconds"])


@pytest.mark.parametrize(
    ("number", "fact"), [(13, "clock_hz"), (36, "bytes_per_second"), (37, "bytes_per_second"), (38, "l2_bytes")]
)
def test_an_attribute_that_the_driver_refuses_costs_the_fact_that_it_tells(number, fact):
    """Clock, memory clock, bus width, L2: unknown, as where the driver says 0; the others are there."""
    code = """
        from cubatch.hardware import driver
        (gpu,) = driver.visible_gpus()
        print([name for name in ("clock_hz", "bytes_per_second", "l2_bytes") if getattr(gpu, name) is None])
    """
    assert python(code, faults=f"attribute:{number}") == str([fact])


def test_a_mig_slice_is_known_as_one():
    """By the end of its name and by its uuid; NVML tells its memory, and nothing of the board."""
    code = """
        from cubatch.hardware import nvml, probe
        device = probe.resolve("cuda")
        seen = nvml.Monitor(device.uuid).snapshot()
        print(device.mig, device.uuid[:4], seen.total_bytes is not None, seen.sm_clock_mhz, seen.power_watts)
    """
    assert python(code, faults="mig") == "1g.10gb MIG- True None None"


def test_a_process_whose_worker_met_a_fault_tunes_again():
    """The GPU's context that broke was the worker's."""
    code = """
        import os, cubatch
        def tuned():
            try:
                found = cubatch.autotune("mnist-cnn", device="cuda", batch_sizes=[2], budget=20, store=False)
                return found.batch_size
            except cubatch.CubatchError as error:
                return type(error).__name__
        if __name__ == "__main__":
            said = []
            for fault in ("trap:max_pool", "die:max_pool", ""):
                os.environ["CUDASIM_FAULTS"] = fault
                said.append(tuned())
            print(said)
    """
    assert python(code) == "['NothingMeasured', 'NothingMeasured', 2]"


def bench(*command: str, fault: str = "", **options: Any) -> tuple[int, dict[str, Any], str]:
    done = cubatch(*command, devices="a100", late=True, faults=f"{MEMORY},{fault}", check=False, **options)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_a_variant_that_faults_is_named_and_what_was_timed_before_it_is_shown():
    """The bench has no worker: the passes behind it are lost, and the status says so."""
    status, found, said = bench(*BENCH, fault=f"trap:{VARIANT}")
    assert status == 1
    assert [result["case"]["pass"] for result in found["results"]] == ["fprop"]
    assert f"the first run of {VARIANT} failed with cudaErrorIllegalAddress" in found["failure"]
    assert f"the first run of {VARIANT}" in said


def test_a_fault_after_a_right_first_run_is_not_the_vendors():
    """Our kernel breaks the GPU while it is timed beside cuBLAS: no result blames cuBLAS, the message blames nobody."""
    status, found, _ = bench(*GEMM, fault="trap:gemm_nt@3")
    assert (status, found["results"]) == (1, [])
    assert "cuBLAS" not in found["failure"]
    assert "A kernel that was launched earlier may have caused it" in found["failure"]


def test_launches_that_block_name_the_kernel_themselves():
    """Then the error is that of the kernel that was launched, and no other is suspected."""
    _, found, _ = bench(*GEMM, fault="trap:gemm_nt@3", CUDA_LAUNCH_BLOCKING="1")
    assert "launched before" not in found["failure"]


@pytest.mark.parametrize("fault", ["oom:12", "nvml:none", "nvml:unknown", "nvml:slow", "mig"])
def test_the_bench_survives(fault):
    """Our kernel is right and timed; what NVML does not tell is left out."""
    status, found, said = bench(*BENCH, "--pass", "fprop", fault=fault)
    assert status == 0, said
    entries = [entry for result in found["results"] for entry in result["entries"] if entry["side"] == "ours"]
    assert [entry["status"] for entry in entries] == ["ok"]


def test_a_case_that_has_no_memory_costs_itself():
    """It is out of memory; the command ends well."""
    big = ("bench", "gemm", "--m", "8192", "--n", "8192", "--k", "8192", *BENCH[-6:])
    done = cubatch(*big, late=True, faults=f"memory:{1400 << 20}", check=False)
    (result,) = json.loads(done.stdout)["results"]
    assert result["status"] == "out_of_memory"


FULL = f"memory:{(512 << 20) + 4096}"  # a context fits, and no array of any size


@pytest.mark.parametrize(
    ("command", "doing"),
    [
        (GEMM, "using the GPU"),
        (("profile", "mlp", "--batch-size", "4", "--device", "cuda"), "profiling mlp at batch size 4"),
        (
            ("train", "mnist-cnn", "--data", "tests/data/mnist-sample", "--batch-size", "50", "--device", "cuda"),
            "training mnist-cnn",
        ),
    ],
)
def test_a_gpu_that_is_full_ends_a_command_in_a_sentence(command, doing):
    """CuPy says so by two types of its own, at arrays that no plan counts: weights, and what times the kernels."""
    done = cubatch(*command, faults=FULL, check=False)
    assert done.returncode == 1
    assert f"out of memory: {doing}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_tensor_map_costs_the_variants_that_need_one():
    """Each says why; the others are timed."""
    done = cubatch(*GEMM, "--variants", "all", late=True, faults=f"{MEMORY},tensor-map")
    entries = [entry for entry in json.loads(done.stdout)["results"][0]["entries"] if entry["side"] == "ours"]
    refused = {entry["name"] for entry in entries if entry["status"] == "error"}
    assert refused == {entry["name"] for entry in entries if "hopper" in entry["name"]} != set()
    assert all("encoding (" in entry["reason"] for entry in entries if entry["status"] == "error")


def test_a_dead_gpu_and_a_process_that_is_killed_end_the_bench():
    """The first in a sentence; of the second there is nobody left to say anything."""
    status, _, said = bench(*GEMM, fault="dead")
    assert (status, "using the GPU failed with" in said) == (1, True)
    assert bench(*GEMM, fault="die:gemm_nt")[0] == -signal.SIGKILL


def test_a_pass_on_a_dead_gpu_lists_all_that_it_did_not_reach(tmp_path):
    """Its file is whole, every stage failed, and the status says so."""
    out = tmp_path / "pass.json"
    done = run(
        "-m", "benchmarks.gpu_pass", "--out", str(out), "--stage", "conformance", "--stage", "gemm",
        faults="dead", check=False,
    )  # fmt: skip
    stages = json.loads(out.read_text())["stages"]
    assert done.returncode == 1
    assert [(run["status"], run["items"], len(run["skipped"]) > 9) for run in stages] == [("failed", [], True)] * 2


def test_pending_work_loses_nothing_and_ends_in_time(tmp_path):
    """One kernel hangs, one kills its process, one item needs too many minutes; a second run repeats the first two."""
    out, listed, minutes = tmp_path / "out.json", tmp_path / "list.toml", 5
    command = f"python -m cubatch {shlex.join(GEMM[:-1])} {{out}}.json --layout"

    def statuses(faults: str, status: int, *, limit: float) -> dict[str, str]:
        """Run the items, of which `limit` bounds the one that hangs; return their statuses."""
        rows = (("right", "nt", 2), ("hangs", "tn", limit), ("dies", "nn", 2), ("long", "nt", 60), ("later", "nt", 2))
        listed.write_text(
            "".join(
                f"[[item]]\nname='{name}'\ncommand='{command} {layout}'\nminutes={most}\n"
                "expectation='-'\ndecision='-'\n"
                for name, layout, most in rows
            )
        )
        begun = time.monotonic()
        call = ("-m", "benchmarks.gpu_pass", "--pending", str(listed), "--minutes", str(minutes), "--out", str(out))
        done = run(*call, devices="a100", late=True, faults=f"{MEMORY},{faults}", check=False)
        assert done.returncode == status, done.stderr
        assert time.monotonic() - begun < 60 * minutes
        return {item["name"]: item["status"] for item in json.loads(out.read_text())["items"]}

    def results() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out-*.json")}

    ended = {"right": "ok", "hangs": "timeout", "dies": "failed", "long": "skipped", "later": "ok"}
    assert statuses("hang:gemm_tn,die:gemm_nn", 1, limit=0.5) == ended
    first = results()
    assert first.keys() == {"out-right.json", "out-later.json"}
    assert statuses("", 0, limit=2) == ended | {"hangs": "ok", "dies": "ok"}
    assert first.items() < results().items()
