"""Arguments for the Trainer of Hugging Face: how a wanted batch is best cut into steps."""

from __future__ import annotations

import numpy as np

from cubatch.checks import check_batch_size
from cubatch.errors import InvalidArgument
from cubatch.tuning.results import TuningResult


def batch_arguments(result: TuningResult, target_batch_size: int, *, num_devices: int = 1) -> dict[str, int]:
    """
    Cut a batch that an optimiser step is to see into as many steps as take the least time together.

    The product of the two and `num_devices` is the target exactly, so that learning rates keep their meaning.  Of the
    sizes that make it so, up to the largest that was measured, the one is taken whose steps should take the least
    time: as measured, and between measured sizes along straight lines.

    Args:
        result: Of tuning a training step, by `autotune_module(model, inputs, mode="training")` for one.
        target_batch_size: Samples that an optimiser step is to see, on all devices together.
        num_devices: How many of them train side by side.

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
    if result.mode == "inference":
        raise InvalidArgument("result", "of inference", "of training", "Tune with mode='training'.")
    if target % devices:
        nearest = max(1, round(target / devices)) * devices
        remedy = f"{nearest} is the nearest."
        raise InvalidArgument("target_batch_size", target, f"a multiple of num_devices={devices}", remedy)
    seconds = {m.batch_size: m.latency_seconds for m in result.measurements if m.status == "ok" and m.latency_seconds}
    if not seconds:
        raise InvalidArgument("result", "without a size that ran", "of a finished run", "Tune again.")
    share = target // devices
    largest = max(seconds)
    divisors = [size for size in range(1, min(share, largest) + 1) if share % size == 0]
    known = sorted(seconds)
    expected = np.interp(divisors, known, [seconds[size] for size in known])
    size = min(zip(divisors, expected, strict=True), key=lambda pair: (share // pair[0]) * pair[1])[0]
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": share // size}
