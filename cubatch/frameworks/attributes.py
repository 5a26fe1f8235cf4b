"""What a step may change of a module beside parameters and buffers, and how it is put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def kept_attributes(module: Any) -> Iterator[None]:
    """
    Put the attributes of a module and its parts back when the block ends, however it does.

    Steps write to them: lists of outputs grow, metrics count, tables are made when they are first needed, also as
    buffers, parameters or parts.  Lists, deques, dicts and sets that changed get their old items back, tensors their
    values, and buffers, parameters and parts are those that were there; of what lies deeper only the identity is kept.
    """
    with ExitStack() as undo:  # what refuses to be put back keeps nothing else from it
        for part in module.modules():
            attributes = _attributes(part)
            for name, value in attributes.items():
                undo.callback(_restore, part, name, value, _copied(value))
            undo.callback(_drop_new, part, attributes.keys())
        yield


def put_back(tensor: Any, before: Any) -> None:
    """Write old values into a tensor, unless it has them: memory that nothing wrote to may be a file to be read."""
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
    """Say whether its values can be compared: not of another layout or class, nor where it has none."""
    import torch

    is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout == torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized


def _bits(tensor: Any) -> Any:
    """Give its values as bytes, in which a NaN equals itself and 0 not -0."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _is_script(part: Any) -> bool:
    import torch

    return isinstance(part, torch.jit.ScriptModule)


def _attributes(part: Any) -> dict[str, Any]:
    """Give what steps may change: of a script what has a type, its train flag and buffers among them."""
    if _is_script(part):
        types = part._concrete_type.get_attributes()  # noqa: SLF001 - its only name
        return {name: getattr(part, name) for name, (_, is_parameter) in types.items() if not is_parameter}
    return dict(vars(part))


def _restore(part: Any, name: str, value: Any, copy: Any) -> None:
    """Set an attribute; past a module's own way to, by which some would become parts or parameters."""
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
    """Copy what a collection holds into a plain one: a class of its own may not take it, or copy something else."""
    if isinstance(value, dict):
        return dict(value.items())
    return list(value) if isinstance(value, list | deque | set) else None


def _ids(held: Any) -> list[int]:
    return [*map(id, held), *map(id, held.values() if isinstance(held, dict) else ())]
