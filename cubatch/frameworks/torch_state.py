"""A module as it was: what steps may change of it, and how it is put back."""

from __future__ import annotations

from typing import Any, Self

from cubatch.frameworks.attributes import kept_attributes


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

        self._attributes = kept_attributes(self._module)
        self._attributes.__enter__()
        parameters = list(self._module.parameters())
        copied = [*(parameters if self._training else ()), *self._module.buffers()]
        self._values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in copied]
        self._places = [(tensor, tensor.data) for tensor in [*parameters, *self._module.buffers()]]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        for parameter in parameters:
            parameter.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        try:
            self._attributes.__exit__(None, None, None)  # the train flag and the buffers among them
        finally:  # a module may have attributes that refuse to be set
            for tensor, data in self._places:
                tensor.data = data
            with torch.no_grad():
                for tensor, value in self._values:
                    tensor.data.copy_(value)
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            torch.set_rng_state(self._random)
            if self._cuda_random:
                torch.cuda.set_rng_state_all(self._cuda_random)
