"""How the inputs of a module grow with the batch size, inferred from batches of different size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from cubatch.frameworks.input_objects import children, is_cache, is_holder, is_tensor, tensors_in

_PROPORTIONAL = 0.75  # of proportional growth, from which lengths that lie on no line count as growing

Path = tuple[Any, ...]
"""Position of a value in nested containers: an index or key for each level."""


@attrs.frozen
class Line:
    """
    A length that is linear in the batch size.

    Example:
        >>> Line.through({4: 28, 8: 56}).at(100)
        700
        >>> Line.through({4: 5, 8: 9}).at(100), Line.through({4: 24, 8: 31}) is None
        (101, True)
    """

    slope: Fraction
    offset: Fraction

    @classmethod
    def through(cls, lengths: Mapping[int, int]) -> Line | None:
        """
        Return the line through lengths by batch size; None if they do not grow about linearly with it.

        A slope that is no whole number is only accepted without an offset: padded lengths differ by chance. Lengths
        that grow about in proportion, such as the numbers of nodes of graphs, get the steepest proportional line.
        """
        (small, first), *_, (large, last) = sorted(lengths.items())
        slope = Fraction(last - first, large - small)
        line = cls(slope, first - slope * small)
        is_exact = all(line.at(n) == length for n, length in lengths.items())
        if slope > 0 and is_exact and (slope.denominator == 1 or not line.offset):
            return line
        if first > 0 and last * small >= _PROPORTIONAL * first * large:
            return cls(max(Fraction(length, n) for n, length in lengths.items()), Fraction(0))
        return None

    def at(self, batch_size: int) -> int:
        """Return the length at a batch size, at least 0."""
        return max(0, round(self.slope * batch_size + self.offset))


ROWS = Line(Fraction(1), Fraction(0))
"""One row for each sample."""


@attrs.frozen
class Growth:
    """How the extents of a tensor, the length of a list, or a whole number change with the batch size."""

    # by growing axis of a tensor, the line of its extent; of a list, tuple or whole number one line, at key 0
    lines: Mapping[int, Line]
    # the largest extent, in the given batches, of each axis that varies without a line, such as padded lengths
    most: Mapping[int, int] = attrs.field(factory=dict)
    # whether the elements of a tensor count samples: the largest one is the batch size, as in a PackedSequence
    counts: bool = False

    def shape(self, like: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """Return the shape of a tensor at a batch size; `like` is its shape in the example."""
        extents = [self.most.get(axis, extent) for axis, extent in enumerate(like)]
        for axis, line in self.lines.items():
            extents[axis] = line.at(batch_size)
        return tuple(extents)


def by_difference(batches: Mapping[int, Any], path: Path = ()) -> dict[Path, Growth]:
    """
    Return how values grow with the batch size, by their path, from batches of different batch sizes.

    Values that are the same in all batches are left out.

    Example:
        >>> growths = by_difference({2: (["a", "b"], 5), 3: (["c", "d", "e"], 5)})
        >>> {path: growth.lines[0].at(10) for path, growth in growths.items()}
        {(0,): 10}
    """
    values = list(batches.values())
    if all(is_tensor(value) for value in values):
        return _of_tensors(batches, path)
    parts = [children(value) for value in values]
    if all(part is not None for part in parts):
        keys = [[key for key, _ in part or ()] for part in parts]
        if all(each == keys[0] for each in keys):
            growths: dict[Path, Growth] = {}
            for key in keys[0]:
                below = {n: dict(part or ())[key] for n, part in zip(batches, parts, strict=True)}
                growths |= by_difference(below, (*path, key))
            return growths
        line = Line.through({n: len(part or ()) for n, part in zip(batches, parts, strict=True)})
        return {path: Growth({0: line})} if line and isinstance(values[0], tuple | list) else {}
    if all(map(is_holder, values)):
        tensors = {n: tuple(tensors_in(value)) for n, value in batches.items()}
        return by_difference(tensors, path) if len(set(map(len, tensors.values()))) == 1 else {}
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        line = Line.through(batches) if len(set(values)) > 1 else None
        return {path: Growth({0: line})} if line else {}
    return {}


def _of_tensors(tensors: Mapping[int, Any], path: Path) -> dict[Path, Growth]:
    if len({tensor.ndim for tensor in tensors.values()}) > 1:
        return {}
    lines: dict[int, Line] = {}
    most: dict[int, int] = {}
    first = next(iter(tensors.values()))
    for axis in range(1 if first.is_nested else first.ndim):  # only the samples of nested tensors are an axis
        extents = {n: int(tensor.size(axis)) for n, tensor in tensors.items()}
        if len(set(extents.values())) == 1:
            continue
        line = Line.through(extents)
        if line is None:
            most[axis] = max(extents.values())
        else:
            lines[axis] = line
    counts = not lines and all(_is_whole(tensor) and int(tensor.max()) == n for n, tensor in tensors.items())
    return {path: Growth(lines, most, counts)} if lines or most or counts else {}


def _is_whole(tensor: Any) -> bool:
    """Return whether a tensor has elements that are whole numbers and can be compared."""
    is_dense = str(tensor.layout) == "torch.strided" and not (tensor.is_nested or tensor.is_meta)
    return is_dense and tensor.numel() > 0 and str(tensor.dtype).startswith("torch.int")


def of_example(batch: Any, batch_size: int, path: Path = ()) -> dict[Path, Growth]:
    """
    Return how values grow with the batch size, by path, from one batch of `batch_size` samples; empty if none grows.

    Each tensor and list as long as the batch has a row per sample. A list or tuple of tensors that are as long as the
    batch themselves holds inputs, not samples. With one sample, tensors in an object grow only if it is a cache: others
    may be the same in every batch, such as means.
    """
    if is_tensor(batch):
        return {path: Growth({0: ROWS})} if batch.ndim and len(batch) == batch_size else {}
    if is_holder(batch):
        rows = [place for place, each in enumerate(tensors_in(batch)) if each.ndim and len(each) == batch_size]
        return {(*path, place): Growth({0: ROWS}) for place in rows if batch_size > 1 or is_cache(batch)}
    parts = children(batch)
    if parts is None:
        return {}
    is_sequence = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    if len(path) > 1 and is_sequence and len(parts) == batch_size and not _has_rows(batch, batch_size):
        return {path: Growth({0: ROWS})}
    growths: dict[Path, Growth] = {}
    for key, item in parts:
        growths |= of_example(item, batch_size, (*path, key))
    return growths


def _has_rows(value: Any, batch_size: int) -> bool:
    """Return whether a tensor, or one in nested lists and tuples, has `batch_size` rows along axis 0."""
    if isinstance(value, list | tuple):
        return any(_has_rows(item, batch_size) for item in value)
    return is_tensor(value) and value.ndim > 0 and len(value) == batch_size
