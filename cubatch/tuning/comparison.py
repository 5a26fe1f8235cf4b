"""
compare(): predictions of one network for several GPUs that need not be present, with the cost of a million samples.

Prices are given by the user, in any currency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from cubatch import checks
from cubatch.errors import CubatchError, InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.network.models import SpecLike
from cubatch.shown import Shown
from cubatch.tuning import prediction, priced_devices
from cubatch.tuning.forecast_record import Forecast

COMMON_TO_GPUS = 0.2
"""
Correlation of the errors of predictions of one step on two GPUs.

It is 0.21 for 744 pairs of published steps of networks, by `benchmarks/predictor/score_modules.py`.
"""

_SECONDS_PER_HOUR = 3600.0
_MILLION = 1e6


@attrs.frozen(kw_only=True)
class Comparison(Shown):
    """
    Predictions for several GPUs; nothing was measured.

    Attributes:
        forecasts: The forecast of each GPU, by its name in the catalogue, best first.
        failed: The message of the error of each GPU without a forecast, by name.
        prices: Price of an hour of each GPU whose price is known, by name, in the user's currency.
    """

    forecasts: Mapping[str, Forecast] = attrs.field(hash=False)
    failed: Mapping[str, str] = attrs.field(hash=False)
    prices: Mapping[str, float] = attrs.field(hash=False)

    @property
    def cost_per_million_samples(self) -> dict[str, float]:
        """By GPU with a price, the cost of a million samples at its recommended batch size, in the prices' currency."""
        return {
            name: self.prices[name] / _SECONDS_PER_HOUR * _MILLION / forecast.samples_per_second[forecast.batch_size]
            for name, forecast in self.forecasts.items()
            if name in self.prices
        }

    def to_mapping(self) -> dict[str, Any]:
        """Return the comparison as plain mappings and lists, for JSON."""
        return {
            "schema": 1,
            "predicted": True,
            "forecasts": [forecast.to_mapping() for forecast in self.forecasts.values()],
            "failed": dict(self.failed),
            "prices_per_hour": dict(self.prices),
            "cost_per_million_samples": self.cost_per_million_samples,
        }


def compare(
    spec: SpecLike,
    devices: Iterable[Device | str],
    *,
    prices: Mapping[str, float] | None = None,
    **options: Any,
) -> Comparison:
    """
    Predict the best batch size of a network on each of several GPUs, and the cost of a million samples there.

    Args:
        spec: As for `predict`.
        devices: Names of the catalogue, or Devices; duplicates count once.
        prices: Price of an hour of a GPU by its name, in any currency; other GPUs may have one too. None: unknown.
        options: The other arguments of `predict`, for all GPUs: mode, dtype, memory_limit, latency_limit, ...

    Returns:
        Comparison: The forecasts, best first. GPUs without a forecast are in `failed`, with the error's message.

    Raises:
        InvalidArgument: If no device is given, or two different ones have one name. Also if a price is no positive
            number, or two names of one GPU have different prices.
        CubatchError: The first error, if there is no prediction for any GPU.

    Example:
        >>> comparison = compare("lenet5", ["t4", "a40"], prices={"t4": 0.35}, batch_sizes=[64])
        >>> list(comparison.forecasts), list(comparison.cost_per_million_samples)
        (['a40', 't4'], ['t4'])
    """
    if not isinstance(prices, Mapping | None):
        raise InvalidArgument("prices", prices, 'a mapping such as {"t4": 0.35}')
    checks.check_options(options, prediction.predict)
    gpus = priced_devices.distinct(devices)
    paid = priced_devices.prices_of(gpus, prices or {})
    for name in {"anchors", "batch_sizes"} & set(options):
        if isinstance(options[name], Iterator):  # every GPU reads it
            options[name] = list(options[name])
    forecasts: dict[str, Forecast] = {}
    errors: dict[str, CubatchError] = {}
    for name, gpu in gpus.items():
        try:
            forecasts[name] = prediction.predict(spec, device=gpu, **options)
        except CubatchError as error:
            errors[name] = error
    if not forecasts:
        raise next(iter(errors.values()))
    best = sorted(forecasts, key=lambda name: _latency_or_rate(forecasts[name]))
    return Comparison(
        forecasts={name: forecasts[name] for name in best},
        failed={name: str(error) for name, error in errors.items()},
        prices=paid,
    )


def is_tied(forecast: Forecast, other: Forecast, *, ratio: float | None = None) -> bool:
    """
    Return whether two GPUs may be equally good: the 90 % interval of the ratio of their predictions contains 1.

    Errors that both predictions of a network share cancel in the ratio. `ratio` is that of other figures with the same
    relative errors, such as costs; None: that of the objective.
    """
    (value, width), (second, second_width) = map(_logarithm, (forecast, other))
    variance = width**2 + second_width**2 - 2 * COMMON_TO_GPUS * width * second_width
    return abs(value - second if ratio is None else math.log(ratio)) <= math.sqrt(variance)


def _logarithm(forecast: Forecast) -> tuple[float, float]:
    """
    Return the logarithm (base e) of the objective at the recommended batch size, and half its 90 % interval.

    The objective is seconds of a step for latency, else samples per second.
    """
    low, high = forecast.interval[forecast.batch_size]
    return math.log(abs(_latency_or_rate(forecast))), math.log(high / low) / 2


def _latency_or_rate(forecast: Forecast) -> float:
    """Return a sort key, smaller for a better GPU: seconds of a step for latency, else negative samples/s."""
    n = forecast.batch_size
    return forecast.seconds[n] if forecast.objective == "latency" else -forecast.samples_per_second[n]
