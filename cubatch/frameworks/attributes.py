"""Backup of attributes of a module that a step may change, besides parameters and buffers."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np

from cubatch import user_code
from cubatch.frameworks.lazy_torch import torch

_DEEPEST, _LONGEST = 3, 1000  # collections within each other, and items, of which the inner ones are restored too
_MOST_PARTS, _LARGEST_ARRAY = 2000, 2**20  # parts of an object, and bytes of an array, that are compared
_VALUES = int | float | complex | str | bytes | None

_log = logging.getLogger(__name__)


@attrs.frozen
class _Watched:
    """An object that is not restored, the attribute that holds it, and marks that differ if the object has changed."""

    name: str
    value: Any
    marks: list[Any]


class Snapshot:
    """
    The attributes of a module and its submodules, which can be restored as often as needed.

    Steps append to lists, count metrics and create tables on first use, also as buffers, parameters or submodules.
    Lists, deques, dicts and sets get their old items back, also within each other, and tensors their values. Objects of
    a user's class get their old attributes back. Other nested objects are not restored; `restore` returns the paths of
    the attributes in which such an object changed.

    Args:
        module: The module.
    """

    def __init__(self, module: Any) -> None:
        values = [value for part in module.modules() for value in _attributes(part).values()]
        restored = [*module.modules(), *module.parameters(), *module.buffers(), *filter(torch.is_tensor, values)]
        self._known = set(map(id, restored))
        self._watched: dict[int, _Watched] = {}
        self._parts: list[tuple[str, Any, dict[str, tuple[Any, Any]]]] = []
        for path, part in module.named_modules():
            attributes = {}
            for name, value in _attributes(part).items():
                others: list[Any] = []
                attributes[name] = value, _copied(value, others)
                self._watch(_joined(path, name), part, others)
            self._parts.append((path, part, attributes))

    def _watch(self, name: str, part: Any, objects: list[Any]) -> None:
        for each in objects:
            if id(each) in self._watched or _is_plain(each, self._known):
                continue
            marks = _marks(each, self._known)
            if id(part) not in marks:  # what refers to the module, such as its trainer, is no state of it
                self._watched[id(each)] = _Watched(name, each, marks)

    def restore(self) -> set[str]:
        """
        Restore all attributes; return the paths, such as "encoder.cache", of those that still differ from before.

        Either their class did not accept the old value, or a step changed an object in them that is not restored.
        """
        changed: set[str] = set()

        def restore_one(path: str, part: Any, name: str, saved: tuple[Any, Any]) -> None:
            try:
                _restore(part, name, *saved)
            except Exception as error:  # noqa: BLE001 - of a user's class
                _log.warning("attribute %s of the module refuses to be restored: %s", _joined(path, name), error)
                changed.add(_joined(path, name))

        with ExitStack() as undo:  # Ctrl-C in one of them ends none of the others
            for path, part, attributes in self._parts:
                for name, saved in attributes.items():
                    undo.callback(restore_one, path, part, name, saved)
                undo.callback(_drop_new, part, attributes.keys())
        return changed | {each.name for each in self._watched.values() if _marks(each.value, self._known) != each.marks}

    def kept_batches(self, batch_size: int) -> list[str]:
        """
        Return the paths, such as "encoder.cache", of attributes that hold a new tensor with `batch_size` rows.

        A tensor is new if the snapshot's attribute lacks it. Tensors in collections and nested objects count too.
        """
        names = []
        for path, part, attributes in self._parts:
            for name, value in _attributes(part).items():
                before, copy = attributes.get(name, (None, None))
                old = {id(before), *(_ids(copy[0]) if isinstance(copy, tuple) and _held(before) is not None else ())}
                rows = (each for each in _inside(value) if id(each) not in old)
                if any(each.ndim and len(each) == batch_size for each in rows):
                    names.append(_joined(path, name))
        for each in self._watched.values():
            new = _tensor_marks(_marks(each.value, self._known)) - _tensor_marks(each.marks)
            if any(mark.shape[:1] == (batch_size,) for mark in new):
                names.append(each.name)
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
    """Copy `before` into a tensor unless both are equal: unmodified memory may be a read-only file mapping."""
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        if tensor.shape != before.shape:  # a step resized it, as observers of quantization do
            tensor.data = before.clone()
            return
        if _has_bits(tensor):
            if torch.equal(_bits(tensor.to(before.device)), _bits(before)):
                return
            for axis, stride in enumerate(tensor.stride()):
                if not stride:  # of an expanded axis every place is the same memory
                    tensor, before = tensor.narrow(axis, 0, 1), before.narrow(axis, 0, 1)
        tensor.data.copy_(before)  # past the version by which autograd knows that a tensor was written to


def _has_bits(tensor: Any) -> bool:
    """Return whether a tensor's values can be compared as bytes: only plain dense tensors with data."""
    is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout == torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized


