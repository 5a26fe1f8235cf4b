"""The memory of a step, and the largest batch that fits: of cubatch's own engine, and of PyTorch modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from cubatch import user_code
from cubatch.checks import check_batch_size, check_optimizer
from cubatch.choices import Dtype, Library, Mode, ModuleOptimizer, Optimizer
from cubatch.errors import CubatchError, DoesNotFit, InvalidArgument
from cubatch.frameworks import batch_sources, module_source
from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.frameworks.module_worker import CALLABLE
from cubatch.frameworks.torch_memory import Opaque
from cubatch.frameworks.torch_module import TorchModule
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.memory import fit, step_footprint, thumb_rules
from cubatch.memory.step_footprint import Footprint
from cubatch.memory.thumb_rules import Rule
from cubatch.network.models import SpecLike
from cubatch.units import first_line
from cubatch.workload import Workload, accumulating

_OF_NETWORK: Mapping[str, Any] = {
    "dtype": "float32", "recompute": False, "library": "auto", "target_batch_size": None,
}  # fmt: skip
_OF_MODULE: Mapping[str, Any] = {
    "loss": None, "autocast": None, "accumulate": 1, "constant_inputs": (), "opaque": None,
}  # fmt: skip


def footprint(
    spec: SpecLike | Any,
    batches: Any = None,
    *,
    batch_size: int = 256,
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    optimizer: Optimizer | ModuleOptimizer = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: Library = "auto",
    target_batch_size: int | None = None,
    loss: Callable[..., Any] | None = None,
    autocast: str | None = None,
    accumulate: int = 1,
    constant_inputs: str | int | Sequence[str | int] = (),
    opaque: Mapping[str, Opaque] | None = None,
) -> Footprint | ModuleFootprint:
    """
    Return the memory of a step by part: of a network in cubatch's engine, or of a PyTorch module. No step is run.

    For a network this is the plan that the engine follows, not an estimate.  It does not include the process overhead.
    On a GPU that is the CUDA context and libraries.  On a CPU it is some percent of the plan, for a large batch of a
    deep network up to a fifth.

    A module's step is traced on tensors without data, also one on the "meta" device.  Only an operator of PyTorch that
    cannot be traced is run, on zeros, if its inputs take at most 64 MiB.  On a GPU, the parts of PyTorch's allocator,
    of cuBLAS and of the CUDA context are included.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file. Or a torch.nn.Module; with
            `batches` also the name of a function that returns one, "package.module:build".
        batches: For a module only: its batches, as for `autotune_module`.
        batch_size: Samples per step.
        mode: "inference" or "training".
        dtype: Storage of activations and parameters. A module has the types of its own parameters.
        optimizer: In training "sgd", "momentum" or "adam"; for a module as for `autotune_module`.
        recompute: Discard activations and compute them again in the backward pass.
        device: For a network the GPU or CPU whose workspace rule applies; None is the device of this machine. For a
            module a GPU, which need not be present; None is the GPU of its parameters, or none.
        library: The kernels of a network, see `autotune`.
        target_batch_size: Samples per optimizer step, a multiple of the batch size, for training a network. If it is
            larger than the batch, the sum of the gradients is included. None: one batch per step.
        loss, autocast, accumulate, constant_inputs: For a module only: as for `autotune_module`.
        opaque: For a module only: operators ("library::name") and submodules (names of `named_modules`) that tensors
            without data cannot run through, or that take memory inside. The value is a function that replaces them in
            the trace, from the same arguments to tensors like the results. Or it is the bytes that they take while they
            run, in addition to their results. A name that the step does not call is an error.

    Returns:
        Footprint | ModuleFootprint: Bytes by part, and the peak.

    Raises:
        InvalidArgument: If an argument is out of range, or does not apply (also a ValueError).
        MissingDependency: If batches are given and PyTorch is not installed.

    Example:
        >>> print(footprint("mlp", batch_size=256, mode="training", device="cpu").elements_per_sample * 256)
        465920
        >>> model = torchvision.models.resnet50()                                     # doctest: +SKIP
        >>> footprint(model, (3, 224, 224), batch_size=64, mode="training").total     # doctest: +SKIP
    """
    options: dict[str, Any] = {
        "mode": mode, "optimizer": optimizer, "dtype": dtype, "recompute": recompute, "library": library,
        "target_batch_size": target_batch_size, "loss": loss, "autocast": autocast, "accumulate": accumulate,
        "constant_inputs": constant_inputs, "opaque": opaque,
    }  # fmt: skip
    with step_of(spec, batches, options) as step:
        return step.footprint(
            check_batch_size(batch_size), None if device is None else probe.resolve(device, live=False)
        )


def max_batch_size(
    spec: SpecLike | Any,
    batches: Any = None,
    *,
    memory: int | str = "100%",
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    optimizer: Optimizer | ModuleOptimizer = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: Library = "auto",
    target_batch_size: int | None = None,
    loss: Callable[..., Any] | None = None,
    autocast: str | None = None,
    accumulate: int = 1,
    constant_inputs: str | int | Sequence[str | int] = (),
    opaque: Mapping[str, Opaque] | None = None,
) -> int:
    """
    Return the largest batch size whose step fits a limit: by the memory plan of a network, or the trace of a module.

    Args:
        spec: As for `footprint`.
        batches: For a module only: its batches, as for `autotune_module`.
        memory: The limit in bytes, "12GiB", or "80%" of the free memory of the device. `footprint(...).total` is within
            it, for a module on a GPU with the CUDA context.
        mode, dtype, optimizer, recompute, device, library: As for `footprint`.
        target_batch_size: Samples per optimizer step, for training a network. Only its divisors count; smaller batches
            also need memory for the sum of their gradients. None: any size, one batch per step.
        loss, autocast, accumulate, constant_inputs: For a module only: as for `autotune_module`.
        opaque: For a module only: as for `footprint`.

    Returns:
        int: The largest batch size, any integer, not only powers of two. If a module takes multiples of a number only,
            it is the largest multiple.

    Raises:
        DoesNotFit: If not even one sample fits (also a MemoryError).
        InvalidArgument: If an argument is out of range, or does not apply.
        MissingDependency: If batches are given and PyTorch is not installed.

    Example:
        >>> options = {"mode": "training", "device": "v100-sxm2-16gb"}
        >>> most = max_batch_size("resnet50", memory="12GiB", **options)
        >>> totals = [footprint("resnet50", batch_size=n, **options).total for n in (most, most + 1)]
        >>> totals[0] <= 12 * 2**30 < totals[1]
        True
        >>> max_batch_size(torch.nn.LSTM(64, 64), (100, 64), memory="12GiB")                 # doctest: +SKIP
    """
    target = probe.resolve(device, live=False)
    options: dict[str, Any] = {
        "mode": mode, "optimizer": optimizer, "dtype": dtype, "recompute": recompute, "library": library,
        "target_batch_size": target_batch_size, "loss": loss, "autocast": autocast, "accumulate": accumulate,
        "constant_inputs": constant_inputs, "opaque": opaque,
    }  # fmt: skip
    limit = fit.limit_bytes(memory, target)
    with step_of(spec, batches, options) as step:
        return step.largest(limit, None if device is None else target)


@attrs.frozen
class NetworkStep:
    """The step of a network in cubatch's engine, by its memory plan: its spec, and options of `footprint` by name."""

    spec: SpecLike
    options: Mapping[str, Any]

    def footprint(self, batch_size: int, device: Device | None) -> Footprint:
        """Return the memory of a step by part, on a device; None is the device of this machine."""
        work = accumulating(self._work(device), batch_size, self.options["target_batch_size"])
        return step_footprint.footprint_of(work, batch_size)

    def largest(self, limit: int, device: Device | None) -> int:
        """
        Return the largest batch size that fits a limit in bytes; `device` is as for `footprint`, or None.

        Raises:
            DoesNotFit: If not even one sample fits.
        """
        return fit.largest(self._work(device), limit, self.options["target_batch_size"])

    def rules(self, taken: Footprint, device: Device, limit: int, most: int) -> Sequence[Rule]:
        """
        Return rules of thumb for memory, compared with the footprint `taken` and the batch size `most`.

        Args:
            taken: The memory plan's footprint at the batch size.
            limit: Bytes that a step may take.
            most: The largest batch size that fits; 0 if not even one sample does.
        """
        is_any = self.options["target_batch_size"] is None  # a formula does not know what divides a target
        return thumb_rules.compare_rules(self._work(device), taken, limit, most if is_any else 0)

    def _work(self, device: Device | None) -> Workload:
        kind = {name: value for name, value in self.options.items() if name != "target_batch_size"}
        return Workload.of(self.spec, device, **kind)


