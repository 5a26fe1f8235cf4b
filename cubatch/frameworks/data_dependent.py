"""
Assumed results of operations that depend on data, for a trace without data.

A truth value is False, since most conditions guard against an error; a number is 1; a mask selects everything; `unique`
has one value. Sequences are as long as they may be. Steps that really run correct the predicted memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.frameworks.lazy_torch import torch


def result(operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """
    Return a possible result of an operation whose result depends on data: tensors without data, or a number.

    Returns:
        Any: The assumed result; NotImplemented for an unknown operation.
    """
    aten = torch.ops.aten
    known: Mapping[Any, Callable[..., Any]] = {
        aten._local_scalar_dense.default: _number,  # noqa: SLF001 - its name
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


def _number(x: Any) -> Any:
    if x.dtype is torch.bool:
        return False
    return 1.0 if x.is_floating_point() else 1 + 0j if x.is_complex() else 1


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
