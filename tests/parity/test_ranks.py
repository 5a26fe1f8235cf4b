"""`autotune_module` under torchrun: all ranks step the same sizes, what fails on one fails on all, one answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

HERE = Path(__file__)
RANKS = 3
JOBS = {
    "climbed": ("small", {"batch_sizes": [2000], "memory_limit": "300MiB"}),  # first: nothing else has filled the heap
    "odd": ("small", {"batch_sizes": [255, 256, 257]}),
    "shared": ("small", {"max_batch_size": 4}),
    "clamped": ("clamped", {"mode": "inference", "batch_sizes": [2, 4]}),
    "greedy": ("greedy", {"batch_sizes": [4, 8, 16, 32]}),
    "broken": ("broken", {"batch_sizes": [4, 8]}),
    "sharded": ("sharded", {"batch_sizes": [4, 8]}),
    "late": ("late", {"batch_sizes": [4, 8, 16]}),
}
"""Kinds of modules that all ranks tune one after the other, with the options of each."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run all jobs in one; what each rank was told of each, by its name, and what they wrote to stderr."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        str(HERE.with_name("ranks_job.py")), str(folder), json.dumps(list(JOBS.values())),
    ]  # fmt: skip
    paths = [str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert not done.returncode, done.stderr
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return dict(zip(JOBS, zip(*said, strict=True), strict=True)), done.stderr


@pytest.fixture(scope="module")
def told(job):
    return job[0]


def results(said):
    """Give the result of each rank, which are all the same."""
    found = [json.loads(each["result"]) for each in said]
    assert all(result == found[0] for result in found)
    return found[0]


def statuses(result):
    return {m["batch_size"]: m["status"] for m in result["measurements"]}


def test_every_rank_is_given_the_same_answer(told):
    """For 255, 256 and 257: one result, to the letter, that says how many measured it."""
    result = results(told["odd"])
    assert statuses(result).keys() == {255, 256, 257}
    assert all(m["timings_seconds"] for m in result["measurements"])
    assert result["environment"]["ranks"] == RANKS
    assert any(f"{RANKS} ranks were measured together" in note for note in result["reasons"])


def test_all_ranks_step_the_same_sizes_in_the_same_order(told):
    """Else collective operations of different sizes would meet, or none."""
    assert all(said["sizes"] == told["odd"][0]["sizes"] for said in told["odd"])


def test_modules_are_left_as_they_were(told):
    """Parameters and buffers to the bit, on every rank."""
    assert all(said["restored"] and said["training"] for said in told["odd"])


def test_parameters_that_inference_changes_are_put_back_on_every_rank(told):
    """Clamped in every forward pass, they are as before on all, to the bit."""
    assert all(each["restored"] and each["sizes"] and "result" in each for each in told["clamped"])


def test_what_finds_no_memory_on_one_rank_is_out_of_memory_on_all(told):
    """The sizes above 8 are; the answer is among the others, and the job lives."""
    result = results(told["greedy"])
    found = statuses(result)
    assert {found[16], found[32]} == {"out_of_memory"}
    assert {found[4], found[8]} <= {"ok", "dropped"}
    assert "rank 1" in next(m["stop_reason"] for m in result["measurements"] if m["batch_size"] == 16)


def test_a_failure_in_a_step_with_the_others_is_said_at_once(job):
    """They wait until their group's timeout, 5 s here; then the size is an error, and the answer is of those before."""
    told, written = job
    assert "rank 1 failed in a step with the others" in written
    assert "process group's timeout: ValueError: injected" in written
    result = results(told["late"])
    assert result["batch_size"] in {4, 8}
    assert statuses(result)[16] == "error"


def test_a_rank_on_which_nothing_runs_is_named_on_every_rank(told):
    """No size could be measured, and the error of each rank says which rank raised what."""
    for said in told["broken"]:
        assert said["error"].startswith("NothingMeasured")
        assert f"rank {RANKS - 1} raised ValueError: injected" in said["error"]
        assert said["restored"]


def test_sharded_modules_are_tuned_without_a_bound_on_memory(told):
    """FSDP: one answer, the shards restored to the bit, and a reason that says why no plan bounds it."""
    said = told["sharded"]
    assert "its parameters are sharded over ranks" in " ".join(results(said)["reasons"])
    assert all(each["restored"] and each["sizes"] == said[0]["sizes"] for each in said)


def test_a_size_near_the_limit_is_climbed_to_on_all_ranks(told):
    """Sizes that are stepped to learn what larger ones take are learned of: the run ends, and says how it went."""
    for said in told["climbed"]:
        assert statuses(json.loads(said["result"])) == {2000: "ok"}
        assert any(1 < size < 2000 for size in said["sizes"])


def test_the_memory_of_a_host_is_shared_by_its_ranks(told):
    """Each rank may take no more than its share of what one may."""
    result = results(told["shared"])
    assert f"{RANKS} ranks" in " ".join(result["reasons"])
    free = int(next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1])
    assert result["limits"]["memory_bytes"] <= 0.8 * free * 1024 / RANKS
