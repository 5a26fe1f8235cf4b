"""A GPU pass that was cut off, its processes that outlive it, and what makes all of it slower."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap

import attrs
import pytest

from benchmarks import gpu_pass
from benchmarks.gpu import process, stages as gpu_stages
from benchmarks.gpu.resume import Earlier
from cubatch.errors import InvalidData
from tests.unit.benchmarks.passes import FACTS, H200, lines_of, ran, stage_of
from tests.unit.processes import is_running, wait_until

# --- going on ----------------------------------------------------------------------------------------------------


def test_a_child_leaves_out_what_is_done(monkeypatch, tmp_path):
    """Items keep their numbers, by which a process that is started anew finds its place."""
    stage = stage_of(*[lambda _: {}] * 5)
    said = lines_of(stage, monkeypatch, tmp_path, start=1, done={"item 0", "item 2"})
    assert [line["begins"] for line in said if "begins" in line] == [1, 3, 4]


LIBRARIES = {"name": "libraries", "status": "ok", "torch": "2", "cudnn": "9"}


def passed(path, *, commit="1", items=(), skipped=None, name="Test GPU"):
    """Write the file of an earlier pass whose stage "gemm" gave some items."""
    found = {
        "schema": 1, "benchmark": "gpu_pass", "date": "2000-01-01", "commit": commit, "device": {"name": name},
        "seconds_spent": 7.0, "skipped_kernels": skipped or {},
        "stages": [
            {"name": "facts", "status": "ok", "items": [LIBRARIES]},
            {"name": "gemm", "status": "timeout", "items": list(items)},
        ],
    }  # fmt: skip
    path.write_text(json.dumps(found))
    return path


def resume(monkeypatch, tmp_path, *, gives, **earlier):
    """Go on with a pass into its own file: the result, and the command of its process."""
    commands = []

    def stand_in(command, run, save, left_out, patience):
        commands.append([*command(0, 1.0), patience, dict(left_out)])
        run.items.extend(gives)
        save()

    monkeypatch.setattr(gpu_pass, "run_stage", stand_in)
    path = passed(tmp_path / "pass.json", **earlier)
    found = gpu_pass.run_all(
        [attrs.evolve(stage_of(), name="gemm")], path, H200, seconds=9.0, only="", facts=FACTS, commit="1", resumed=path
    )
    assert json.loads(path.read_text()) == found
    return found, commands


OK, HUNG = {"name": "a", "status": "ok", "value": 1}, {"name": "b", "status": "hung"}


def test_the_file_is_the_union_of_both(monkeypatch, tmp_path):
    """What is done again takes the place of what was there; what is not done again stays, whatever became of it."""
    gives = [{"name": "b", "status": "ok"}, {"name": "c", "status": "wrong"}]
    found, (command,) = resume(monkeypatch, tmp_path, gives=gives, items=[OK, HUNG, {"name": "d", "status": "error"}])
    facts, gemm = found["stages"]
    assert [(item["name"], item["status"]) for item in gemm["items"]] == [
        ("a", "ok"), ("b", "ok"), ("d", "error"), ("c", "wrong"),
    ]  # fmt: skip
    assert facts["items"][0]["torch"] == found["environment"]["torch"] == "2"
    assert found["resumed"] == [{"date": "2000-01-01", "commit": "1", "seconds_spent": 7.0}]
    assert command[command.index("--resume") + 1] == str(tmp_path / "pass.json")


def test_kernels_that_ended_processes_stay_left_out_until_they_are_changed(monkeypatch, tmp_path):
    """Of the same commit they would end them again; another's may have mended them."""
    _, (command,) = resume(monkeypatch, tmp_path, gives=[], skipped={"bad": "why"})
    assert command[-1] == {"bad": "why"}
    _, (command,) = resume(monkeypatch, tmp_path, gives=[], skipped={"bad": "why"}, commit="0")
    assert command[-1] == {}


