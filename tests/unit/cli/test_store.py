"""`cubatch store`: looking makes no file, forgetting is asked for."""

from __future__ import annotations

import json

from cubatch.kernels.choice import Winners
from cubatch.tuning.store import Run


def test_an_empty_store_lists_nothing_and_clears_nothing(run, tmp_path):
    """Looking does not make a file."""
    path = tmp_path / "store.db"

    assert "No runs are kept." in run("store", "list", "--store", path)[1]
    found = json.loads(run("store", "clear", "--all", "--store", path, "--json", "-")[1])
    assert (found["cleared"], found["winners"]) == (0, 0)
    assert not list(tmp_path.iterdir())


def test_everything_is_forgotten_only_when_asked_for(run, tmp_path):
    """`store clear` alone forgets nothing: it asks for a number or --all."""
    code, _, err = run("store", "clear", "--store", tmp_path / "store.db")
    assert code == 2
    assert "--all" in err


def test_forgetting_everything_forgets_which_kernels_won(run, tmp_path):
    """`store clear --all` says what of both files it removed; one run's number leaves the winners, which are of all."""
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
    assert f"Forgot 1 run of {path} and 2 kernel choices beside it." in " ".join(out.split())
    assert Winners(beside, gpu="card", sources="abc").get("one") is None
