"""A network or layer on cubatch's own engine, on one device or on several that share a training step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch.engine import layers
from cubatch.errors import CubatchError, InvalidArgument, StoreError
from cubatch.estimate import on_sms, roofline
from cubatch.hardware import arithmetic, memory_limit as hardware_memory
from cubatch.hardware.device_list import resolve_devices
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.kernels import choice
from cubatch.measure import kernel_context
from cubatch.measure.ranks_runner import EXCHANGE_STEPS
from cubatch.measure.records import Candidate
from cubatch.measure.remote import RemoteRunner, prepare_limit
from cubatch.measure.runner import FactoryRef, RunnerFactory
from cubatch.memory import fit
from cubatch.memory.plan import plan
from cubatch.memory.process_overhead import device_bytes
from cubatch.network.graph import as_network
from cubatch.network.layer import Layer
from cubatch.network.models import SpecLike
from cubatch.tuning import store
from cubatch.tuning.exchange_cost import DataParallel
from cubatch.tuning.ladder import Ladder, added, propose, timed
from cubatch.tuning.notes import Note, note, sentence
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.store import Run
from cubatch.tuning.subject import Subject, SubjectFacts
from cubatch.workload import Workload

_ISOLATE_SHARE = 0.25  # on the CPU a plan above this share of the limit could end the user's process
_CHOICE_SHARE = 1 / 3  # of the budget, at most, for timing kernel variants
_EXCHANGE_PATIENCE = 4.0  # times the expected seconds, before measuring the exchange is given up
_L2_SETS = 2  # times the L2 cache, from which the smallest step cannot find its input there


@attrs.frozen(kw_only=True)
class NetworkSubject(Subject):
    """A network or layer that cubatch's engine runs."""

    work: Workload  # the workload, on the first device
    devices: tuple[Device, ...] | None  # all devices that share a step; None for a single device
    memory: MemoryLimit  # the memory that a step may take on each device
    isolate: bool | str  # True, False or "auto": whether steps run in a worker process, which may die
    winners: Path | None  # the file of cached choices of the fastest kernel variants; None if they are not cached

    @classmethod
    def of(
        cls, layer_spec: SpecLike, device: Device | str | None, request: Request, *,
        devices: int | Sequence[Device | str] | None, mode: str, dtype: str, optimizer: str, library: str,
        recompute: bool, isolate: bool | str,
    ) -> Self:  # fmt: skip
        """
        Return the subject, after checking the arguments of `autotune` for the network and its devices.

        `device` None is the first GPU, else the CPU; `devices` None: one device takes the whole step.

        Raises:
            InvalidArgument: If an argument is invalid, or does not apply to these devices.
            CubatchError: If a device is missing, cannot measure energy, or the engine cannot run a layer.
        """
        parts = _sharing(devices, device, mode)
        work = Workload.of(
            layer_spec, parts[0] if parts else device, mode=mode, dtype=dtype, optimizer=optimizer, library=library,
            recompute=recompute, present=True,
        )  # fmt: skip
        if not (isinstance(isolate, bool) or isolate == "auto"):
            raise InvalidArgument("isolate", isolate, 'True, False or "auto"')
        for each in parts or [work.device]:
            request.goal.check_device(each)
        for node in as_network(work.spec).nodes:
            layers.check(node.layer, node.name)
        if parts is not None:
            _check_sharing(work, isolate=isolate)
        path = store.path_of(request.store)
        return cls(
            work=work, devices=parts, memory=memory_limit(parts, work.device, request.memory_limit), isolate=isolate,
            winners=None if path is None or work.library != "cubatch" else choice.winners_path(path),
        )  # fmt: skip

    @property
    def device(self) -> Device:
        """The device that runs steps; the first if several share a step."""
        return self.work.device

    @property
    def identity(self) -> Mapping[str, Any]:
        """The spec, the workload's settings, and the devices that share a step."""
        shared = {} if self.devices is None else {"devices": [each.uuid or each.name for each in self.devices]}
        return {**self.work.settings, "spec": self.work.spec.to_mapping(), **shared}

    @property
    def multiple(self) -> int:
        """The multiple for batch sizes that fills Tensor Cores or the threads of a CPU; 1 if there is none."""
        threads = self.device.threads if self.device.kind == "cpu" else None
        return arithmetic.tensor_core_multiple(self.device, self.work.dtype) or threads or 1

    def start(self, *, refresh: bool) -> Sequence[Note]:
        """
        Return a note if there are no Tensor Cores for the dtype; with `refresh`, discard cached kernel choices.

        They are discarded here and not by a worker, so that a restarted worker finds those made in this run.
        """
        notes, dtype = [], self.work.dtype
        if dtype != "float32" and arithmetic.has_tensor_cores(self.device, dtype) is False:
            notes.append(note("no_tensor_cores", device=self.device, dtype=dtype))
        if refresh and self.winners is not None:
            try:
                choice.delete_winners(self.winners, self.device)
            except StoreError as error:
                notes.append(note("kernel_choices_kept", error=error))
        return notes

    def ladder(self, request: Request, cached: Ladder | None, *, is_finished: bool) -> Ladder:
        """
        Return candidates chosen by the memory plan and the layers, or those of the earlier call.

        Those of the earlier call (`cached`, None if there is none) are marked by whether they fit the present memory
        limit.
        """
        if cached is not None and is_finished:
            return cached
        largest = fit.largest(self.work, max(1, self.memory.bytes))
        if cached is None:
            ladder = timed(self.work, propose(self.work, request, self.memory, largest))
        else:
            ladder = cached.within(self.memory, largest)
        return attrs.evolve(ladder, facts={**ladder.facts, "note": self.memory.note})

    def runner_factory(self, ladder: Ladder, request: Request) -> RunnerFactory:
        """Return a function that makes the runner, in a worker process if a step might end this one."""
        factory, isolate = self.factory(request), self.isolate
        if isolate == "auto":
            isolate = self.device.kind == "cuda" or ladder.most_planned_bytes > _ISOLATE_SHARE * self.memory.bytes
        if self.devices is None and not isolate:
            return factory
        compiles = self.device.kind == "cuda"
        return functools.partial(
            RemoteRunner, factory, prepare_seconds=prepare_limit(request.budget, compiles=compiles)
        )  # fmt: skip

    def factory(self, request: Request) -> FactoryRef:
        """Return a reference to the runner's factory with its arguments, which another process can call."""
        arguments: dict[str, Any] = {
            "spec": self.work.spec.to_mapping(),
            **self.work.settings,
            "seed": request.seed,
            "choice_seconds": _CHOICE_SHARE * request.budget,
            "winners": None if self.winners is None else str(self.winners),
        }
        if self.devices is not None:
            addresses = [device.address for device in self.devices]
            return FactoryRef("cubatch.measure.ranks_runner:ranks_runner", arguments | {"devices": addresses})
        return FactoryRef("cubatch.measure.network_runner:network_runner", arguments | {"device": self.device.address})

    def candidate(self, ladder: Ladder, batch_size: int) -> Candidate:
        """Return a candidate of a size that the search adds, with planned peak bytes and predicted seconds."""
        return added(self.work, ladder, batch_size)

    def describe(self, ladder: Ladder) -> Mapping[str, Any]:
        """
        Return the result's fields of the network, by their names in its JSON.

        They are `spec`, `input_shape`, the settings of the workload, `l2`, and as `environment` the devices of a step.
        """
        shared = {} if self.devices is None else {"devices": [str(device) for device in self.devices]}
        return {
            "spec": self.work.spec.to_mapping(),
            "input_shape": list(self.work.input_shape),
            **self.work.settings,
            "l2": _l2(self.work, ladder),
            "environment": shared,
        }

    def facts(self, sizes: Sequence[int]) -> SubjectFacts:
        """Return FLOP, least seconds, bytes of the process, and for cubatch kernels the blocks of each layer."""
        work, rows = self.work, dict[int, Any]()
        floor = functools.partial(roofline.roofline_seconds, work.spec, library=work.library)
        floors = {n: floor(n, work.device, work.mode, work.dtype) for n in sizes}
        if work.library == "cubatch":
            overlaps = work.mode == "inference" or self.devices is not None  # as `network_runner.network_runner`
            rows = on_sms.layer_rows(
                work, sizes, kernel_context.kept_choice(work.device, self.winners, overlaps=overlaps)
            )
        return SubjectFacts(
            flops_per_sample=work.spec.flops(work.mode),
            roofline_seconds={n: seconds for n, seconds in floors.items() if seconds is not None},
            layers=rows,
            device_bytes={n: device_bytes(work, n, self.memory.overhead_bytes) for n in sizes},
        )

    def complete(self, result: TuningResult, run: Run, request: Request) -> TuningResult:
        """
        Return the result with the cost of sharing a step among devices, cached or measured at its batch size.

        If measuring fails, a sentence in the result reports it. The result of a single device is unchanged.
        """
        if self.devices is None or result.batch_size is None:
            return result
        cached = (run.limit or {}).get("exchange")
        cost = None if cached is None else DataParallel(**cached)
        if cost is None or cost.batch_size != result.batch_size:
            try:
                seconds = _exchange_seconds(self.factory(request), result, request)
            except CubatchError as error:
                unknown = sentence(note("shared_step_unknown", count=len(self.devices), error=error))
                return attrs.evolve(result, reasons=(*result.reasons, unknown))
            cost = DataParallel.of([str(device) for device in self.devices], result.batch_size, seconds)
            run.save_exchange(attrs.asdict(cost))
        reasons = (*result.reasons, sentence(note("shared_step", cost=cost)))
        return attrs.evolve(result, data_parallel=cost, reasons=reasons)


