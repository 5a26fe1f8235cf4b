"""
The operations of a prepared batch, bound to their arrays, as each member of a team walks through them.

A trace may see each of them, and each wait for the others: for `measure.profile`, which asks where a step's time goes.
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
        """Do an operation of the schedule, the `number`-th."""
        ...

    def wait(self, rank: int, meet: Work) -> None:
        """Wait for the other members."""
        ...


class Program:
    """
    What the members of a team do in a step.

    Args:
        team: The members.
        works: The operations in order, for each set of buffers, which take turns, and each member.

    Attributes:
        works: The same.
    """

    def __init__(self, team: Team, works: Sequence[Sequence[Sequence[Work]]]) -> None:
        self._team, self.works = team, works

    def __len__(self) -> int:
        """Count the sets of buffers."""
        return len(self.works)

    @property
    def calls(self) -> int:
        """Recorded calls of the first member: on hand-written kernels, the launches of a step."""
        return sum(len(work) for work in self.works[0][0] if isinstance(work, backend.Replay))

    def run(self, turn: int, trace: Trace | None = None) -> None:
        """
        Make all calls of a step on one of the buffer sets.

        Args:
            turn: Which.
            trace: Sees each operation; None: they are done as fast as it goes.
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
        """Have every member do something, given its rank."""

        def run(rank: int) -> None:
            with np.errstate(all="ignore"):  # a run that diverges is told by its loss, not by warnings from within
                work(rank)

        self._team.run(run)
