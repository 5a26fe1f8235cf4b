"""A step of a PyTorch module, as in a user's training or inference loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from cubatch.errors import InvalidArgument
from cubatch.frameworks.input_growth import Path
from cubatch.frameworks.input_objects import has_holder, renewed
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.torch_inputs import Call, with_copied_objects
from cubatch.user_code import takes

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
}
"""PyTorch's class and options by the name that `autotune` has for it."""

AUTOCAST = ("float16", "bfloat16")
CALL_FIRST = "One that makes layers in its first forward pass is to be called once on a batch before."


@attrs.frozen(kw_only=True, eq=False)
class StepKind:
    """The operations of a step: forward pass, and in training loss, backward pass and optimizer."""

    # True: forward, loss, backward and optimizer step. The gradients of the previous step stay allocated until the
    # backward pass, as in loops that accumulate them and in Lightning. False: a forward pass, in inference mode unless
    # an input requires a gradient or the module differentiates
    training: bool
    # function from the module's output, and targets if it takes them, to a scalar. None: the output's `loss`, else the
    # mean of its squares
    loss: Callable[[Any], Any] | None
    optimizer: str | Callable[[Iterable[Any]], Any]  # one of OPTIMIZERS, or a function from parameters to an optimizer
    autocast: str | None  # one of AUTOCAST, or None
    accumulate: int = 1  # batches of a training step: one optimizer step follows that many forward and backward passes
    # step all parameters at once where the optimizer leaves it open, as PyTorch's do on a GPU. They then have a
    # temporary result for every parameter at a time
    foreach: bool = False
    # a step may free the tensors of a cache that it extends, as a loop that generates words does. False: a step gets
    # copies of objects among its inputs, so that the next step finds the same
    consumes_inputs: bool = False
    # paths in a `Call` of the tensors that a step writes to: each step gets copies of them, as a loop's batches are new
    written: frozenset[Path] = frozenset()
    # the DistributedDataParallel around the module, whose buckets of gradients count in a trace; None without it
    exchange: Any = None

    def step(
        self,
        module: Callable[..., Any],  # the module, compiled or not
        parameters: Iterable[Any],
        device: str,  # "cpu" or "cuda"
        arguments: Call,  # a batch: positional and keyword arguments, and targets of the loss
        scaler: Any = None,  # scales the loss, as `scaler` makes it; None to leave it as it is
    ) -> Callable[[], None]:
        """
        Return a function without arguments that runs one step of `module` on the batch `arguments`.

        Args:
            module: The module, or a function in its place.
            parameters: Its parameters; a training step updates those that require a gradient.
            device: "cpu" or "cuda".
            arguments: The arguments of the module and the targets of the loss.
            scaler: The gradient scaler of `self.scaler`; None: the loss is not scaled.

        Raises:
            InvalidArgument: If the loss does not take the targets, or the optimizer cannot be made.
        """
        targets = arguments.targets
        renew = self._renewal(arguments)
        is_walk = any(map(_has_no_data, tensors_of(arguments)))
        derived = [tensor for tensor in tensors_of(arguments) if tensor.requires_grad]
        unseen = [] if is_walk else [True]

        def seen(made: Any) -> Any:
            """Return the output of a step; raise InvalidArgument if the first output has fake tensors."""
            if unseen and any(map(_has_no_data, tensors_of(made))):
                given = "one whose output has no data: a cache that is not restored kept a tensor of the memory trace"
                allowed = "one that keeps its caches in tensors, lists and dictionaries of its own"
                raise InvalidArgument("module", given, allowed, "Or reset the cache in forward().")
            unseen.clear()
            return made

        if not self.training:

            def run(mode: Any) -> None:
                with mode, self._precision(device):
                    call = renew()
                    seen(module(*call.positional, **call.keyword))

            return _without_gradients(run, is_derived=bool(derived))

        targets = self._targets_of_loss(targets)
        optimizer = self.make_optimizer([parameter for parameter in parameters if parameter.requires_grad])

        def compute_loss() -> Any:
            for tensor in derived:  # a loop's next batch has no gradient either
                tensor.grad = None
            call = renew()
            with self._precision(device):
                output = module(*call.positional, **call.keyword)
                return _checked_loss(seen(self._loss(output, call.targets if targets else ())))

        def train() -> None:
            for place in range(self.accumulate):
                with contextlib.nullcontext() if place == self.accumulate - 1 else _without_exchange(module):
                    loss = compute_loss()
                    if place == 0:
                        optimizer.zero_grad()
                    loss = loss / self.accumulate if self.accumulate > 1 else loss
                    (loss if scaler is None else scaler.scale(loss)).backward()
            _update(optimizer, scaler)

        return train

    def _renewal(self, arguments: Call) -> Callable[[], Call]:
        """Return a function that returns the arguments of a step in new containers, as a step may change these."""
        if self.written or (has_holder(tuple(arguments)) and not self.consumes_inputs):
            return lambda: with_copied_objects(arguments, self.written)
        given = (*arguments.positional, *arguments.keyword.values(), *arguments.targets)
        is_flat = all(isinstance(value, torch.Tensor) for value in given)
        return lambda: arguments if is_flat else Call(*renewed(tuple(arguments)))

    def _targets_of_loss(self, targets: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the targets if the loss takes them, () if it takes the output alone; else raise InvalidArgument."""
        if self.loss is None or takes(self.loss, 1 + len(targets)):
            return targets
        if takes(self.loss, 1):
            return ()
        given = f"one that cannot be called with the module's output and {len(targets)} targets"
        remedy = (
            "Pass batches with the targets last, as (images, labels) or tuple(batch) of a data loader's batch, or a "
            "function of the output alone."
        )
        raise InvalidArgument(
            "loss", given, "a function from the output, or the output and targets, to a scalar", remedy
        )

    def scaler(self, device: str, scale: float = 2.0**16) -> Any:
        """
        Return a gradient scaler for training in float16 autocast; None for other steps.

        `scale` is the factor of the loss in the first step, such as the last one of another batch size.
        """
        is_scaled = self.training and self.autocast == "float16"
        return torch.amp.GradScaler(device, init_scale=scale) if is_scaled else None

    def _precision(self, device: str) -> Any:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=getattr(torch, self.autocast))

    def make_optimizer(self, parameters: list[Any]) -> Any:
        """
        Return a new optimizer of `parameters`.

        Raises:
            InvalidArgument: If `parameters` is empty, or the user's function returns no optimizer, or one that
                needs a closure (LBFGS).
        """
        if not parameters:
            allowed = "inference: the module has no parameter that requires a gradient"
            raise InvalidArgument("mode", "training", allowed, CALL_FIRST)
        if isinstance(self.optimizer, str):
            name, options = OPTIMIZERS[self.optimizer]
            # A rate of 0 does the same work on the same parameters in every step.
            made = getattr(torch.optim, name)(parameters, lr=0.0, **options)
        else:
            made = self.optimizer(parameters)
            if not (hasattr(made, "zero_grad") and hasattr(made, "step")):
                allowed = "a function from parameters to an optimizer, such as torch.optim.Adam"
                raise InvalidArgument("optimizer", f"one that returned {made!r}", allowed)
        if not takes(made.step, 0):  # such as LBFGS
            raise _needs_closure(made)
        for group in getattr(made, "param_groups", ()) if self.foreach else ():
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        return made

    def _loss(self, output: Any, targets: tuple[Any, ...]) -> Any:
        if self.loss is not None:
            return self.loss(output, *targets)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is not None:
            return own
        tensors = list(tensors_of(output))
        losses = [each for each in tensors if each.requires_grad]
        if losses and all(each.numel() == 1 for each in losses):  # as a detector returns in training
            return sum(losses)
        first = next(iter(tensors), None)
        if first is None:
            allowed = f"a function that makes a scalar of the {type(output).__name__} that the module returns"
            raise InvalidArgument("loss", None, allowed, "autotune_module takes one as loss.")
        return first.float().square().mean()


def _checked_loss(loss: Any) -> Any:
    """Return a loss; raise InvalidArgument unless it is a scalar of PyTorch that depends on the parameters."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    kind = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    allowed = "a function that returns one number as a tensor with a gradient, such as the mean over the samples"
    raise InvalidArgument("loss", f"one that returns a {kind}", allowed)


def _update(optimizer: Any, scaler: Any) -> None:
    try:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    except Exception as error:
        if "closure" in str(error):  # which others than PyTorch's require without a sign in their arguments, as SAM
            raise _needs_closure(optimizer) from error
        raise


def _needs_closure(optimizer: Any) -> InvalidArgument:
    remedy = 'Time its steps with autotune_callable(): see "Optimizers" in docs/how-to/pytorch.md.'
    return InvalidArgument("optimizer", type(optimizer).__name__, "one that steps without a closure", remedy)


def _without_gradients(run: Callable[[Any], None], *, is_derived: bool) -> Callable[[], None]:
    """
    Return a function that calls `run` with a context in which no gradients are recorded, where inputs need none.

    It is inference mode, or if the module differentiates by itself, which that mode forbids, no_grad. If the module
    does not enable gradients either, it is the usual mode.
    """
    modes: list[Callable[[], Any]] = [lambda: torch.inference_mode(not is_derived), torch.no_grad, torch.enable_grad]

    def infer() -> None:
        try:
            run(modes[0]())
        except RuntimeError as error:
            if len(modes) == 1 or "grad" not in str(error):
                raise
            del modes[0]
            infer()

    return infer


def _without_exchange(module: Any) -> Any:
    """
    Return a context in which DistributedDataParallel does not sum gradients over ranks.

    Loops that accumulate gradients use the context for all batches but the last. For other modules it does nothing.
    """
    inner = getattr(module, "_orig_mod", module)
    is_shared = isinstance(inner, torch.nn.parallel.DistributedDataParallel)
    return inner.no_sync() if is_shared else contextlib.nullcontext()


def _has_no_data(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def tensors_of(output: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from tensors_of([getattr(output, field.name) for field in dataclasses.fields(output)])
    elif isinstance(output, tuple | list | Mapping):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_of(part)
