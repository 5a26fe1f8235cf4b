"""
Assumed results of operations that depend on data, for a trace without data.

A truth value is False, since most conditions guard against an error; a number is 1; a mask selects everything; `unique`
has one value. Sequences are as long as they may be. Steps that really run correct the predicted memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cubatch.frameworks.lazy_torch import torch

NUMBER = "aten._local_scalar_dense.default"
"""Operator that returns a number in a tensor to Python."""

CHECKS = frozenset({"aten::all", "aten::_is_all_true"})
"""Operators that check all elements, as in `if not (x > 0).all(): raise`."""


def result(operation: Any, arguments: Sequence[Any], options: Mapping[str, Any], number: int = 1) -> Any:
    """
    Return a possible result of an operation whose result depends on data: tensors without data, or a number.

    `number` is assumed where a number depends on data.

    Returns:
        Any: The assumed result; NotImplemented for an unknown operation.
    """
    aten = torch.ops.aten
    known: Mapping[Any, Callable[..., Any]] = {
        aten._local_scalar_dense.default: lambda x: _number(x, number),  # noqa: SLF001 - its name
        aten.equal.default: lambda *_: False,
        aten.nonzero.default: lambda x: _places(x, x.numel(), x.ndim),
        aten.masked_select.default: _selected,
        aten.index.Tensor: _indexed,
        aten.repeat_interleave.Tensor: lambda repeats, **_: _places(repeats, repeats.numel()),
        aten.bincount.default: lambda x, _=None, minlength=0: _places(x, max(1, minlength)),
        aten._unique2.default: _unique,  # noqa: SLF001 - its name
        aten.unique_consecutive.default: _unique,
        aten.unique_dim.default: _unique_parts,
        aten._pack_padded_sequence.default: _packed,  # noqa: SLF001 - its name
        aten._ctc_loss.default: _alignments,  # noqa: SLF001 - its name
        aten._ctc_loss.Tensor: _alignments,  # noqa: SLF001 - its name
    }
    return known[operation](*arguments, **options) if operation in known else NotImplemented


@contextmanager
def replaced_functions(assumed: set[str]) -> Iterator[None]:
    """
    In the block, replace functions of PyTorch that read data without an operator, for tensors without data.

    A number in a text is that of `result`.  An array of NumPy, as SciPy makes of a tensor, has zeros, and
    "numpy.asarray" is added to `assumed`.  A packed sequence is padded as it was assumed to be packed.  A conversion of
    parameters that changes nothing is left out, as PyTorch exchanges those without data.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    pad = torch._VF._pad_packed_sequence  # noqa: SLF001 - its only name
    convert = torch.nn.Module._apply  # noqa: SLF001 - which all conversions call

    def written(x: Any, form: str) -> str:
        return format(x.detach().item(), form) if x.ndim == 0 else object.__format__(x, form)

    def array(x: Any, dtype: Any = None) -> Any:
        assumed.add("numpy.asarray")
        with _disable_current_modes():
            zeros = torch.zeros(x.shape, dtype=x.dtype).numpy()
        return zeros if dtype is None else zeros.astype(dtype)

    def padded(data: Any, counts: Any, batch_first: bool, value: Any, steps: int) -> Any:  # noqa: FBT001 - as called
        if not isinstance(data, FakeTensor):
            return pad(data, counts, batch_first, value, steps)
        with _disable_current_modes():
            samples = int(counts[0])
        whole = data.new_full((steps, samples, *data.shape[1:]), value)
        whole.flatten(0, 1)[: len(data)] = data
        return whole.transpose(0, 1) if batch_first else whole, torch.full((samples,), len(counts))

    def converted(part: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        tensors = [*part.parameters(recurse), *part.buffers(recurse)]
        with torch.no_grad():
            is_same = all(isinstance(each, FakeTensor) and function(each) is each for each in tensors)
        return part if is_same else convert(part, function, recurse)

    with ExitStack() as undo:
        for home, name, function in (
            (FakeTensor, "__format__", written),
            (FakeTensor, "__array__", array),
            (torch._VF, "_pad_packed_sequence", padded),  # noqa: SLF001
            (torch.nn.Module, "_apply", converted),
        ):
            had = name in vars(home)
            undo.callback(*(setattr, home, name, vars(home)[name]) if had else (delattr, home, name))
            setattr(home, name, function)
        yield


def _number(x: Any, number: int) -> Any:
    if x.dtype is torch.bool:
        return False
    return float(number) if x.is_floating_point() else complex(number) if x.is_complex() else number


def _places(like: Any, *extents: int) -> Any:
    return like.new_empty(extents, dtype=torch.int64)


def _selected(x: Any, mask: Any) -> Any:
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def _indexed(x: Any, indices: Sequence[Any]) -> Any:
    """Return a tensor without data, indexed by `indices` as if each mask in them selected everything."""
    places: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += [_places(index, index.numel()) for _ in range(index.ndim)] if is_mask else [index]
    return torch.ops.aten.index.Tensor(x, places)


def _unique(x: Any, *_: Any, **__: Any) -> Any:
    return x.new_empty(1), _places(x, *x.shape), _places(x, 1)


def _unique_parts(x: Any, dim: int, *_: Any, **__: Any) -> Any:
    return x.narrow(dim, 0, 1), _places(x, x.shape[dim]), _places(x, 1)


def _packed(x: Any, lengths: Any, batch_first: bool) -> Any:  # noqa: FBT001 - as PyTorch passes it
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():  # recurrent layers read how many samples a step has
        counts = torch.full((x.shape[batch_first],), len(lengths), device="cpu")
    return x.new_empty(x.shape[:2].numel(), *x.shape[2:]), counts


def _alignments(scores: Any, targets: Any, *_: Any, **__: Any) -> Any:
    """Return the loss of each sample and the logarithms of sums over alignments, of targets of equal length."""
    steps, samples, _classes = scores.shape
    return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * (targets.numel() // samples) + 1)
