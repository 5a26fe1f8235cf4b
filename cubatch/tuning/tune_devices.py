"""What autotune() does otherwise where several devices share a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import attrs

from cubatch.errors import CubatchError, InvalidArgument
from cubatch.hardware import room as hardware_room
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.hardware.several import several
from cubatch.measure.ranks_runner import EXCHANGE_STEPS
from cubatch.measure.remote import RemoteRunner, prepare_limit
from cubatch.measure.runner import FactoryRef
from cubatch.network.graph import as_network
from cubatch.tuning.data_parallel import DataParallel, data_parallel
from cubatch.tuning.limits import Limits
from cubatch.tuning.results import TuningResult
from cubatch.tuning.stored_run import Run
from cubatch.tuning.story import hand_out
from cubatch.workload import Workload

PATIENT = 4.0  # times what steps should take, that their exchange may


def sharing(
    devices: int | Sequence[Device | str] | None, device: Device | str | None, mode: str
) -> tuple[Device, ...] | None:
    """
    Give the devices that share a step; None where there is one.

    Raises:
        InvalidArgument: If the mode is not training, whose gradients are all that devices exchange; or as `several`.
    """
    found = several(devices, device)
    if found is not None and mode != "training":
        remedy = "In inference devices have nothing to exchange: tune one of them."
        raise InvalidArgument("mode", mode, '"training" where devices share a step', remedy)
    return found


def check(work: Workload, devices: Sequence[Device] | None, *, isolate: bool | str) -> None:
    """Refuse a layer on its own, which has no loss to share, and to do in this process what several share."""
    if devices is None:
        return
    if as_network(work.spec) is not work.spec:
        raise InvalidArgument("layer_spec", work.name, "a network where devices share a training step")
    if isolate is False:
        allowed = 'True or "auto" where devices share a step, each in a process of its own'
        raise InvalidArgument("isolate", isolate, allowed)


def memory_limit(devices: Sequence[Device] | None, device: Device, requested: int | str | None) -> MemoryLimit:
    """Say how much memory each of the devices may take: the least of them all; ranks on a CPU share what is free."""
    if devices is None:
        return hardware_room.memory_limit(device, requested)
    rooms = [hardware_room.memory_limit(one, requested) for one in devices]
    least = min(rooms, key=lambda room: room.bytes)
    if device.kind == "cpu":
        share = hardware_room.memory_limit(device).bytes // len(devices)
        if share < least.bytes:
            note = f"{len(devices)} ranks share what is free"
            return attrs.evolve(least, bytes=share, note=note, is_lowered=requested is not None)
    return least


def with_exchange(
    result: TuningResult, run: Run, made: FactoryRef, devices: Sequence[Device] | None, limits: Limits
) -> TuningResult:
    """
    Add what it costs the devices to share a step of the answer's size: as it was kept, or measured now.

    Where that fails the answer is handed out all the same, and says so.
    """
    if devices is None or result.batch_size is None:
        return result
    found = _kept(run, result.batch_size)
    if found is None:
        try:
            seconds = _measured(made, result, limits)
        except CubatchError as error:
            about = f"Sizes and rates above are those of one of {len(devices)} devices"
            sentence = f"{about}; what sharing a step costs them is not known: {error}"
            return attrs.evolve(result, reasons=(*result.reasons, sentence))
        except BaseException as stop:  # Ctrl-C: the answer is there
            hand_out(stop, result, run)
            raise
        found = DataParallel.of([str(device) for device in devices], result.batch_size, seconds)
        run.save_exchange(attrs.asdict(found))
    sentence = f"{found}. Sizes and rates above are those of one of them."
    return attrs.evolve(result, data_parallel=found, reasons=(*result.reasons, sentence))


def _kept(run: Run, batch_size: int) -> DataParallel | None:
    """Give what an earlier call measured at this size, if it can be read."""
    with contextlib.suppress(TypeError, ValueError):
        found = data_parallel((run.limit or {}).get("exchange"))
        return found if found is not None and found.batch_size == batch_size else None
    return None


def _measured(made: FactoryRef, result: TuningResult, limits: Limits) -> dict[str, float]:
    step = next(m.latency_seconds or 0.0 for m in result.measurements if m.batch_size == result.batch_size)
    allowed = max(prepare_limit(limits.budget), PATIENT * EXCHANGE_STEPS * step)
    runner = RemoteRunner(made, prepare_seconds=allowed)
    try:
        taken: dict[str, float] = runner.call("exchange", batch_size=result.batch_size)
    finally:
        runner.close()
    return taken
