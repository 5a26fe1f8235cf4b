"""What a step may change of a module beside parameters and buffers, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_attributes(module: Any) -> Iterator[None]:
    """
    Put the attributes of a module and its parts back when the block ends, however it does.

    Steps write to them: lists of outputs grow, metrics count, tables are made when they are first needed, also as
    buffers, parameters or parts.  Lists, dicts and sets that changed get their old items back, tensors their values,
    and buffers, parameters and parts are those that were there; of what lies deeper only the identity is kept.
    """
    kept = [
        (part, {name: (value, _copied(value)) for name, value in _attributes(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes in kept:
            now = _attributes(part)
            for name in now.keys() - attributes.keys():
                del vars(part)[name]
            for name, (value, copy) in attributes.items():
                if name not in now or now[name] is not value:
                    _assign(part, name, value)
                _put_back(value, copy)


def _is_script(part: Any) -> bool:
    import torch

    return isinstance(part, torch.jit.ScriptModule)


def _attributes(part: Any) -> dict[str, Any]:
    """Give what steps may change: of a script what has a type, its train flag and buffers among them."""
    if _is_script(part):
        types = part._concrete_type.get_attributes()  # noqa: SLF001 - its only name
        return {name: getattr(part, name) for name, (_, is_parameter) in types.items() if not is_parameter}
    return dict(vars(part))


def _assign(part: Any, name: str, value: Any) -> None:
    """Set an attribute; past a module's own way to, by which some would become parts or parameters."""
    if _is_script(part):
        setattr(part, name, value)
    else:
        vars(part)[name] = value


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone(), None if value.is_inference() else value._version  # noqa: SLF001 - its only name
    return _held(value)


def _put_back(value: Any, copy: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        before, version = copy
        if version is None or value._version != version:  # noqa: SLF001 - as above
            with torch.no_grad(), torch.inference_mode(value.is_inference()):
                value.copy_(before)
    elif copy is None or _ids(value) == _ids(copy):  # one that refuses changes is as it was
        return
    elif isinstance(value, list):
        value[:] = copy
    else:
        value.clear()
        value.update(copy)


def _held(value: Any) -> Any:
    """Copy what a collection holds into a plain one: a class of its own may not take it, or copy something else."""
    if isinstance(value, dict):
        return dict(value.items())
    return list(value) if isinstance(value, list | set) else None


def _ids(held: Any) -> list[int]:
    return [*map(id, held), *map(id, held.values() if isinstance(held, dict) else ())]
