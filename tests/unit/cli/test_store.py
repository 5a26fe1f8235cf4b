"""`cubatch store`: list and clear cached runs."""

from __future__ import annotations

import json

from cubatch.kernels.choice import Winners
from cubatch.tuning.store import Run


def test_a_missing_store_lists_nothing_and_clears_nothing(run, tmp_path):
    """No file is created."""
    path = tmp_path / "store.db"

    assert json.loads(run("store", "list", "--store", path, "--json", "-")[1])["runs"] == []
    cleared = json.loads(run("store", "clear", "--all", "--store", path, "--json", "-")[1])
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
