"""The engine's contexts for cubatch kernels: compiled, and with timed choices of variants."""

from __future__ import annotations

import functools
from pathlib import Path

from cubatch import sqlite_file
from cubatch.engine.conditions import kernels_sha256
from cubatch.engine.native.context import Context
from cubatch.hardware import arithmetic
from cubatch.hardware.facts import Device
from cubatch.kernels.choice import TimedChoice, Winners, gpu_name, winners_path
from cubatch.kernels.launch import CudaLauncher
from cubatch.kernels.variant import arch_number, kernels
from cubatch.measure.clocks import HostClock, cupy_kernel_clock

_TRAINING_CHOICE_SECONDS = 20.0
_FILLER_BYTES = 1 << 25  # two such arrays are outside the memory plan: small, but a copy lasts longer than its launch


def kernel_context(device: Device, dtype: str, *, overlaps: bool, seconds: float, path: Path | None) -> Context:
    """
    Compile the cubatch kernels and return the context in which the engine runs them.

    When an operation of new extents first runs, the context times variants of its kernel and chooses the fastest, for
    `seconds` in all. No GPU memory is allocated before. The fastest variants are cached in the file `path`; None: for
    this process only.

    With `overlaps` a launch may begin before the last one has ended. This shortens small steps that are launched one
    by one, and graphs of inference. Graphs of training of ResNet-50 took 3 to 4 % longer from batch 8 on an H100
    (benchmarks/results/h100-sxm).
    """
    launcher = CudaLauncher(device, overlaps=overlaps)
    arch = arch_number(device.arch or "")
    needed = {dtype, "float32"} if dtype == "tf32" else {dtype}  # tf32 only rounds the factors of products
    usual = (kernel for kernel in kernels() if not kernel.sums_norms)  # those are compiled by the steps that have them
    launcher.compile(kernel for kernel in usual if kernel.dtype in needed and kernel.runs_on(arch))
    winners = Winners(path, gpu=gpu_name(device), sources=kernels_sha256(), overlaps=launcher.overlaps)
    chooser = TimedChoice(functools.partial(cupy_kernel_clock, None, _FILLER_BYTES), winners, seconds)
    return Context(device, launcher, chooser, tf32=dtype == "tf32")


def kept_choice(device: Device, path: Path | None, *, overlaps: bool = False) -> TimedChoice:
    """
    Return a function that chooses an operation's kernel variant by timings of earlier runs in a file (None: no file).

    It chooses the variant that was fastest at the nearest batch size. If none was timed, it chooses the variant with
    the least predicted seconds. It times nothing, so this machine need not have the GPU. Timings with the other value
    of `overlaps` are used where there are none: only the driver knows whether launches did overlap.
    """
    winners, others = (
        Winners(path, gpu=gpu_name(device), sources=kernels_sha256(), overlaps=kind)
        for kind in (overlaps, not overlaps)
    )
    winners.add_missing(others)
    return TimedChoice(HostClock, winners, seconds=0.0)


def usual_context(device: Device, dtype: str = "float32", *, overlaps: bool = False) -> Context | None:
    """
    Return the context in which a model runs cubatch kernels on a GPU, chosen by earlier runs; None on a CPU.

    `overlaps` is as for `kernel_context`; False if steps are graphs of training.
    """
    arithmetic.check_dtype(device, dtype)
    if device.kind == "cpu":
        return None
    path = winners_path(sqlite_file.default_path())
    return kernel_context(device, dtype, overlaps=overlaps, seconds=_TRAINING_CHOICE_SECONDS, path=path)
