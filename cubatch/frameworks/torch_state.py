"""Backup of everything that steps may change in a module."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self

import numpy as np

from cubatch.frameworks.attributes import Snapshot, kept_attributes, put_back
from cubatch.frameworks.lazy_torch import torch


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


def with_loss(module: Any, loss: Any) -> Any:
    """
    Return a module that has the parameters and the state of a module and of the modules that its loss uses.

    These are the loss itself, if it is a module, or else the variables of the function that are modules.
    """
    used = {"loss": loss}
    with suppress(TypeError, ValueError):  # no function of Python's, or one with a variable that has no value yet
        variables = inspect.getclosurevars(loss)
        used |= {f"loss_{name}": value for name, value in {**variables.globals, **variables.nonlocals}.items()}
    others = {name: value for name, value in used.items() if isinstance(value, torch.nn.Module) and value is not module}
    return torch.nn.ModuleDict({"module": module, **others}) if others else module


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
