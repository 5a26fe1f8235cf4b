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
    """Sees a step from within: each method is called by the member that does the work."""

    def run(self, rank: int, number: int, work: Work) -> None:
        """Do the operation of the schedule with this number."""
        ...

    def wait(self, rank: int, meet: Work) -> None:
        """Wait for the other members."""
        ...


class Program:
    """
    The work of a team's members in a step.

    Args:
        team: The members.
        works: The operations in order, for each set of buffers, which take turns, and each member.

    Attributes:
        works: The same.
    """

    def __init__(self, team: Team, works: Sequence[Sequence[Sequence[Work]]]) -> None:
        self._team, self.works = team, works

    def __len__(self) -> int:
        """Return the number of buffer sets."""
        return len(self.works)

    @property
    def calls(self) -> int:
        """Recorded calls of the first member: on hand-written kernels, the launches of a step."""
        return sum(len(work) for work in self.works[0][0] if isinstance(work, backend.Replay))

    def run(self, turn: int, trace: Trace | None = None) -> None:
        """
        Make all calls of a step on one of the buffer sets.

        Args:
            turn: The number of the buffer set.
            trace: Sees each operation; None: at full speed.
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
        """Call a function with every member's rank, in its thread."""

        def run(rank: int) -> None:
            with np.errstate(all="ignore"):  # the loss shows a run that diverges, not warnings
                work(rank)

        self._team.run(run)
