"""Which runner measures a network on our engine, and in which process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.measure.remote import RemoteRunner, prepare_limit
from cubatch.measure.runner import FactoryRef, RunnerFactory
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.limits import Limits
from cubatch.workload import Workload

# On the CPU a plan above this share of the limit could take the user's process with it.
_ISOLATE_SHARE = 0.25
# Timing kernel variants takes at most this share of the budget.
_CHOICE_SHARE = 1 / 3


def factory(work: Workload, limits: Limits, winners: Path | None, devices: Sequence[Device] | None) -> FactoryRef:
    """Name the maker of the runner and its arguments, as another process can read them."""
    arguments: dict[str, Any] = {
        "spec": work.spec.to_mapping(),
        **work.settings,
        "seed": limits.seed,
        "choice_seconds": _CHOICE_SHARE * limits.budget,
        "winners": None if winners is None else str(winners),
    }
    if devices is not None:
        arguments["devices"] = [device.address for device in devices]
        return FactoryRef("cubatch.measure.ranks_runner:ranks_runner", arguments)
    return FactoryRef("cubatch.measure.network_runner:network_runner", arguments | {"device": work.device.address})


def isolated(made: FactoryRef, limits: Limits) -> RunnerFactory:
    """Have a worker process make the runner, which may then die."""
    return functools.partial(RemoteRunner, made, prepare_seconds=prepare_limit(limits.budget))


def is_isolated(isolate: bool | str, device: Device, ladder: Ladder, room: MemoryLimit) -> bool:  # noqa: FBT001
    """Decide once for all candidates whether they run in a worker."""
    if isolate != "auto":
        return bool(isolate)
    return device.kind == "cuda" or ladder.most_planned_bytes > _ISOLATE_SHARE * room.bytes
