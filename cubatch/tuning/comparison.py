"""
compare(): one network on several GPUs that need not be here, with what a million samples cost on each.

Prices are the user's own, in any currency; nothing here knows what a cloud asks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from cubatch.errors import CubatchError, InvalidArgument
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.network.models import SpecLike
from cubatch.shown import Shown
from cubatch.tuning import forecast
from cubatch.tuning.forecast_record import Forecast
from cubatch.tuning.limits import MOST_SIZES

_SECONDS_PER_HOUR = 3600.0
_MILLION = 1e6


@attrs.frozen(kw_only=True)
class Comparison(Shown):
    """
    What was predicted of several GPUs; nothing of it was measured.

    Attributes:
        forecasts: By the GPU's name in the catalogue, best first.
        failed: Why there is none, by name.
        prices: Of an hour, by name, as they were given.
    """

    forecasts: Mapping[str, Forecast] = attrs.field(hash=False)
    failed: Mapping[str, str] = attrs.field(hash=False)
    prices: Mapping[str, float] = attrs.field(hash=False)

    @property
    def cost_per_million_samples(self) -> dict[str, float]:
        """What a million samples cost at each GPU's answer, in the currency of the prices, where there is one."""
        return {
            name: self.prices[name] / _SECONDS_PER_HOUR * _MILLION / found.samples_per_second[found.batch_size]
            for name, found in self.forecasts.items()
            if name in self.prices
        }

    def to_mapping(self) -> dict[str, Any]:
        """Give it as plain mappings and lists, for JSON."""
        return {
            "schema": 1,
            "predicted": True,
            "forecasts": [found.to_mapping() for found in self.forecasts.values()],
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
    Predict the best batch size of a network on each of several GPUs, and what a million samples cost there.

    Args:
        spec: As for `predict`.
        devices: Names of the catalogue, or Devices; one that is named twice counts once.
        prices: What an hour of a GPU costs, by its name as in `devices`, in any currency.
        options: The other arguments of `predict`, the same for all: mode, dtype, memory_limit, latency_limit, ...

    Returns:
        Comparison: A GPU that cannot do it is in `failed`, with the reason.

    Raises:
        InvalidArgument: If no device is named, two that differ have one name, a price is no positive number or that of
            no device, or one device has two.
        CubatchError: That of the first GPU, where none can do it.

    Example:
        >>> found = compare("lenet5", ["t4", "a40"], prices={"t4": 0.35}, batch_sizes=[64])
        >>> list(found.forecasts), list(found.cost_per_million_samples)
        (['a40', 't4'], ['t4'])
    """
    gpus: dict[str, Device] = {}
    for gpu in (probe.resolve(one, live=False) for one in devices):
        if gpus.setdefault(_name(gpu), gpu) != gpu:
            remedy = "Give the name of one in its file, or leave one out."
            raise InvalidArgument("devices", _name(gpu), "GPUs of different names", remedy)
    if not gpus:
        raise InvalidArgument("devices", [], "at least one GPU's name")
    paid = _checked(prices or {}, gpus)
    for name in {"anchors", "batch_sizes"} & set(options):
        if isinstance(options[name], Iterator):  # which may have no end; each GPU reads it anew
            options[name] = list(itertools.islice(options[name], MOST_SIZES + 1))
    found: dict[str, Forecast] = {}
    errors: dict[str, CubatchError] = {}
    for name, gpu in gpus.items():
        try:
            found[name] = forecast.predict(spec, device=gpu, **options)
        except CubatchError as error:  # no reason to keep silent about the others
            errors[name] = error
    if not found:
        raise next(iter(errors.values()))
    best = sorted(found, key=lambda name: _latency_or_rate(found[name]))
    return Comparison(
        forecasts={name: found[name] for name in best},
        failed={name: str(error) for name, error in errors.items()},
        prices=paid,
    )


def _name(gpu: Device) -> str:
    return gpu.slug or gpu.name


def _latency_or_rate(found: Forecast) -> float:
    """Give what the objective looks at, the smaller the better."""
    n = found.batch_size
    return found.seconds[n] if found.objective == "latency" else -found.samples_per_second[n]


def _checked(prices: Mapping[str, float], gpus: Mapping[str, Device]) -> dict[str, float]:
    paid: dict[str, float] = {}
    for given, price in prices.items():
        gpu = probe.resolve(given, live=False)
        name = _name(gpu)
        if gpus.get(name) != gpu:
            raise InvalidArgument("prices", given, "of the GPUs that are compared: " + ", ".join(gpus))
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
            raise InvalidArgument(f"prices[{given!r}]", price, "a positive number: what an hour costs")
        if paid.setdefault(name, float(price)) != price:
            raise InvalidArgument(f"prices[{given!r}]", price, f"{paid[name]!r}, as another name of {name} has it")
    return paid
