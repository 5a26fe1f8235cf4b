"""The workload of a step: network, device and settings, on which its time and memory depend."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Self

import attrs

from cubatch.checks import check_batch_size, check_experimental
from cubatch.errors import InvalidArgument
from cubatch.hardware import arithmetic, probe
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Spec, as_network
from cubatch.network.layer import check_mode
from cubatch.network.models import SpecLike

OPTIMIZERS = ("sgd", "momentum", "adam")


@attrs.frozen(kw_only=True)
class Workload:
    """
    The network, device and settings that determine a step, except for its batch size.

    Example:
        >>> work = Workload.of("mlp", "v100-sxm2-16gb", mode="training", dtype="float16")
        >>> work.name, work.device.num_sms, work.library
        ('mlp', 80, 'cubatch')
    """

    spec: Spec  # a layer or network
    device: Device  # the device
    mode: str  # "inference" or "training"
    dtype: str  # storage of activations and parameters
    optimizer: str  # one of OPTIMIZERS; counts in training only
    # "cubatch": cubatch kernels; "im2col": gathered operands and a BLAS; "vendor": cuDNN and cuBLAS, for predictions
    # only
    library: str
    recompute: bool  # discard activations and compute them again in the backward pass
    accumulate: bool = False  # accumulate the gradients of several batches for an optimizer step, in training
    # experimental kernels that run where they can, of EXPERIMENTAL
    experimental: frozenset[str] = attrs.field(default=frozenset(), converter=check_experimental)

    @classmethod
    def of(
        cls,
        spec: SpecLike,  # a layer, a network, a mapping, a model's name or a path to a spec file
        device: Device | str | None,  # a device or its name; None is this machine's
        *,
        mode: str,  # mode, dtype, optimizer, recompute: as the attributes
        dtype: str,
        optimizer: str = "sgd",
        library: str = "auto",  # "auto" is "cubatch" on a GPU and "im2col" on the CPU
        recompute: bool = False,
        present: bool = False,  # whether the device must be in this machine
    ) -> Self:
        """
        Return the workload, after resolving and checking the arguments of a public function.

        Raises:
            InvalidArgument: If an argument is invalid; as InvalidSpec, UnknownName or UnsupportedDtype where these fit.
            DeviceNotAvailable: If the device is not in this machine, and must be.
        """
        resolved, device = models.resolve(spec), probe.resolve(device, live=present)
        arithmetic.check_dtype(device, dtype)
        check_mode(mode)
        if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
            raise InvalidArgument("optimizer", optimizer, "one of " + ", ".join(OPTIMIZERS))
        if not isinstance(recompute, bool):
            raise InvalidArgument("recompute", recompute, "True or False")
        return cls(
            spec=resolved,
            device=device,
            mode=mode,
            dtype=dtype,
            optimizer=optimizer,
            library=arithmetic.resolve_library(library, device, dtype),
            recompute=recompute,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Mode, dtype, optimizer, library and recompute by name, for the store, JSON and worker processes."""
        names = ("mode", "dtype", "optimizer", "library", "recompute")
        return {name: getattr(self, name) for name in names}

    @property
    def name(self) -> str:
        """The name in the spec, else the type of the layer, else "a network"."""
        mapping = self.spec.to_mapping()
        return str(mapping.get("name") or mapping.get("type") or "a network")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Extents (h, w, c) of one sample."""
        return as_network(self.spec).input_shape

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward pass computes activations again: `recompute` is set and the mode is "training"."""
        return self.recompute and self.mode == "training"


def accumulating(work: Workload, batch_size: int, target_batch_size: int | None) -> Workload:
    """
    Return the workload of an optimizer step whose gradients are accumulated over smaller batches.

    Args:
        work: The workload; with a target it must be the training of a network, not of a single layer.
        batch_size: Samples of each smaller batch.
        target_batch_size: Samples per optimizer step; None: one batch per step, and `work` is returned.

    Raises:
        InvalidArgument: If a target is given without training of a network, or is no multiple of the batch size.
    """
    if target_batch_size is None:
        return work
    if work.mode != "training" or as_network(work.spec) is not work.spec:
        raise InvalidArgument("target_batch_size", target_batch_size, "left out, except for training a network")
    check_target(batch_size, target_batch_size)
    return attrs.evolve(work, accumulate=batch_size != target_batch_size)


def check_target(batch_size: int, target_batch_size: int) -> None:
    """
    Check that `target_batch_size`, the samples of an optimizer step, is a multiple of `batch_size`.

    Raises:
        InvalidArgument: If it is no multiple. The message names a multiple, and a batch size that divides the target.
    """
    target = check_batch_size(target_batch_size, "target_batch_size")
    if target % batch_size:
        below = target // batch_size * batch_size or batch_size
        nearest = min(divisors(target), key=lambda n: abs(n - batch_size))
        remedy = f"{below} is one, and batches of {nearest} make {target}."
        raise InvalidArgument("target_batch_size", target, f"a multiple of the batch size, {batch_size}", remedy)


def divisors(number: int) -> list[int]:
    """
    Return the divisors of a number, ascending.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def common_divisor(ran: Collection[int], failed: Collection[int]) -> int:
    """
    Return the smallest number above 1 that divides all sizes that ran and none that failed; 1 if there is none.

    Example:
        >>> common_divisor([12, 24], [4, 8, 16]), common_divisor([8, 12], [4])
        (3, 1)
    """
    return next((n for n in divisors(math.gcd(*ran))[1:] if all(size % n for size in failed)), 1)
