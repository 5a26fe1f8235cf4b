"""Batches of any size that a user's function, data loader or data set makes."""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

from cubatch import user_code
from cubatch.errors import InvalidArgument
from cubatch.frameworks import module_source
from cubatch.frameworks.lazy_torch import torch

FIELD = "batches"
INPUTS = (
    "batches is a function from a batch size to (arguments, ..., targets), as your loop passes them on; the shape of "
    "one sample without the batch, such as (3, 224, 224), where PyTorch has channels first; or a batch of tensors, "
    "those of several arguments in a tuple or, by name, a dict. A list is one argument: pass the batch of a data "
    "loader as tuple(batch), or the loader itself."
)
"""It names an argument of the Python function; the command line replaces it by its options."""
ALLOWED = (
    "a function from a batch size to inputs, a data loader or data set, two batches of different size, a batch, or the "
    "shape of one sample"
)
_END = object()  # in place of a sample, where an iterator has no other
_MOST_SAMPLES, _MOST_SECONDS = 256, 2.0
"""A data set is read up to here; larger batches repeat its first samples."""
_MOST_UNEVEN, _MOST_ELEMENTS = 4096, 2**24
"""Samples of unequal length are read up to here, within the same seconds."""
_FEWEST_DRAWS, _MOST_DRAWS, _MOST_KEPT, _DRAW_SECONDS = 8, 32, 2**21, 0.1
"""Batches of samples of unequal length that are drawn to find a typical one; the most if they are small.  Those of a
function cannot be made again: they are kept up to a number of elements, and made for each trial within these seconds.

A padded batch is as long as its longest sample. Lengths that deviate by a factor of two were tried, with batches of 32.
The first samples of a data set made a batch that was off by 38 % on average. The chosen one of 8 draws was off by 13 %,
of 32 by 7 %, of 64 by 5 %. Steps of a transformer layer were timed too, on an AMD EPYC on November 30, 2026. Their CPU
time was off by 12 % with 8 draws, by 6 % with 32, and by 16 % with 4 batches in rotation.
"""

Source = Callable[[int], Any]
"""Makes the inputs of a batch size."""


def find(given: Any) -> Source | None:
    """
    Return the function that makes a batch of a given size; None if the argument is an example.

    InvalidArgument is raised for an iterator and for several data loaders. It is also raised for a data set of whole
    batches, of which no single samples can be read.
    """
    if is_loader(given):
        return LoaderBatches(given)
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    if any(map(is_loader, parts)):
        remedy = "Pass a function from a batch size to inputs, which joins samples of all of their data sets."
        raise InvalidArgument(FIELD, "several data loaders", ALLOWED, remedy)
    if _is_data_set(given):
        return DataSetBatches(given, None)
    if hasattr(given, "__next__") and not callable(given):
        remedy = "Pass the object that it iterates over, such as the data loader itself."
        raise InvalidArgument(FIELD, f"an iterator, {type(given).__name__}", ALLOWED, remedy)
    return given if callable(given) else None


def input_names(given: Any) -> list[str | int]:
    """Return the argument `constant_inputs`, one name or position of an input or several, as a list."""
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for name in names:
        if not isinstance(name, str | int):
            raise InvalidArgument("constant_inputs", name, "names or positions of inputs")
    return names


def load(name: str) -> Any:
    """
    Import the object "package.module:name": a function from a batch size to inputs, a loader, a data set or examples.

    Return it, or if it is a function without required parameters, its result.
    """
    with user_code.users(FIELD, name, ALLOWED):
        given = module_source.load_any(name, FIELD)
        is_factory = callable(given) and not is_loader(given) and not _is_data_set(given) and user_code.takes(given, 0)
        return given() if is_factory else given


def is_loader(given: Any) -> bool:
    """Return whether an object, but no class, has `dataset` and `collate_fn`, as a PyTorch data loader has."""
    return not isinstance(given, type) and hasattr(given, "dataset") and hasattr(given, "collate_fn")


def num_elements(tree: Any) -> int:
    """
    Return the number of elements of arrays and characters of strings in nested lists and mappings.

    Any other value counts as one.

    Example:
        >>> num_elements({"words": ["to", "be"], "label": 3})
        5
    """
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return sum(map(num_elements, tree))
    if isinstance(tree, str | bytes):
        return len(tree)
    count = tree.numel() if hasattr(tree, "numel") else getattr(tree, "size", 1)
    return count if isinstance(count, int) else 1  # the size of an image file is a pair


