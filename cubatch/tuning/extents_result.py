"""The result of tuning at several extents of another axis, such as the length of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import checks, files
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.shown import Shown
from cubatch.tuning import length_plan
from cubatch.tuning.length_plan import LengthPlan
from cubatch.tuning.results import BUSY_MACHINE, TuningResult
from cubatch.units import join_words

_OPTIONS = ("max_batch_size", "batch_sizes", "budget")
"""Arguments that end a search, by their name in `decided_by`."""


@attrs.frozen(kw_only=True)
class ExtentsResult(Shown):
    """
    A tuning result for each extent of an axis, and figures of all of them, such as a token budget.

    A token is one position of the axis in one sample: a word of a text, a frame of speech, a row of an image.

    Attributes:
        axis: Name of the axis, such as "sequence".
        results: The tuning result of each extent, ascending.
        failed: The message of the error of each extent without a result.
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
        The fewest tokens per batch that at every extent (sequence length) come within the tolerance of its best rate.

        A batch of that many tokens has `token_budget // extent` samples. None if an extent failed, or no measured
        extent times batch size comes that near to the best rates.
        """
        tried = sorted({extent * n for extent, result in self.results.items() for n in result.loop_rates})
        return next((budget for budget in tried if self._keeps_up(budget)), None)

    def _keeps_up(self, budget: int) -> bool:
        for extent, result in self.results.items():
            rates, n = result.loop_rates, budget // extent
            if not n or n > self.largest_at(extent):
                return False
            if self.rate_at(extent, n) < (1 - (result.tolerance or 0.0)) * max(rates.values()):
                return False
        return not self.failed

    def largest_at(self, extent: int) -> int:
        """
        Return the largest batch size measured at the smallest tuned extent from `extent` on; 0 if none was measured.

        Raises:
            InvalidArgument: If the extent is not positive, or above the largest that was tuned.
        """
        return max(self.results[self._above(extent)].loop_rates, default=0)

    def rate_at(self, extent: int, batch_size: int) -> float:
        """
        Return samples per second at an extent and a batch size, interpolated between those that were measured.

        The time of a sample is linear in the extent, and the rate in the logarithm of the batch size.  Below the
        smallest extent or batch size a step takes as long as at the smallest.  Above the largest measured batch size
        the rate is that of the largest.

        Raises:
            InvalidArgument: If a value is not positive, the extent is above the largest tuned one, or the next tuned
                extents have no measured batch size.
        """
        batch_size, above = checks.check_batch_size(batch_size), self._above(extent)
        below = max((tuned for tuned in self.results if tuned <= extent), default=above)
        times = [1 / _rate(self.results[each].loop_rates, batch_size, each) for each in (below, above)]
        return 1 / float(np.interp(extent, (below, above), times)) if above > below else 1 / times[0]

    def _above(self, extent: int) -> int:
        checks.check_whole(self.axis, extent)
        above = next((tuned for tuned in self.results if tuned >= extent), None)
        if above is None:
            raise InvalidArgument(self.axis, extent, f"at most {max(self.results)}, the largest tuned", "Tune it too.")
        return above

    def with_lengths(self, lengths: Iterable[int] | str | Path, *, seed: int = 0) -> LengthPlan:
        """
        Return ways to form batches of samples of these lengths, the one with most tokens (no padding) per second first.

        The longest samples have at most the largest batch size that was measured at their extent.

        Args:
            lengths: The length of each sample of your data, in tokens, or the path of a text file of them.
            seed: Seed of the random order.

        Raises:
            InvalidArgument: If there is no length, one is no whole number or longer than the largest tuned extent, or
                nothing was measured at an extent.
            InvalidData: If the file cannot be read, or has other words than whole numbers.
        """
        if isinstance(lengths, str | Path):
            lengths = _read_lengths(lengths)
        checks.check_kind("lengths", lengths, Iterable, "the length of each sample, or the path of a file of them")
        ascending = sorted(
            checks.check_whole("lengths", length.item() if hasattr(length, "item") and np.ndim(length) == 0 else length)
            for length in lengths
        )
        if not ascending:
            raise InvalidArgument("lengths", [], "the length of at least one sample")
        self._above(ascending[-1])
        measured = {extent: sorted(result.loop_rates) for extent, result in self.results.items()}
        chosen = {extent: n or self._fastest(extent) for extent, n in self.batch_sizes.items()}
        seed = checks.check_whole("seed", seed, least=0)
        plan = length_plan.plan(self.axis, ascending, rate_at=self.rate_at, measured=measured, chosen=chosen, seed=seed)
        undecided = [str(extent) for extent, n in self.batch_sizes.items() if n is None]
        doubts = [f"Rates at {join_words(undecided)} are rough: there is no recommendation."] if undecided else []
        doubts += [BUSY_MACHINE] if self.on_busy_machine else []
        return attrs.evolve(plan, reasons=tuple(doubts))

    @property
    def on_busy_machine(self) -> bool:
        """Whether other processes used the machine while steps were timed, at any extent."""
        return any(result.disturbed for result in self.results.values())

    def _fastest(self, extent: int) -> int:
        rates = self.results[extent].loop_rates
        if not rates:
            raise InvalidArgument(self.axis, extent, "an extent at which a batch size was measured", "Raise budget.")
        return max(rates, key=lambda n: rates[n])

    def plot(self, path: str | Path) -> None:
        """
        Draw tokens per second against batch size, a line per extent, into a .png, .svg or .pdf file.

        Raises:
            MissingDependency: If Matplotlib is not installed.
            InvalidArgument: If `path` is no path, has another ending, or the file cannot be written.
        """
        from cubatch.report import plot

        checks.check_path(path)
        plot.by_extent(self, path)

    def to_lhotse(self, *, tokens_per_unit: float = 1.0) -> str:
        """
        Return buckets for the data loaders of lhotse and NeMo, as YAML.

        Args:
            tokens_per_unit: Positions of the axis in one unit of `bucket_duration_bins`. That unit is a second for
                speech (100 for frames of 10 ms), and a token for texts.

        Raises:
            InvalidArgument: If an extent has no recommendation, or the unit is not positive.
        """
        unit = checks.check_number("tokens_per_unit", tokens_per_unit, above=0.0)
        sizes = {extent: n for extent, n in self.batch_sizes.items() if n is not None}
        if (extent := self._undecided) is not None:
            allowed = "extents that all have a recommended batch size"
            raise InvalidArgument(self.axis, extent, allowed, self._remedy(extent))
        bins = ", ".join(f"{extent / unit:g}" for extent in sizes)
        return f"use_bucketing: true\nbucket_duration_bins: [{bins}]\nbucket_batch_size: {list(sizes.values())}\n"

    def to_fairseq(self) -> str:
        """
        Return the options of `fairseq-train` for batches of as many tokens as the budget.

        By default, fairseq 0.12 leaves samples to the next batch until their number is a multiple of 8.

        Raises:
            InvalidArgument: If there is no token budget.
        """
        return f"--max-tokens {self._budget()} --required-batch-size-multiple 1"

    def to_vllm(self) -> str:
        """
        Return the options of `vllm serve` for steps of as many prompt tokens as the budget.

        `--max-num-seqs` is the number of prompts of the smallest extent in such a step. It also bounds the requests for
        which tokens are generated at the same time: leave it out, or raise it, for models that generate.

        Raises:
            InvalidArgument: If there is no token budget.
        """
        budget = self._budget()
        return f"--max-num-batched-tokens {budget} --max-num-seqs {budget // min(self.results)}"

    def _budget(self) -> int:
        budget = self.token_budget
        if budget is None:
            allowed = "a number of tokens that suits all extents"
            raise InvalidArgument("token_budget", None, allowed, self.budget_remedy)
        return budget

    @property
    def budget_remedy(self) -> str:
        """The next step if `token_budget` is None, as a sentence."""
        if (extent := self._undecided) is not None:
            return self._remedy(extent)
        ended = {extent: str(each.decided_by) for extent, each in self.results.items() if each.decided_by in _OPTIONS}
        if ended:
            names, extents = join_words(sorted(set(ended.values()))), join_words([*map(str, ended)])
            return f"Raise {names}, which ended the search at {extents}, or use buckets: to_lhotse()."
        return "Tune with a larger tolerance, or use buckets: to_lhotse()."

    @property
    def _undecided(self) -> int | None:
        """The first extent without a recommendation, failed extents before others; None if all have one."""
        return next(iter([*self.failed, *(extent for extent, n in self.batch_sizes.items() if n is None)]), None)

    def _remedy(self, extent: int) -> str:
        if extent in self.failed:
            return f"Resolve why tuning failed at {extent}, or leave it out: {self.failed[extent]}"
        return f"Tune again with a larger budget: {extent} has no recommendation."

    def to_mapping(self) -> dict[str, Any]:
        """Return the result as plain mappings and lists, for JSON."""
        return {
            "schema": 1,
            "axis": self.axis,
            "token_budget": self.token_budget,
            "tokens_per_second": {str(extent): rate for extent, rate in self.tokens_per_second.items()},
            "results": {str(extent): result.to_mapping() for extent, result in self.results.items()},
            "failed": {str(extent): error for extent, error in self.failed.items()},
        }


def _read_lengths(path: str | Path) -> list[int]:
    try:
        return [int(word) for word in Path(path).read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise InvalidData(str(path), files.reason(error), "Write the length of each sample on a line.") from error


def _rate(rates: Mapping[int, float], batch_size: int, extent: int) -> float:
    if not rates:
        raise InvalidArgument("extent", extent, "an extent at which a batch size was measured", "Raise budget.")
    sizes = sorted(rates)
    if batch_size < sizes[0]:
        return rates[sizes[0]] * batch_size / sizes[0]
    return float(np.interp(math.log(batch_size), [math.log(n) for n in sizes], [rates[n] for n in sizes]))
