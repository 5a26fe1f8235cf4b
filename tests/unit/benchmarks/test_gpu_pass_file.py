"""The file that a GPU pass writes, stage by stage."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap

import attrs
import numpy as np
import pytest

from benchmarks import gpu_pass, render
from benchmarks.gpu import form, items as gpu_items
from benchmarks.gpu.resume import Earlier
from cubatch.measure.records import Timing
from cubatch.report.tables.common import plain
from tests.unit.benchmarks.passes import FACTS, H200, stage_of


def run_all(monkeypatch, tmp_path, stages, runs, seconds=100.0, facts=FACTS):
    """Run stages whose results are given, on a clock that passes 10 s in each."""
    now, limits = [0.0], []

    def stand_in(_, run, save, *__):
        now[0] += 10
        limits.append(run.limit_seconds)
        run.items.extend(runs.get(run.name, ()))
        run.status = "ok"
        save()
        kept.append(json.loads(out.read_text()))

    kept, out = [], tmp_path / "pass.json"
    monkeypatch.setattr(gpu_pass, "run_stage", stand_in)
    monkeypatch.setattr(gpu_pass.time, "monotonic", lambda: now[0])
    found = gpu_pass.run_all(stages, out, H200, seconds=seconds, only="", facts=facts)
    return found, out, limits, kept


def test_the_file_is_whole_after_every_stage_and_holds_what_the_stages_gave(monkeypatch, tmp_path):
    """The versions of libraries come from the stage of facts; nothing partial is left beside it."""
    stages = [attrs.evolve(stage_of(), name=name) for name in ("facts", "gemm")]
    libraries = {"name": "libraries", "status": "ok", "torch": "2", "cudnn": "9"}
    found, out, _, kept = run_all(monkeypatch, tmp_path, stages, {"facts": [libraries]})
    assert json.loads(out.read_text()) == found
    assert found["schema"] == 1
    assert found["device"] == {"name": "Test GPU"}
    assert found["environment"] == {"cupy": "14", "torch": "2", "cudnn": "9"}
    assert [run["name"] for run in found["stages"]] == ["facts", "gemm"]
    assert [len(each["stages"]) for each in kept] == [2, 2]
    assert [run["status"] for run in kept[0]["stages"]] == ["ok", "not begun"]
    assert [path.name for path in tmp_path.iterdir()] == ["pass.json"]


def test_the_file_says_what_it_is_of_though_no_stage_could_begin(monkeypatch, tmp_path):
    """Driver, NVML and packages are asked without a context, and without a library that may not come up."""
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    facts = gpu_items.device_facts(attrs.evolve(H200, uuid="GPU-0"))
    found, *_ = run_all(monkeypatch, tmp_path, [], {}, facts=facts)
    assert found["device"]["name"] == "NVIDIA H200"
    assert found["environment"]["numpy"] == np.__version__
    assert (found["environment"]["torch"], found["monitor"]) == (None, None)


def test_the_file_names_the_commit_that_it_is_told(tmp_path):
    """A machine with a GPU may have a copy of the tree and no repository."""
    found = gpu_pass.run_all([], tmp_path / "pass.json", H200, seconds=1.0, only="", commit="1234567", facts=FACTS)
    assert found["commit"] == "1234567"


def test_time_that_a_stage_leaves_goes_to_the_later_ones(monkeypatch, tmp_path):
    """Of 100 s the first of three equal shares is 33; it takes 10, so the next has half of 90, the last 80."""
    stages = [attrs.evolve(stage_of(), name=name) for name in "abc"]
    _, _, limits, _ = run_all(monkeypatch, tmp_path, stages, {})
    assert limits == pytest.approx([100 / 3, 45, 80])


def test_a_stage_without_time_does_not_begin(monkeypatch, tmp_path):
    """And says so, with the items that were not reached."""
    stages = [attrs.evolve(stage_of(print, print), name=name) for name in "abc"]
    found, *_ = run_all(monkeypatch, tmp_path, stages, {}, seconds=15.0)
    assert [run["status"] for run in found["stages"]] == ["ok", "ok", "timeout"]
    assert found["stages"][2]["skipped"] == ["item 0", "item 1"]


def test_no_item_is_lost_whatever_becomes_of_its_stage(tmp_path):
    """What is not among the items is not reached, also where a stage is given up, and in the file of a killed pass."""
    script = '''
    import sys
    from pathlib import Path
    from benchmarks import gpu_pass
    from benchmarks.gpu import process
    from tests.unit.benchmarks.passes import FACTS, H200, stage_of, tell
    killing = f"""do(0); say(begins=1, name="item 1", limit=9)
    while "running" not in open({sys.argv[1]!r}).read(): time.sleep(0.01)
    os.kill(os.getppid(), 9); time.sleep(60)"""
    def run_stage(_, run, save, *rest):
        if run.name == "killed":
            process.run_stage(tell(killing.replace("    ", ""), {}), run, save, *rest)
        falls = "say(begins=start, name=f'item {start}', limit=9); sys.exit('gone')"
        process.run_stage(tell(falls, {}), run, save, *rest)
    gpu_pass.run_stage, gpu_pass.SAVE_SECONDS = run_stage, 0.0
    stages = [gpu_pass.attrs.evolve(stage_of(*[print] * 9), name=name) for name in ("given up", "killed", "after")]
    gpu_pass.run_all(stages, Path(sys.argv[1]), H200, seconds=99.0, only="", facts=FACTS)
    '''
    out = tmp_path / "pass.json"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    stages = json.loads(out.read_text())["stages"]
    assert [(run["status"], len(run["items"]), len(run["skipped"])) for run in stages] == [
        ("failed", 5, 4), ("running", 1, 8), ("not begun", 0, 9),
    ]  # fmt: skip
    for run in stages:
        assert {item["name"] for item in run["items"]} | set(run["skipped"]) == {f"item {n}" for n in range(9)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no GPU|--out"),
        ("--out nowhere/f.json", "no GPU|no folder"),
        ("--stage dreams --out f.json", "dreams"),
        ("--dry-run --device titan", "titan"),
        ("--dry-run --only (", "unterminated|missing"),
        ("--dry-run --seconds -5", "--seconds"),
        ("--dry-run --patience 0.5", "--patience must be at least 1"),
        ("--dry-run --minutes 5", "--minutes goes with --pending"),
        ("--pending --stage gemm", "--pending goes with"),
        ("--pending --seconds 60", "--pending goes with"),
        ("--pending --minutes 0", "--minutes must be positive"),
        ("--pending --out no/such/folder/out.json", "no folder"),
        ("--pending none.toml", "none.toml"),
        ("--pending --dry-run --only (", "unterminated|missing"),
    ],
)
def test_wrong_options_are_refused(line, message, capsys):
    """Below a line on the usage, the command names the wrong option, before anything runs."""
    with pytest.raises(SystemExit) as ended:
        gpu_pass.main(line.split())
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert "--help" in usage
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("statuses", "code", "said"),
    [
        (["ok", "unavailable", "ok"], 0, "0 items not ok, 1 unavailable, 0 stages failed"),
        (["ok", "unavailable", "wrong"], 1, "1 items not ok, 1 unavailable, 0 stages failed"),
        (["ok", "ok", "ok"], 0, "0 items not ok, 0 stages failed"),
    ],
)
def test_what_is_unavailable_is_neither_ok_nor_failed(statuses, code, said, monkeypatch, tmp_path, capsys):
    """It is counted by itself, changes no exit status, and is tried again when the pass is resumed."""
    items = [{"name": f"item {n}", "status": status} for n, status in enumerate(statuses)]
    found = {"stages": [{"name": "gemm", "status": "ok", "items": items}], "skipped_kernels": {}}
    monkeypatch.setattr(gpu_pass, "run_all", lambda *_, **__: found)
    monkeypatch.setattr(gpu_pass.probe, "device", lambda: H200)
    monkeypatch.setattr(gpu_pass.probe, "resolve", lambda _: H200)
    monkeypatch.setattr(gpu_pass.gpu_items, "device_facts", lambda _: {})
    assert gpu_pass.main(["--out", str(tmp_path / "pass.json")]) == code
    assert said in capsys.readouterr().out
    done = {item["name"] for item in items if item["status"] == "ok"}
    assert Earlier(found | {"commit": "1"}).done("gemm", "1") == done


def test_the_readme_names_all_that_the_pass_imports():
    """Where there is no package index, what it forgets is found out after the machine was started."""
    script = """
    import sys
    before = set(sys.modules)
    import benchmarks.gpu_pass, cubatch.measure.network_runner, cubatch.worker
    import pynvml  # as cubatch.hardware.nvml does where there is a GPU
    from importlib import metadata
    known = metadata.packages_distributions()
    print(*{name for module in set(sys.modules) - before for name in known.get(module, ())})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=render.ROOT, check=True, capture_output=True, text=True
    )
    said = (render.ROOT / "benchmarks/gpu/README.md").read_text().lower()
    imported = set(done.stdout.split()) - {"cubatch"}
    assert "platformdirs" in imported
    assert [name for name in sorted(imported) if name not in said] == []


