"""A module as it was: what steps may change of it, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

from cubatch.frameworks.attributes import kept_attributes, put_back


class SavedState:
    """
    Keeps what steps may change of a module and of PyTorch, and puts it back to the bit.

    Parameters and buffers (in inference buffers, and those parameters that `keep` is told of: few are written to) are
    copied to the host, so that the device keeps its room.  Gradients, other attributes such as the train flag of each
    part, and PyTorch's random generators are kept too.  Use it with `with`: it puts back also after an error or Ctrl-C.
    """

    def __init__(self, module: Any, *, training: bool) -> None:
        self._module, self._training = module, training
        self._told: ExitStack | None = None

    def __enter__(self) -> Self:
        import torch

        parameters = list(self._module.parameters())
        tensors = [*parameters, *self._module.buffers()]
        with ExitStack() as undo:  # the last is put back first, and what refuses to be keeps nothing else from it
            undo.callback(torch.set_rng_state, torch.get_rng_state())
            if torch.cuda.is_initialized():
                undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
            for parameter in parameters:
                undo.callback(setattr, parameter, "grad", parameter.grad)
            for tensor in tensors if self._training else self._module.buffers():
                undo.callback(put_back, tensor, tensor.detach().to("cpu", copy=True))
            self._told = undo.enter_context(ExitStack())
            for tensor in tensors:
                undo.callback(setattr, tensor, "data", tensor.data)
            undo.enter_context(kept_attributes(self._module))  # the train flag and the buffers among them
            for parameter in parameters:
                parameter.grad = None
            self._undo = undo.pop_all()
        return self

    def keep(self, parameters: Iterable[Any]) -> bool:
        """Keep the values of parameters, too, where nobody has yet: what steps in inference change; say if any was."""
        if self._told is None or self._training:
            return False
        has_copied = False
        for parameter in parameters:
            self._told.callback(put_back, parameter, parameter.detach().to("cpu", copy=True))
            has_copied = True
        return has_copied

    def __exit__(self, *_: object) -> None:
        self._undo.close()
