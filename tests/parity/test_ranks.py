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


def job(folder: Path, ranks: int, kind: str = "small", **options) -> list[dict]:
    """Run a job, and give what each rank was given."""
    return logged_job(folder, ranks, kind, **options)[0]


def logged_job(folder: Path, ranks: int, kind: str, **options) -> tuple[list[dict], str]:
    """Run a job, and give what each rank was given, and all that they wrote."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        str(HERE.with_name("ranks_job.py")), str(folder), kind, json.dumps(options),
    ]  # fmt: skip
    paths = [str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert not done.returncode, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)], done.stderr


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return job(tmp_path_factory.mktemp("four"), 4, batch_sizes=[255, 256, 257])


def test_every_rank_is_given_the_same_answer(four):
    """Four ranks, 255, 256 and 257: one result, to the letter, that says how many measured it."""
    results = [json.loads(said["result"]) for said in four]
    assert all(result == results[0] for result in results)
    assert {m["batch_size"]: m["status"] for m in results[0]["measurements"]}.keys() == {255, 256, 257}
    assert all(m["timings_seconds"] for m in results[0]["measurements"])
    assert results[0]["environment"]["ranks"] == 4
    assert any("4 ranks were measured together" in note for note in results[0]["reasons"])


def test_all_ranks_step_the_same_sizes_in_the_same_order(four):
    """Else collective operations of different sizes would meet, or none."""
    assert all(said["sizes"] == four[0]["sizes"] for said in four)


def test_modules_are_left_as_they_were(four):
    """Parameters and buffers to the bit, on every rank."""
    assert all(said["restored"] and said["training"] for said in four)


def test_parameters_that_inference_changes_are_put_back_on_every_rank(tmp_path):
    """Clamped in every forward pass, they are as before on both, to the bit."""
    said = job(tmp_path, 2, "clamped", mode="inference", batch_sizes=[2, 4])
    assert all(each["restored"] and each["sizes"] and "result" in each for each in said)


def test_what_finds_no_memory_on_one_rank_is_out_of_memory_on_all(tmp_path):
    """The sizes above 8 are; the answer is among the others, and the job lives."""
    said = job(tmp_path, 2, "greedy", batch_sizes=[4, 8, 16, 32])
    results = [json.loads(each["result"]) for each in said]
    assert results[0] == results[1]
    statuses = {m["batch_size"]: m["status"] for m in results[0]["measurements"]}
    assert {statuses[16], statuses[32]} == {"out_of_memory"}
    assert {statuses[4], statuses[8]} <= {"ok", "dropped"}
    assert "rank 1" in next(m["stop_reason"] for m in results[0]["measurements"] if m["batch_size"] == 16)


def test_a_failure_in_a_step_with_the_others_is_said_at_once(tmp_path):
    """They wait until their group's timeout, 5 s here; then the size is an error, and the answer is of those before."""
    said, written = logged_job(tmp_path, 2, "late", batch_sizes=[4, 8, 16], timeout=5)
    assert "rank 1 failed in a step with the others" in written
    assert "ValueError: injected" in written
    results = [json.loads(each["result"]) for each in said]
    assert results[0] == results[1]
    assert results[0]["batch_size"] in {4, 8}
    assert {m["batch_size"]: m["status"] for m in results[0]["measurements"]}[16] == "error"


def test_a_rank_on_which_nothing_runs_is_named_on_every_rank(tmp_path):
    """No size could be measured, and the error of each rank says which rank raised what."""
    for said in job(tmp_path, 2, "broken", batch_sizes=[4, 8]):
        assert said["error"].startswith("NothingMeasured")
        assert "rank 1 raised ValueError: injected" in said["error"]
        assert said["restored"]


def test_sharded_modules_are_tuned_without_a_bound_on_memory(tmp_path):
    """FSDP: one answer, the shards restored to the bit, and a reason that says why no plan bounds it."""
    said = job(tmp_path, 2, "sharded", batch_sizes=[4, 8])
    results = [json.loads(each["result"]) for each in said]
    assert results[0] == results[1]
    assert "its parameters are sharded over ranks" in " ".join(results[0]["reasons"])
    assert all(each["restored"] for each in said)
    assert said[0]["sizes"] == said[1]["sizes"]


def test_a_size_near_the_limit_is_climbed_to_on_all_ranks(tmp_path):
    """Sizes that are stepped to learn what larger ones take are learned of: the run ends, and says how it went."""
    for said in job(tmp_path, 2, batch_sizes=[2000], memory_limit="300MiB"):
        statuses = {m["batch_size"]: m["status"] for m in json.loads(said["result"])["measurements"]}
        assert statuses == {2000: "ok"}
        assert any(1 < size < 2000 for size in said["sizes"])


def test_the_memory_of_a_host_is_shared_by_its_ranks(tmp_path):
    """Two ranks may take no more than half of what one may."""
    said = job(tmp_path, 2, max_batch_size=4)
    limits = json.loads(said[0]["result"])["limits"]
    assert "2 ranks" in " ".join(json.loads(said[0]["result"])["reasons"])
    free = int(next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1])
    assert limits["memory_bytes"] <= 0.8 * free * 1024 / 2
