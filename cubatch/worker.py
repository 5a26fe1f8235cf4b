"""
The worker process that measures, and the protocol of the runner that represents it.

An out-of-memory kill, a crash in a driver or a step that hangs ends the worker, never the user's process. The user's
process makes no CUDA context.

    in the user's process                                     python -P -m cubatch.worker
    RemoteRunner(factory)
        {"do": "start", "factory": "module:function", ...} ->  compares version and file of the two cubatches,
                                                           <-  imports and calls the factory: {"ok": null}
    .prepare(64)
        {"do": "prepare", "batch_size": 64}                ->  runner.prepare(64)
                                                           <-  {"ok": null}
    .clock.time(step, 10)
        {"do": "time", "repeats": 10}                      ->  runner.clock.time(runner.step, 10)
                                                           <-  {"ok": {"seconds": ...}} or {"error": ...}

Each request and each answer is one JSON line. The worker ends when its standard input or its parent does, even during
a step or suspended, so a killed user's process leaves none behind. It has a session of its own: Ctrl-C reaches only the
user's process, and one kill ends the worker with all its children.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import IO, Any, NoReturn

import attrs

from cubatch.errors import WorkerFailed
from cubatch.frameworks import heap
from cubatch.measure import replies
from cubatch.measure.remote import identify
from cubatch.measure.runner import FactoryRef

_WATCH_SECONDS = 1.0


class _Worker(replies.RunnerServer):
    """Serves the requests that a `RemoteRunner` sends to its process."""

    def start(
        self,
        *,
        factory: str,
        arguments: dict[str, Any],
        expected: dict[str, str],
        paths: list[str],
        pythonpath: str | None,
        cpus: list[int],
    ) -> None:
        if (mine := identify()) != expected:
            raise WorkerFailed(f"it would run cubatch {mine}, not cubatch {expected}", "Install only one.")
        os.environ.pop("PYTHONPATH", None)  # it was for this process only
        if pythonpath is not None:
            os.environ["PYTHONPATH"] = pythonpath
        sys.path.extend(paths)
        if cpus:  # before a library counts the CPUs for its threads
            os.sched_setaffinity(0, cpus)
        self._runner = FactoryRef(factory, arguments)()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        attribute = getattr(self._runner, method)
        return attribute(**arguments) if callable(attribute) else attribute

    def close(self) -> None:
        self._runner.close()


def main() -> NoReturn:
    """Run the worker: serve requests until "close", or until standard input ends."""
    # The pipes are moved: a library's output goes to standard error, and its input is empty.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    replies.set_up_worker()
    heap.own_process()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, inbox), daemon=True).start()
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), daemon=True).start()
    worker = _Worker()
    doing = ""
    while doing != "close":
        doing, reply = _serve(worker, inbox.get())
        answers.write(reply)
        answers.flush()
    os._exit(0)


def _serve(worker: _Worker, line: bytes) -> tuple[str, bytes]:
    """Execute a request, a line of JSON; return the request's name and the reply as a line of JSON."""
    request = json.loads(line)
    doing = request.pop("do")
    try:
        reply = json.dumps({"ok": getattr(worker, doing)(**request)}, default=attrs.asdict)  # a `Reading`
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the other side raises it
        reply = json.dumps({"error": replies.describe_error(error)})
    return doing, reply.encode() + b"\n"


def _listen(requests: IO[bytes], inbox: queue.SimpleQueue[bytes]) -> NoReturn:
    """Queue the requests that arrive; end the process when the input ends, even within a step."""
    for line in requests:
        inbox.put(line)
    os._exit(0)


def _watch(parent: int) -> NoReturn:
    """End this process when its parent has ended; children of the parent may keep standard input open."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
