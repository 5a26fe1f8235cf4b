"""What a fleet's calls cost Dask's scheduler and the caller, measured on clusters of one machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch.fleet import on_worker

MESSAGE_BYTES = 4096  # of what an event carries: a message of a worker's is as long
_REPEATS = 20
_EVENTS = 400  # in a burst, of all workers together
_IDLE_SECONDS = 5.0
_LOST_SECONDS = 60.0  # an event that takes longer was lost


@attrs.frozen
class Line:
    """Seconds of the processor that a call takes with so many workers: a part for itself, and one for each."""

    fixed: float
    each: float

    def __call__(self, workers: int) -> float:
        """Give it for a number of workers, measured or not."""
        return self.fixed + self.each * workers


@attrs.frozen
class Costs:
    """
    What calls cost, by who pays: "scheduler" or "client".

    Attributes:
        describe: All workers are asked what they have; those asked count, each of which takes `describe_seconds`.
        poll: The scheduler is asked who is there.
        submit: A task is handed to a worker, and its result comes back.
        event: A worker says something to the client, whatever the number of workers.
        idle: A second of nothing else, heartbeats of the workers included.
        describe_seconds: What a worker takes to say what it has for the first time, which imports cubatch: where it has
            its machine for itself.
        files: That the scheduler has open.
        memory: Bytes that the scheduler holds.
    """

    describe: Mapping[str, Line]
    poll: Mapping[str, Line]
    submit: Mapping[str, Line]
    event: Mapping[str, Line]
    idle: Mapping[str, Line]
    describe_seconds: float
    files: Line
    memory: Line

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Costs:
        """Draw straight lines through what was measured, by least squares; none falls, or begins below nought."""
        at = [row["workers"] for row in rows]

        def line(values: Sequence[float]) -> Line:
            slope, start = np.polyfit(at, values, 1) if len(set(at)) > 1 else (0.0, values[0])
            if slope < 0 or start < 0:  # one of them is none that can be told from nought
                through_nought = float(np.dot(at, values) / np.dot(at, at))
                return Line(float(np.mean(values)), 0.0) if slope < 0 else Line(0.0, through_nought)
            return Line(float(start), float(slope))

        both = {
            call: {who: line([row[call][who] for row in rows]) for who in ("scheduler", "client")}
            for call in ("describe", "poll", "submit", "event", "idle")
        }
        return cls(
            **both,
            describe_seconds=min(row["describe_seconds"] for row in rows),
            files=line([row["files"] for row in rows]),
            memory=line([row["memory"] for row in rows]),
        )


def measure(workers: int) -> dict[str, Any]:
    """
    Measure what calls cost in a cluster of so many workers, each in a process of its own.

    Returns:
        dict: "workers"; seconds of the processor per call, of "scheduler" and "client", under the names of `Costs`;
        "files" that the scheduler has open and "memory", bytes that it holds.
    """
    with _cluster(workers) as (client, pid):
        began = time.monotonic()
        client.run(on_worker.describe)
        first = time.monotonic() - began
        addresses = list(client.nthreads())
        given = {"text": "x" * MESSAGE_BYTES}
        row: dict[str, Any] = {
            "workers": workers,
            "describe": _cost(pid, lambda: client.run(on_worker.describe)),
            "poll": _cost(pid, client.nthreads),
            "submit": _cost(pid, lambda: client.submit(len, given, workers=addresses[:1], pure=False).result()),
            "event": _event_cost(client, pid, addresses),
            "idle": _cost(pid, lambda: time.sleep(_IDLE_SECONDS), 1),
            "describe_seconds": first,
            "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "memory": int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        }
        row["idle"] = {who: seconds / _IDLE_SECONDS for who, seconds in row["idle"].items()}
        return row


def _cost(pid: int, call: Callable[[], object], repeats: int = _REPEATS) -> dict[str, float]:
    """Give seconds of the processor per call, of the scheduler and of this process."""
    call()
    before, mine = _seconds_of(pid), time.process_time()
    for _ in range(repeats):
        call()
    return {
        "scheduler": (_seconds_of(pid) - before) / repeats,
        "client": (time.process_time() - mine) / repeats,
    }


def _event_cost(client: Any, pid: int, addresses: Sequence[str]) -> dict[str, float]:
    """Have workers say something until so many events have come."""
    arrived, each = threading.Semaphore(0), -(-_EVENTS // len(addresses))
    client.subscribe_topic("burst", lambda _: arrived.release())
    client.submit(len, "", pure=False).result()  # by the same stream: the scheduler has heard of it by then

    def burst() -> None:
        for _ in range(each * len(addresses)):
            if not arrived.acquire(timeout=_LOST_SECONDS):
                raise TimeoutError("an event never came")

    def begin() -> None:
        client.run(_talk, each)
        burst()

    found = _cost(pid, begin, 3)
    client.unsubscribe_topic("burst")
    asked = _cost(pid, lambda: client.run(_talk, 0), 3)  # what asking for it cost
    return {who: max(found[who] - asked[who], 0.0) / (each * len(addresses)) for who in found}


def _talk(events: int, dask_worker: Any) -> None:
    for _ in range(events):
        dask_worker.log_event("burst", "x" * MESSAGE_BYTES)


def _seconds_of(pid: int) -> float:
    """Read what a process has taken of the processors."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextlib.contextmanager
def _cluster(workers: int) -> Iterator[tuple[Any, int]]:
    """Start a scheduler and workers as one does by hand; gives a client and the scheduler's process."""
    import distributed

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder) / "scheduler.json"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
        dask, common = [sys.executable, "-m", "dask"], ["--scheduler-file", str(file), "--no-dashboard"]
        server = stack.enter_context(
            subprocess.Popen([*dask, "scheduler", *common, "--host", "127.0.0.1", "--port", "0"], **quiet)
        )
        stack.callback(server.terminate)
        while not file.exists() or not file.read_text():
            time.sleep(0.1)
        more = ["--nworkers", str(workers), "--nthreads", "1", "--memory-limit", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        several = stack.enter_context(subprocess.Popen([*dask, "worker", *common, *more], env=environment, **quiet))
        stack.callback(several.terminate)
        address = json.loads(file.read_text())["address"]
        client = stack.enter_context(distributed.Client(address, set_as_default=False, timeout=60))
        client.wait_for_workers(workers, timeout=300)
        time.sleep(2.0)  # until heartbeats are what they stay
        yield client, server.pid
