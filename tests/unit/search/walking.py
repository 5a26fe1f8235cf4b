"""The walk on fake devices with a clock of their own: asking for it, reading what came, and what spoils it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.search.events import Event
from cubatch.search.loop import Search
from cubatch.tuning import answer, ladder
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from tests.fakes import Behaviour, FakeDevice, FakeRunner, affine

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
FLAT = affine(0.02, 0.0)  # every step 20 ms: one step is one timing
RISES = affine(0.02, 1e-6)  # the largest size is the best by far


def given(*sizes: int, over: Iterable[int] = ()) -> list[Candidate]:
    """Give candidates."""
    return [Candidate(n, over_limit=n in over) for n in sizes or SIZES]


def go(device: Callable[[], FakeRunner], candidates: Sequence[Candidate], **more: Any) -> Measured:
    """Measure a ladder to which no size is added, with a goal, a budget and a seed unless told otherwise."""
    arguments: dict[str, Any] = {"goal": Goal(), "budget": 60.0, "seed": 0, "on_host": False}
    return Search(factory=device, ladder=candidates, **arguments | more).run()


def seek(
    device: Callable[[], FakeRunner], top: int | Sequence[Candidate] = 512, **more: Any
) -> tuple[Measured, TuningResult]:
    """Measure as `autotune_callable` does, where the search adds sizes, and choose."""
    steps = ladder.plain(Request(max_batch_size=top)) if isinstance(top, int) else list(top)
    goal = more.get("goal") or Goal()
    measured = go(device, steps, **{"extend": functools.partial(ladder.between, steps=steps)} | more)
    rungs = [*steps, *measured.added]
    device_kind = "cpu" if more.get("on_host") else "cuda"
    setting = {"limits": {"max_batch_size": top if isinstance(top, int) else None}, "device": {"kind": device_kind}}
    return measured, answer.answer(rungs, measured, goal=goal, setting=setting)


def statuses(measured: Measured) -> dict[int, str]:
    """Give the status of every size."""
    return {outcome.batch_size: outcome.status for outcome in measured.outcomes}


def outcome_of(measured: Measured, batch_size: int) -> Outcome:
    """Give the outcome of a size."""
    return next(outcome for outcome in measured.outcomes if outcome.batch_size == batch_size)


def first_visits(measured: Measured) -> list[int]:
    """Give the sizes in the order of their first timings."""
    return list(dict.fromkeys(timing.batch_size for timing in measured.timings))


def share_of_best(device: FakeDevice, result: TuningResult, top: int) -> float:
    """Give what the answer truly does, as a share of the best of all integers."""
    assert result.batch_size is not None
    return device.throughput(result.batch_size) / device.true_best(top)[1]


@attrs.define
class Sessions:
    """A factory that remembers its runners."""

    device: FakeDevice
    opened: list[FakeRunner] = attrs.field(factory=list)

    def __call__(self) -> FakeRunner:
        """Open a session."""
        self.opened.append(self.device())
        return self.opened[-1]


@attrs.define
class FailsLater(Behaviour):
    """One size raises so many times, after so many of its steps came back."""

    at: int
    after: int = 0
    times: int = 1
    error: type[Exception] = ValueError
    _steps: int = 0
    _raised: int = 0

    def step(self, batch_size: int) -> None:
        """Count the steps of the size, and raise."""
        if batch_size != self.at:
            return
        if self._steps >= self.after and self._raised < self.times:
            self._raised += 1
            raise self.error("somebody pulled the plug")
        self._steps += 1


@attrs.define
class SlowFirst(Behaviour):
    """The first steps of a session take longer, as beside another process."""

    count: int = 6
    extra: float = 0.68
    _steps: int = 0

    def step(self, batch_size: int) -> None:
        """Count."""
        self._steps += 1

    def delay(self) -> float:
        """Give what they take on top."""
        return self.extra if self._steps <= self.count else 0.0


def stop_after(count: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[Event], None]:
    """Interrupt after so many timings, as Ctrl-C does between two of them."""
    taken = []

    def progress(event: Event) -> None:
        if event.kind == "timing":
            taken.append(event)
            if len(taken) == count:
                raise error

    return progress


# --- limits --------------------------------------------------------------------------------------------------


def near(low: int, high: int) -> bool:
    """Say whether two sizes are within 2 % of each other, or 1."""
    return high - low <= max(1, int(0.02 * low))
