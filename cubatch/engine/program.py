"""
The operations of a prepared batch, bound to their arrays, and their execution by the members of a team.

A trace may see each operation and each wait for the others: `measure.profile` uses it to show where a step's time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cubatch.engine import backend
from cubatch.engine.team import Team

Work = Callable[[], object]


class Trace(Protocol):
    """Observes the operations of a step: the thread (member of the team) that does the work calls each method."""

    def run(self, rank: int, number: int, work: Work) -> None:
        """Call `work`, which is operation `number` of the schedule, in the thread `rank`."""

    def wait(self, rank: int, meet: Work) -> None:
        """Call `meet`, which waits for the other threads, in the thread `rank`."""


class Program:
    """
    The operations of a team's members in a step.

    Args:
        team: The members.
        works: The operations in order, by set of buffers and member; the sets take turns.

    Attributes:
        works: The argument of this name.
    """

    def __init__(self, team: Team, works: Sequence[Sequence[Sequence[Work]]]) -> None:
        self._team, self.works = team, works

    def __len__(self) -> int:
        """Return the number of buffer sets."""
        return len(self.works)

    @property
    def calls(self) -> int:
        """Number of recorded calls of the first member; with hand-written kernels, the launches of a step."""
        return sum(len(work) for work in self.works[0][0] if isinstance(work, backend.Replay))

    def run(self, turn: int, trace: Trace | None = None) -> None:
        """
        Run all operations of a step on one of the buffer sets.

        Args:
            turn: The number of the buffer set.
            trace: Observes each operation; None: run at full speed.
        """
        programs = self.works[turn]

        def walk(rank: int) -> None:
            if trace is None:
                for work in programs[rank]:
                    work()
            else:
                for number, work in enumerate(programs[rank]):
                    trace.run(rank, number, work)

        if trace is None:
            self.together(walk)
        else:
            with self._team.seen_waiting(trace.wait):
                self.together(walk)

    def together(self, work: Callable[[int], object]) -> None:
        """Call a function with the rank of every member, in the member's thread, and wait for all."""

        def run(rank: int) -> None:
            with np.errstate(all="ignore"):  # the loss shows a run that diverges, not warnings
                work(rank)

        self._team.run(run)
