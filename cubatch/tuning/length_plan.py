"""Batches of samples of unequal length: the share of padding, and the fastest way to form such batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from cubatch.shown import Shown

Batches = Iterator[Sequence[int]]
"""The lengths of the samples of each batch."""


RateAt = Callable[[int, int], float]
"""Returns samples per second at an extent and a batch size."""

_GROUPED = 50
"""Batches that are sorted together: `get_length_grouped_indices` of transformers 5.23."""


@attrs.frozen(kw_only=True)
class Batching:
    """
    A way to form batches, with its padding and its rate.

    Attributes:
        name: "random", "grouped", "sorted", "buckets" or "token budget".
        batch_sizes: Samples of a batch, by the length of its longest sample. "buckets" has an entry for the largest
            length of each bucket, any other way one entry for the longest of all samples.
        token_budget: Positions of a batch at most, padding included; None for ways other than "token budget".
        padding_share: Share of the positions of all batches that hold no token of a sample, from 0 to below 1.
        tokens_per_second: Tokens per second without padding, by the measured times.
    """

    name: str
    batch_sizes: Mapping[int, int] = attrs.field(hash=False)
    token_budget: int | None = None
    padding_share: float
    tokens_per_second: float


@attrs.frozen(kw_only=True)
class LengthPlan(Shown):
    """
    Ways to form batches of samples of given lengths, the fastest first.

    Attributes:
        axis: Name of the axis along which lengths differ.
        num_samples: Number of samples.
        ways: Each way at its best batch size, the fastest first.
        reasons: Sentences for a user: what makes the rates doubtful, if anything.
    """

    axis: str
    num_samples: int
    ways: tuple[Batching, ...]
    reasons: tuple[str, ...] = ()

    @property
    def best(self) -> Batching:
        """The way with the most tokens per second."""
        return self.ways[0]

    def to_huggingface(self) -> str:
        """
        Return the options of a script with the Trainer of Hugging Face, which forms random or grouped batches.

        They are fields of its `TrainingArguments`, as options of the command line.
        """
        way = next(way for way in self.ways if way.name in {"random", "grouped"})
        strategy = "random" if way.name == "random" else "group_by_length"
        (batch_size,) = way.batch_sizes.values()
        return f"--per_device_train_batch_size {batch_size} --train_sampling_strategy {strategy}"


def plan(
    axis: str, lengths: Sequence[int], *, rate_at: RateAt, measured: Mapping[int, Iterable[int]],
    chosen: Mapping[int, int], seed: int,
) -> LengthPlan:  # fmt: skip
    """
    Return the ways to form batches, each at its best batch size, the fastest first.

    Args:
        axis: Name of the axis, for the result.
        lengths: The length of each sample, ascending; at least one.
        rate_at: Returns samples per second at an extent and a batch size.
        measured: The measured batch sizes of each extent; at least one at the smallest extent that holds all lengths.
        chosen: The recommended batch size of each extent, by ascending extent; the fastest where none is recommended.
        seed: Seed of the random order.
    """
    shuffled = np.random.default_rng(seed).permutation(np.asarray(lengths)).tolist()
    longest, rate_at = lengths[-1], functools.cache(rate_at)
    padded = min(extent for extent in measured if extent >= longest)
    most = max(measured[padded])  # larger batches of the longest samples were not measured, and may not fit
    sizes = sorted({n for each in measured.values() for n in each if n <= most})
    positions = {extent * n for extent, each in measured.items() for n in each}
    budgets = sorted(each for each in positions if longest <= each <= padded * most)

    def fastest(ways: Iterable[Batching]) -> Batching:
        return max(ways, key=lambda way: way.tokens_per_second)

    ways = [
        fastest(_timed(rate_at, "random", _of_size(shuffled, n), {longest: n}) for n in sizes),
        fastest(_timed(rate_at, "grouped", _of_groups(shuffled, n), {longest: n}) for n in sizes),
        fastest(_timed(rate_at, "sorted", _of_size(lengths, n), {longest: n}) for n in sizes),
        _timed(rate_at, "buckets", _of_buckets(shuffled, chosen), chosen),
        fastest(
            _timed(rate_at, "token budget", _of_tokens(lengths, budget), {longest: budget // longest}, budget)
            for budget in budgets
        ),
    ]
    ways.sort(key=lambda way: -way.tokens_per_second)
    return LengthPlan(axis=axis, num_samples=len(lengths), ways=tuple(ways))


def _timed(
    rate_at: RateAt, name: str, batches: Batches, batch_sizes: Mapping[int, int], token_budget: int | None = None
) -> Batching:
    seconds, tokens, positions = 0.0, 0, 0
    for batch in batches:
        padded = max(batch)
        seconds += len(batch) / rate_at(padded, len(batch))
        tokens += sum(batch)
        positions += padded * len(batch)
    return Batching(
        name=name, batch_sizes=batch_sizes, token_budget=token_budget, padding_share=1 - tokens / positions,
        tokens_per_second=tokens / seconds,
    )  # fmt: skip


def _of_size(lengths: Sequence[int], batch_size: int) -> Batches:
    return (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))


def _of_groups(lengths: Sequence[int], batch_size: int) -> Batches:
    """
    Yield batches as with `group_by_length` of Hugging Face: stretches of the samples are sorted, longest first.

    A stretch has 50 batches, or a quarter of all if that is less.
    """
    stretch = batch_size * max(1, min(len(lengths) // (4 * batch_size), _GROUPED))
    for start in range(0, len(lengths), stretch):
        yield from _of_size(sorted(lengths[start : start + stretch], reverse=True), batch_size)


def _of_buckets(lengths: Sequence[int], edges: Mapping[int, int]) -> Batches:
    """
    Yield batches of samples whose lengths belong to one bucket, in the given order of samples.

    `edges` has the batch size of each bucket, by the largest length in it.
    """
    lower = 0
    for edge, batch_size in edges.items():
        yield from _of_size([n for n in lengths if lower < n <= edge], batch_size)
        lower = edge


def _of_tokens(lengths: Sequence[int], budget: int) -> Batches:
    """
    Yield batches of successive lengths that have at most `budget` positions after padding to the longest.

    `lengths` are in ascending order. One above `budget` is a batch of its own.
    """
    first = 0
    for stop, length in enumerate(lengths, start=1):
        if (stop - first) * length > budget and stop - first > 1:
            yield lengths[first : stop - 1]
            first = stop - 1
    yield lengths[first:]