def _is_data_set(given: Any) -> bool:
    if isinstance(given, torch.utils.data.Dataset):
        return True
    if isinstance(given, torch.Tensor | torch.nn.Module | Mapping | tuple | list | str | bytes | type):
        return False
    if hasattr(given, "__array_interface__"):  # an array is one batch, not a data set of its rows
        return False
    return hasattr(type(given), "__getitem__") and hasattr(type(given), "__len__")


def _most_typical(counts: Mapping[int, int]) -> int:
    """
    Return the key of the number of elements that is nearest to the mean of all, by ratio.

    With few samples that are much longer, half of the mean is then as far off as twice.
    """
    mean = statistics.fmean(counts.values())
    return min(counts, key=lambda key: abs(math.log(max(1, counts[key]) / max(1.0, mean))))


class TypicalBatches:
    """
    Batches of a user's function that differ in length from call to call: of several draws the most typical one.

    Args:
        make: The user's function.

    Attributes:
        is_even: Whether all samples have the same number of elements; always False.
    """

    is_even = False

    def __init__(self, make: Source) -> None:
        self._make, self.__name__ = make, getattr(make, "__name__", type(make).__name__)

    def __call__(self, batch_size: int) -> Any:
        """Return a batch of `batch_size` samples; no draw begins after _DRAW_SECONDS or _MOST_KEPT elements."""
        batches, counts, began = list[Any](), dict[int, int](), time.monotonic()
        while len(batches) < _MOST_DRAWS:
            batches.append(self._make(batch_size))
            counts[len(counts)] = num_elements(batches[-1])
            if time.monotonic() - began > _DRAW_SECONDS or sum(counts.values()) > _MOST_KEPT:
                break
        return batches[_most_typical(counts)]


