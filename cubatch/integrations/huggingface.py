"""Batch size and accumulation steps for the Trainer of Hugging Face."""

from __future__ import annotations

import warnings

from cubatch.checks import check_batch_size
from cubatch.errors import InvalidArgument
from cubatch.tuning.accumulation import cut
from cubatch.tuning.results import TuningResult
from cubatch.units import format_percent

MUCH_LESS = 0.9  # of the best throughput: another target is worth a thought


def batch_arguments(result: TuningResult, target_batch_size: int, *, num_devices: int = 1) -> dict[str, int]:
    """
    Divide an effective batch into the steps that take the least time in total.

    The product of both arguments and `num_devices` is exactly the target, so that learning rates keep their meaning.
    Times are those measured, interpolated linearly between measured sizes. If all divisors are below the measured
    sizes, the largest is taken.

    Args:
        result: The result of tuning a training step, as of `autotune_module(model, inputs, mode="training")`.
        target_batch_size: Samples per optimizer step on all devices together.
        num_devices: Number of devices that train in parallel.

    Warns:
        UserWarning: If no divisor of the target reaches nine tenths of the best throughput, or is as large as a
            measured size; the message names better targets.

    Returns:
        dict[str, int]: `per_device_train_batch_size` and `gradient_accumulation_steps`.

    Raises:
        InvalidArgument: If the target is no multiple of `num_devices`, or the result is of inference or without a
            measured size.

    Example:
        >>> arguments = TrainingArguments(**batch_arguments(result, 512), learning_rate=1e-3)     # doctest: +SKIP
    """
    target, devices = check_batch_size(target_batch_size, "target_batch_size"), check_batch_size(
        num_devices, "num_devices"
    )  # fmt: skip
    if target % devices:
        nearest = max(1, round(target / devices)) * devices
        remedy = f"{nearest} is the nearest."
        raise InvalidArgument("target_batch_size", target, f"a multiple of num_devices={devices}", remedy)
    found = cut(result, target // devices)
    best = max((m.samples_per_second or 0.0, m.batch_size) for m in result.comparable)
    share = found.batch_size / found.seconds / best[0]
    if found.is_below or share < MUCH_LESS:
        whole = best[1] * devices
        near = sorted({max(1, target // whole) * whole, -(-target // whole) * whole})
        less = f"at {format_percent(share)} of the throughput of batch size {best[1]}, which does not divide it"
        if found.is_below:
            less = "fewer than were measured"
        warnings.warn(
            f"target_batch_size={target} is best cut into steps of {found.batch_size} samples, {less}; "
            f"{' and '.join(map(str, near))} can be cut into steps of {best[1]}.",
            stacklevel=2,
        )
    return {"per_device_train_batch_size": found.batch_size, "gradient_accumulation_steps": found.steps}
