"""Backup of attributes of a module that a step may change, besides parameters and buffers."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cubatch import user_code

_DEEPEST, _LONGEST = 3, 1000  # collections within each other, and items, of which the inner ones are restored too


class Snapshot:
    """
    The attributes of a module and its submodules, which can be restored as often as needed.

    Steps append to lists, count metrics and create tables on first use, also as buffers, parameters or submodules.
    Lists, deques, dicts and sets get their old items back, also within each other, and tensors their values. Objects of
    a user's class get their old attributes back; other nested objects are the same ones.

    Args:
        module: The module.
    """

    def __init__(self, module: Any) -> None:
        self._parts: list[tuple[Any, dict[str, tuple[Any, Any]]]] = [
            (part, {name: (value, _copied(value)) for name, value in _attributes(part).items()})
            for part in module.modules()
        ]

    def restore(self) -> None:
        """Restore all attributes, also where some refuse it: the last error is raised at the end."""
        with ExitStack() as undo:
            for part, attributes in self._parts:
                for name, (value, copy) in attributes.items():
                    undo.callback(_restore, part, name, value, copy)
                undo.callback(_drop_new, part, attributes.keys())

    def kept_batches(self, batch_size: int) -> list[str]:
        """Return the names of attributes that hold a tensor with that number of rows which they did not hold before."""
        names = []
        for part, attributes in self._parts:
            for name, value in _attributes(part).items():
                before, copy = attributes.get(name, (None, None))
                old = {id(before), *(_ids(copy[0]) if isinstance(copy, tuple) and _held(before) is not None else ())}
                rows = (each for each in _inside(value) if id(each) not in old)
                if any(each.ndim and len(each) == batch_size for each in rows):
                    names.append(name)
        return names


@contextmanager
def kept_attributes(module: Any) -> Iterator[None]:
    """Restore the attributes of a module and its submodules at the end of the block, also after an error."""
    snapshot = Snapshot(module)
    try:
        yield
    finally:
        snapshot.restore()


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


def _copied(value: Any, depth: int = 0) -> Any:
    """Return what `_put_back` needs: of a tensor its values, of a collection or object its items; else None."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone(), None if value.is_inference() else value._version  # noqa: SLF001 - its only name
    if (held := _held(value)) is None:
        return None
    items = _items(held) if depth < _DEEPEST and len(held) <= _LONGEST else ()
    nested = [(item, _copied(item, depth + 1)) for item in items if _held(item) is not None]
    return held, nested


def _put_back(value: Any, copy: Any) -> None:
    import torch

    if copy is None:
        return
    if isinstance(value, torch.Tensor):
        before, version = copy
        if _has_bits(value) or version is None or value._version != version:  # noqa: SLF001 - as above
            put_back(value, before)
        return
    held, nested = copy
    if _ids(_held(value)) != _ids(held):  # one that refuses changes is as it was
        if isinstance(value, list):
            value[:] = held
        else:
            target = vars(value) if _is_users(value) else value
            target.clear()
            target.extend(held) if isinstance(target, deque) else target.update(held)
    for item, below in nested:
        _put_back(item, below)


def _held(value: Any) -> Any:
    """Copy the items of a collection, or attributes of a user's object, into a plain collection; else return None."""
    if isinstance(value, dict):
        return dict(value.items())
    if isinstance(value, list | deque | set):
        return list(value)
    return dict(vars(value)) if _is_users(value) else None


def _is_users(value: Any) -> bool:
    """Return whether it is an object with attributes, of a class in the user's own files."""
    import torch

    if (
        isinstance(value, type | torch.nn.Module | dict | list | deque | set)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    return _is_own_file(type(value).__module__)


@functools.cache
def _is_own_file(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not user_code.is_installed(Path(file)))


def _items(held: Any) -> list[Any]:
    return list(held.values() if isinstance(held, dict) else held)


def _inside(value: Any) -> Iterator[Any]:
    """Yield the tensors that an attribute is or holds directly."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif (held := _held(value)) is not None:
        yield from (item for item in _items(held) if isinstance(item, torch.Tensor))


def _ids(held: Any) -> list[int]:
    return [*map(id, held), *map(id, held.values() if isinstance(held, dict) else ())]
