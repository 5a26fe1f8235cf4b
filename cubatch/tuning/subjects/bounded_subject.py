"""A subject that another framework runs: its memory at large batch sizes is predicted from steps at small sizes."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cubatch import checks
from cubatch.errors import DoesNotFit, InvalidArgument
from cubatch.frameworks import heap, loader_rate, optimizers
from cubatch.frameworks.batch_sources import INPUTS
from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.frameworks.pinned_instances import PinnedInstances
from cubatch.frameworks.remote_bounded_runner import RemoteBoundedRunner
from cubatch.hardware import host
from cubatch.hardware.device_list import cpu_groups
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.measure.records import Candidate, Measured
from cubatch.measure.remote import prepare_limit
from cubatch.measure.runner import FactoryRef, LearnsMemory, RunnerFactory
from cubatch.tuning.decision import is_near
from cubatch.tuning.ladder import Ladder, between, of_memory, plain
from cubatch.tuning.notes import STATE_REMAINS, Note, note, of_remark, sentence
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subject import Revision, Subject
from cubatch.units import first_line

_LOADER_SHARE, _LEAST_LOADER_SECONDS, _MOST_LOADER_SECONDS = 0.1, 1.0, 10.0  # of the budget, for the data loader
_LOADER_SIZES = 4  # batch sizes, roughly, at which it is timed besides the recommended one
_LEAST_TRACE_SECONDS, _TRACE_SHARE = 5.0, 0.25  # seconds and share of the budget, of which a trace may take the larger
_LOOK_SHARE = 0.05
"""Share of the budget for steps of small sizes, from which the memory of larger ones is predicted."""

LOSS = " loss is called with the module's output and returns a scalar."
"""It names an argument of the Python function; the command line leaves it out."""

_CACHED_FACTS = {"memory_bytes", "largest_batch_size", "first", "dtype"}
"""What must be cached with a ladder for it to be used again."""


@attrs.define(kw_only=True)
class BoundedSubject(Subject):
    """A subject whose steps run in another framework, with memory predicted from small batch sizes."""

    name: str  # its name in results and messages
    library: str  # the framework's name in results
    device: Device  # device, memory: see `Subject`
    memory: MemoryLimit
    mode: str  # mode, optimizer, seed, budget, accumulate, loader: as for `autotune_module`
    seed: int
    budget: float = 60.0
    accumulate: int = 1
    loader: Any = None
    multiple: int = 1  # the user's data makes batches of multiples of it, as far as known before a runner is made
    optimizer: object | None = None  # None for a subject that is never trained: an ONNX file
    # versions that are added to the `environment` of the result
    versions: Mapping[str, Any] = attrs.field(factory=dict)
    # CPUs of each instance that steps at the same time, by `share_cpus`; empty: one instance, not bound
    shares: Sequence[Sequence[int]] = ()
    _runner: LearnsMemory | None = attrs.field(default=None, init=False)  # None before its first use

    @abc.abstractmethod
    def make_runner(self) -> LearnsMemory:
        """Return a runner whose steps take at most the bytes of the limit `memory`."""

    def start(self, *, refresh: bool) -> Sequence[Note]:  # noqa: ARG002
        """Return a note on the thresholds of glibc's heap in the worker; none if the user has set them."""
        is_raised, variables = heap.is_raised(self.device.kind), heap.format_variables(heap.RAISED)
        return [note("heap_thresholds", variables=variables)] if is_raised else []

    def ladder(self, request: Request, cached: Ladder | None, *, is_finished: bool) -> Ladder:
        """
        Return batch sizes up to the largest that fits, predicted from small sizes or `cached` by an earlier call.

        `cached` None: no earlier call has cached any.

        Raises:
            DoesNotFit: If not even one sample fits.
            InvalidArgument: If the step does not run, or its memory is unknown and no maximum size is given.
        """
        if cached is None or not cached.facts.keys() >= _CACHED_FACTS:
            return self._propose(request)
        if cached.largest is None or is_finished:
            return cached
        fits = [step.batch_size for step in cached.candidates if (step.predicted_peak_bytes or 0) <= self.memory.bytes]
        if not fits and cached.facts["first"] > self.memory.bytes:
            raise self._does_not_fit(cached.facts["first"], self.memory.bytes)
        return cached.within(self.memory, max(fits, default=1))

    def _propose(self, request: Request) -> Ladder:
        runner = self._started()
        share = 0.0 if request.batch_sizes else _LOOK_SHARE  # listed sizes are taken as they come
        look = runner.look(
            seconds=share * request.budget,
            top=max(request.batch_sizes) if request.batch_sizes else request.max_batch_size,
            trace_seconds=max(_LEAST_TRACE_SECONDS, _TRACE_SHARE * request.budget),
        )
        memory, notes = self.memory, list[Note]()
        samples = look.get("num_samples") or (None if self.loader is None else loader_rate.num_samples(self.loader))
        if samples is not None and request.batch_sizes is None and samples < (request.max_batch_size or samples + 1):
            request = attrs.evolve(request, max_batch_size=max(samples, request.current or 1, request.multiple_of))
            notes.append(note("data_set_size", count=samples))
        if (multiple := math.lcm(self.multiple, look.get("multiple", 1))) > 1 and request.batch_sizes is None:
            request = attrs.evolve(request, multiple_of=math.lcm(request.multiple_of, multiple))
            notes.append(note("multiples_only", multiple=multiple))
        if (left := look.get("memory_bytes", memory.bytes)) < memory.bytes:
            reason = "a copy of the parameters that its steps change takes the rest"
            memory = attrs.evolve(memory, bytes=left, note=reason, is_lowered=True)
            notes.append(note("memory_lowered", limit_bytes=left, reason=reason))
        largest, why_not = look["largest"], look["why_not"]
        if why_not:
            is_bounded = largest is not None
            bound = (
                note("memory_measured", reason=why_not) if is_bounded else note("memory_not_bounded", reason=why_not)
            )
            notes.append(bound)
        if largest is None:
            self._check_unbounded(request, look.get("raised"), why_not)
            ladder = Ladder(tuple(plain(request)), None, memory.bytes)
        elif not largest:
            raise self._does_not_fit(look["first"] or 0, memory.bytes)
        else:
            ladder = of_memory(request, memory, largest, runner.predicted)
            if why_not and request.batch_sizes:  # small steps say little: the runner runs more before it refuses
                opened = tuple(attrs.evolve(step, over_limit=False) for step in ladder.candidates)
                ladder = attrs.evolve(ladder, candidates=opened)
        if look.get("is_compiled") and request.batch_sizes is None and len(ladder.candidates) > 1:
            ladder, without_one = _without_one(ladder, request)
            notes += without_one
        facts = {"memory_bytes": memory.bytes, "note": memory.note, **look, "multiple": multiple}
        return attrs.evolve(ladder, facts=facts, notes=tuple(notes))

    def _check_unbounded(self, request: Request, raised: str | None, why_not: str | None) -> None:
        """
        Raise InvalidArgument if the step does not run, or if its memory is unknown and the user gave no maximum size.

        `raised` is the error of a step on two samples, None if it ran; `why_not` is why memory cannot be predicted.
        """
        if raised:
            allowed = f"one whose {self.mode} step runs on batches of its inputs"
            raise InvalidArgument("module", self.name, allowed, f"On two samples it raised {raised}. {self._needs()}")
        if request.max_batch_size is None and request.batch_sizes is None:
            raise InvalidArgument("max_batch_size", None, "given here", f"Memory cannot be bounded: {why_not}.")

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that has tried small batch sizes; None without a worker."""
        return None if self._runner is None else self._runner.worker_pid

    def runner_factory(self, ladder: Ladder, request: Request) -> RunnerFactory:  # noqa: ARG002
        """Return a function that makes the runner on the first call, and then returns the same one."""
        return self._started

    def candidate(self, ladder: Ladder, batch_size: int) -> Candidate:
        """Return a candidate of a size that the search adds, with predicted peak bytes."""
        step = between(batch_size, ladder.candidates)
        return attrs.evolve(step, predicted_peak_bytes=self._started().predicted(batch_size))

    def close(self) -> None:
        """Close the runner, if there is one."""
        if self._runner is not None:
            self._runner.close()

    def revise(self, ladder: Ladder, measured: Measured, request: Request) -> Revision:
        """
        Return candidates and timings with the final memory predictions, and notes of the runner.

        A batch size that ran keeps the prediction made just before. The largest is not raised above the proposed one,
        since no larger size may have been tried. It is rough, "is_rough" in `facts`, if the sizes that ran took little
        memory; a traced one that ran is not.
        """
        remarks, notes = ladder.facts.get("remarks", []), list[Note]()
        is_traced = ladder.facts.get("why_not") is None
        if self._runner is not None:
            report = self._runner.report()
            remarks = report["remarks"]
            predicted = {row["batch_size"]: row["predicted_bytes"] for row in report["history"]}
            largest, is_rough = ladder.largest, bool(ladder.facts.get("is_rough"))
            if (forecast := report["forecast"]) is not None:
                largest = forecast["largest"] or ladder.largest
                if not request.batch_sizes:
                    largest = min((size for size in (largest, ladder.largest) if size), default=None)
                ran = max((timing.batch_size for timing in measured.timings), default=0)
                has_run = is_traced and is_near(ran, largest or 0)
                is_rough = forecast["is_rough"] and not has_run
                predicted = {**dict(forecast["bytes"]), **predicted}
            ladder = attrs.evolve(
                ladder, candidates=_predicted(ladder.candidates, predicted), largest=largest,
                facts={**ladder.facts, "remarks": remarks, "is_rough": is_rough},
            )  # fmt: skip
            measured = attrs.evolve(measured, added=_predicted(measured.added, predicted))
        if ladder.facts.get("is_rough"):
            rough = note("largest_unchecked", most=ladder.largest) if is_traced else note("largest_unknown")
            notes.append(rough)
        return Revision(ladder=ladder, measured=measured, notes=[*notes, *map(of_remark, remarks)])

    def measure_loader(self, result: TuningResult, request: Request) -> LoaderRate | Note | None:
        """
        Return the data loader's rate at the recommended and some other measured batch sizes; a note if that fails.

        A single measured size counts as recommended. The result is None without a loader or without a fastest size.
        """
        if self.loader is None or result.fastest_batch_size is None:
            return None
        seconds = loader_seconds(request)
        try:
            sizes = sorted(result.loop_rates)
            return loader_rate.measure(
                self.loader, result.batch_size or result.fastest_batch_size, seconds=seconds, copy=self.copy_batch,
                others={sizes[0], *sizes[:: -max(1, len(sizes) // _LOADER_SIZES)]},
                shares_cpus=self.device.kind == "cpu",
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the user's data set; the timings of the steps still hold
            return note("loader_unknown", error=first_line(error))

    @property
    def copy_batch(self) -> Callable[[Any], None] | None:
        """Function that copies a batch of the loader to the device; None if there is nothing to copy."""
        return None

    def describe(self, ladder: Ladder) -> Mapping[str, Any]:
        """
        Return the result's fields of the subject, by their names in its JSON.

        They are `spec` with a `name`, `mode`, `dtype`, `optimizer`, `library`, `accumulate`, `l2`, and additions to
        `environment`.
        """
        return {
            "spec": {"name": self.name},
            "mode": self.mode,
            "dtype": ladder.facts["dtype"],
            "optimizer": optimizers.name_of(self.optimizer),
            "library": self.library,
            "accumulate": self.accumulate,
            "l2": "warm",
            "environment": {**self.versions, **self.instances},
        }

    @property
    def instances(self) -> dict[str, int]:
        """
        How many instances step at the same time, "instances", and how many CPUs each is bound to, "threads".

        Empty for a single instance that is not bound to CPUs.
        """
        return {"instances": len(self.shares), "threads": len(self.shares[0])} if self.shares else {}

    def remote(self, path: str, arguments: Mapping[str, Any], remedy: str) -> LearnsMemory:
        """
        Return a runner whose worker processes, one for each instance, call a factory with these arguments.

        `path` is the factory as "module:function". `remedy` is the next step in the message of a worker that fails.
        """
        factory, seconds = FactoryRef(path, arguments), prepare_limit(self.budget)
        if self.shares:
            return PinnedInstances(factory, self.shares, prepare_seconds=seconds, remedy=remedy)
        return RemoteBoundedRunner(factory, prepare_seconds=seconds, remedy=remedy)

    def remedy(self, ladder: Ladder) -> str:
        """Return sentences on why all batch sizes may have failed: state of earlier steps, or inputs without trace."""
        remains = [
            sentence(of_remark(each)) for each in ladder.facts.get("remarks", []) if each["code"] == STATE_REMAINS
        ]
        return " ".join([*remains, *([] if ladder.facts.get("why_not") is None else [self._needs()])])

    def _started(self) -> LearnsMemory:
        if self._runner is None:
            self._runner = self.make_runner()
        return self._runner

    def _needs(self) -> str:
        return INPUTS + LOSS * (self.mode == "training")

    def _does_not_fit(self, needed_bytes: int, available_bytes: int) -> DoesNotFit:
        return DoesNotFit(self.name, str(self.device), needed_bytes, available_bytes, self.mode)


def share_cpus(
    device: Device, memory: MemoryLimit, threads: int | None
) -> tuple[Device, MemoryLimit, list[list[int]]]:  # fmt: skip
    """
    Return the device and memory of one instance of `threads` threads, and the CPUs of each of as many as fit.

    If `threads` is None, device and memory are returned unchanged, with an empty list of CPUs.

    Raises:
        InvalidArgument: If `threads` is no number from 1 to that of the CPUs, or the device is a GPU.
    """
    if threads is None:
        return device, memory, []
    if device.kind != "cpu":
        raise InvalidArgument("threads", threads, f"left out for {device}", 'Or pass device="cpu".')
    shares = cpu_groups(checks.check_whole("threads", threads, most=host.cpu_threads()))
    if len(shares) > 1:
        share = memory.bytes // len(shares)
        memory = attrs.evolve(memory, bytes=share, note=f"{len(shares)} instances share it", is_lowered=True)
    return attrs.evolve(device, threads=threads), memory, shares


def loader_seconds(request: Request) -> float:
    """Return the seconds for timing a data loader: a tenth of the budget, but 1 to 10 s."""
    return min(_MOST_LOADER_SECONDS, max(_LEAST_LOADER_SECONDS, _LOADER_SHARE * request.budget))


def _without_one(ladder: Ladder, request: Request) -> tuple[Ladder, list[Note]]:
    """
    Return the candidates without batch size 1, and a note: torch.compile compiles size 1 separately.

    They are unchanged if the user's current size is 1.
    """
    rest = tuple(step for step in ladder.candidates if step.batch_size > 1)
    if request.current == 1 or len(rest) == len(ladder.candidates):
        return ladder, []
    return attrs.evolve(ladder, candidates=rest), [note("compiled_without_one")]


def _predicted(steps: Sequence[Candidate], num_bytes: Mapping[int, int | None]) -> tuple[Candidate, ...]:
    return tuple(
        attrs.evolve(step, predicted_peak_bytes=num_bytes.get(step.batch_size, step.predicted_peak_bytes))
        for step in steps
    )
