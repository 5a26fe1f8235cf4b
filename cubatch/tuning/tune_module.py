"""autotune_module(): find the fastest batch size of a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from cubatch import checks
from cubatch.choices import Mode, ModuleOptimizer, Objective
from cubatch.errors import InvalidArgument
from cubatch.frameworks import batch_sources, loader_rate
from cubatch.frameworks.ranks import Ranks
from cubatch.frameworks.torch_inputs import FURTHER_SIZES
from cubatch.frameworks.torch_module import TorchModule, check_module
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.hardware.facts import Device
from cubatch.measure.runner import LearnsMemory
from cubatch.search.events import Event
from cubatch.tuning import session
from cubatch.tuning.notes import note
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subjects.module_subject import NamedModuleSubject, PresentModuleSubject
from cubatch.workload import divisors

_SMALL = 64  # batches up to this size are cheap to make
_LEAST_USEFUL = 4  # in smaller batches, an axis of the batch is easily taken for another one


def autotune_module(
    module: Any,
    batches: Any = None,
    *,
    example_inputs: Any = None,
    constant_inputs: Iterable[str | int] = (),
    mode: Mode = "inference",
    loss: Callable[..., Any] | str | None = None,
    optimizer: ModuleOptimizer = "sgd",
    autocast: str | None = None,
    channels_last: bool = False,
    accumulate: int = 1,
    loader: Any = None,
    compile: bool = False,  # noqa: A002 - PyTorch's own word
    device: Device | str | None = None,
    threads: int | None = None,
    batch_sizes: Iterable[int] | None = None,
    max_batch_size: int | None = None,
    current: int | None = None,
    multiple_of: int = 1,
    divides: int | None = None,
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
    Find the batch size at which a PyTorch module runs fastest.

    The memory of a step is predicted by a trace on tensors without data, and corrected by measured steps of smaller
    sizes. No size above the limit is tried. Steps take random inputs; the search is that of `autotune`.

    A module is restored to the bit at the end, also after an error or Ctrl-C. This includes gradients, attributes and
    random generators. Each batch size starts from that state too. Objects of libraries in attributes are not restored;
    the result names those that steps changed.

    A module given by name, "package.module:build", is built and run in a worker process. Its timings are cached: a
    rerun answers from the cache, an interrupted run continues. Cached timings are not used if the source of the module
    or the version of an imported package has changed. Inputs that are the same at all sizes count too: seed random
    ones.

    Under torchrun, after `torch.distributed.init_process_group`, all ranks call it together with equal arguments and a
    module each, wrapped in DistributedDataParallel or not. They step the same sizes in the same order. The slowest
    rank's time and the fullest rank's memory count, and an out-of-memory on one rank counts for all. Every rank gets
    the same result, with sizes and rates of one rank. A rank that fails after its first step of a size, or within the
    module's own collective operations (FSDP), is noticed when these time out.

    Args:
        module: A torch.nn.Module on its device, or "package.module:build", a function without arguments or a module.
        batches: What the module is called with at any batch size, in one of these forms.

            - A function from a batch size to inputs: a tensor, a tuple of positional arguments, a dict of keyword
              arguments, or (tuple, dict). The step is timed on them. A named module takes "package.module:function".
            - A torch DataLoader, or a data set with its `collate_fn`: batches of each size are made of its samples. For
              a named module pass its name, "package.module:loader"; otherwise random batches like two of it are timed.
            - Two batches of different size in a list. What grows, and in which proportion, is read from them.
            - One batch, whose axis 0 is the batch; or the shape of one sample, such as (3, 224, 224). Batches are
              random floats in its range; integers and booleans repeat its samples.

            The last items are the targets of the loss, as many as it requires: (images, labels). Without a loss, an
            item more than the module takes is one. A list is one argument: pass the batch of a data loader as
            tuple(batch). A dict is one argument if the module takes one and none of its keys. Inputs require a gradient
            where the example does. A batch of a class of its own goes into a tuple: (batch,). A layer that reads axis 0
            as time is reported.
        example_inputs: The older name of `batches`.
        constant_inputs: Names or positions of arguments that are the same at every batch size, such as a mask. Any
            other tensor must grow, unless its first axis is 1; else the result has no recommendation.
        mode: "inference": a forward pass in inference mode. "training": forward, loss, backward and optimizer step. The
            gradients of the previous step stay allocated until the backward pass, so that memory suffices for loops
            that accumulate them. Parts in evaluation mode stay so if the module as a whole trains.
        loss: In training, a function from the module's output, or from output and targets, to a scalar. A loss that is
            a module is trained too; modules and objects that a function uses are restored. A named module requires its
            name "package.module:function". None: the output's own `loss`, as in Hugging Face models with labels. Else
            it is the sum of the tensors with a gradient, if all are scalars, or the mean square of the first tensor. A
            note then reports unused targets.
        optimizer: In training only: "sgd", "momentum", "adam", "adamw", or a function from parameters to an optimizer
            that steps without a closure, or its name. An optimizer of the module's parameters is copied with a learning
            rate of 0; parameters that it lacks are not stepped.
        autocast: "float16" or "bfloat16": automatic mixed precision; float16 scales the loss.
        channels_last: Lay filters and four-dimensional inputs out as NHWC.
        accumulate: In training, batches to an optimizer step: a timed step has that many forward and backward passes,
            and one optimizer step. `batch_size` is that of one pass.
        loader: The torch DataLoader of your loop, or its name; None is `batches`, if that is one. It is measured by
            itself for a tenth of the budget (1 to 10 s, not counted). Where it is the bottleneck, the recommendation is
            the smallest size at which the loop gains nothing more. `result.samples_per_second` is the rate of the loop.
            On the CPU, a module that is not named is then run in that loop for as long once more.
            The worker of a named module imports `batches` that are given by name; pass that name here too.
        compile: Run it through torch.compile, once for all sizes above 1; 1 is proposed only if it is `current`. The
            first compilation, and up to 10 s or half the budget of others, do not count.
            A size whose step PyTorch would no longer compile is an error, not a result.
        device: Reject another device than this; None is the device of the parameters. A named module is moved there;
            None is the first GPU, else the CPU.
        threads: For a named module on the CPU, threads of an instance. As many instances as the CPUs allow then run at
            the same time, each bound to CPUs of its own. Sizes and rates are those of one of them.
        batch_sizes: Measure exactly these.
        max_batch_size: Propose nothing larger.
        current, multiple_of, divides: As for `autotune`.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory, which includes the module's own; never more than that.
            It bounds PyTorch's allocator on a GPU, and the growth of the resident set on the CPU. On the CPU, a module
            that is not named runs in this process, whose allocator cubatch does not change. Sizes above about half of
            the limit are then rejected. The worker of a named module raises glibc's thresholds (`mallopt`) and can use
            more. A note in the result has the variables that do so in another process.
        latency_limit, objective, tolerance, seed: As for `autotune`.
        progress: As for `autotune`; called on rank 0.
        budget: As for `autotune`. Predicting memory may take a twentieth more; importing PyTorch, building a named
            module and tracing it take some seconds.
        store: As for `autotune`, for a named module only. The values of floats with the batch as axis 0 in
            an example do not count, since batches are drawn.

    Returns:
        TuningResult: As from `autotune`; `predicted_peak_bytes` is the prediction just before the size first ran.

    Raises:
        InvalidArgument: If an argument is invalid, or memory cannot be predicted and max_batch_size is None.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        EnergyNotAvailable: If the objective is energy, and the energy of the device cannot be read.
        MissingDependency: If PyTorch is not installed.
        NothingMeasured: If no size could be measured.

    Example:
        >>> import torch                                                              # doctest: +SKIP
        >>> model = torchvision.models.resnet50().cuda()                              # doctest: +SKIP
        >>> result = autotune_module(model, (3, 224, 224), mode="training", autocast="bfloat16")  # doctest: +SKIP
    """
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, current=current, multiple_of=multiple_of, divides=divides,
        budget=budget, seed=seed, memory_limit=memory_limit,
        store=store, progress=progress,
    )  # fmt: skip
    kind: dict[str, Any] = {
        "mode": mode, "loss": loss, "optimizer": optimizer, "autocast": _dtype_name(autocast),
        "channels_last": channels_last, "compiled": compile,
        "accumulate": checks.check_batch_size(accumulate, "accumulate"),
        "constant_inputs": batch_sources.input_names(constant_inputs),
        "sizes": _drawn_sizes(request),
    }  # fmt: skip
    if mode == "inference" and accumulate > 1:
        raise InvalidArgument("accumulate", accumulate, "1 in inference", "Or tune with mode='training'.")
    if not isinstance(module, str):
        check_module(module)
    batches = _only(batches, example_inputs)
    if isinstance(batches, str) and not isinstance(module, str):
        batches = batch_sources.load(batches)
    if loader is None:
        loader = loader_rate.measurable(batches)
    else:
        loader = batch_sources.load(loader) if isinstance(loader, str) else loader
        loader_rate.check_loader(loader)
    device, ranks = _named(device), Ranks.present()
    if isinstance(module, str):
        if ranks is not None:
            raise InvalidArgument(
                "module", module, f"a torch.nn.Module, not its name, where {ranks.size} ranks tune together"
            )
        subject = NamedModuleSubject.of(module, batches, kind, device, request, threads=threads)
        return session.tune(attrs.evolve(subject, loader=loader), request)
    if threads is not None:
        allowed = "the name of the function that builds it, 'package.module:build', where threads is given"
        raise InvalidArgument("module", type(module).__name__, allowed, "Instances run in processes of their own.")
    if not isinstance(store, bool):
        remedy = "To cache its timings, name the function that builds it: 'package.module:build'."
        raise InvalidArgument("store", store, "True or False for a module that has no name", remedy)
    return _tune_present(TorchModule(module, batches, **kind), {**kind, "loader": loader}, device, request, ranks)


