"""A module as it was: what steps may change of it, and how it is put back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from cubatch.frameworks.attributes import kept_attributes, put_back


class SavedState:
    """
    Keeps what steps may change of a module and of PyTorch, and puts it back to the bit.

    Parameters and buffers (in training; in inference buffers alone, since nothing writes to parameters) are copied to
    the host, so that the device keeps its room.  Gradients, other attributes such as the train flag of each part, and
    PyTorch's random generators are kept too.  Use it with `with`: it puts back also after an error or Ctrl-C.
    """

    def __init__(self, module: Any, *, training: bool) -> None:
        self._module, self._training = module, training

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
            for tensor in tensors:
                undo.callback(setattr, tensor, "data", tensor.data)
            undo.enter_context(kept_attributes(self._module))  # the train flag and the buffers among them
            for parameter in parameters:
                parameter.grad = None
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
