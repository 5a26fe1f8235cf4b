"""The result of tuning with several numbers of threads: instances, batch size, and whether to batch at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from cubatch.shown import Shown
from cubatch.tuning.results import BUSY_MACHINE, TuningResult
from cubatch.units import format_count, format_counted, format_percent


@attrs.frozen(kw_only=True)
class ThreadsResult(Shown):
    """
    A tuning result for each number of threads of an instance, measured while instances use all CPUs.

    Attributes:
        results: The tuning result of one instance by its threads, ascending; its rates are those of one instance.
        failed: The message of the error of each number of threads without a result.
    """

    results: Mapping[int, TuningResult] = attrs.field(hash=False)
    failed: Mapping[int, str] = attrs.field(hash=False)

    @property
    def instances(self) -> dict[int, int]:
        """The number of instances that ran at the same time, by threads of an instance."""
        return {threads: result.environment["instances"] for threads, result in self.results.items()}

    @property
    def samples_per_second(self) -> dict[int, float]:
        """Samples per second of all instances at the recommended batch size, by threads of an instance."""
        return {
            threads: self.instances[threads] * result.samples_per_second
            for threads, result in self.results.items()
            if result.samples_per_second is not None
        }

    @property
    def single_samples_per_second(self) -> dict[int, float]:
        """Samples per second of all instances without batching, by threads; only where a batch of one was measured."""
        return {
            threads: self.instances[threads] * result.loop_rates[1]
            for threads, result in self.results.items()
            if 1 in result.loop_rates
        }

    @property
    def threads(self) -> int | None:
        """The threads of an instance with the highest rate of all instances; None without a recommended batch size."""
        rates = self.samples_per_second
        return max(rates, key=lambda threads: rates[threads], default=None)

    @property
    def best(self) -> TuningResult | None:
        """The tuning result of an instance with `threads` threads; None without a recommended batch size."""
        return None if self.threads is None else self.results[self.threads]

    @property
    def batch_size(self) -> int | None:
        """The recommended batch size of an instance with `threads` threads (1: do not batch); None as for `threads`."""
        return None if self.best is None else self.best.batch_size

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences for a user: the best number of threads, the others, the gain of batches, and a busy machine."""
        if self.threads is None:
            return ("No number of threads has a recommended batch size: tune again with a larger budget.",)
        rate, single = self.samples_per_second[self.threads], self.single_samples_per_second.get(self.threads)
        missing = [self._of_all(threads) for threads in self.results if threads not in self.samples_per_second]
        rank = "the highest of the compared rates" if missing or self.failed else "the highest rate"
        of_all = self._of_all(self.threads)
        reach = f"{'reaches' if self.instances[self.threads] == 1 else 'reach'} {format_count(rate)} samples/s"
        if self.batch_size == 1:
            first = f"Do not batch: {of_all} {reach} with single samples, {rank}."
        else:
            first = f"{of_all} with batches of {self.batch_size} {reach}, {rank}."
        gain = (
            [] if single is None or self.batch_size == 1 else [f"Batching gains {format_percent(rate / single - 1)}."]
        )
        others = [
            f"That is {rate / other:.3g} times the rate of {self._of_all(threads)}."
            for threads, other in self.samples_per_second.items()
            if threads != self.threads
        ]
        open_ = [
            f"No recommendation for {each}, which may be faster: tune again with a larger budget." for each in missing
        ]
        busy = [BUSY_MACHINE] if any(result.disturbed for result in self.results.values()) else []
        return (first, *others, *open_, *gain, *busy)

    def _of_all(self, threads: int) -> str:
        count = self.instances[threads]
        return f"{format_counted(count, 'instance')} of {format_counted(threads, 'thread')}"

    def to_mapping(self) -> dict[str, Any]:
        """Return the result as plain mappings and lists, for JSON."""
        return {
            "schema": 1,
            "threads": self.threads,
            "batch_size": self.batch_size,
            "instances": {str(threads): count for threads, count in self.instances.items()},
            "samples_per_second": {str(threads): rate for threads, rate in self.samples_per_second.items()},
            "reasons": list(self.reasons),
            "results": {str(threads): result.to_mapping() for threads, result in self.results.items()},
            "failed": {str(threads): error for threads, error in self.failed.items()},
        }
