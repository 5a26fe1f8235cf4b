"""The result of a fleet: a tuning result per distinct device, and shares of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.shown import Shown
from cubatch.tuning.forecast_record import Forecast
from cubatch.tuning.results import Measurement, TuningResult

_MILLION, _SECONDS_PER_HOUR = 1e6, 3600.0


@attrs.frozen(kw_only=True)
class FleetDevice:
    """
    A distinct device of a fleet.

    Attributes:
        name: Its name, unique in the fleet.
        workers: Addresses of the workers that have this device; none for a device that is not in the fleet.
        result: The tuning result of one worker; None if the measurement failed or the device is not in the fleet.
        forecast: The prediction for a device that is not in the fleet; None for other devices, or if the prediction
            failed.
        error: Why there is neither a result nor a forecast; empty if there is either.
        price_per_hour: Cost of one hour of the device, as given; None if unknown.
    """

    name: str
    workers: tuple[str, ...] = ()
    result: TuningResult | None = None
    forecast: Forecast | None = None
    error: str = ""
    price_per_hour: float | None = None

    @property
    def batch_size(self) -> int | None:
        """The recommended batch size, measured or predicted; None without a result or a recommendation."""
        answer = self.result or self.forecast
        return None if answer is None else answer.batch_size

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second at `batch_size`, measured or predicted; None without a `batch_size` or its measurement."""
        if self.batch_size is None:
            return None
        if self.forecast is not None:
            return self.forecast.samples_per_second[self.batch_size]
        return None if self._measurement is None else self._measurement.samples_per_second

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of a step at the recommended batch size, measured or else planned; None if unknown."""
        if self.forecast is not None:
            return self.forecast.peak_bytes[self.forecast.batch_size]
        measured = self._measurement
        return None if measured is None else measured.peak_bytes or measured.predicted_peak_bytes

    @property
    def _measurement(self) -> Measurement | None:
        measurements = () if self.result is None else self.result.measurements
        return next((m for m in measurements if m.batch_size == self.batch_size), None)

    @property
    def largest_measured(self) -> int:
        """The largest batch size that ran on the device; 0 if no size ran, also for a predicted device."""
        return 0 if self.result is None else self.result.largest_measured or 0

    @property
    def cost_per_million_samples(self) -> float | None:
        """Cost of a million samples at `samples_per_second` in the currency of the price; None if either is None."""
        if self.price_per_hour is None or not self.samples_per_second:
            return None
        return self.price_per_hour / _SECONDS_PER_HOUR * _MILLION / self.samples_per_second


@attrs.frozen(kw_only=True)
class FleetResult(Shown):
    """
    The results of a fleet.

    Attributes:
        devices: An entry per distinct device: measured, then predicted, then failed devices; the fastest of each group
            first.
    """

    devices: tuple[FleetDevice, ...]

    def shares(self, batch_size: int) -> dict[str, int]:
        """
        Divide a batch among all workers, so that unequal devices finish together.

        Shares are proportional to the measured rates; none exceeds the largest batch size that ran on the device.

        Args:
            batch_size: Samples per step of all workers together.

        Returns:
            Samples by the worker's address; they add up to batch_size.

        Raises:
            InvalidArgument: If `batch_size` exceeds the sum, over all workers, of the largest batch sizes that ran; the
                sum is 0 if no device was measured.

        Example:
            >>> fleet.shares(96)                                                        # doctest: +SKIP
            {'tcp://10.0.0.1:40331': 64, 'tcp://10.0.0.2:40847': 32}
        """
        checks.check_batch_size(batch_size)
        rates = {
            address: (device.samples_per_second, device.largest_measured)
            for device in self.devices
            for address in device.workers
            if device.result is not None and device.samples_per_second
        }
        most_samples = sum(most for _, most in rates.values())
        if batch_size > most_samples:
            allowed = f"at most {most_samples}, the sum of the largest batches that ran on the workers"
            remedy = "" if most_samples else "No device was measured: `error` of each of `devices` has the reason."
            raise InvalidArgument("batch_size", batch_size, allowed, remedy)
        return _shared(batch_size, {address: (rate or 0.0, most) for address, (rate, most) in rates.items()})

    def to_mapping(self) -> dict[str, Any]:
        """Return the results as plain mappings and lists, in the JSON form that docs/reference/api.md lists."""
        return {
            "schema": 1,
            "devices": [
                {
                    "name": device.name,
                    "workers": list(device.workers),
                    "predicted": device.forecast is not None,
                    "batch_size": device.batch_size,
                    "samples_per_second": device.samples_per_second,
                    "peak_bytes": device.peak_bytes,
                    "price_per_hour": device.price_per_hour,
                    "cost_per_million_samples": device.cost_per_million_samples,
                    "error": device.error,
                    "result": None if device.result is None else device.result.to_mapping(),
                    "forecast": None if device.forecast is None else device.forecast.to_mapping(),
                }
                for device in self.devices
            ],
        }


def _shared(batch_size: int, workers: Mapping[str, tuple[float, int]]) -> dict[str, int]:
    """
    Return the number of samples of a batch that each worker receives, in proportion to its rate.

    `workers` has, by address, the rate in samples per second and the largest batch size; a share does not exceed the
    latter. The largest remainders round up.
    """
    shares = dict.fromkeys(workers, 0)
    open_, left = dict(workers), batch_size
    while open_:
        total = sum(rate for rate, _ in open_.values())
        full = {name: most for name, (rate, most) in open_.items() if left * rate / total >= most}
        if not full:
            break
        for name, most in full.items():  # the others share the rest
            shares[name] = min(most, left)
            left -= shares[name]
            del open_[name]
    if open_:
        total = sum(rate for rate, _ in open_.values())
        exact = {name: left * rate / total for name, (rate, _) in open_.items()}
        shares |= {name: int(part) for name, part in exact.items()}
        spare = left - sum(int(part) for part in exact.values())
        for name in sorted(exact, key=lambda name: int(exact[name]) - exact[name])[:spare]:
            shares[name] += 1
    return shares
