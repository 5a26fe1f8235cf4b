"""`cubatch store`: list and clear cached runs."""

from __future__ import annotations

import json

import pytest

from cubatch.kernels.choice import Winners
from cubatch.tuning.store import Run


@pytest.mark.parametrize("command", [["list"], ["show", "1"], ["clear", "--all"]])
def test_a_store_that_the_user_names_must_exist(run, tmp_path, command):
    """A misspelled path is an error, not a store without runs; no file is created."""
    path = tmp_path / "store.db"
    code, out, err = run("store", *command, "--store", path)
    assert (code, out) == (1, "")
    assert str(path) in "".join(err.split())
    assert not list(tmp_path.iterdir())


def test_without_the_default_store_there_are_no_runs(run, tmp_path, monkeypatch):
    """Nothing was tuned yet: that is no error, and no file is created."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert json.loads(run("store", "list", "--json", "-")[1])["runs"] == []
    cleared = json.loads(run("store", "clear", "--all", "--json", "-")[1])
    assert (cleared["cleared"], cleared["winners"]) == (0, 0)
    assert not list(tmp_path.iterdir())


def test_clearing_all_runs_also_clears_kernel_choices(run, tmp_path):
    """Clearing one run leaves them, since all runs share them."""
    path, beside = tmp_path / "store.db", tmp_path / "store-kernels.sqlite3"
    for number in range(2):
        with Run(path, identity={"number": number}, conditions={}, budget=1.0):
            pass
    for problem in ("one", "two"):
        Winners(beside, gpu="card", sources="abc").put(problem, "first", {})

    assert "kernel choice" not in run("store", "clear", "1", "--store", path)[1]
    assert Winners(beside, gpu="card", sources="abc").get("one") == "first"
    code, out, _ = run("store", "clear", "--all", "--store", path)

    assert code == 0
    assert f"Deleted 1 run and 2 kernel choices from {path}." in " ".join(out.split())
    assert Winners(beside, gpu="card", sources="abc").get("one") is None
