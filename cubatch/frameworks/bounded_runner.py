"""Runners of other frameworks that stay within a memory limit and measure the memory of their steps."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from cubatch.checks import MAX_BATCH_SIZE
from cubatch.errors import CubatchError, OutOfMemory, OverLimit, is_out_of_memory
from cubatch.frameworks.memory_meter import HostMeter, Meter
from cubatch.frameworks.memory_plan import MemoryPlan
from cubatch.frameworks.page_faults import PageFaults
from cubatch.frameworks.torch_memory import Peaks, TraceTooLong
from cubatch.measure.clocks import HostClock
from cubatch.measure.runner import REFERENCE_SHARE, MemoryForecast, MemoryLook, MemoryReport, Remark
from cubatch.units import first_line, format_seconds
from cubatch.workload import divisors

_LOOK_FACTOR = 4  # between sizes that are stepped to learn what larger ones take
_CLIMB_SHARE = 0.03  # of a size: a nearer size below it adds no information
_STEPS_TO_LEARN = 3  # the second finds gradients and the optimizer's state, the third what was kept of freed blocks
_MOST_REFUSED = 3  # sizes that raise errors before one runs

_TRACE_SECONDS = 15.0  # of a trace, where `look` was not called
_UNTRACED_DOUBT = 2.0
"""As `memory_plan.DOUBT` without a trace: steps of twice the size may then take four times as much."""

_log = logging.getLogger(__name__)


class BoundedRunner(abc.ABC):
    """
    Runs steps of another framework within a memory limit; predicts memory from a trace and from smaller batches.

    Args:
        clock: Times steps.
        meter: Measures the memory of a step.
        memory_limit: Bytes that the model, a batch and its step may take together.
        dtype: Name of the type that steps compute in, such as "float32".
        own_bytes: Bytes allocated before the meter starts, such as the model's; the same at all batch sizes.

    Attributes:
        clock, meter, dtype, own_bytes: The arguments of these names.
        is_compiled: Whether the first step of a batch size may compile.
        compile_seconds: Seconds of the last `prepare` in which something was compiled; 0 if nothing was.
        num_samples: Samples of the data set that batches are made of; None if unknown.
        sizes: Small batch sizes that the user allows; empty if unknown.
        multiple: A number of which all batch sizes of the user's data are multiples; 1 if all sizes are possible.
    """

    is_compiled = False
    compile_seconds = 0.0
    num_samples: int | None = None
    sizes: Sequence[int] = ()
    multiple = 1

    def __init__(self, clock: HostClock, meter: Meter, memory_limit: int, dtype: str, own_bytes: int) -> None:
        self.clock = clock
        self.meter, self._memory_limit, self.dtype, self.own_bytes = meter, memory_limit, dtype, own_bytes
        self._plan: MemoryPlan | None = None
        self._is_planned = False
        self._why_not: str | None = None
        self._raised: str | None = None
        self._trace_seconds = _TRACE_SECONDS
        self._step: Callable[[], None] | None = None
        self._batch_size, self._batch_bytes = 0, 0
        self._reference_size, self._reference_bytes = 0, 0
        self._steps, self._page_faults = 0, PageFaults()
        self._tidied_at: int | None = None
        self._requested: set[int] = set()
        self._is_informed = False
        self._first_seconds: dict[int, float] = {}

    @abc.abstractmethod
    def walk(self, num_bytes: int, top: int | None, seconds: float) -> Peaks:
        """
        Return peak bytes of steps by batch size, from traces on tensors without data that take at most `seconds`.

        Sizes go up to the largest one that fits into `num_bytes`, or to `top` (None: no maximum).
        """

    def put_aside(self, walked: Peaks | None) -> int:  # noqa: ARG002 - few have anything to put back
        """
        Back up the parameters that a step modifies, if a subclass does so; return the bytes left for steps.

        `walked` is the result of the trace; None if there is none.
        """
        return self._memory_limit

    @abc.abstractmethod
    def _make(self, batch_size: int) -> tuple[Callable[[], None], int]:
        """Start the memory meter; return a function that runs a step on a random batch, and the bytes of that batch."""

    @abc.abstractmethod
    def _drop(self) -> None:
        """Free what steps allocated; errors are suppressed, since the step has already raised them."""

    @property
    def peak_bytes(self) -> int | None:
        """
        Peak bytes of the model, the batch and its steps since `prepare`; None where unknown.

        It is also None for a size smaller than a held reference step, whose larger batch runs in between.
        """
        if self._step is None:
            return self.own_bytes
        taken = None if self._batch_size < self._reference_size else self.meter.peak()
        return None if taken is None else self.own_bytes + self._batch_bytes + taken

    @property
    def peak_device_bytes(self) -> int | None:
        """Always None: these runners do not query the driver."""
        return None

    @property
    def worker_pid(self) -> int | None:
        """Always None: steps run in this process."""
        return None

    def look(self, *, seconds: float, top: int | None, trace_seconds: float) -> MemoryLook:
        """
        Return the predicted memory of steps by a trace without data and by a few small steps; see `LearnsMemory.look`.

        `top` may be None: no maximum. Without a trace, steps of two samples are measured, or of one if `top` is 1.
        """
        self._trace_seconds = trace_seconds
        plan = self._planned(top)
        self._is_informed = True
        look = MemoryLook(
            largest=None, why_not=self._why_not, first=None, memory_bytes=self._memory_limit, dtype=self.dtype,
            num_samples=self.num_samples, multiple=self.multiple,
        )  # fmt: skip
        if plan is None:
            return {**look, "raised": self._raised if top is None else None}
        # If it is compiled, a first step would be compiled outside the budget.
        if seconds and plan.largest(self._memory_limit) and not self.is_compiled:
            self._climb(plan, seconds, top)
        largest = plan.largest(self._memory_limit)
        return {**look, "largest": largest, "first": plan.at(1), "is_compiled": self.is_compiled}

    def _climb(self, plan: MemoryPlan, seconds: float, top: int | None) -> None:
        """Correct the plan by steps of growing batch sizes, up to `top` (None: no maximum), within about `seconds`."""
        began, refused, multiple = time.monotonic(), 0, math.lcm(self.multiple, plan.multiple)
        size = _LOOK_FACTOR * max(plan.measured) if plan.measured else self.multiple
        while size <= min(MAX_BATCH_SIZE if top is None else top, plan.largest(self._memory_limit, plan.most) or 1):
            before = time.monotonic()
            try:
                self._learn_of(size)
            except Exception as error:  # noqa: BLE001 - a trial of the size raises it again
                _log.info("looking at batch size %d ended with %s", size, error)
                is_final = isinstance(error, CubatchError) or is_out_of_memory(error) or plan.measured
                refused = _MOST_REFUSED if is_final else refused + 1
            finally:
                self.release()
            now, size = time.monotonic(), math.ceil(size * _LOOK_FACTOR / multiple) * multiple
            if refused == _MOST_REFUSED or now - began + _LOOK_FACTOR * (now - before) > seconds:
                break

    def _measured_plan(self, top: int | None) -> MemoryPlan | None:
        """
        Return a plan by the measured memory of small batches, for a module without a trace; None if that fails.

        The first has two samples, or one if `top`, the largest batch size, is 1; None: no maximum.  A second one has
        twice as many, or what surely fits: their difference is what grows with the batch.
        """
        if self.is_compiled:  # a first step would be compiled outside the budget
            return None
        share = (self._memory_limit - self.own_bytes) // 2  # until it is known, one sample more is as much as fits
        guess = Peaks({1: self.own_bytes + share, 2: self.own_bytes + 2 * share})
        plan = self._plan = MemoryPlan(
            guess, self.meter.grain, self.meter.scatter, doubt=_UNTRACED_DOUBT, is_traced=False
        )
        most = MAX_BATCH_SIZE if top is None else top
        # One sample is too few for a batch norm in training.
        for size in dict.fromkeys([min(2, most), *(size for size in self.sizes if size <= most)]):
            try:
                self._learn_of(size)
            except CubatchError:
                raise
            except Exception as error:  # noqa: BLE001 - any error of a user's module
                self._raised = self._raised or first_line(error)
                continue
            finally:
                self.release()
            self._raised = None
            with contextlib.suppress(Exception):  # it may take multiples only
                self._learn_of(min(2 * size, most, plan.largest(self._memory_limit, plan.most)))
            self.release()
            break
        plan.predicted |= plan.measured  # before them, nothing was predicted
        return plan if plan.measured and self._raised is None else None

    def skip_trace(self, reason: str) -> None:
        """Predict memory from measured steps alone; `reason` is why, for a message."""
        self._why_not = reason

    def predicted(self, batch_size: int) -> int | None:
        """
        Return the predicted peak bytes of a step; None if steps can be neither traced nor measured in advance.

        Without a trace, it is also None below all measured sizes.
        """
        plan = self._planned()
        self._requested.add(batch_size)
        return None if plan is None else plan.known_at(batch_size)

    @property
    def forecast(self) -> MemoryForecast | None:
        """
        Return the present prediction: the largest size that fits, and the peak bytes of sizes given to `predicted`.

        The memory of a held reference step counts as free: only a search holds one. None if `look` was not called: a
        resumed run steps few sizes, so the cached prediction is better.
        """
        if (plan := self._plan) is None or not self._is_informed:
            return None
        return {
            "largest": plan.largest(self._memory_limit + self._reference_bytes),
            "is_rough": plan.is_rough,
            "bytes": [(n, known) for n in sorted(self._requested) if (known := plan.known_at(n)) is not None],
        }

    @property
    def history(self) -> list[dict[str, Any]]:
        """
        Return a mapping for each batch size that ran, ascending; empty before memory is examined.

        It has `batch_size`, the peak memory that was predicted just before it ran (`predicted_bytes`), and the largest
        measured one (`measured_bytes`).
        """
        if (plan := self._plan) is None:
            return []
        measured = {**plan.earlier, **plan.measured}
        return [
            {"batch_size": n, "predicted_bytes": plan.predicted[n], "measured_bytes": measured[n]}
            for n in sorted(measured)
        ]

    @property
    def remarks(self) -> list[Remark]:
        """Return remarks on the batch size from which the heap was kept compact, if it was, and on page faults."""
        tidied = [] if self._tidied_at is None else [self._tidied_at]
        compacted = [Remark(code="heap_compacted", values={"batch_size": size}) for size in tidied]
        return [*compacted, *self._page_faults.remarks]

    def report(self) -> MemoryReport:
        """Return predicted and measured bytes of the sizes that ran, the prediction now, and remarks."""
        return {"history": self.history, "forecast": self.forecast, "remarks": self.remarks}

    def prepare(self, batch_size: int) -> float | None:
        """
        Draw a batch and run a first step, which compiles and chooses algorithms; return its seconds, never None.

        OverLimit is raised, and nothing run, for a step that might exceed the memory limit by the trace or smaller
        sizes. OutOfMemory is raised for a step that did.
        """
        self.release()
        self._confirm(batch_size)
        self.draw(batch_size)
        self.step()
        if self._plan is None:
            self.step()  # the second step allocates gradients and optimizer state, which no trace predicted
        if isinstance(self.meter, HostMeter):
            self._page_faults.begin(self._steps)
        taken = self.peak_bytes
        if taken is not None and taken > self._memory_limit:
            raise OutOfMemory(f"a step of batch size {batch_size}", taken, self._memory_limit)
        return self._first_seconds.get(batch_size)

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared step as the reference step; return whether that is possible.

        `repeats` reference steps run before and after each timing. It is impossible without a prepared step, on a GPU,
        and if the batch takes more than 5 % of the memory limit.
        """
        if not isinstance(self.meter, HostMeter) or self._step is None:
            return False
        if self._batch_bytes > REFERENCE_SHARE * self._memory_limit:
            return False
        step = self._reference_step(self._step)
        self.drop_reference()
        self._memory_limit -= self._batch_bytes
        self._reference_bytes = self._batch_bytes
        self.clock.hold_reference(step, repeats)
        self.release()
        self._reference_size = self._batch_size
        return True

    def drop_reference(self) -> None:
        """Run no reference steps from now on, and free the batch of a held one."""
        self._memory_limit += self._reference_bytes
        self._reference_size = self._reference_bytes = 0
        self.clock.drop_reference()

    def _reference_step(self, prepared: Callable[[], None]) -> Callable[[], object]:
        """
        Return the reference step, which runs around timings of other batch sizes; here it is `prepared` itself.

        `prepared` runs a step on the prepared batch. The result may keep that batch in memory, but no optimizer state.
        """
        return prepared

    def step(self) -> None:
        """Run a step of the prepared batch, or on a GPU enqueue it; without a prepared batch, do nothing."""
        if self._step is not None:
            began = time.perf_counter()
            self._step()
            if not self._steps:
                if self._batch_size not in self._first_seconds:
                    self.clock.wait()
                    self._first_seconds[self._batch_size] = time.perf_counter() - began
                self.meter.settle()
            self._steps += 1

    def release(self) -> None:
        """Free the batch and the memory of its steps; first correct the memory plan by their measured peak bytes."""
        taken = None
        with contextlib.suppress(Exception):  # after a GPU error every call fails
            taken = self.peak_bytes
        if self._plan is not None and taken is not None and self._steps:
            self._plan.learn(self._batch_size, taken)
        self._page_faults.end(self._batch_size, self._steps)
        self._step, self._steps = None, 0
        self.meter.settle()  # before the very first step, and also where none came to an end
        self._drop()

    def close(self) -> None:
        """Free the batch and the memory of its steps; another `draw` allocates them again."""
        self.release()

    def _planned(self, top: int | None = None) -> MemoryPlan | None:
        """Return the memory plan, made once from a trace or else from a first step; None if neither is possible."""
        if not self._is_planned:
            walked = None
            try:
                if self._why_not is None:
                    walked = self.walk(self._memory_limit, top, self._trace_seconds)
                    self._plan = MemoryPlan(walked, self.meter.grain, self.meter.scatter)
            except CubatchError:
                raise
            except TraceTooLong:
                self._why_not = f"a trace of its operations did not end within {format_seconds(self._trace_seconds)}"
            except Exception as error:  # noqa: BLE001 - a user's module may raise any error on fake tensors
                self._why_not = f"a step without data could not be traced ({first_line(error)})"
            self._is_planned = True
            self._memory_limit = self.put_aside(walked)  # what fails here ends the run
            if walked is None:
                self._plan = self._measured_plan(top)
        return self._plan

    def _confirm(self, batch_size: int) -> None:
        """Raise OverLimit unless a batch size fits; if that is uncertain, run smaller sizes first to find out."""
        plan, limit = self._planned(), self._memory_limit
        if plan is None:
            return
        while plan.most(batch_size) > limit:
            if self.meter.tidy():
                self._tidied_at = batch_size
                plan.restart(self.meter.scatter)
                continue
            likely = plan.at(batch_size)
            safe = plan.largest(limit, plan.most)
            if not plan.measured and likely <= limit:
                safe = max(1, min(safe, batch_size))  # something must be first, and nothing is smaller
            nearest = max((n for n in plan.measured if n <= batch_size), default=0)
            is_old = bool(plan.earlier) and not plan.measured  # and rather overestimates than underestimates
            is_over = (likely > limit and not is_old) or safe <= nearest + _CLIMB_SHARE * batch_size
            if not is_over and safe >= batch_size:
                return
            if is_over or (learned := self._learn_near(plan, safe, nearest, batch_size)) is None:
                what = f"a step of batch size {batch_size}, which was not tried, by what smaller ones took"
                raise OverLimit(what, plan.most(batch_size), limit, remedy=self.meter.remedy * (likely <= limit))
            if learned not in plan.measured:  # its step gave no bytes: there is only the trace
                return

    def _learn_near(self, plan: MemoryPlan, most: int, nearest: int, batch_size: int) -> int | None:
        """
        Learn the memory of a size above `nearest` and up to `most`; return the size, None if the module takes none.

        It is `most`, or if that raises an error that is not about memory, one with the divisors of `batch_size`.
        The error is raised if no size was measured before.
        """
        common = math.gcd(batch_size, *plan.measured)
        alike = [most // common * common, *reversed(divisors(batch_size))]
        raised = list[Exception]()
        for size in dict.fromkeys([most, *(size for size in alike if nearest < size < most)]):
            try:
                self._learn_of(size)
            except Exception as error:
                if isinstance(error, CubatchError) or is_out_of_memory(error):
                    raise
                raised.append(error)
                continue
            finally:
                self.release()
            return size
        if plan.measured:
            return None
        raise raised[0]

    def _learn_of(self, batch_size: int) -> None:
        self.draw(batch_size)
        self.clock.time(self.step, _STEPS_TO_LEARN)
        self._steps = _STEPS_TO_LEARN  # also where the clock has ranks do steps of their own

    def draw(self, batch_size: int) -> None:
        """Replace the prepared batch by one of this size, and start measuring memory."""
        self.release()
        step, self._batch_bytes = self._make(batch_size)
        self._batch_size, self._step = batch_size, step