def _only(batches: Any, example_inputs: Any) -> Any:
    """Return the argument that was given, `batches` or its older name; raise InvalidArgument for none or both."""
    if (batches is None) == (example_inputs is None):
        given = None if batches is None else "given with example_inputs, its older name"
        raise InvalidArgument("batches", given, batch_sources.ALLOWED)
    return example_inputs if batches is None else batches


def _drawn_sizes(request: Request) -> list[int]:
    """
    Return batch sizes at which to call the user's function of inputs, to see which axes grow with the batch.

    Small sizes that the workload accepts come first, then sizes of `batch_sizes`, then multiples of many numbers.
    """
    multiples = [request.multiple_of * count for count in (1, 2, 3, 4, 8, 16)]
    sizes = multiples if request.divides is None else divisors(request.divides)
    allowed, further = (
        [n for n in some if request.accepts(n) and n <= (request.max_batch_size or n)]
        for some in (sizes, [request.multiple_of * count for count in FURTHER_SIZES])
    )
    small = [n for n in allowed if n <= _SMALL]
    useful = [n for n in small if n >= _LEAST_USEFUL]
    chosen = useful[:3] if len(useful) > 1 else small[-3:] if len(small) > 1 else allowed[:3]
    listed, more = (request.batch_sizes or ())[:2], multiples[: 2 if len(chosen) == 1 else 0]
    return list(dict.fromkeys([*chosen, *listed, *more, *further]))


