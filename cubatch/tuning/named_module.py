"""A PyTorch module that is made by name: what is asked of it, what its timings depend on, and a worker that runs it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch.engine.conditions import conditions
from cubatch.errors import CubatchError, InvalidArgument
from cubatch.frameworks import module_worker
from cubatch.frameworks.module_source import ModuleSource
from cubatch.frameworks.torch_module import check_kind
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.measure import heap
from cubatch.measure.goal import Goal
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef
from cubatch.tuning import store
from cubatch.tuning.limits import Limits


class WorkersModule(RemoteRunner):
    """A `ModuleRunner` in a worker process."""

    _ran: list[dict[str, int]] = []  # noqa: RUF012 - replaced, never changed
    _notes: list[str] = []  # noqa: RUF012 - as above
    _page_faults: list[dict[str, Any]] = []  # noqa: RUF012 - as above
    _foreseen: dict[str, Any] | None = None

    def look(self, *, seconds: float, top: int | None) -> dict[str, Any]:
        """Have it find out what steps take: see `ModuleRunner.look`."""
        facts: dict[str, Any] = self.call("look", seconds=seconds, top=top)
        return facts

    def predicted(self, batch_size: int) -> int | None:
        """Say what a step takes: see `ModuleRunner.predicted`; None where the worker died since it was asked last."""
        with contextlib.suppress(CubatchError):  # whether a size fits is seen again when it is prepared
            num_bytes: int | None = self.call("predicted", batch_size=batch_size)
            return num_bytes
        return None

    @property
    def foreseen(self) -> dict[str, Any] | None:
        """Say what was known at last: see `ModuleRunner.foreseen`; None where the worker died last."""
        return self._foreseen

    @property
    def ran(self) -> list[dict[str, int]]:
        """Sizes that have run, and their memory: see `ModuleRunner.ran`; none where the worker died last."""
        return self._ran

    @property
    def notes(self) -> list[str]:
        """What is to be told of the memory of its steps, as far as the worker lived to tell it."""
        return self._notes

    @property
    def page_faults(self) -> list[dict[str, Any]]:
        """What page faults took of the steps of each size, as far as the worker lived to tell it."""
        return self._page_faults

    def close(self) -> None:
        """End the worker, after asking it for the last time."""
        if self.worker_pid is not None:
            with contextlib.suppress(CubatchError):
                self._ran, self._notes = self.call("ran"), self.call("notes")
                self._page_faults, self._foreseen = self.call("page_faults"), self.call("foreseen")
        super().close()


@attrs.frozen(kw_only=True)
class NamedModule:
    """
    What is asked of a module that is made by name.

    Attributes:
        name: "package.module:build".
        inputs: An example of its inputs, as JSON can hold it.
        kind: mode, loss, optimizer, autocast, channels_last, compiled: how it is stepped, functions by name.
        device: What it runs on.
        sources: Of the functions: their files and what these import.
    """

    name: str
    inputs: Any
    kind: Mapping[str, Any]
    device: Device
    sources: tuple[ModuleSource, ...]

    @classmethod
    def of(cls, name: str, example_inputs: Any, kind: Mapping[str, Any], device: Device | str | None) -> Self:
        """
        Check what a public function was given; nothing of the user's is imported.

        Raises:
            InvalidArgument: If there is no such function, or one of the others makes no sense.
        """
        sources = [ModuleSource.of(name)]
        for field in ("loss", "optimizer"):
            value = kind[field]
            if callable(value):
                remedy = "A module that is made by name runs in a process of its own, which cannot be given a function."
                raise InvalidArgument(field, value, "the name of a function too: 'package.module:function'", remedy)
            if isinstance(value, str) and ":" in value:
                sources.append(ModuleSource.of(value, field))
        check_kind(kind["mode"], kind["loss"], kind["optimizer"], kind["autocast"])
        return cls(
            name=name, inputs=module_worker.pack(example_inputs), kind=dict(kind), device=probe.resolve(device),
            sources=tuple(sources),
        )  # fmt: skip

    def open(
        self,
        place: bool | str | Path,  # noqa: FBT001
        goal: Goal,
        limits: Limits,
        memory_limit: int | str | None,
        room: MemoryLimit,
    ) -> store.Run:
        """Open the run that `store=` means, under all that its timings depend on."""
        extents = {"input_shape": self.inputs} if isinstance(self.inputs, list) else {}  # else tensors, packed
        identity = {
            "spec": {"name": self.name, **extents},
            "library": "torch",
            **self.kind,
            "inputs": module_worker.digest(self.inputs),
            "device": self.device.uuid or self.device.name,
            "mig": self.device.mig,
            **attrs.asdict(goal),
            **limits.identity,
            "memory_limit": memory_limit,
        }
        return store.open_run(
            store.path_of(place), identity=identity, conditions=self._conditions(), budget=limits.budget,
            memory_bytes=room.bytes, refresh=place == "refresh",
        )  # fmt: skip

    def runner(self, memory_limit: int, seed: int) -> WorkersModule:
        """Start a worker that makes the module and steps it."""
        arguments = {
            "build": self.name, "inputs": self.inputs, **self.kind, "memory_limit": memory_limit, "seed": seed,
            "device": self.device.address,
        }  # fmt: skip
        remedy = "In Python, autotune_module runs it in your own process where it is given the module and not its name."
        return WorkersModule(FactoryRef("cubatch.frameworks.module_worker:runner", arguments), remedy=remedy)

    def _conditions(self) -> dict[str, Any]:
        malloc = heap.settings(self.device.kind)
        found: dict[str, Any] = {"omp_threads": os.environ.get("OMP_NUM_THREADS"), "malloc": malloc}
        for number, source in enumerate(self.sources):
            facts = source.conditions()
            if number:  # where the loss or the optimiser is in a file of its own
                facts = {**source.packages, f"source_sha256 of {source.name}": facts["source_sha256"]}
            found |= facts
        return found | conditions(self.device)