@attrs.frozen
class ModuleStep:
    """The step of a PyTorch module, by a trace on tensors without data."""

    module: TorchModule  # the module
    only_tensors: bool = False  # whether to count tensors only, without the overhead of a GPU such as its CUDA context

    def footprint(self, batch_size: int, device: Device | None) -> ModuleFootprint:
        """Return the memory of a step by part, on a device; None is the device of the module's parameters."""
        return self.module.footprint(batch_size, None if self.only_tensors else device)

    def largest(self, limit: int, device: Device | None) -> int:
        """
        Return the largest batch size that fits a limit in bytes; `device` is as for `footprint`, or None.

        Raises:
            DoesNotFit: If not even one sample fits.
        """
        if size := self.module.largest(limit, None if self.only_tensors else device):
            return size
        least = self.footprint(self.module.least_size, device)
        raise DoesNotFit(least.name, str(probe.resolve(device, live=False)), least.total, limit, least.mode)


@contextlib.contextmanager
def step_of(spec: Any, batches: Any, options: Mapping[str, Any]) -> Iterator[NetworkStep | ModuleStep]:
    """
    Yield an object that returns the memory of the steps of a network or of a PyTorch module, by batch size.

    For a module, exceptions in the block other than a CubatchError become InvalidArgument.

    Args:
        spec, batches: As for `footprint`.
        options: The other arguments of `footprint` by name, except "batch_size" and "device".
    """
    check_optimizer(options["mode"], options.get("optimizer", "sgd"))
    is_foreign = is_module(spec, batches)
    applying = applicable(options, is_foreign=is_foreign)
    if is_foreign:
        with traced(spec, batches, {**_OF_MODULE, **applying}) as module:
            yield ModuleStep(module)
    else:
        yield NetworkStep(spec, {**_OF_NETWORK, **applying})


