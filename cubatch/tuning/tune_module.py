"""autotune_module(): the walk of `autotune` for a PyTorch module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from cubatch.choices import Mode, Objective
from cubatch.errors import CubatchError, DoesNotFit, InvalidArgument
from cubatch.frameworks.torch_memory import Peaks
from cubatch.frameworks.torch_module import TorchModule
from cubatch.hardware import probe
from cubatch.hardware import room as hardware_room
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.search import walk
from cubatch.tuning import store, tune
from cubatch.tuning import story as stories
from cubatch.tuning.ladder import Ladder, between, of_memory, plain
from cubatch.tuning.limits import Limits
from cubatch.tuning.results import TuningResult


def autotune_module(
    module: Any,
    example_inputs: Any,
    *,
    mode: Mode = "inference",
    loss: Callable[[Any], Any] | None = None,
    optimizer: str | Callable[[Iterable[Any]], Any] = "sgd",
    autocast: str | None = None,
    channels_last: bool = False,
    compile: bool = False,  # noqa: A002 - PyTorch's own word
    device: Device | str | None = None,
    batch_sizes: Iterable[int] | None = None,
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    objective: Objective = "throughput",
    tolerance: float = 0.01,
    budget: float = 60.0,
    seed: int = 0,
    progress: Callable[[walk.Event], None] | None = None,
) -> TuningResult:
    """
    Find the batch size at which a PyTorch module really runs fastest, and say why.

    What its steps take of memory is worked out beforehand, by walking through a step on tensors without data, so that
    no size above the limit is tried.  The rest is as for `autotune`: a few sizes are timed on random inputs, then
    whichever promises most, until the answer is known.  The module is left as it was, to the bit: parameters, buffers,
    gradients, train flags, and PyTorch's random generators; also after an error or Ctrl-C.

    Args:
        module: A torch.nn.Module, on the device that it is to run on.
        example_inputs: What it is called with: a tensor, a tuple (positional arguments) or a dict (keyword arguments)
            whose tensors have the batch as axis 0; or the shape of one sample, such as (3, 224, 224).  Batches are
            random, of the example's dtypes and ranges.
        mode: "inference": a forward pass in inference mode; "training": forward, loss, backward, optimiser step.
        loss: In training, from the module's output to a scalar.  None: the output's own `loss`, as of the models of
            Hugging Face that are given labels, else the mean of the squares of its first tensor.
        optimizer: In training: "sgd", "momentum", "adam", or a function from parameters to an optimiser, whose class
            and states count.
        autocast: "float16" or "bfloat16": automatic mixed precision, the former with a scaled loss.
        channels_last: Lay the module's filters, and four-dimensional inputs, out as NHWC.
        compile: Run it through torch.compile, once for all sizes; compiling is not timed.
        device: Refuse to run elsewhere than on this; None is where the module's parameters are.
        batch_sizes: Measure exactly these.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory; never more than is free.
        latency_limit, objective, tolerance, budget, seed, progress: As for `autotune`.

    Returns:
        TuningResult: As from `autotune`; `largest_batch_size` and `predicted_peak_bytes` are of the walk without data.

    Raises:
        InvalidArgument: If an argument makes no sense, or the memory cannot be worked out and max_batch_size is None.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        MissingDependency: If PyTorch is not installed.
        NothingMeasured: If no size could be measured.

    Example:
        >>> import torch                                                              # doctest: +SKIP
        >>> model = torchvision.models.resnet50().cuda()                              # doctest: +SKIP
        >>> result = autotune_module(model, (3, 224, 224), mode="training", autocast="bfloat16")  # doctest: +SKIP
    """
    subject = TorchModule(
        module, example_inputs, mode=mode, loss=loss, optimizer=optimizer, autocast=autocast,
        channels_last=channels_last, compiled=compile,
    )  # fmt: skip
    found = _present(subject, device)
    goal = Goal.of(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
    limits = Limits.of(batch_sizes, max_batch_size, budget=budget, seed=seed)
    tune.check_progress(progress)
    room = hardware_room.memory_limit(found, memory_limit)
    with subject, store.open_run(None, identity={}, conditions={}, budget=budget) as run:
        peaks, why_not = _peaks(subject, room)
        run.notes += [*room.told(), *([] if peaks else [f"Memory was not bounded beforehand: {why_not}."])]
        ladder = _ladder(peaks, limits, room, subject, found, mode, why_not)
        story = stories.of_module(subject.name, subject.dtype, mode, optimizer, found, goal, limits, room, ladder)
        measure = functools.partial(
            walk.measure,
            functools.partial(subject.runner, room.bytes, seed),
            extend=None if limits.batch_sizes else functools.partial(_added, ladder, peaks),
        )
        measured = tune.measured_by(measure, story, run, progress, found)
        return story.answer(measured, notes=run.notes)


def _present(subject: TorchModule, wanted: Device | str | None) -> Device:
    found = subject.device
    if wanted is not None and (asked := probe.resolve(wanted)) != found:
        raise InvalidArgument(
            "device", str(asked), f"where the module is, {found}", "Move it there first: module.to()."
        )
    return found


def _peaks(subject: TorchModule, room: MemoryLimit) -> tuple[Peaks | None, str]:
    """Work out what steps take; or say why that cannot be."""
    try:
        return subject.peaks(room.bytes), ""
    except CubatchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises on tensors without data
        return None, f"on tensors without data the module raised {type(error).__name__}: {error}".splitlines()[0]


def _ladder(
    peaks: Peaks | None,
    limits: Limits,
    room: MemoryLimit,
    subject: TorchModule,
    device: Device,
    mode: str,
    why_not: str,
) -> Ladder:
    if peaks is None:
        if limits.max_batch_size is None and limits.batch_sizes is None:
            raise InvalidArgument("max_batch_size", None, "given here", f"Memory cannot be bounded: {why_not}.")
        return Ladder(tuple(plain(limits)), None, room.bytes)
    largest = peaks.largest(room.bytes)
    if not largest:
        raise DoesNotFit(subject.name, str(device), peaks.at(1), room.bytes, mode)
    return of_memory(limits, room, largest, peaks.at)


def _added(ladder: Ladder, peaks: Peaks | None, batch_size: int) -> Candidate:
    step = between(batch_size, ladder.candidates)
    return step if peaks is None else attrs.evolve(step, predicted_peak_bytes=peaks.at(batch_size))
