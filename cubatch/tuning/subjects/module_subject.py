"""PyTorch modules: one that is built by name in a worker process, and one that is in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs

from cubatch.errors import InvalidArgument
from cubatch.frameworks import heap, loader_rate, module_worker
from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.module_source import ModuleSource
from cubatch.frameworks.torch_module import check_kind
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.hardware.facts import Device
from cubatch.measure.runner import LearnsMemory
from cubatch.tuning.notes import Note, note
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subjects.bounded_subject import BoundedSubject, loader_seconds, share_cpus
from cubatch.units import first_line

_CONTENDER_SHARE = 0.8  # of the best predicted rate: the smallest and the largest such size are run in a loop too


@attrs.define(kw_only=True)
class PresentModuleSubject(BoundedSubject):
    """A module of this process, whose timings cannot be cached."""

    make: Callable[[int, int], LearnsMemory]  # makes a runner for a limit of bytes and a seed
    first_notes: Sequence[Note] = ()  # facts that a user should know, known before measuring

    def start(self, *, refresh: bool) -> Sequence[Note]:  # noqa: ARG002
        """Return the notes known before measuring, `first_notes`."""
        return self.first_notes

    @property
    def copy_batch(self) -> Callable[[Any], None] | None:
        """Function that copies a batch to the GPU of the module; None on a CPU."""
        return None if self.device.kind == "cpu" else loader_rate.copy_to(f"cuda:{self.device.index or 0}")

    def run_loop(self, result: TuningResult, request: Request) -> LoaderRate | Note | None:
        """
        Run the loop of loader and step on the CPU and return its rates, or a note of failure.

        It runs at the recommended size, and at the smallest and the largest that may be as fast. Return None on a GPU,
        whose steps overlap with loading, and with ranks, which would all have to step.
        """
        rate, runner = result.loader, self._runner
        if rate is None or result.batch_size is None or self.device.kind != "cpu":
            return None
        rates = result.loop_rates
        close = [n for n in sorted(rates) if rates[n] >= _CONTENDER_SHARE * max(rates.values())]
        if not isinstance(runner, ModuleRunner) or result.batch_size not in rates:
            return None

        try:
            turns = loader_rate.run_loops(
                self.loader, list(dict.fromkeys([result.batch_size, close[-1], close[0]])),
                lambda n: runner.loop_step(n, self.loader), seconds=loader_seconds(request), accumulate=self.accumulate,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the user's data set or module; all that was measured still holds
            return note("loop_failed", error=first_line(error))
        finally:
            runner.release()
        parts = {n: rate.rate_of_parts(result.sizes[n].samples_per_second or 0.0, n) for n in turns}
        return attrs.evolve(rate, loop_ratios=loader_rate.loop_ratios(turns, parts)) if turns else None

    def make_runner(self) -> LearnsMemory:
        """Return a runner that runs the module's steps in this process."""
        return self.make(self.memory.bytes, self.seed)


@attrs.define(kw_only=True)
class NamedModuleSubject(BoundedSubject):
    """A module that a worker process builds."""

    inputs: Any  # an example of its inputs, as JSON can hold it
    kind: Mapping[str, Any]  # mode, loss, optimizer, autocast, channels_last, compiled, accumulate; functions by name
    sources: tuple[ModuleSource, ...]  # files of the named functions, with the packages that they import

    @classmethod
    def of(
        cls, name: str, batches: Any, kind: Mapping[str, Any], device: Device | str | None, request: Request, *,
        threads: int | None = None,
    ) -> Self:  # fmt: skip
        """
        Return the subject of a module that a function makes, after checking all arguments; no user code is imported.

        `name` is "package.module:function", and `kind` has the options of the step. `device` None is the first GPU,
        else the CPU; `threads` None: one instance, with all CPUs.

        Raises:
            InvalidArgument: If there is no such function, or another argument is invalid.
        """
        sources = [ModuleSource.of(name)]
        if isinstance(batches, str):
            sources.append(ModuleSource.of(batches, "batches"))
        for field in ("loss", "optimizer"):
            value = kind[field]
            if callable(value) or hasattr(value, "step"):
                remedy = (
                    "A module that is built by name runs in a process of its own, which takes no object of this one."
                )
                raise InvalidArgument(field, value, "the name of a function too: 'package.module:function'", remedy)
            if isinstance(value, str) and ":" in value:
                sources.append(ModuleSource.of(value, field))
        check_kind(kind["mode"], kind["loss"], kind["optimizer"], kind["autocast"])
        example, multiple = module_worker.examples(batches, kind["sizes"])
        inputs, resolved = module_worker.pack(example), probe.resolve(device)
        request.goal.check_device(resolved)
        memory = hardware_memory.memory_limit(resolved, request.memory_limit)
        resolved, memory, shares = share_cpus(resolved, memory, threads)
        return cls(
            name=name, library="torch", device=resolved, mode=kind["mode"], optimizer=kind["optimizer"],
            memory=memory, seed=request.seed, budget=request.budget, accumulate=kind["accumulate"],
            inputs=inputs, kind=dict(kind), sources=tuple(sources), shares=shares, multiple=multiple,
        )  # fmt: skip

    @property
    def identity(self) -> Mapping[str, Any]:
        """The builder's name in `spec`, `library`, the options of the step, `inputs` as a digest, and the instances."""
        extents = {"input_shape": self.inputs} if isinstance(self.inputs, list) else {}  # else tensors, packed
        return {
            "spec": {"name": self.name, **extents},
            "library": self.library,
            **self.kind,
            "inputs": module_worker.digest(self.inputs),
            **self.instances,
        }

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Hashes of the sources, versions of the packages that they import, and settings of malloc and OpenMP."""
        facts: dict[str, Any] = {
            "omp_threads": os.environ.get("OMP_NUM_THREADS"), "malloc": heap.settings(self.device.kind),
        }  # fmt: skip
        for number, source in enumerate(self.sources):
            own = source.conditions()
            if number:  # where the loss or the optimizer is in a file of its own
                own = {**source.packages, f"source_sha256 of {source.name}": own["source_sha256"]}
            facts |= own
        return facts

    def make_runner(self) -> LearnsMemory:
        """Return a runner whose worker process builds the module and runs its steps."""
        arguments = {
            "build": self.name, "inputs": self.inputs, **self.kind, "memory_limit": self.memory.bytes,
            "seed": self.seed, "device": self.device.address, "untraced": None,
        }  # fmt: skip
        remedy = "In Python, autotune_module runs it in your own process if it is given the module, not its name."
        return self.remote("cubatch.frameworks.module_worker:runner", arguments, remedy)