def timing(round_, seconds, **facts):
    """A timing as the JSON of measuring has it, nulls included."""
    return plain(Timing(batch_size=1, round=round_, seconds=seconds, **facts))


def test_an_item_is_a_line_and_its_timings_are_columns():
    """Of what no timing knows there is no column; what is null elsewhere stays, since tables look it up."""
    entries = [{"timings": [timing(0, 0.5, repeats=4), timing(2, 0.25, joules=1.5)], "ratio": None}, {"timings": []}]
    item = {"name": "a", "result": {"entries": entries}, "timings": {"ours": [timing(0, 0.5)]}}
    facts = {"schema": 1, "stages": [{"name": "gemm", "items": [item, {"name": "b"}], "skipped": ["c"]}]}
    text = form.text_of(facts)
    found = json.loads(text)
    columns = found["stages"][0]["items"][0]["result"]["entries"][0]["timings"]
    assert columns == {
        "batch_size": [1, 1], "round": [0, 2], "seconds": [0.5, 0.25], "repeats": [4, 1], "throttled": [False, False],
        "joules": [None, 1.5],
    }  # fmt: skip
    first, second = found["stages"][0]["items"]
    assert first["timings"]["ours"]["seconds"] == [0.5]
    assert (first["result"]["entries"][0]["ratio"], first["result"]["entries"][1]) == (None, {"timings": []})
    assert [line[:11] for line in text.splitlines()] == [
        '{"schema":1',
        '{"name":"ge',
        '{"name":"a"',
        '{"name":"b"',
        "]}",
        "]}",
    ]
    assert (second, found["stages"][0]["skipped"]) == ({"name": "b"}, ["c"])


def test_a_pass_that_is_read_and_written_again_is_the_same():
    """As a resumed one is: columns stay columns, stages without items lists."""
    run = {"name": "gemm", "items": [{"name": "a", "timings": [timing(0, 0.5)]}]}
    text = form.text_of({"schema": 1, "stages": [run, {"name": "steps", "items": []}]})
    assert form.text_of(json.loads(text)) == text
