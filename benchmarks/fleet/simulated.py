"""
A cluster of Dask in virtual time, under the caller's own code.

`autotune_fleet` runs as it is, with its store; what it calls of a `distributed.Client` is answered here, by workers
that say what real code said on devices in virtual time.  The scheduler does one thing at a time, each for as long as
was measured of it; what the caller computes meanwhile is measured as it happens.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs

from benchmarks.fleet.costs import Costs, Line
from benchmarks.fleet.streams import Stream
from cubatch.fleet import on_worker, tune_fleet

_GIB = 2**30


class TooLong(Exception):
    """The fleet has not answered for far too long."""


@attrs.frozen
class Worker:
    """One of the cluster: what it measures as, and from when to when it is there."""

    stream: Stream
    comes: float = 0.0
    goes: float = float("inf")


class SimulatedClient:
    """
    What `autotune_fleet` calls of a `distributed.Client`.

    Args:
        workers: By address.
        costs: Of the scheduler, and of Dask in the caller.
        cpu_seconds: What the caller itself has computed so far.
        longest: Virtual seconds after which TooLong is raised.

    Attributes:
        now: Virtual seconds of the caller.
        busy: Seconds of work, of "scheduler" and "client".
        messages, message_bytes: That workers have said.
        described: How many workers were asked what they have.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        costs: Costs,
        cpu_seconds: Callable[[], float] = lambda: 0.0,
        *,
        longest: float = float("inf"),
    ) -> None:
        self.workers, self.costs, self.cpu_seconds = workers, costs, cpu_seconds
        self.versions = on_worker.versions()
        self.longest = longest
        self.now, self.free_at, self.last_cpu = 0.0, 0.0, cpu_seconds()
        self.busy = {"scheduler": 0.0, "client": 0.0}
        self.messages = self.message_bytes = self.described = 0
        self.knows: set[str] = set()
        self.numbers = itertools.count()
        self.under_way: list[tuple[float, int, str, str]] = []  # when a worker says it, number, worker, text
        self.arrived: deque[tuple[float, str]] = deque()  # when the scheduler has handed it on
        self.handler: Callable[[tuple[float, str]], object] = lambda _: None

    # --- what is called ---

    def sleep(self, seconds: float) -> None:
        """Let time pass, and hear what comes meanwhile."""
        with self._answering():
            self.now += seconds
            self._hear()

    def nthreads(self) -> dict[str, int]:
        """Say who is there."""
        with self._answering():
            there = self._there()
            self._called(self.costs.poll, len(there))
            return dict.fromkeys(there, 1)

    def run(
        self, function: Callable[..., Any], *, workers: Sequence[str] | None = None, on_error: str = "raise"
    ) -> dict[str, Any]:
        """Have workers say what they have; the first time takes longer."""
        del function, on_error
        with self._answering():
            there = set(self._there())
            asked = [address for address in (self.workers if workers is None else workers) if address in there]
            self.described += len(asked)
            self._called(self.costs.describe, len(asked))
            if not self.knows.issuperset(asked):
                self.knows.update(asked)
                self.now += self.costs.describe_seconds
            return {address: self._facts(address) for address in asked if self.workers[address].goes > self.now}

    def subscribe_topic(self, _: str, handler: Callable[[tuple[float, str]], object]) -> None:
        """Hand on what workers say."""
        self.handler = handler

    def unsubscribe_topic(self, _: str) -> None:
        """Hand on what is under way, and no more."""
        with self._answering():
            self._serve(self.now)
            self.now = max(self.now, self.free_at)
            self._hear()

    def submit(
        self, function: Callable[..., Any], spec: object, options: object, known: Iterable[Mapping[str, Any]],
        topic: str, place: str, *, workers: Sequence[str], **_: object,
    ) -> _Future:  # fmt: skip
        """Have a worker go on from what is known."""
        del function, spec, options, topic, place
        with self._answering():
            self._called(self.costs.submit, 1)
            (address,) = workers
            return _Future(self, address, _kept_of(known, self.workers[address].stream))

    def cancel(self, futures: Sequence[_Future], *, force: bool) -> None:
        """Stop nothing: what was not ended does not answer."""

    # --- time ---

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Count what the caller has computed since the last answer; what it takes to answer here is nobody's."""
        computed = self.cpu_seconds() - self.last_cpu
        self.now += computed
        self.busy["client"] += computed
        yield
        self.last_cpu = self.cpu_seconds()
        if self.now > self.longest:
            raise TooLong

    def _called(self, cost: Mapping[str, Line], workers: int) -> None:
        """Wait for the scheduler, which first does what came before, and for the answer to be read."""
        self._serve(self.now)
        self.free_at = max(self.free_at, self.now) + cost["scheduler"](workers)
        self.now = self.free_at + cost["client"](workers)
        for who in self.busy:
            self.busy[who] += cost[who](workers)
        self._hear()

    def _serve(self, until: float) -> None:
        """Have the scheduler hand on what workers have said by then."""
        cost = self.costs.event["scheduler"](1)
        while self.under_way and self.under_way[0][0] <= until:
            said, _, address, text = heapq.heappop(self.under_way)
            if said > self.workers[address].goes:
                continue
            self.free_at = max(self.free_at, said) + cost
            self.busy["scheduler"] += cost
            self.arrived.append((self.free_at, text))

    def _hear(self) -> None:
        """Hand on to the caller what has arrived by now, each of which takes it a little."""
        self._serve(self.now)
        while self.arrived and self.arrived[0][0] <= self.now:
            at, text = self.arrived.popleft()
            self.messages += 1
            self.message_bytes += len(text)
            self.busy["client"] += self.costs.event["client"](1)
            self.now += self.costs.event["client"](1)
            self.handler((at, text))

    # --- workers ---

    def _there(self) -> list[str]:
        return [address for address, worker in self.workers.items() if worker.comes <= self.now < worker.goes]

    def _facts(self, address: str) -> dict[str, Any]:
        return {
            "device": self.workers[address].stream.device.to_mapping(),
            "place": address,
            "blas_threads": 1,
            "memory_bytes": 64 * _GIB,
            "resources": None,
            "versions": self.versions,
        }