def _bits(tensor: Any) -> Any:
    """Return a tensor's values as a flat uint8 tensor, in which NaN equals itself and 0 differs from -0."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _is_script(part: Any) -> bool:
    return isinstance(part, torch.jit.ScriptModule)


def _attributes(part: Any) -> dict[str, Any]:
    """Return by name the attributes of a module that steps may change; of TorchScript those that its type declares."""
    if _is_script(part):
        types = part._concrete_type.get_attributes()  # noqa: SLF001 - its only name
        return {name: getattr(part, name) for name, (_, is_parameter) in types.items() if not is_parameter}
    return dict(vars(part))


def _restore(part: Any, name: str, value: Any, copy: Any) -> None:
    """
    Set attribute `name` of a module to `value`, and the contents of `value` to `copy`, the backup that `_copied` made.

    Except in TorchScript, `Module.__setattr__` is not called: it would register some values as submodules.
    """
    if _is_script(part):
        if getattr(part, name) is not value:
            setattr(part, name, value)
    else:
        vars(part)[name] = value
    _put_back(value, copy)


def _drop_new(part: Any, names: Any) -> None:
    for name in _attributes(part).keys() - names:
        del vars(part)[name]


def _copied(value: Any, others: list[Any], depth: int = 0) -> Any:
    """
    Return a backup of a value: a tensor's values and version, or the items of a collection or object; else None.

    There is none for a tensor within a collection, nor deeper than _DEEPEST collections. A collection of more than
    _LONGEST items is restored without the contents of its items. Values without a backup are appended to `others`.
    """
    if isinstance(value, torch.Tensor) and not depth:
        return value.detach().clone(), None if value.is_inference() else value._version  # noqa: SLF001 - its only name
    if (held := _held(value)) is None or depth > _DEEPEST:
        others.append(value)
        return None
    items = _items(held) if len(held) <= _LONGEST else ()
    copies = [(item, _copied(item, others, depth + 1)) for item in items]
    return held, [(item, copy) for item, copy in copies if copy is not None]


def _put_back(value: Any, copy: Any) -> None:
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
    """Return the items of a collection, or the attributes of a user's object, in a new list or dict; else None."""
    if isinstance(value, dict):
        return dict(value.items())
    if isinstance(value, list | deque | set):
        return list(value)
    return dict(vars(value)) if _is_users(value) else None


def _is_users(value: Any) -> bool:
    """Return whether an object has attributes and is of a user's class; False for modules, containers and callables."""
    if (
        isinstance(value, type | torch.nn.Module | dict | list | deque | set)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    return is_own_file(type(value).__module__)


@functools.cache
def is_own_file(module: str) -> bool:
    """Return whether a module of Python, by its name, is the user's: not installed, nor part of Python or cubatch."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not user_code.is_installed(Path(file)))


def _items(held: Any) -> list[Any]:
    return list(held.values() if isinstance(held, dict) else held)


@attrs.frozen
class _TensorMark:
    """Identity, shape and version (count of in-place writes) of a tensor; replacing or writing changes them."""

    identity: int
    shape: tuple[int, ...]
    version: int | None  # None for a tensor of inference mode, which counts no writes


def _marks(value: Any, known: Collection[int]) -> list[Any]:
    """
    Return marks that change if an object changes: of the tensors, arrays and lengths in it, the outer ones first.

    Numbers and strings are left out: libraries write settings on first use, and these hold no batch.

    Args:
        known: Identities of the module's parts and tensors, which are restored.
    """
    marks, queue, seen = list[Any](), deque([value]), set[int]()
    while queue and len(marks) < _MOST_PARTS:
        each = queue.popleft()
        if isinstance(each, torch.Tensor) and id(each) not in known:
            version = None if each.is_inference() else each._version  # noqa: SLF001 - its only name
            marks.append(_TensorMark(id(each), tuple(each.shape), version))
        elif isinstance(each, np.ndarray):
            marks.append((each.shape, hash(each.tobytes()) if each.nbytes <= _LARGEST_ARRAY else None))
        elif id(each) in known:
            marks.append(id(each))
        elif not _is_plain(each, known) and id(each) not in seen:
            seen.add(id(each))
            items = _items_of(each)
            marks.append((type(each), None if items is None else len(items)))
            queue.extend(_state_of(each) if items is None else items)
    return marks


def _tensor_marks(marks: list[Any]) -> set[_TensorMark]:
    return {mark for mark in marks if isinstance(mark, _TensorMark)}


def _is_plain(value: Any, known: Collection[int]) -> bool:
    """
    Return whether `_marks` may ignore an object: a number or text, a class or module, a callable, or a restored one.

    Loggers are ignored too, as each refers to all others. `known` has the identities of the module's parts and tensors,
    which are restored.
    """
    return isinstance(value, _VALUES | type | ModuleType | logging.Logger) or callable(value) or id(value) in known


def _items_of(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return [*itertools.islice(value.keys(), _MOST_PARTS), *itertools.islice(value.values(), _MOST_PARTS)]
    is_collection = isinstance(value, list | tuple | deque | set | frozenset)
    return list(itertools.islice(value, _MOST_PARTS)) if is_collection else None


def _state_of(value: Any) -> list[Any]:
    state = object.__getstate__(value)
    return [each for part in (state if isinstance(state, tuple) else (state,)) if part for each in part.values()]


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif (held := _held(value)) is not None:
        yield from (item for item in _items(held) if isinstance(item, torch.Tensor))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _ids(held: Any) -> list[int]:
    return [*map(id, held), *map(id, held.values() if isinstance(held, dict) else ())]
