"""Batches of samples of unequal length: how much of each is padding, and which way to form them is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from cubatch.shown import Shown

if TYPE_CHECKING:
    from cubatch.tuning.sizes_result import SizesResult

Batches = Iterator[Sequence[int]]
"""The lengths of the samples of each batch."""


@attrs.frozen(kw_only=True)
class Batching:
    """
    A way to form batches.

    Attributes:
        name: "random", "sorted", "buckets" or "token budget".
        batch_sizes: Samples of a batch, by the longest sample for "buckets" (one entry per bucket); else one entry for
            the longest sample of all.
        padding_share: Share of the positions of all batches that hold no token of a sample.
        tokens_per_second: Real tokens per second, by the measured times.
    """

    name: str
    batch_sizes: Mapping[int, int] = attrs.field(hash=False)
    padding_share: float
    tokens_per_second: float


@attrs.frozen(kw_only=True)
class LengthPlan(Shown):
    """
    Ways to form batches of samples of given lengths, the fastest first.

    Attributes:
        axis: Name of the axis.
        num_samples: Number of lengths.
        ways: Each way at its best batch size, the fastest first.
    """

    axis: str
    num_samples: int
    ways: tuple[Batching, ...]

    @property
    def best(self) -> Batching:
        """The fastest way."""
        return self.ways[0]


def plan(rates: SizesResult, lengths: Sequence[int], *, seed: int) -> LengthPlan:
    """Compare the ways to form batches of samples of these lengths, given ascending."""
    shuffled = [int(n) for n in np.random.default_rng(seed).permutation(np.asarray(lengths))]
    longest, extents = lengths[-1], list(rates.results)
    sizes = sorted({n for result in rates.results.values() for n in result.loop_rates})
    ways: list[Batching] = []

    def add(name: str, form: Callable[[], Batches], batch_sizes: Mapping[int, int]) -> None:
        way = _timed(rates, name, form(), batch_sizes)
        same = next((each for each in ways if each.name == name), None)
        if way is not None and (same is None or way.tokens_per_second > same.tokens_per_second):
            ways[:] = [*(each for each in ways if each is not same), way]

    for n in sizes:
        add("random", lambda n=n: _of_size(shuffled, n), {longest: n})  # type: ignore[misc]
        add("sorted", lambda n=n: _of_size(lengths, n), {longest: n})  # type: ignore[misc]
    edges = {e: n for e, n in rates.batch_sizes.items() if n is not None}
    if list(edges) == extents:
        add("buckets", lambda: _of_buckets(shuffled, edges), edges)
    for budget in sorted({extent * n for extent, result in rates.results.items() for n in result.loop_rates}):
        if budget >= longest:
            add("token budget", lambda budget=budget: _of_tokens(lengths, budget), {longest: budget // longest})  # type: ignore[misc]
    ways.sort(key=lambda way: -way.tokens_per_second)
    return LengthPlan(axis=rates.axis, num_samples=len(lengths), ways=tuple(ways))


def _timed(rates: SizesResult, name: str, batches: Batches, batch_sizes: Mapping[int, int]) -> Batching | None:
    """Return a way with its padding and rate; None if a batch of it is larger than those that were measured."""
    seconds, tokens, positions = 0.0, 0, 0
    for batch in batches:
        padded = max(batch)
        rate = rates.samples_per_second(padded, len(batch))
        if rate is None:
            return None
        seconds += len(batch) / rate
        tokens += sum(batch)
        positions += padded * len(batch)
    return Batching(
        name=name, batch_sizes=batch_sizes, padding_share=1 - tokens / positions, tokens_per_second=tokens / seconds
    )


def _of_size(lengths: Sequence[int], batch_size: int) -> Batches:
    return (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))


def _of_buckets(lengths: Sequence[int], edges: Mapping[int, int]) -> Batches:
    """Yield batches of samples that lie between the same two extents, in their given order."""
    lower = 0
    for edge, batch_size in edges.items():
        yield from _of_size([n for n in lengths if lower < n <= edge], batch_size)
        lower = edge


def _of_tokens(lengths: Sequence[int], budget: int) -> Batches:
    """Yield batches of successive lengths, which ascend, with at most that many positions."""
    first = 0
    for stop, length in enumerate(lengths, start=1):
        if (stop - first) * length > budget:
            yield lengths[first : stop - 1]
            first = stop - 1
    yield lengths[first:]
