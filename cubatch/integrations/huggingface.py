"""Arguments for the Trainer of Hugging Face: how a wanted batch is best cut into steps."""

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
    Cut a batch that an optimiser step is to see into as many steps as take the least time together.

    The product of the two and `num_devices` is the target exactly, so that learning rates keep their meaning.  Of the
    sizes that make it so, up to the largest that was measured, the one is taken whose steps should take the least
    time: as measured, and between measured sizes along straight lines.  Where all are below what was measured, the
    largest is taken.

    Args:
        result: Of tuning a training step, by `autotune_module(model, inputs, mode="training")` for one.
        target_batch_size: Samples that an optimiser step is to see, on all devices together.
        num_devices: How many of them train side by side.

    Warns:
        UserWarning: If no size that divides the target reaches nine tenths of the best samples per second, or is as
            large as one that was measured, with targets that can be cut into steps of the best.

    Returns:
        dict[str, int]: `per_device_train_batch_size` and `gradient_accumulation_steps`.

    Raises:
        InvalidArgument: If the target cannot be divided by `num_devices`, or the result is of inference, or holds no
            size that ran.

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
