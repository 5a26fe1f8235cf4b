"""The cost of sharing a training step among devices, as a record in a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import attrs
from attrs import field
from attrs.converters import optional

from cubatch import checks
from cubatch.units import format_count, format_counted, format_seconds, format_whole_percent


@attrs.frozen(kw_only=True)
class DataParallel:
    """
    Steps that several devices share, compared with steps of the first device alone.

    Attributes:
        devices: Names of the devices, one per rank.
        batch_size: Samples per device.
        step_seconds: Median seconds of a shared step, on the slowest device.
        alone_seconds: Median seconds of a step of the first device alone, also with `batch_size` samples.
        exchange_seconds: Median seconds of a shared step during which gradients are being summed.
        exposed_seconds: The part of `exchange_seconds` for which the optimizer waits.
        overlap: Share of the exchange that is hidden behind the backward pass; None without an exchange.
        scaling_efficiency: alone_seconds / step_seconds; 1 is perfect scaling.
        samples_per_second: Samples per second of all devices together.
    """

    devices: tuple[str, ...] = field(converter=checks.texts)
    batch_size: int = field(converter=checks.size)
    step_seconds: float = field(converter=checks.positive)
    alone_seconds: float = field(converter=checks.positive)
    exchange_seconds: float = field(converter=checks.number)
    exposed_seconds: float = field(converter=checks.number)
    overlap: float | None = field(converter=optional(checks.number))
    scaling_efficiency: float = field(converter=checks.positive)
    samples_per_second: float = field(converter=checks.positive)

    @classmethod
    def of(cls, devices: Sequence[str], batch_size: int, seconds: Mapping[str, float]) -> Self:
        """
        Return the record of a gradient exchange between devices.

        Args:
            devices: Names of the devices, one for each rank.
            batch_size: Samples of each device.
            seconds: The result of `RanksRunner.measure_exchange`: "together", "alone", "exchange" and "exposed".
        """
        step, exchange, exposed = seconds["together"], seconds["exchange"], seconds["exposed"]
        return cls(
            devices=tuple(devices),
            batch_size=batch_size,
            step_seconds=step,
            alone_seconds=seconds["alone"],
            exchange_seconds=exchange,
            exposed_seconds=exposed,
            # A wait begins before its sum may: the sums that it is for are then all exposed.
            overlap=max(0.0, 1 - exposed / exchange) if exchange > 0 else None,
            scaling_efficiency=seconds["alone"] / step,
            samples_per_second=len(devices) * batch_size / step,
        )

    def __str__(self) -> str:
        """Return a sentence on the rate of all devices, its efficiency, and the time of summing gradients."""
        count, hidden = len(self.devices), ""
        if self.overlap is not None:
            hidden = f", {format_whole_percent(self.overlap)} of that behind the backward pass"
        return (
            f"{count} devices share a step of {format_counted(self.batch_size, 'sample')} each: "
            f"{format_count(self.samples_per_second)} samples/s together, "
            f"{format_whole_percent(self.scaling_efficiency)} of {count} times one alone; summing gradients takes "
            f"{format_seconds(self.exchange_seconds)} of {format_seconds(self.step_seconds)}{hidden}"
        )
