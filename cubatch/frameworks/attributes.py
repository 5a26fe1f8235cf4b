"""What a step may change of a module beside parameters and buffers, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OWN = ("_parameters", "_buffers", "_modules")  # whose values are kept by whoever steps the module


@contextmanager
def kept_attributes(module: Any) -> Iterator[None]:
    """
    Put the attributes of a module and its parts back when the block ends, however it does.

    Steps write to them: lists of outputs grow, metrics count, tables are made when they are first needed, also as
    buffers.  Lists, dicts and sets get their old items back, tensors their values, and buffers are those that were
    there; of what lies deeper only the identity is kept.
    """
    kept = [
        (part, dict(part._buffers), {name: (value, _copied(value)) for name, value in _own(part).items()})  # noqa: SLF001 - a module's own dictionary
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, buffers, attributes in kept:
            part._buffers.clear()  # noqa: SLF001 - as above
            part._buffers.update(buffers)  # noqa: SLF001 - as above
            for name in set(_own(part)) - set(attributes):
                del vars(part)[name]
            for name, (value, copy) in attributes.items():
                vars(part)[name] = value
                _put_back(value, copy)


def _own(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _OWN}


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone(), None if value.is_inference() else value._version  # noqa: SLF001 - its only name
    return value.copy() if isinstance(value, list | dict | set) else None


def _put_back(value: Any, copy: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        before, version = copy
        if version is None or value._version != version:  # noqa: SLF001 - as above
            with torch.no_grad(), torch.inference_mode(value.is_inference()):
                value.copy_(before)
    elif isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy)