def _dtype_name(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype


def _named(device: Any) -> Any:
    return str(device) if type(device).__module__ == "torch" else device


def _tune_present(
    module: TorchModule, kind: Mapping[str, Any], device: Device | str | None, request: Request, ranks: Ranks | None
) -> TuningResult:
    """
    Return the result of tuning a module of this process, together with the other ranks, if there are any.

    `kind` has the options of the step: mode, loss, optimizer and others. `device` None is that of the module, and
    `ranks` None: this process has no other ranks.
    """
    resolved = _check_device(module, device)
    request.goal.check_device(resolved)
    with module:
        held = module.held_bytes
        memory = hardware_memory.memory_limit(resolved, request.memory_limit, held=held)
        notes = [note("no_cache")] if request.store else []

        def tune(make: Callable[[int, int], LearnsMemory], **versions: int) -> TuningResult:
            subject = PresentModuleSubject(
                name=module.name, library="torch", device=resolved, memory=memory, mode=kind["mode"],
                optimizer=kind["optimizer"], accumulate=kind["accumulate"], seed=request.seed,
                versions=versions, make=make, first_notes=notes, loader=kind["loader"],
            )  # fmt: skip
            return session.tune(subject, request)

        if ranks is None:
            return tune(module.runner)
        memory = ranks.room(resolved, memory, held)
        notes.append(note("ranks", count=ranks.size))
        runner = module.runner(memory.bytes, request.seed)
        return ranks.run(runner, lambda make: tune(make, ranks=ranks.size))


def _check_device(module: TorchModule, device: Device | str | None) -> Device:
    present = module.device
    if device is not None and (wanted := probe.resolve(device)) != present:
        remedy = "Move it there first: module.to(); one without parameters runs where example_inputs are."
        raise InvalidArgument("device", str(wanted), f"where the module is, {present}", remedy)
    return present