def applicable(options: Mapping[str, Any], *, is_foreign: bool) -> dict[str, Any]:
    """
    Return the options that apply to a PyTorch module (`is_foreign`) or to a network; reject others with a value.

    An option with its default value is left out.
    """
    others, what = (_OF_NETWORK, "a PyTorch module") if is_foreign else (_OF_MODULE, "a network")
    for name, default in others.items():
        if options.get(name, default) != default:
            raise InvalidArgument(name, options[name], f"left out for {what}, to which it does not apply")
    return {name: value for name, value in options.items() if name not in others}


def is_module(spec: Any, batches: Any) -> bool:
    """Return whether a workload is a PyTorch module, or its name with batches; reject a module without batches."""
    if user_code.is_torch_module(spec):
        if batches is None:
            raise InvalidArgument("batches", None, batch_sources.ALLOWED)
        return True
    if batches is not None and isinstance(spec, str) and ":" not in spec:
        raise InvalidArgument("batches", batches, f"left out for the network {spec!r}, to which it does not apply")
    return batches is not None


@contextlib.contextmanager
def traced(spec: Any, batches: Any, kind: Mapping[str, Any]) -> Iterator[TorchModule]:
    """
    Yield a module whose steps can be traced; `kind` has the options of its step, and those of `TorchModule`.

    A function named by text that cannot be imported, and invalid options, raise InvalidArgument. Exceptions in the
    block other than a CubatchError become InvalidArgument.
    """
    if isinstance(spec, str):
        with user_code.users("module", spec, CALLABLE):
            spec = module_source.make(spec)
    if isinstance(batches, str):
        batches = batch_sources.load(batches)
    accumulate = check_batch_size(kind["accumulate"], "accumulate")
    if accumulate > 1 and kind["mode"] == "inference":
        raise InvalidArgument("accumulate", accumulate, "1 in inference", "Or pass mode='training'.")
    options = {**kind, "accumulate": accumulate, "constant_inputs": batch_sources.input_names(kind["constant_inputs"])}
    module = TorchModule(spec, batches, **options)
    try:
        yield module
    except CubatchError:
        raise
    except Exception as error:
        allowed = f"one whose {kind['mode']} step can be traced on tensors without data"
        raise InvalidArgument("module", module.name, allowed, f"It raised {first_line(error)}.") from error
