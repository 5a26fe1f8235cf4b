"""The result of tuning at several extents of another axis, such as the length of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.shown import Shown
from cubatch.tuning import length_plan
from cubatch.tuning.length_plan import LengthPlan
from cubatch.tuning.results import TuningResult


@attrs.frozen(kw_only=True)
class SizesResult(Shown):
    """
    A tuning result for each extent of an axis, and what they have in common.

    A token is one position of the axis in one sample: a word of a text, a frame of speech, a row of an image.

    Attributes:
        axis: Name of the axis, as `batches` takes it.
        results: The tuning result of each extent, ascending.
        failed: The error of each extent that has none.
    """

    axis: str
    results: Mapping[int, TuningResult] = attrs.field(hash=False)
    failed: Mapping[int, str] = attrs.field(hash=False)

    @property
    def batch_sizes(self) -> dict[int, int | None]:
        """The recommended batch size by extent; None where there is no recommendation."""
        return {extent: result.batch_size for extent, result in self.results.items()}

    @property
    def tokens_per_second(self) -> dict[int, float]:
        """Tokens per second at the recommended batch size, by extent."""
        return {
            extent: extent * result.samples_per_second
            for extent, result in self.results.items()
            if result.samples_per_second is not None
        }

    @property
    def token_budget(self) -> int | None:
        """
        The smallest number of tokens per batch that is within the tolerance of the best rate at every extent.

        A batch of that many tokens has `token_budget // extent` samples. None if no such number was measured.
        """
        tried = sorted({extent * n for extent, result in self.results.items() for n in result.loop_rates})
        return next((budget for budget in tried if self._keeps_up(budget)), None)

    def _keeps_up(self, budget: int) -> bool:
        for extent, result in self.results.items():
            rates = result.loop_rates
            rate = self.samples_per_second(extent, budget // extent) if budget >= extent else None
            if rate is None or rate < (1 - (result.tolerance or 0.0)) * max(rates.values()):
                return False
        return bool(self.results) and not self.failed

    def samples_per_second(self, extent: float, batch_size: int) -> float | None:
        """
        Return the rate at an extent and a batch size, interpolated between those that were measured.

        The time of a sample is linear in the extent, and the rate in the logarithm of the batch size.  Extents below
        the smallest take as long as that.  None above the largest extent, or the largest batch size measured there.
        """
        above = next((measured for measured in self.results if measured >= extent), None)
        if above is None:
            return None
        below = max((measured for measured in self.results if measured <= extent), default=above)
        times = []
        for each in (below, above):
            rates = sorted(self.results[each].loop_rates.items())
            if not rates or (batch_size > rates[-1][0] and each == above):
                return None
            sizes = [math.log(n) for n, _ in rates]
            times.append(1 / float(np.interp(math.log(batch_size), sizes, [rate for _, rate in rates])))
        return 1 / float(np.interp(extent, (below, above), times)) if above > below else 1 / times[1]

    def with_lengths(self, lengths: Iterable[int], *, seed: int = 0) -> LengthPlan:
        """
        Return how to form batches of samples of these lengths, by real tokens per second, padding left out.

        Args:
            lengths: The length of each sample of your data, in tokens.
            seed: Of the random order.

        Raises:
            InvalidArgument: If there is no length, or one is longer than the largest measured extent.
        """
        known = sorted(checks.check_whole("lengths", length) for length in lengths)
        largest = max(self.results, default=0)
        if not known or known[-1] > largest:
            raise InvalidArgument(
                "lengths",
                known[-1] if known else None,
                f"lengths up to {largest}, the largest measured",
                "Tune at it too.",
            )
        return length_plan.plan(self, known, seed=seed)

    def plot(self, path: str | Path) -> None:
        """
        Draw tokens per second against batch size, a line per extent, into a .png, .svg or .pdf file.

        Raises:
            MissingDependency: If Matplotlib is not installed.
            InvalidArgument: If it is no path, the ending is none of the three, or the file cannot be written.
        """
        from cubatch.report import plot

        checks.check_path(path)
        plot.by_extent(self, path)

    def to_lhotse(self) -> str:
        """
        Return buckets for the data loaders of lhotse and NeMo, as YAML.

        Raises:
            InvalidArgument: If an extent has no recommendation.
        """
        sizes = self.batch_sizes
        if None in sizes.values() or self.failed:
            missing = next((extent for extent, n in sizes.items() if n is None), None) or next(iter(self.failed))
            raise InvalidArgument("sizes", missing, "extents that all have a recommendation", "Tune them again.")
        return f"use_bucketing: true\nbucket_duration_bins: {list(sizes)}\nbucket_batch_size: {list(sizes.values())}\n"

    def to_fairseq(self) -> str:
        """
        Return the options of `fairseq-train` for batches of as many tokens as the budget.

        Raises:
            InvalidArgument: If there is no token budget.
        """
        return f"--max-tokens {self._budget()}"

    def to_vllm(self) -> str:
        """
        Return the options of `vllm serve` for batches of as many tokens as the budget.

        Raises:
            InvalidArgument: If there is no token budget.
        """
        return f"--max-num-batched-tokens {self._budget()} --max-num-seqs {self._budget() // min(self.results)}"

    def _budget(self) -> int:
        budget = self.token_budget
        if budget is None:
            remedy = "Tune with a larger tolerance, or use buckets: to_lhotse()."
            raise InvalidArgument("token_budget", None, "a number of tokens that suits all extents", remedy)
        return budget

    def to_mapping(self) -> dict[str, Any]:
        """Return plain mappings and lists, for JSON."""
        return {
            "schema": 1,
            "axis": self.axis,
            "token_budget": self.token_budget,
            "tokens_per_second": {str(extent): rate for extent, rate in self.tokens_per_second.items()},
            "results": {str(extent): result.to_mapping() for extent, result in self.results.items()},
            "failed": {str(extent): error for extent, error in self.failed.items()},
        }
