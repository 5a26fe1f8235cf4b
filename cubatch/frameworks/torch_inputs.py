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
    Example inputs of a module.

    Attributes:
        positional, keyword: Arguments; other values than tensors are passed on unchanged.
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
            dtype: Type of the elements if only a shape is given.

        Raises:
            InvalidArgument: If it has no tensor, its first tensor has no axis, or an object that is none of these
                containers holds the batch.
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
        """Return the inputs for a device: constant tensors are moved there, the example stays on the CPU."""

        def moved(tensor: Any) -> Any:
            if tensor.is_meta:
                raise InvalidArgument("example_inputs", "a tensor on meta", "tensors with data, which batches are like")
            there = tensor.detach().to("cpu" if self._holds_batch(tensor) else device)
            return there.requires_grad_(tensor.requires_grad)

        positional, keyword = _mapped((self.positional, dict(self.keyword)), moved)
        return Inputs(positional, keyword, self.batch_size)

    @property
    def device(self) -> Any:
        """Device of its first tensor."""
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
        """Return an object of unknown class that holds a tensor with the batch; None if there is none."""
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
        """Return whether a collection or the attributes of an object, or what these hold, contain the batch."""
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
        Return the arguments for another batch size.

        Args:
            batch_size: Samples.
            make: make(tensor, n) returns a tensor with n rows in place of one of the example.

        Returns:
            Positional and keyword arguments; they require a gradient where the example does. Tensors without a batch
            axis are the same at all sizes.
        """

        def replaced(tensor: Any) -> Any:
            if not self._holds_batch(tensor):
                return tensor
            return make(tensor, batch_size).requires_grad_(tensor.requires_grad)

        positional, keyword = _mapped((self.positional, dict(self.keyword)), replaced)
        return positional, keyword


def random_like(generator: Any, device: Any) -> Callable[[Any, int], Any]:
    """
    Return a function that draws tensors like an example's: floats within its range, or normal if it is constant.

    Integers and booleans repeat whole samples of the example in order, so that padding labels, the density of masks
    and sorted sequence lengths stay valid. Floats are never constant: the power of a GPU, and so its clock, depends on
    the data.
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
    """Return an example with its batched floats set to 0: what identifies the workload."""
    import torch

    def blank(tensor: Any, _: int) -> Any:
        return torch.zeros_like(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    inputs = Inputs.of(example, None)
    return inputs.batch(inputs.batch_size, blank)


def _is_cache(value: Any) -> bool:
    """Return whether its class or a base class is called a cache, as in Hugging Face."""
    return any("cache" in kind.__name__.lower() for kind in type(value).__mro__)


def is_shape(example: Any) -> bool:
    """Return whether it is the shape of one sample."""
    return (
        isinstance(example, tuple | list)
        and len(example) > 0
        and all(isinstance(extent, int) and not isinstance(extent, bool) and extent > 0 for extent in example)
    )


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Map every tensor in nested tuples, lists, mappings and dataclasses."""
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
    """Convert a list or mapping to the class of another, unless its constructor does not take it."""
    if type(tree) is type(parts):
        return parts
    if isinstance(tree, list | dict | UserDict) or hasattr(tree, "__copy__"):  # else a copy may share what it holds
        with contextlib.suppress(Exception):  # whatever a class of the user's raises
            made = copy.copy(tree)
            for place, part in enumerate(parts) if isinstance(parts, list) else parts.items():
                made[place] = part
            return made
    return parts
