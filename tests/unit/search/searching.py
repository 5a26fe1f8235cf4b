"""Curves that the rules are shown, and a search of a device to its end."""

from __future__ import annotations

from typing import Any

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Timing
from cubatch.search.loop import Search
from tests.fakes import Curve, FakeDevice, FakeRunner
from tests.unit.situations import POWERS, record

LATENCY = Goal(objective="latency", tolerance=0.05)


def line(n: int) -> float:
    """A step of 64 ms and 1 ms a sample."""
    return 0.064 + 0.001 * n


def falling(n: int) -> float:
    """Throughput falls by a third with every octave."""
    return 0.001 * n**1.5


def rising() -> dict[int, float | list[Timing]]:
    """Read once each: the throughput rises to the end, and what lies between is unknown."""
    return {n: record(n, line(n), visits=1) for n in (1, 8, 64, 512)}


def go(device: FakeDevice, sizes: tuple[int, ...] = POWERS, **more: Any) -> tuple[FakeRunner, Measured]:
    """Search on a device; the model, where there is one, is a curve."""
    opened: list[FakeRunner] = []

    def open_session() -> FakeRunner:
        opened.append(device())
        return opened[-1]

    model: Curve = more.pop("model", lambda n: None)
    arguments: dict[str, Any] = {"goal": Goal(), "budget": 60.0, "seed": 0, "extend": Candidate, "on_host": False}
    ladder = [Candidate(n, predicted_seconds=model(n)) for n in sizes]
    found = Search(factory=open_session, ladder=ladder, **arguments | more).run()
    return opened[0], found
