"""`cubatch study`: folders, pages and tables of short runs on this CPU, and what goes on after a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import attrs
import pytest
from threadpoolctl import threadpool_info

from cubatch.errors import InvalidArgument, InvalidData
from cubatch.studies.run import STUDIES
from tests.unit.tuning.small_runs import CHECKOUT, rows

pytestmark = pytest.mark.usefixtures("quiet")

SMALL = ("powers-of-two", "mlp", "--device", "cpu", "--quick", "--max-batch-size", 9)


def test_the_studies_are_listed(run):
    """With the defaults that `cubatch study NAME` uses."""
    code, out, _ = run("study", "list", "--json", "-")
    listed = {study["name"]: study for study in json.loads(out)["studies"]}
    assert (code, set(listed)) == (0, set(STUDIES))
    waves = listed["waves"]
    assert (waves["model"], waves["modes"], waves["budget_seconds"]) == ("go-net", ["inference"], 600.0)
    text = run("study", "list")[1]
    assert all(name in text and study["title"] in text for name, study in listed.items())


def test_a_study_writes_its_folder(run, tmp_path, virtual):
    """JSON, a self-contained page and figures; the table and the answer on stdout."""
    folder = tmp_path / "out"
    code, out, err = run("study", *SMALL, "--out", folder)
    assert code == 0, err
    assert "Is a power of two faster? mlp" in out
    found = json.loads((folder / "study.json").read_text())
    assert (found["schema"], found["study"], found["model"]) == (1, "powers-of-two", "mlp")
    assert [(c["batch_size"], c["reference"]) for c in found["comparisons"]] == [(3, 4), (5, 4), (7, 8), (9, 8)]
    assert found["device"]["name"]
    assert found["environment"]["numpy"]
    assert found["created"]
    assert found["mode"] == "training"
    assert {path.name for path in folder.iterdir()} >= {"index.html", "study.json", "figure.png", "figure.svg"}
    assert str(folder / "index.html") in err
    text = (folder / "index.html").read_text()
    assert not re.findall(r"<script|<link|href=|@import|url\(", text)
    images = re.findall(r'src="([^"]*)"', text)
    assert len(images) == 1
    assert images[0].startswith("data:image/svg+xml;base64,")
    headings = ("The question", "How it was measured", "How to repeat it", "Device")
    for words in (*headings, "cubatch study powers-of-two mlp", "numpy", found["created"]):
        assert words in text


def test_a_study_whose_files_cannot_be_written_is_shown(run, tmp_path, virtual, monkeypatch):
    """The answer took long to measure: it is printed, and in the JSON, before the error."""

    def fail(_, folder):
        raise InvalidData(str(folder), "No space left on device")

    monkeypatch.setattr("cubatch.studies.run.write", fail)
    code, out, err = run("study", *SMALL, "--out", tmp_path / "out", "--json", tmp_path / "s.json")
    assert (code, "No space left" in err) == (1, True)
    assert "Is a power of two faster? mlp" in out
    assert json.loads((tmp_path / "s.json").read_text())["answer"]


def begin(arguments):
    """Start a study in a process of its own, with as many threads of BLAS as this one: cached timings ask for that."""
    command = [sys.executable, "-m", "cubatch", "study", *arguments]
    threads = next(each["num_threads"] for each in threadpool_info() if "numpy" in each["filepath"])
    environment = CHECKOUT | {"OPENBLAS_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_killed_study_goes_on(run, tmp_path, virtual):
    """After SIGKILL the same command keeps every timing as it was, and each size has its five visits in the end."""
    folder = tmp_path / "out"
    store = folder / "measured.sqlite3"
    command = [*map(str, SMALL), "--out", str(folder)]
    running = begin(command)
    while running.poll() is None and len(rows(store)) < 12:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    before = rows(store)
    assert before
    assert not (folder / "study.json").exists()
    assert run("study", *command)[0] == 0
    after = rows(store)
    assert {key: after[key] for key in before} == before
    visits = {(size, number // 16) for size, number in after}
    assert sorted(size for size, _ in visits) == [n for n in (3, 4, 5, 7, 8, 9) for _ in range(5)]


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("small-batch-floor", ["inference"]),
        ("powers-of-two", ["training"]),
        ("memory-rules", ["inference", "training"]),
    ],
)
def test_each_study_has_the_mode_of_its_question(run, tmp_path, monkeypatch, name, modes):
    """Inference as everywhere, but where the question is of training or of both; what --mode says goes before that."""
    asked = []

    def refuse(request, _):
        asked.append(request.modes)
        raise InvalidArgument("mode", request.modes, "none")

    monkeypatch.setitem(STUDIES, name, attrs.evolve(STUDIES[name], run=refuse))
    arguments = ("study", name, "mlp", "--device", "cpu", "--out", tmp_path)
    assert [run(*arguments)[0], run(*arguments, "--mode", "inference")[0]] == [2, 2]
    assert asked == [tuple(modes), ("inference",)]


@pytest.mark.thorough
def test_a_killed_training_study_goes_on(run, tmp_path):
    """After SIGKILL the same command trains only what is missing, and what was trained is kept as it was."""
    (tmp_path / "linear.toml").write_text(
        'name = "linear"\ninput_shape = [28, 28, 1]\n[[layers]]\ntype = "flatten"\n'
        '[[layers]]\ntype = "linear"\nk = 10\n'
    )
    folder = tmp_path / "out"
    command = ["generalisation", str(tmp_path / "linear.toml"), "--quick", "--max-batch-size", "64"]
    command += ["--device", "cpu", "--out", str(folder)]
    running = begin(command)
    kept = folder / "cells.jsonl"
    while running.poll() is None and not (kept.exists() and kept.read_text()):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    before = kept.read_text()
    assert before
    assert not (folder / "study.json").exists()
    assert run("study", *command)[0] == 0
    after = kept.read_text()
    assert after.startswith(before)
    assert len(after.split()) > len(before.split())
    assert after.count('"name"') == 6
