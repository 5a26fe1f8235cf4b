"""A user's step function, of which nothing is known but that it can be called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import attrs

from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.measure import clocks
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.records import Measured
from cubatch.measure.runner import RunnerFactory
from cubatch.tuning.ladder import Ladder, plain
from cubatch.tuning.notes import Note, note
from cubatch.tuning.request import Request
from cubatch.tuning.subject import Revision, Subject

_SPAN = 8  # times a batch size, from which on a step should take longer
_EQUAL, _LESS = 1.1, 0.7  # times the seconds of a smaller batch size: no growth, and less work


@attrs.frozen(kw_only=True)
class CallableSubject(Subject):
    """A subject whose steps are calls of the user's function."""

    make_step: Callable[[int], Callable[[], object]]  # make_step(n) returns a step of batch size n
    device: Device  # device, memory: see `Subject`
    memory: MemoryLimit
    # a step after which CuPy and PyTorch hold more bytes counts as out of memory; None: no limit
    watched_bytes: int | None
    index: int | None  # number of the GPU that is made current; None changes nothing

    def ladder(self, request: Request, cached: Ladder | None, *, is_finished: bool) -> Ladder:  # noqa: ARG002
        """Return candidates of the requested batch sizes, or of round ones up to the maximum; `cached` may be None."""
        return Ladder(tuple(plain(request)), None, self.watched_bytes)

    def runner_factory(self, ladder: Ladder, request: Request) -> RunnerFactory:  # noqa: ARG002
        """Return a function that makes the runner in this process."""
        return functools.partial(CallableRunner, self.make_step, self.watched_bytes, self.index)

    def revise(self, ladder: Ladder, measured: Measured, request: Request) -> Revision:  # noqa: ARG002
        """Return the candidates and timings unchanged, with notes on the clock, unwatched memory and equal times."""
        notes = list(_growth(measured))
        if not isinstance(clocks.callable_clock(), clocks.EventClock):
            notes.append(note("host_clock"))
            if self.watched_bytes is not None:
                notes.append(note("memory_not_watched"))
        return Revision(ladder=ladder, measured=measured, notes=notes)


def _growth(measured: Measured) -> Iterator[Note]:
    """
    Yield a note if steps of the largest batch sizes took no longer than those of the smallest, or much less.

    A busy host lengthens timings, of some sizes all of them. So the shortest timing of a size counts. A time that stays
    is the shortest of the largest sizes against the middle one of the smallest. A time that falls is less for each of
    the largest than for each of the smallest, and nowhere above that of the smallest size.
    """
    sizes = sorted({timing.batch_size for timing in measured.timings})
    seconds = {n: min(timing.seconds for timing in measured.of(n)) for n in sizes}
    low = sorted((n for n in sizes if _SPAN * n <= sizes[-1]), key=seconds.__getitem__)
    high = sorted((n for n in sizes if 2 * n > sizes[-1]), key=seconds.__getitem__)
    if not low:
        return
    falls = seconds[high[-1]] < _LESS * seconds[low[0]] and max(seconds.values()) < _EQUAL * seconds[sizes[0]]
    small, large = (sizes[0], sizes[-1]) if falls else (low[(len(low) - 1) // 2], high[0])
    if falls or seconds[large] < _EQUAL * seconds[small]:
        values = {"small": small, "first_seconds": seconds[small], "large": large, "last_seconds": seconds[large]}
        yield note("step_time_falls", **values) if falls else note("step_time_stays", **values)
