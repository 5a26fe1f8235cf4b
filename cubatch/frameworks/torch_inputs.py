"""Random inputs of any batch size, like an example of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import UserDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cubatch.errors import InvalidArgument
from cubatch.measure.runner import Remark

_ALLOWED = (
    "a tensor, or a tuple (positional arguments) or dict (keyword arguments) of tensors with the batch as axis 0, "
    "or the shape of one sample, such as (3, 224, 224)"
)


@attrs.frozen(eq=False)
class Inputs:
    """
    What a module is called with, as an example of it.

    Attributes:
        positional, keyword: Arguments whose tensors stand for a batch; what is no tensor is handed on as it is.
        batch_size: Samples of the example: axis 0 of its first tensor.
    """

    positional: tuple[Any, ...]
    keyword: Mapping[str, Any]
    batch_size: int

    @classmethod
    def of(cls, example: Any, dtype: Any) -> Inputs:
        """
        Read the `example_inputs` of a public function.

        Args:
            example: A tensor, a tuple, a mapping, a dataclass, or the shape of one sample.
            dtype: Type of the elements where only a shape is given.

        Raises:
            InvalidArgument: If there is no tensor in it, its first one has no axis, or an object that is none of these
                containers holds the batch too.
        """
        import torch

        if is_shape(example):
            example = torch.randn(1, *example, dtype=dtype, generator=torch.Generator().manual_seed(0), device="cpu")
        positional: tuple[Any, ...] = ()
        keyword: Mapping[str, Any] = {}
        if isinstance(example, Mapping):
            keyword = dict(example)
        else:
            positional = example if isinstance(example, tuple) and not hasattr(example, "_fields") else (example,)
        found: list[Any] = []

        def noted(tensor: Any) -> Any:
            found.append(tensor)
            return tensor.detach().requires_grad_() if tensor.requires_grad else tensor  # the example gets no gradient

        positional, keyword = _mapped((positional, keyword), noted)
        if not found or not found[0].ndim or not len(found[0]):
            raise InvalidArgument("example_inputs", example, _ALLOWED)
        inputs = cls(positional, keyword, len(found[0]))
        if (holder := inputs._opaque((positional, keyword))) is not None:
            given = f"a {type(holder).__name__}, whose tensors nobody can replace by those of another batch"
            remedy = (
                "Wrap the module in one that makes it, as a cache of keys and values, of tensors; or, if these are the "
                "same in every batch, give an example of another number of samples."
            )
            raise InvalidArgument("example_inputs", given, _ALLOWED, remedy)
        return inputs

    def on(self, device: Any) -> Inputs:
        """Give them for a device: what every batch has is there, and what batches are drawn like is on the CPU."""

        def moved(tensor: Any) -> Any:
            if tensor.is_meta:
                raise InvalidArgument("example_inputs", "a tensor on meta", "tensors with data, which batches are like")
            there = tensor.detach().to("cpu" if self._holds_batch(tensor) else device)
            return there.requires_grad_(tensor.requires_grad)

        positional, keyword = _mapped((self.positional, dict(self.keyword)), moved)
        return Inputs(positional, keyword, self.batch_size)

    @property
    def device(self) -> Any:
        """Where the first of its tensors is."""
        return self._tensors()[0].device

    def remarks(self) -> list[Remark]:
        """Return a remark on tensors without a batch axis, which are the same at all batch sizes."""
        shapes = [str(tuple(tensor.shape)) for tensor in self._tensors() if not self._holds_batch(tensor)]
        values = {"batch_size": self.batch_size, "shapes": ", ".join(shapes)}
        return [Remark(code="constant_inputs", values=values)] if shapes else []

    def _tensors(self) -> list[Any]:
        found: list[Any] = []

        def noted(tensor: Any) -> Any:
            found.append(tensor)
            return tensor

        _mapped((self.positional, dict(self.keyword)), noted)
        return found

    def _holds_batch(self, tensor: Any) -> bool:
        return bool(tensor.ndim) and len(tensor) == self.batch_size

    def _opaque(self, tree: Any) -> Any:
        """Find an object in which the example's batch would stay: no container that is known, but it holds some."""
        import torch

        if isinstance(tree, Mapping):
            tree = list(tree.values())
        elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            tree = [getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init]
        if isinstance(tree, tuple | list):
            return next((found for part in tree if (found := self._opaque(part)) is not None), None)
        if isinstance(tree, torch.Tensor) or (self.batch_size == 1 and not _is_cache(tree)):
            return None  # of one sample tensors that are the same in every batch may look the same
        return tree if self._has_batch(tree, {}) else None

    def _has_batch(self, value: Any, seen: dict[int, Any]) -> bool:
        """Say whether a tensor that holds the batch is in a collection, an object's attributes, or what these hold."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._holds_batch(value)
        if id(value) in seen or isinstance(value, type | torch.nn.Module) or callable(value):
            return False
        seen[id(value)] = value  # kept, as no other may have its id
        is_collection = isinstance(value, tuple | list | set | frozenset | deque)
        parts = value.values() if isinstance(value, Mapping) else value if is_collection else ()
        state = object.__getstate__(value)  # all attributes, also those in slots
        return any(self._has_batch(part, seen) for part in (*parts, state))

    def batch(self, batch_size: int, make: Callable[[Any, int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """
        Give the arguments for another batch size.

        Args:
            batch_size: Samples.
            make: make(tensor, n) gives a tensor with n rows in the place of one of the example.

        Returns:
            Positional and keyword arguments: those require a gradient that do in the example. Tensors whose axis 0 is
            not the batch are the same each time.
        """

        def replaced(tensor: Any) -> Any:
            if not self._holds_batch(tensor):
                return tensor
            return make(tensor, batch_size).requires_grad_(tensor.requires_grad)

        positional, keyword = _mapped((self.positional, dict(self.keyword)), replaced)
        return positional, keyword


def random_like(generator: Any, device: Any) -> Callable[[Any, int], Any]:
    """
    Make tensors like an example's, of its dtype: floats within its range, or normal where that holds one value only.

    Integers and booleans are whole samples of the example, each as often and in its order: labels of padding are -100,
    rows of a mask leave equally many, and lengths of sequences are sorted, which those drawn one by one would not be.
    Floats are never constant: what a GPU draws, and so its clock, depends on the data.
    """
    import torch

    like: dict[str, Any] = {"generator": generator, "device": generator.device}  # a process may have a default device

    def make(tensor: Any, batch_size: int) -> Any:
        shape = (batch_size, *tensor.shape[1:])
        if not tensor.numel():
            return torch.empty(shape, dtype=tensor.dtype, device=device)
        if tensor.dtype.is_complex:  # which have no range
            return torch.randn(shape, dtype=tensor.dtype, **like).to(device)
        if not tensor.dtype.is_floating_point:
            samples = torch.arange(batch_size, device=generator.device) * len(tensor) // batch_size
            return tensor.cpu()[samples].to(device)
        low, high = (bound.item() for bound in tensor.float().aminmax())  # the smallest types have none of their own
        drawn = torch.randn(shape, **like)
        if low < high and math.isfinite(low) and math.isfinite(high):
            drawn = torch.rand(shape, **like).mul_(high - low).add_(low)
        return drawn.to(device, tensor.dtype)

    return make


def without_floats(example: Any) -> Any:
    """Give the arguments of an example with 0 for the floats that each batch draws: all that decides what runs."""
    import torch

    def blank(tensor: Any, _: int) -> Any:
        return torch.zeros_like(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    inputs = Inputs.of(example, None)
    return inputs.batch(inputs.batch_size, blank)


def _is_cache(value: Any) -> bool:
    """Say whether its class, or one that this is made of, is called a cache, as those of Hugging Face are."""
    return any("cache" in kind.__name__.lower() for kind in type(value).__mro__)


def is_shape(example: Any) -> bool:
    """Say whether it is the shape of one sample."""
    return (
        isinstance(example, tuple | list)
        and len(example) > 0
        and all(isinstance(extent, int) and not isinstance(extent, bool) and extent > 0 for extent in example)
    )


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Change every tensor of nested tuples, lists, mappings and dataclasses."""
    import torch

    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        parts = [_mapped(part, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return _alike(tree, [_mapped(part, change) for part in tree])
    if isinstance(tree, Mapping):
        return _alike(tree, {name: _mapped(part, change) for name, part in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: _mapped(getattr(tree, name), change) for name in names})
    return tree


def _alike(tree: Any, parts: Any) -> Any:
    """Give a list or mapping of other parts the class of one, unless that is a class that takes no others."""
    if type(tree) is type(parts):
        return parts
    if isinstance(tree, list | dict | UserDict) or hasattr(tree, "__copy__"):  # else a copy may share what it holds
        with contextlib.suppress(Exception):  # whatever a class of the user's raises
            made = copy.copy(tree)
            for place, part in enumerate(parts) if isinstance(parts, list) else parts.items():
                made[place] = part
            return made
    return parts
