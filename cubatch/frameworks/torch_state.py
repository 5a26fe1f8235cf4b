"""Backup of everything that steps may change in a module."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType
from typing import Any, Self

import numpy as np

from cubatch.frameworks.attributes import Snapshot, is_own_file, kept_attributes, put_back
from cubatch.frameworks.lazy_torch import torch

_MOST_USED, _LONGEST, _LARGEST = 500, 100, 2**26
"""Values that a loss refers to, and items of a collection, that are examined for state; bytes of a tensor that is
copied.  Writing to a larger one is noticed only: it may be the user's data set."""


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random generators of PyTorch, NumPy and Python at the end of the block, also after an error."""
    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the generator that users seed
        undo.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        yield


@contextmanager
def kept_gradients(module: Any) -> Iterator[None]:
    """Restore the gradients of a module's parameters at the end of the block, also after an error."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def with_loss(module: Any, loss: Any) -> Any:
    """
    Return a module that has the parameters and the state of a module and of all that its loss uses.

    That is the loss itself, if it is a module. Of a function it is what its variables and defaults refer to. Of a
    method it is its object, and of an object of the user its attributes.
    """
    used = dict(_used_by(loss, module))
    if not used:
        return module
    others = {path: value for path, value in used.items() if isinstance(value, torch.nn.Module)}
    holder = torch.nn.ModuleDict({"module": module, **others})
    for path, value in used.items():
        if isinstance(value, torch.nn.Parameter):
            holder.register_parameter(path, value)
        elif path not in others:
            vars(holder)[path] = value
    return holder


def _used_by(loss: Any, module: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the modules, tensors, collections and attributes of objects that a loss refers to."""
    seen, waiting = {id(module): module}, [("loss", loss)]
    while waiting and len(seen) < _MOST_USED:
        path, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            yield path, value
            continue
        if isinstance(value, torch.Tensor):
            yield path, value if value.numel() * value.element_size() <= _LARGEST else [value]
            continue
        if hasattr(value, "__dict__") and not isinstance(value, type | dict) and is_own_file(type(value).__module__):
            value = vars(value)
        if isinstance(value, list | dict):
            yield path, value
        waiting += [(f"{path}/{name}".replace(".", "_"), part) for name, part in _parts_of(value)]


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """
    Return name and value of each item of a collection, and of each value that a function or method refers to.

    The list is empty for other values, and for a collection of more than _LONGEST items.
    """
    if isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return list(items) if len(value) <= _LONGEST else []
    if isinstance(value, functools.partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if inspect.ismethod(value):
        return [("function", value.__func__), ("self", value.__self__)]
    if not inspect.isfunction(value):
        return []
    parts = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            parts.append((name, cell.cell_contents))
    if is_own_file(value.__module__):
        parts += [(name, value.__globals__[name]) for name in _names(value.__code__) if name in value.__globals__]
    return parts


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function's code, and in functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def trained(module: Any, loss: Any) -> list[Any]:
    """Return the parameters of a module, and of its loss if that is a module, as a loop gives them to its optimizer."""
    return list(with_loss(module, loss if isinstance(loss, torch.nn.Module) else None).parameters())


class SavedState:
    """
    Context manager that restores a module and the random generators to the bit, also after an error.

    Buffers, and in training parameters, are copied to the host, so that device memory stays free. In inference `keep`
    adds the few parameters that a step modifies. Gradients and other attributes, such as train flags, are restored too.
    """

    def __init__(self, module: Any, *, training: bool) -> None:
        self._module, self._training = module, training
        self._backups: ExitStack | None = None

    def __enter__(self) -> Self:
        parameters = list(self._module.parameters())
        tensors = [*parameters, *self._module.buffers()]
        with ExitStack() as undo:  # the last is put back first, and what refuses to be keeps nothing else from it
            undo.enter_context(kept_random_state())
            for parameter in parameters:
                undo.callback(setattr, parameter, "grad", parameter.grad)
            for tensor in tensors if self._training else self._module.buffers():
                undo.callback(put_back, tensor, tensor.detach().to("cpu", copy=True))
            self._backups = undo.enter_context(ExitStack())
            for tensor in tensors:
                undo.callback(setattr, tensor, "data", tensor.data)
            undo.enter_context(kept_attributes(self._module))  # the train flag and the buffers among them
            for parameter in parameters:
                parameter.grad = None
            self._undo = undo.pop_all()
        return self

    def keep(self, parameters: Iterable[Any]) -> bool:
        """
        Back up further parameters, which steps in inference modify; return whether any were backed up.

        Nothing is backed up in training, in which all parameters are already, or before the context is entered.
        """
        if self._backups is None or self._training:
            return False
        has_copied = False
        for parameter in parameters:
            self._backups.callback(put_back, parameter, parameter.detach().to("cpu", copy=True))
            has_copied = True
        return has_copied

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class StartState:
    """
    Holds the state in which the steps of each batch size begin: a module's attributes, buffers, random generators.

    Parameters are restored too if steps change them. cubatch sets its optimizers' learning rate to 0, so that only
    a user's own optimizer changes them.

    Args:
        module: The module, without wrappers, ready for steps.
        parameters: Whether steps change its parameters.
    """

    def __init__(self, module: Any, *, parameters: bool) -> None:
        self._attributes = Snapshot(module)
        tensors = [*module.buffers(), *(module.parameters() if parameters else ())]
        self._tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
        self._random = torch.get_rng_state()
        self._gpu_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._changed: set[str] = set()

    def restore(self) -> None:
        """Restore attributes, buffers, random generators and, if steps change them, parameters."""
        self._changed |= self._attributes.restore()
        for tensor, before in self._tensors:
            put_back(tensor, before)
        torch.set_rng_state(self._random)
        if self._gpu_random is not None:
            torch.cuda.set_rng_state_all(self._gpu_random)

    def unrestored(self) -> list[str]:
        """Restore the state; return the paths of attributes that could not be restored, now or before."""
        self.restore()
        return sorted(self._changed)

    def kept_batches(self, batch_size: int) -> list[str]:
        """Return the paths, such as "encoder.cache", of attributes that hold a new tensor with `batch_size` rows."""
        return self._attributes.kept_batches(batch_size)
