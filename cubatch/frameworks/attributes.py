"""Backup of attributes of a module that a step may change, besides parameters and buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def kept_attributes(module: Any) -> Iterator[None]:
    """
    Restore the attributes of a module and its submodules at the end of the block, also after an error.

    Steps append to lists, count metrics and create tables on first use, also as buffers, parameters or submodules.
    Lists, deques, dicts and sets get their old items back, tensors their values; nested objects by identity only.
    """
    with ExitStack() as undo:  # what refuses to be put back keeps nothing else from it
        for part in module.modules():
            attributes = _attributes(part)
            for name, value in attributes.items():
                undo.callback(_restore, part, name, value, _copied(value))
            undo.callback(_drop_new, part, attributes.keys())
        yield


def put_back(tensor: Any, before: Any) -> None:
    """Write old values into a tensor if it differs: unmodified memory may be a read-only file mapping."""
    import torch

    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        if _has_bits(tensor):
            if torch.equal(_bits(tensor.to(before.device)), _bits(before)):
                return
            for axis, stride in enumerate(tensor.stride()):
                if not stride:  # of an expanded axis every place is the same memory
                    tensor, before = tensor.narrow(axis, 0, 1), before.narrow(axis, 0, 1)
        tensor.data.copy_(before)  # past the version by which autograd knows that a tensor was written to


def _has_bits(tensor: Any) -> bool:
    """Return whether its values can be compared: dense tensors with data only."""
    import torch

    is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout == torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized


def _bits(tensor: Any) -> Any:
    """Return its values as bytes, in which NaN equals itself and 0 differs from -0."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _is_script(part: Any) -> bool:
    import torch

    return isinstance(part, torch.jit.ScriptModule)


def _attributes(part: Any) -> dict[str, Any]:
    """Return the attributes that steps may change; of a script module those with a type."""
    if _is_script(part):
        types = part._concrete_type.get_attributes()  # noqa: SLF001 - its only name
        return {name: getattr(part, name) for name, (_, is_parameter) in types.items() if not is_parameter}
    return dict(vars(part))


def _restore(part: Any, name: str, value: Any, copy: Any) -> None:
    """Set an attribute without `Module.__setattr__`, which would register some as submodules or parameters."""
    if _is_script(part):
        if getattr(part, name) is not value:
            setattr(part, name, value)
    else:
        vars(part)[name] = value
    _put_back(value, copy)


def _drop_new(part: Any, names: Any) -> None:
    for name in _attributes(part).keys() - names:
        del vars(part)[name]


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone(), None if value.is_inference() else value._version  # noqa: SLF001 - its only name
    return _held(value)


def _put_back(value: Any, copy: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        before, version = copy
        if _has_bits(value) or version is None or value._version != version:  # noqa: SLF001 - as above
            put_back(value, before)
    elif copy is None or _ids(value) == _ids(copy):  # one that refuses changes is as it was
        return
    elif isinstance(value, list):
        value[:] = copy
    else:
        value.clear()
        value.extend(copy) if isinstance(value, deque) else value.update(copy)


def _held(value: Any) -> Any:
    """Copy the items of a collection into a plain one, since a subclass may copy otherwise."""
    if isinstance(value, dict):
        return dict(value.items())
    return list(value) if isinstance(value, list | deque | set) else None


def _ids(held: Any) -> list[int]:
    return [*map(id, held), *map(id, held.values() if isinstance(held, dict) else ())]
