"""What runs on a worker of the cluster: it says what it has, and measures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import cubatch
from cubatch.engine import conditions
from cubatch.errors import CubatchError
from cubatch.fleet import kept_rows
from cubatch.hardware import probe
from cubatch.search.walk import Event
from cubatch.tuning import store, tune

_PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "distributed")


def describe(dask_worker: Any) -> dict[str, Any]:
    """
    Say which device a worker measures on: the first GPU that it sees, else its CPU.

    Args:
        dask_worker: The worker, which Dask hands in.

    Returns:
        dict: "device", its facts; "place", what a measurement must have for itself: the GPU, or the host;
        "blas_threads" of a CPU; "memory_bytes", what Dask lets the worker take of main memory; "resources" that a task
        must claim to have the GPU; "versions".
    """
    device = probe.resolve(None, live=True)  # the CPU where there is no GPU
    host = socket.gethostname()
    return {
        "device": device.to_mapping(),
        "place": device.uuid or host,
        "blas_threads": conditions.conditions(device)["blas_threads"],
        "memory_bytes": dask_worker.memory_manager.memory_limit,
        "resources": {name: 1 for name in dask_worker.state.total_resources if name == "GPU"} or None,
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Give what must be the same on all workers and where the fleet is asked from; None for what is not there."""
    found: dict[str, str | None] = {"cubatch": cubatch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def measure(
    spec: Mapping[str, Any], options: Mapping[str, Any], known: Iterable[Mapping[str, Any]], topic: str, place: str
) -> dict[str, str]:
    """
    Tune on this worker, alone at its place, and say each timing as it is taken.

    Args:
        spec: A layer or network, as a mapping.
        options: Those of `autotune`.
        known: Runs that were kept of it before, as messages of `kept_rows`.
        topic: Where to say what is kept: a message of `kept_rows` in JSON each time.
        place: What no other measurement may use meanwhile.

    Returns:
        dict: "result", in JSON, or the "error" that `autotune` ended with: Dask hands no error on that has two parents.
    """
    from distributed import Lock, get_worker

    worker = get_worker()
    with tempfile.TemporaryDirectory(prefix="cubatch-fleet-") as folder, Lock(f"cubatch {place}"):
        path = Path(folder) / "store.sqlite3"
        for message in known:
            with kept_rows.opened(path, message) as run:
                kept_rows.replay(run, message)
        said = _Said(path, lambda message: worker.log_event(topic, json.dumps(message)))
        try:
            result = tune.autotune(dict(spec), **options, store=path, progress=said.event)
        except CubatchError as error:
            return {"error": str(error)}
        finally:
            said.rest()
        return {"result": result.to_json()}


class _Said:
    """Says what a store has kept since it was last asked."""

    def __init__(self, path: Path, say: Callable[[Mapping[str, Any]], None]) -> None:
        self._path, self._say = path, say
        self._seen = {run.id: run for run in store.list_runs(path)}
        self._questions = {kept_rows.question(run.identity, run.conditions) for run in self._seen.values()}

    def event(self, event: Event) -> None:
        """Say what is new after something was kept."""
        if event.kind in {"timing", "outcome"}:
            self.rest()

    def rest(self) -> None:
        """Say what is new."""
        for run in store.list_runs(self._path):
            before = self._seen.get(run.id)
            if run != before:
                past = 0 if before is None else before.num_timings
                question = kept_rows.question(run.identity, run.conditions)
                anew = before is None and question in self._questions
                self._questions.add(question)
                self._say(kept_rows.of_run(self._path, run, past=past, anew=anew))
                self._seen[run.id] = run