class DataSetBatches:
    """
    Batches of a data set's samples, joined by a `collate_fn`.

    If the samples are of unequal length, each batch is the most typical of several draws in its number of elements.

    Args:
        data_set: A data set with `__getitem__` and `__len__`, or an iterable.
        collate: Joins a list of samples; None is the `collate_fn` of the data set, else PyTorch's default.
        places: Returns an iterator of the indices of the samples, in the order to read; None is the order of the data
            set.

    Attributes:
        num_samples: Samples in the data set; None if unknown.
        is_even: Whether all samples that were read have the same number of elements.
        loader: The data loader of the samples; None for a data set.
        repeats: Whether samples repeat in large batches; always True.
    """

    loader: Any = None
    repeats = True

    def __init__(
        self,
        data_set: Any,
        collate: Callable[[list[Any]], Any] | None,
        places: Callable[[], Iterator[int]] | None = None,
    ) -> None:
        default = torch.utils.data.default_collate
        self._collate = collate or getattr(data_set, "collate_fn", None) or default
        self._data_set, self._places = data_set, places
        is_iterable = isinstance(data_set, torch.utils.data.IterableDataset) or not hasattr(data_set, "__getitem__")
        self.num_samples: int | None = None if is_iterable else len(data_set)
        self._is_iterable = is_iterable
        self._samples: list[Any] = []
        self.is_even = True
        self._first: dict[int, int] = {}

    def __call__(self, batch_size: int) -> Any:
        """Return a batch of `batch_size` samples, which repeat if fewer were read."""
        if not self._samples:
            self._samples = self._read()
        if batch_size not in self._first:
            is_typical = self.is_even or batch_size >= len(self._samples)
            self._first[batch_size] = 0 if is_typical else self._find_typical(batch_size)
        return self._joined(batch_size, self._first[batch_size])

    def _joined(self, batch_size: int, first: int) -> Any:
        samples = self._samples
        return self._collate([samples[(first + place) % len(samples)] for place in range(batch_size)])

    def _find_typical(self, batch_size: int) -> int:
        """
        Return the index, among the samples read, of the first sample of a typical batch.

        It is the most typical of several batches that begin at equal distances.
        """
        counts = {0: num_elements(self._joined(batch_size, 0))}
        draws = min(_MOST_DRAWS, max(_FEWEST_DRAWS, _MOST_ELEMENTS // max(1, counts[0])))
        for first in (draw * len(self._samples) // draws for draw in range(1, draws)):
            counts[first] = num_elements(self._joined(batch_size, first))
        return _most_typical(counts)

    def _read(self) -> list[Any]:
        """
        Return the first samples of the data set, and record whether all have the same number of elements.

        Raises:
            InvalidArgument: If the data set has no samples, or can be read only once: the loop would lack what is read.
        """
        began, samples, lengths, count = time.monotonic(), list[Any](), set[int](), 0
        ended = False
        before, iterator = self._positions(), self._all()
        start = self._numbers()
        for sample in itertools.islice(iterator, _MOST_UNEVEN):
            samples.append(sample)
            lengths.add(length := num_elements(sample))
            count += length
            is_enough = len(samples) >= _MOST_SAMPLES and (len(lengths) == 1 or count > _MOST_ELEMENTS)
            if is_enough or time.monotonic() - began > _MOST_SECONDS:
                break
        else:
            ended = next(iterator, _END) is _END
        self.is_even = len(lengths) <= 1
        has_moved = any(before.get(key, now)[0] != now[0] for key, now in self._positions().items())
        is_empty = self._is_iterable and ended and bool(samples) and next(self._all(), _END) is _END
        if has_moved or is_empty or self._continues(iterator, start):
            raise self._read_once()
        if not samples:
            raise InvalidArgument(FIELD, "a data set without samples", "one with a sample at least")
        return samples

    def _all(self) -> Iterator[Any]:
        if not self._is_iterable:
            places = range(len(self._data_set)) if self._places is None else self._places()
            return (self._data_set[place] for place in places)
        iterators: list[Iterator[Any]] = [iter(self._data_set), iter(self._data_set)]
        if iterators[0] is iterators[1] is not self._data_set:
            raise self._read_once()
        return iterators[1]

    def _continues(self, iterator: Iterator[Any], start: Mapping[str, Any]) -> bool:
        """
        Return whether a data set that is its own iterator goes on where it was when it is iterated again.

        It does if reading has changed numbers or texts in its attributes, `start` before, and none is put back.
        """
        moved = {name for name, value in self._numbers().items() if start.get(name) != value}
        if iterator is not self._data_set or not moved:
            return False
        iter(self._data_set)
        now = self._numbers()
        return all(now.get(name) != start.get(name) for name in moved)

    def _numbers(self) -> dict[str, Any]:
        """Return the numbers and texts in attributes of the data set, by name."""
        held = getattr(self._data_set, "__dict__", {})
        return {name: value for name, value in held.items() if isinstance(value, int | float | str)}

    def _positions(self) -> dict[int, tuple[Any, Iterator[Any]]]:
        """
        Return how far generators and iterators of Python in attributes of an iterable data set are, by identity.

        They come with their position, as no other may get their identity.
        """
        values = getattr(self._data_set, "__dict__", {}).values() if self._is_iterable else ()
        held = [each for each in values if isinstance(each, Iterator) and type(each).__module__ == "builtins"]
        return {
            id(each): (inspect.getgeneratorstate(each) if inspect.isgenerator(each) else length_hint(each), each)
            for each in held
        }

    def _read_once(self) -> InvalidArgument:
        given = f"a {type(self._data_set).__name__} that can be read only once: its iterator is always the same one"
        remedy = "Make the iterator in __iter__, or pass a function from a batch size to inputs."
        return InvalidArgument(FIELD, given, "a data set that starts over with each iteration", remedy)


class LoaderBatches(DataSetBatches):
    """
    Batches of any size from a PyTorch data loader: its samples, its order and its `collate_fn`.

    Args:
        loader: The data loader.

    Raises:
        InvalidArgument: If its data set returns whole batches, so that single samples cannot be read.
    """

    def __init__(self, loader: Any) -> None:
        batches, batch_size = getattr(loader, "batch_sampler", None), getattr(loader, "batch_size", None)
        if batches is None and batch_size is None:
            given, allowed = "a data loader without a batch size", "one that makes batches of samples"
            remedy = "Its data set makes whole batches: pass a function from a batch size to inputs."
            raise InvalidArgument(FIELD, given, allowed, remedy)
        sampler = getattr(loader, "sampler", None)
        in_order: Callable[[], Iterator[int]] | None = None
        if batch_size is not None and sampler is not None:
            in_order = lambda: iter(sampler)  # noqa: E731
        elif batches is not None:
            in_order = lambda: itertools.chain.from_iterable(batches)  # noqa: E731
        super().__init__(loader.dataset, loader.collate_fn, in_order)
        self.loader = loader
