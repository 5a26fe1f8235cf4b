"""
The process of one rank of a data parallel run, controlled by a `RankGroup`.

    in the process that has the group                         python -P -m cubatch.rank ADDRESS
    RankGroup(devices)                                     <-  its number, and which cubatch it runs
                                                           ->  the CPUs that it may use
    .do("build", ...)
        ("build", arguments)                               ->  makes the model and what sums its gradients
                                                           <-  ("ok", None)
    .do("time", 10)
        ("time", (10,))                                    ->  runner.clock.time(runner.step, 10)
                                                           <-  ("ok", Reading) or ("error", facts)

All ranks get the same calls; while they step, they meet in their sums. On CPUs `mpiexec` starts them, and MPI numbers
them; on GPUs they are started one by one with their number. A rank ends when its connection does.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from cubatch.measure import replies
from cubatch.measure.remote import identify

if TYPE_CHECKING:
    from cubatch.engine.exchange import Exchanged
    from cubatch.engine.training_run import Training
    from cubatch.measure.runner import Reading


class _Rank(replies.RunnerServer):
    """Serves the calls that a `RankGroup` sends to one of its processes."""

    _runner: Any  # the runner of `network_runner`

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        self._connection, self._rank, self._size = connection, rank, size
        self._exchange: Any = None

    def identifier(self) -> Any:
        """Return a new NCCL identifier; ranks on GPUs that pass the same identifier to `meet` are connected."""
        from cubatch.engine.exchange import nccl_identifier

        return nccl_identifier()

    def meet(self, device: str, identifier: Any) -> None:
        """Connect this rank to the others: by MPI on the CPU, by NCCL with the result of `identifier` on a GPU."""
        from cubatch.engine.exchange import MpiExchange, NcclExchange
        from cubatch.hardware import probe

        if device == "cpu":
            self._exchange = MpiExchange()
        else:
            self._exchange = NcclExchange(identifier, self._rank, self._size, probe.resolve(device).index or 0)

    def build(self, device: str, arguments: Mapping[str, Any]) -> None:
        """Create the runner that times this rank's steps; `arguments` are keyword arguments of `network_runner`."""
        from cubatch.measure.network_runner import network_runner

        self._runner = network_runner(device=device, exchange=self._exchange, **arguments)

    def time_alone(self, repeats: int) -> Reading:
        """Return the timing of `repeats` steps of this rank, without exchange with the others."""
        with self._runner.model.alone():
            return self.time(repeats)

    def exchanged(self) -> Exchanged:
        """Return the seconds of the gradient sums over all ranks since the last call."""
        exchanged: Exchanged = self._exchange.exchanged()
        return exchanged

    def train(self, device: str, network: Any, options: Mapping[str, Any]) -> Training:
        """
        Train the network together with the other ranks, and return the record of the training.

        `options` are keyword arguments of `engine.train`. Rank 0 reports the progress.
        """
        from cubatch.engine import train as engine
        from cubatch.hardware import probe
        from cubatch.measure import kernel_context

        def send(event: Any) -> None:
            self._connection.send(("said", event))

        resolved = probe.resolve(device)
        report = send if self._rank == 0 else None
        dtype = options["dtype"]
        context = kernel_context.usual_context(resolved, dtype, overlaps=True) if resolved.kind == "cuda" else None
        return engine.train(
            network, device=resolved, context=context,
            exchange=self._exchange, progress=report, stepped=report, **options,
        )  # fmt: skip


def main() -> NoReturn:
    """Run the rank: serve calls until the connection ends."""
    replies.set_up_worker()
    address, *number = sys.argv[1:]
    if number:
        rank, size = int(number[0]), int(number[1])
    else:
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    connection = Connection(line.detach())
    connection.send({"rank": rank, "size": size, **identify()})
    if cpus := connection.recv():  # before NumPy is imported, whose BLAS counts them
        os.sched_setaffinity(0, cpus)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    worker = _Rank(connection, rank, size)
    while True:
        deed, arguments = inbox.get()
        try:
            reply = ("ok", getattr(worker, deed)(*arguments))
        except Exception as error:  # noqa: BLE001 - the other side raises it
            reply = ("error", replies.describe_error(error))
        connection.send(reply)


def _listen(connection: Connection, inbox: queue.SimpleQueue[Any]) -> NoReturn:
    """Queue the calls that arrive; end the process when the connection closes, even within a gradient sum."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