def memory_limit(devices: Sequence[Device] | None, device: Device, requested: int | str | None) -> MemoryLimit:
    """
    Return the memory that a step may take on each device: the least of all; ranks on a CPU divide the free memory.

    Args:
        devices: The devices that share a step; None for `device` alone.
        requested: As for `hardware.memory_limit`.
    """
    if devices is None:
        return hardware_memory.memory_limit(device, requested)
    least = min((hardware_memory.memory_limit(each, requested) for each in devices), key=lambda limit: limit.bytes)
    if device.kind == "cpu":
        share = hardware_memory.memory_limit(device).bytes // len(devices)
        if share < least.bytes:
            reason = f"{len(devices)} ranks share what is free"
            return attrs.evolve(least, bytes=share, note=reason, is_lowered=requested is not None)
    return least


def _sharing(
    devices: int | Sequence[Device | str] | None, device: Device | str | None, mode: str
) -> tuple[Device, ...] | None:
    """Return the devices that share a step, None for a single one; raise InvalidArgument outside of training."""
    parts = resolve_devices(devices, device)
    if parts is not None and mode != "training":
        remedy = "In inference devices have nothing to exchange: tune one of them."
        raise InvalidArgument("mode", mode, '"training" where devices share a step', remedy)
    return parts


def _check_sharing(work: Workload, *, isolate: bool | str) -> None:
    """Raise InvalidArgument for a single layer, which has no loss, and for steps in this process."""
    if as_network(work.spec) is not work.spec:
        raise InvalidArgument("layer_spec", work.name, "a network where devices share a training step")
    if isolate is False:
        allowed = 'True or "auto" where devices share a step, each in a process of its own'
        raise InvalidArgument("isolate", isolate, allowed)


def _l2(work: Workload, ladder: Ladder) -> str:
    """Return "cold" if the smallest candidate of a single layer needs at least twice the L2 cache, else "warm"."""
    l2_bytes = work.device.l2_bytes
    if not isinstance(work.spec, Layer) or not ladder.candidates or not l2_bytes:
        return "warm"
    smallest = plan(work, ladder.candidates[0].batch_size)
    return "cold" if smallest.total - smallest.fixed_bytes >= _L2_SETS * l2_bytes else "warm"


def _exchange_seconds(factory: FactoryRef, result: TuningResult, request: Request) -> dict[str, float]:
    step = next(m.latency_seconds or 0.0 for m in result.measurements if m.batch_size == result.batch_size)
    allowed = max(prepare_limit(request.budget), _EXCHANGE_PATIENCE * EXCHANGE_STEPS * step)
    runner = RemoteRunner(factory, prepare_seconds=allowed)
    try:
        seconds: dict[str, float] = runner.call("measure_exchange", batch_size=result.batch_size)
    finally:
        runner.close()
    return seconds