def test_what_another_commit_gave_says_so(monkeypatch, tmp_path):
    """A file's own commit is that of what it was written by."""
    found, _ = resume(monkeypatch, tmp_path, gives=[{"name": "b", "status": "ok"}], items=[OK, HUNG], commit="0")
    assert [item.get("commit") for item in found["stages"][1]["items"]] == ["0", None]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"benchmark": "x", "schema": 1}', "no result"),
    ],
)
def test_what_is_no_pass_is_not_resumed(tmp_path, text, reason):
    """Before anything is run."""
    path = tmp_path / "pass.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidData, match=reason):
        Earlier.read(path)


def test_another_devices_pass_is_not_resumed(monkeypatch, tmp_path):
    """Nor is its file touched."""
    with pytest.raises(InvalidData, match="it is of H100, and this is Test GPU"):
        resume(monkeypatch, tmp_path, gives=[], name="H100")
    assert json.loads((tmp_path / "pass.json").read_text())["device"] == {"name": "H100"}


def test_what_is_ok_is_what_is_not_done_again(tmp_path):
    """Of the stage's own items; what compiling leaves is on the machine, so that it is always done."""
    earlier = Earlier.read(passed(tmp_path / "pass.json", items=[OK, HUNG]))
    assert (earlier.done("gemm", "1"), earlier.done("misc", "1")) == ({"a"}, frozenset())
    assert [stage.name for stage in gpu_stages.STAGES if stage.always] == ["compile"]


def test_what_lacks_a_kernel_that_is_left_out_is_not_done_again_by_the_same_commit(tmp_path):
    """It would lack it again; another commit may have mended it."""
    earlier = Earlier.read(passed(tmp_path / "pass.json", items=[OK, {"name": "c", "status": "incomplete"}]))
    assert earlier.done("gemm", "1") == {"a", "c"}
    assert earlier.done("gemm", "2") == {"a"}


# --- processes that outlive it -----------------------------------------------------------------------------------


def test_a_process_ends_with_its_parent(tmp_path):
    """Killed without warning, at the limit of a call, a pass leaves nothing on the GPU beside the next's timings."""
    child = (
        "import os, time; from benchmarks.gpu.process import end_with; end_with(os.getppid()); print('on', flush=True)"
    )
    parent = f"""
    import subprocess, sys, time
    code = {child + "; time.sleep(60)"!r}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True
    ) as started:
        pid = int(started.stdout.readline())
        started.kill()
        wait_until(lambda: not is_running(pid))


def test_a_process_whose_parent_is_gone_already_does_not_begin():
    """It would wait for nobody's end."""
    script = "from benchmarks.gpu.process import end_with; end_with(1 << 30); print('on')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_stage_goes_on_beside_a_process_that_cannot_be_ended(monkeypatch):
    """And says so: what is timed beside it may be slower than it is."""
    end = process._end
    monkeypatch.setattr(process, "_end", lambda *given: end(*given) and given[1] > 0)  # those that hung
    run, _ = ran(
        """
        for index in range(start, 3):
            if index == 1:
                say(begins=1, name="item 1", limit=0.3)
                time.sleep(60)
            do(index)
        """
    )
    assert [item["status"] for item in run.items] == ["ok", "hung", "ok"]
    assert "cannot be ended" in run.items[1]["message"]


# --- what items give, and how long they may take ------------------------------------------------------------------


def test_what_is_no_number_is_null(monkeypatch, tmp_path):
    """A rate of a time that was never taken is no reason to end the process."""
    said = lines_of(stage_of(lambda _: {"rate": math.nan, "rows": [{"x": math.inf}]}), monkeypatch, tmp_path)
    (item,) = [line["item"] for line in said if "ends" in line]
    assert (item["rate"], item["rows"]) == (None, [{"x": None}])


def test_patience_lengthens_every_limit(monkeypatch, tmp_path):
    """Under compute-sanitizer everything takes ten times and longer."""
    (begins,) = [
        line for line in lines_of(stage_of(lambda _: {}), monkeypatch, tmp_path, patience=20.0) if "begins" in line
    ]
    assert begins["limit"] == 20 * attrs.fields(gpu_stages.Item).limit_seconds.default
    position = process.Position(patience=20.0)
    assert position.limit_seconds == 20 * process.READY_SECONDS
    position.hear({"count": 1}, process.Run("stage", 1.0))
    assert position.limit_seconds == 20 * process.NEXT_SECONDS
