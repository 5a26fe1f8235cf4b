"""Containers of a module's inputs, and objects of any class that hold tensors, such as a cache of keys and values."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cubatch.errors import InvalidArgument
from cubatch.frameworks.batch_sources import FIELD

_REMEDY = "Wrap the module in one that makes the object of tensors."


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return (key, item) of each item of a list, tuple, mapping, dataclass or batch object; None for other values."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if hasattr(value, "to") and hasattr(value, "__dict__") and not isinstance(value, type):  # as batches of graphs
        return [(name, item) for name, item in vars(value).items() if not name.startswith("__")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value) if each.init]
    return None


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch; False if PyTorch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_device(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.device)


def is_holder(value: Any) -> bool:
    """
    Return whether a value is an object that holds tensors, at any depth, or a cache that may get tensors.

    It is False for tensors, modules, functions and classes, and for containers: see `children`.
    """
    if is_tensor(value) or callable(value) or children(value) is not None:
        return False
    return is_cache(value) or bool(tensors_in(value))


def has_holder(tree: Any) -> bool:
    """Return whether a value, or an item of nested containers, is an object for which `is_holder` is true."""
    parts = children(tree)
    return is_holder(tree) if parts is None else any(has_holder(part) for _, part in parts)


def is_cache(value: Any) -> bool:
    """
    Return whether the class of an object or a base class has "cache" in its name.

    Caches have nothing else in common by which an empty one, or one of a single sample, differs from other objects.
    Those of Transformers have the word in their names; for convolutions and Mamba they have no method `update`. Two
    examples, or a function of the batch size, need no such guess unless the cache is empty.
    """
    return any("cache" in kind.__name__.lower() for kind in type(value).__mro__)


def tensors_in(value: Any) -> list[Any]:
    """
    Return the tensors that an object holds at any depth, each once, in the order of its attributes.

    Raises:
        InvalidArgument: If the parts of the object cannot be listed.
    """
    return list(filter(is_tensor, _shared(value)))


def copied(
    value: Any, change: Callable[[Any, int], Any], device: Any = None, *, may_share: bool = False
) -> Any:  # fmt: skip
    """
    Return a copy of an object in which each tensor of `tensors_in` is replaced by `change(tensor, place)`.

    Its other parts are copied too, except for modules, functions and classes. A `device` replaces the recorded ones;
    None keeps them. An object that cannot be copied is returned as it is if no tensor is replaced, or with `may_share`;
    else InvalidArgument is raised.
    """
    shared = _shared(value)
    memo = {id(each): device if _is_device(each) and device not in {None, each} else each for each in shared}
    memo |= {id(each): change(each, place) for place, each in enumerate(filter(is_tensor, shared))}
    is_changed = any(memo[id(each)] is not each for each in shared)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        if may_share or not is_changed:
            return value
        given = f"a {type(value).__name__}, which cannot be copied ({type(error).__name__}: {error})"
        raise InvalidArgument(FIELD, given, "objects whose tensors can be replaced", _REMEDY) from error


def renewed(tree: Any) -> Any:
    """Return nested containers and batch objects in new ones that have the same items."""
    if type(tree) is dict:
        return {key: renewed(item) for key, item in tree.items()}
    if type(tree) in {list, tuple}:
        return type(tree)(map(renewed, tree))
    is_container = hasattr(tree, "__dict__") and not is_tensor(tree) and children(tree) is not None
    return copy.copy(tree) if is_container else tree


def _shared(value: Any) -> list[Any]:
    """
    Return the parts of an object that a copy shares with it: tensors, devices, modules, functions and classes.

    Raises:
        InvalidArgument: If the parts cannot be listed.
    """
    shared, seen, stack = list[Any](), dict[int, Any](), [value]
    while stack:  # not by recursion, as a chain of objects may be long
        part = stack.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part  # kept, as no other may have its id
        if is_tensor(part) or _is_device(part) or callable(part):
            shared.append(part)
            continue
        try:
            is_collection = isinstance(part, tuple | list | set | frozenset | deque)
            items = part.values() if isinstance(part, Mapping) else part if is_collection else ()
            stack += reversed([*items, object.__getstate__(part)])  # all attributes, also those in slots
        except Exception as error:
            given = f"a {type(value).__name__} with a {type(part).__name__} that raised {type(error).__name__}: {error}"
            raise InvalidArgument(FIELD, given, "objects whose tensors can be listed", _REMEDY) from error
    return shared
