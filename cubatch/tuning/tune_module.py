"""autotune_module(): find the fastest batch size of a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cubatch.choices import Mode, Objective
from cubatch.errors import InvalidArgument
from cubatch.frameworks.ranks import Ranks
from cubatch.frameworks.torch_module import TorchModule
from cubatch.hardware import probe
from cubatch.hardware import room as hardware_room
from cubatch.hardware.facts import Device
from cubatch.measure.runner import LearnsMemory
from cubatch.search.events import Event
from cubatch.tuning import session
from cubatch.tuning.notes import note
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subjects.module_subject import NamedModuleSubject, PresentModuleSubject


def autotune_module(
    module: Any,
    example_inputs: Any,
    *,
    mode: Mode = "inference",
    loss: Callable[[Any], Any] | str | None = None,
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
    store: bool | str | Path = True,  # noqa: A002, RUF100 - a public name, see docs/reference/api.md
    seed: int = 0,
    progress: Callable[[Event], None] | None = None,
) -> TuningResult:
    """
    Find the batch size at which a PyTorch module really runs fastest, and say why.

    What its steps take of memory is worked out beforehand, by walking through a step on tensors without data, and
    corrected by what the smaller sizes really took, so that no size above the limit is tried.  The rest is as for
    `autotune`: a few sizes are timed on random inputs, then whichever promises most, until the answer is known.

    A module is left as it was, to the bit: parameters, buffers, gradients, train flags, and PyTorch's random
    generators; also after an error or Ctrl-C.  One that is named, "package.module:build", is made and run in a process
    of its own, which may die, and its timings are kept: a rerun answers from the store, an interrupted one goes on
    (inputs that every batch holds as they are must be equal, so seed random ones), and what was kept is refused once
    the source has changed that makes it, or the version of a package that it imports.

    Under torchrun, once `torch.distributed.init_process_group` was called, all ranks call it together, with equal
    arguments and a module each, wrapped in DistributedDataParallel or not.  They step the same sizes in the same order;
    the slowest rank's time and the fullest one's memory count, an out-of-memory on one is one for all, and every rank
    is given the same answer.  Its sizes and rates are those of one rank.  What fails on one rank in a step that has run
    before, or within collective operations of the module's own, as those of FSDP, is noticed when these time out.

    Args:
        module: A torch.nn.Module, on the device that it is to run on; or "package.module:build", the name of a function
            without arguments that gives one.
        example_inputs: What it is called with: a tensor, a tuple (positional arguments) or a dict (keyword arguments)
            whose tensors have the batch as axis 0; or the shape of one sample, such as (3, 224, 224).  Batches are
            random, of the example's dtypes and ranges, but of integers and booleans they hold its own samples, each as
            often; they require a gradient where it does.  A batch of a class of its own is an argument within a tuple:
            (batch,).  A layer that reads that axis as time, for want of `batch_first`, is told of.
        mode: "inference": a forward pass in inference mode; "training": forward, loss, backward, optimiser step; the
            gradients of the step before are there until the backward pass, so that memory suffices for loops that
            accumulate them too.  Parts that are in evaluation mode in a module that trains stay so.
        loss: In training, from the module's output to a scalar.  None: the output's own `loss`, as of the models of
            Hugging Face that are given labels, else the mean of the squares of its first tensor.  It may be named too,
            "package.module:function", and for a named module must be.
        optimizer: In training: "sgd", "momentum", "adam", or a function from parameters to an optimiser, whose class
            and states count, or its name; one that steps without a closure.
        autocast: "float16" or "bfloat16": automatic mixed precision, the former with a scaled loss.
        channels_last: Lay the module's filters, and four-dimensional inputs, out as NHWC.
        compile: Run it through torch.compile, once for all sizes; compiling is not timed.
        device: Refuse to run elsewhere than on this; None is where the module's parameters are.  A named module is
            moved there; None is the first GPU, else the CPU.
        batch_sizes: Measure exactly these.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory, the module's own included where it is there already;
            never more than that. It bounds what the module takes and, on the CPU, the resident set grows by, on a GPU
            PyTorch's allocator; of a limit of some tens of MiB a good part may stay unused.  On the CPU, a module that
            is not named runs in this process, whose allocator cubatch does not change.  Sizes above about half of the
            limit are then refused.  The worker of a named module calls `mallopt`, which raises glibc's thresholds and
            lets larger sizes run; the result names the variables that do the same in another process.
        latency_limit, objective, tolerance, seed: As for `autotune`.
        progress: As for `autotune`; called on rank 0.
        budget: As for `autotune`; finding out beforehand what small sizes take may need a twentieth more, and importing
            PyTorch, making a named module and walking through its steps some seconds.
        store: As for `autotune`, of a named module; others have no name that would still mean the same tomorrow.  Of
            `example_inputs` all counts but the values of floats whose axis 0 is the batch, as these are drawn.

    Returns:
        TuningResult: As from `autotune`; `predicted_peak_bytes` is what was said of a size just before it ran.

    Raises:
        InvalidArgument: If an argument makes no sense, or the memory cannot be worked out and max_batch_size is None.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        EnergyNotAvailable: If the objective is energy, and the device a CPU or one whose energy cannot be read.
        MissingDependency: If PyTorch is not installed.
        NothingMeasured: If no size could be measured.

    Example:
        >>> import torch                                                              # doctest: +SKIP
        >>> model = torchvision.models.resnet50().cuda()                              # doctest: +SKIP
        >>> result = autotune_module(model, (3, 224, 224), mode="training", autocast="bfloat16")  # doctest: +SKIP
    """
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, budget=budget, seed=seed, memory_limit=memory_limit, store=store,
        progress=progress,
    )  # fmt: skip
    kind: dict[str, Any] = {
        "mode": mode, "loss": loss, "optimizer": optimizer, "autocast": autocast, "channels_last": channels_last,
        "compiled": compile,
    }  # fmt: skip
    ranks = Ranks.present()
    if isinstance(module, str):
        if ranks is not None:
            raise InvalidArgument("module", module, f"a module itself where {ranks.size} ranks tune together")
        return session.tune(NamedModuleSubject.of(module, example_inputs, kind, device, request), request)
    if not isinstance(store, bool):
        remedy = "To cache its timings, name the function that builds it: 'package.module:build'."
        raise InvalidArgument("store", store, "True or False for a module that has no name", remedy)
    return _tune_present(TorchModule(module, example_inputs, **kind), kind, device, request, ranks)


def _tune_present(
    module: TorchModule, kind: Mapping[str, Any], device: Device | str | None, request: Request, ranks: Ranks | None
) -> TuningResult:
    """Tune a module of this process, together with those of the other ranks, if there are any."""
    resolved = _check_device(module, device)
    request.goal.check_device(resolved)
    with module:
        held = module.held_bytes
        memory = hardware_room.memory_limit(resolved, request.memory_limit, held=held)
        notes = [note("no_cache")] if request.store else []

        def tune(make: Callable[[int, int], LearnsMemory], **versions: int) -> TuningResult:
            subject = PresentModuleSubject(
                name=module.name, library="torch", device=resolved, memory=memory, mode=kind["mode"],
                optimizer=kind["optimizer"], seed=request.limits.seed, versions=versions, make=make,
                first_notes=notes,
            )  # fmt: skip
            return session.tune(subject, request)

        if ranks is None:
            return tune(module.runner)
        memory = ranks.room(resolved, memory, held)
        notes.append(note("ranks", count=ranks.size))
        runner = module.runner(memory.bytes, request.limits.seed)
        return ranks.answered(runner, lambda make: tune(make, ranks=ranks.size))


def _check_device(module: TorchModule, device: Device | str | None) -> Device:
    """Return where the module is; reject another device."""
    present = module.device
    if device is not None and (wanted := probe.resolve(device)) != present:
        remedy = "Move it there first: module.to(); one without parameters runs where example_inputs are."
        raise InvalidArgument("device", str(wanted), f"where the module is, {present}", remedy)
    return present
