"""From what was measured to what a result says: the settings beside it, the answer, the rows of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from cubatch.engine.conditions import environment
from cubatch.errors import CubatchError
from cubatch.estimate import on_sms, roofline
from cubatch.hardware import arithmetic
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.measure import kernel_choice
from cubatch.measure.goal import Goal
from cubatch.measure.records import Measured, Recorder
from cubatch.memory.beside import device_bytes
from cubatch.memory.plan import plan
from cubatch.network.layer import Layer
from cubatch.tuning import answer as answers
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.limits import Limits
from cubatch.tuning.results import TuningResult
from cubatch.tuning.stored_run import Run
from cubatch.workload import Workload

_DEVICE_FACTS = (
    "name", "kind", "slug", "compute_capability", "num_sms", "uuid", "mig", "memory_bytes", "power_limit_watts",
    "threads",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Story:
    """
    All that a result says beside the measurements.

    Attributes:
        goal, limits, ladder: What was asked, and which sizes that made.
        setting: What stands in the result as it is.
        facts: What is worked out for the sizes of the ladder and those that the search added.
        multiple: Of which those that the search adds are multiples.
    """

    goal: Goal
    limits: Limits
    ladder: Ladder
    setting: Mapping[str, Any]
    facts: Callable[[Sequence[int]], Mapping[str, Any]]
    multiple: int = 1

    def answer(self, measured: Measured, run: Run, *, partial: bool = False) -> TuningResult:
        """
        Apply the rule of the answer to what was measured.

        How steps were launched stands in the result's `environment`: "launches" of a step, at the size that was
        measured last; whether they are one CUDA "graph"; the "refusal" where they are not.
        """
        setting = {**self.setting, "disturbed": bool(run.disturbed)}
        if measured.launch is not None:
            setting["environment"] = {**setting["environment"], "launch": dict(measured.launch)}
        rungs = [*self.ladder.candidates, *measured.added]
        return answers.answer(
            rungs,
            measured,
            goal=self.goal,
            setting=setting,
            largest_batch_size=self.ladder.largest,
            asked=self.limits.batch_sizes is not None,
            multiple=self.multiple,
            caveats=run.caveats,
            notes=[*run.notes, *launch_notes(measured.launch)],
            partial=partial,
            **self.facts([rung.batch_size for rung in rungs]),
        )

    @contextmanager
    def told_on_interrupt(self, recorder: Recorder, run: Run) -> Iterator[None]:
        """Hand out what there is with Ctrl-C, or whatever else ends a run from outside, as `partial`; say `is_kept`."""
        try:
            yield
        except CubatchError:  # says itself what became of the run
            raise
        except BaseException as stop:
            hand_out(stop, self.answer(recorder.measured, run, partial=True), run)
            raise


def hand_out(stop: BaseException, partial: TuningResult, run: Run) -> None:
    """Let what ends a run from outside carry what there is, and whether it is kept."""
    stop.partial, stop.is_kept = partial, run.is_kept  # type: ignore[attr-defined]


def launch_notes(launch: Mapping[str, Any] | None) -> list[str]:
    """
    Say why steps of our kernels were no graphs: small batches then wait for the host.

    Args:
        launch: As of `Measured`.
    """
    if launch is None or launch["launches"] is None or not launch["refusal"]:
        return []
    sentence = (
        f"The {launch['launches']} launches of a step were made one by one, which small batches may wait for: no CUDA "
        f"graph could be made of them ({launch['refusal']})."
    )
    return [sentence]


def of_network(
    work: Workload,
    goal: Goal,
    limits: Limits,
    room: MemoryLimit,
    ladder: Ladder,
    winners: Path | None,
    devices: Sequence[Device] | None = None,
) -> Story:
    """
    Begin the story of a network or layer; `winners` is the file of the kernels that won.

    Those that share a step stand in `environment`: whatever ends a run, its times are theirs together.
    """

    def facts(sizes: Sequence[int]) -> dict[str, Any]:
        floors = {n: roofline.roofline_seconds(work.spec, n, work.device, work.mode, work.dtype) for n in sizes}
        rows: dict[int, Any] = {}
        if work.library == "cubatch":  # asked for now, so that what won in this run is known
            overlaps = work.mode == "inference" or devices is not None  # as `network_runner.network_runner`
            choice = kernel_choice.kept_choice(work.device, winners, overlaps=overlaps)
            rows = on_sms.layer_rows(work, sizes, choice)
        return {
            "flops_per_sample": work.spec.flops(work.mode),
            "roofline_seconds": {n: seconds for n, seconds in floors.items() if seconds is not None},
            "layers": rows,
            "device_bytes": {n: device_bytes(work, n, room.reserve_bytes) for n in sizes},
        }

    setting = {
        "spec": work.spec.to_mapping(),
        "input_shape": list(work.input_shape),
        **work.settings,
        **_setting(work.device, goal, limits, room, ladder.memory_bytes),
        "l2": _l2(work, ladder),
    }
    if devices is not None:
        setting["environment"] = {**setting["environment"], "devices": [str(device) for device in devices]}
    return Story(
        goal=goal, limits=limits, ladder=ladder, setting=setting, facts=facts, multiple=_multiple(work)
    )  # fmt: skip


def of_callable(device: Device, goal: Goal, limits: Limits, room: MemoryLimit, ladder: Ladder) -> Story:
    """Begin the story of something of which nothing is known but that it can be called."""
    setting = _setting(device, goal, limits, room, ladder.memory_bytes) | {"l2": "warm"}
    return Story(goal=goal, limits=limits, ladder=ladder, setting=setting, facts=lambda _: {})


def of_module(
    name: str, library: str, dtype: str, mode: str, optimizer: object | None, device: Device, goal: Goal,
    limits: Limits, room: MemoryLimit, ladder: Ladder,
) -> Story:  # fmt: skip
    """Begin the story of what another library runs, of which its name, its dtype and its memory are known."""
    setting = {
        "spec": {"name": name},
        "mode": mode,
        "dtype": dtype,
        "optimizer": getattr(optimizer, "__name__", "a function") if callable(optimizer) else optimizer,
        "library": library,
        **_setting(device, goal, limits, room, ladder.memory_bytes),
        "l2": "warm",
    }
    return Story(goal=goal, limits=limits, ladder=ladder, setting=setting, facts=lambda _: {})


def _setting(device: Device, goal: Goal, limits: Limits, room: MemoryLimit, memory_bytes: int | None) -> dict[str, Any]:
    facts = device.to_mapping()
    return {
        "limits": {
            "max_batch_size": limits.max_batch_size,
            "memory_bytes": memory_bytes,
            "latency_seconds": goal.latency_limit,
        },
        "budget_seconds": limits.budget,
        "seed": limits.seed,
        "device": {name: facts[name] for name in _DEVICE_FACTS} | {"free_bytes": room.free_bytes},
        "environment": environment(device),
    }


def _multiple(work: Workload) -> int:
    """Say what sizes that the search adds are multiples of: others leave Tensor Cores, or threads of a CPU, idle."""
    threads = work.device.threads if work.device.kind == "cpu" else None
    return arithmetic.tensor_core_multiple(work.device, work.dtype) or threads or 1


def _l2(work: Workload, ladder: Ladder) -> str:
    """Say whether the smallest candidate finds its input in the L2 from the step before."""
    l2_bytes = work.device.l2_bytes
    if not isinstance(work.spec, Layer) or not ladder.candidates or not l2_bytes:
        return "warm"
    laid_out = plan(work, ladder.candidates[0].batch_size)
    return "cold" if laid_out.total - laid_out.fixed_bytes >= 2 * l2_bytes else "warm"