class _Future:
    """A task on a worker."""

    def __init__(self, client: SimulatedClient, address: str, kept: int) -> None:
        self._client, self._worker = client, client.workers[address]
        stream = self._worker.stream
        held = 0
        first = len(stream.messages)
        for place, (_, text) in enumerate(stream.messages):
            held += len(json.loads(text)["timings"])
            if held > kept:
                first = place
                break
        skipped = stream.messages[first - 1][0] if first else 0.0
        for at, text in stream.messages[first:]:
            heapq.heappush(client.under_way, (client.now + at - skipped, next(client.numbers), address, text))
        self._ends = client.now + stream.seconds - skipped

    @property
    def status(self) -> str:
        """Say whether it has ended; with its worker it never does."""
        return "finished" if self._ends <= min(self._client.now, self._worker.goes) else "pending"

    def result(self) -> Mapping[str, str]:
        """Give what came of it."""
        return self._worker.stream.reply

    def cancel(self, *, force: bool) -> None:
        """Forget it."""


def _kept_of(known: Iterable[Mapping[str, Any]], stream: Stream) -> int:
    """Count the timings of a stream's run that are kept already."""
    if not stream.messages:
        return 0
    identity = json.loads(stream.messages[0][1])["identity"]
    return sum(len(run["timings"]) for run in known if run["identity"] == identity)


@contextlib.contextmanager
def standing_in(client: SimulatedClient) -> Iterator[None]:
    """Let `autotune_fleet` take this client for Dask's, and sleep in its time."""
    with (
        mock.patch.dict(sys.modules, {"distributed": SimpleNamespace(Client=SimulatedClient)}),
        mock.patch.object(tune_fleet, "time", SimpleNamespace(sleep=client.sleep)),
    ):
        yield
