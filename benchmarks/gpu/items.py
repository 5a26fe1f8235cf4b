"""
Items of the GPU pass: each returns a mapping for the JSON.

The GPU is used through the `Session` only, so that this module can be imported on any machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import attrs

from benchmarks.gpu import cases, eager
from cubatch.bench import measure, rivals
from cubatch.bench.bench_results import Result
from cubatch.bench.calls import Case
from cubatch.bench.cases import gemm
from cubatch.bench.contest import Contest
from cubatch.bench.target import Target, fill, on_gpu
from cubatch.engine.conditions import environment
from cubatch.errors import CubatchError, DeviceFailed
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.hardware.nvml import Monitor
from cubatch.kernels import variant as variants
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.variant import Kernel
from cubatch.report.tables.common import plain

CASE_SECONDS = 0.3


@attrs.define(slots=False)
class Session:
    """
    State that items share while a process runs them.

    Attributes:
        device: The GPU.
        deadline: Monotonic time at which the time of the stage is over.
        report: Called with the kernel that is launched for the first time, and when it has finished.
        without: Families of kernels that are left out.
        skipped: Kernels that are not launched because an earlier process ended during one.
        small: Whether all arrays are small, for a rehearsal on a simulated GPU.
        workers: Threads that compile: one per core.
    """

    device: Device
    deadline: float
    report: Callable[..., None]
    without: Collection[str] = ()
    skipped: Collection[str] = ()
    small: bool = False
    workers: int = attrs.field(factory=lambda: len(os.sched_getaffinity(0)))

    def sized(self, case: Case) -> Case:
        """Return the case that runs: the case itself, or a small one in a rehearsal."""
        return cases.small(case) if self.small else case

    def seconds_left(self) -> float:
        """Return the seconds that are left of the stage."""
        return max(0.0, self.deadline - time.monotonic())

    @cached_property
    def target(self) -> Target:
        """Where cases run."""
        return attrs.evolve(on_gpu(self.device), trying=self.trying)

    @contextlib.contextmanager
    def trying(self, kernel: Kernel) -> Iterator[None]:
        """
        Report which kernel is launched and wait for it, so that the parent knows the kernel that ended this process.

        Raises:
            DeviceFailed: If an earlier process ended during this kernel.
        """
        if kernel.name in self.skipped:
            raise DeviceFailed(f"kernel {kernel.name}", "the end of an earlier process", "See skipped_kernels.")
        self.report(tries=kernel.name)
        try:
            yield
        finally:
            self.target.synchronize()  # raises if the kernel broke the context
            self.report(tries="")

    def get_ready(self) -> None:
        """Import the libraries, make a context and compute: from a cold disk this takes longer than items."""
        module = self.target.module
        with contextlib.suppress(OSError, RuntimeError):  # items that need PyTorch report that it is broken
            rivals.torch_of(module)
        fill(module, gemm(8, 8, 8), 0)
        module.cuda.get_current_stream().synchronize()
        module.get_default_memory_pool().free_all_blocks()  # else small arrays of a network would occupy large blocks

    @cached_property
    def contest(self) -> Contest:
        """The contest of all items, which knows whether the clocks are warm."""
        return Contest(self.target.clock, synchronize=self.target.synchronize)

    @cached_property
    def copy_bytes_per_second(self) -> float:
        """Bandwidth of a copy, measured by this process."""
        return measure.copy_bandwidth(self.target, self.contest)


def session_here(seconds: float, report: Callable[..., None], **options: Any) -> Session:
    """Open a session on the first GPU of this machine; its time begins when it is ready."""
    session = Session(probe.resolve("cuda"), math.inf, report, **options)
    session.get_ready()
    session.deadline = time.monotonic() + seconds
    return session


def units(arch: int) -> list[Kernel]:
    """Return one kernel of each compile unit of an architecture."""
    first: dict[object, Kernel] = {}
    for kernel in variants.kernels():
        if kernel.runs_on(arch):
            first.setdefault((kernel.source, kernel.defines), kernel)
    return list(first.values())


def arch_of(device: Device) -> int:
    """Return the compute capability of a device times ten."""
    return variants.arch_number(device.arch or "")


def compile_all(device: Device, workers: int, wanted: Iterable[Kernel] | None = None) -> list[tuple[Kernel, str]]:
    """Compile the units of `wanted` kernels (None: of all) for a device; return those that failed, with the reason."""

    def compiled(kernel: Kernel) -> tuple[Kernel, str]:
        try:
            compiler.compile_unit(kernel, device.arch or "")
        except CubatchError as error:
            return kernel, str(error)
        return kernel, ""

    with ThreadPoolExecutor(workers) as pool:
        return [pair for pair in pool.map(compiled, units(arch_of(device)) if wanted is None else wanted) if pair[1]]


def compile_units(session: Session) -> dict[str, Any]:
    start = time.monotonic()
    failed = compile_all(session.device, session.workers)
    return {
        "status": "failed" if failed else "ok",
        "units": len(units(arch_of(session.device))),
        "seconds": time.monotonic() - start,
        "failed": {kernel.name: reason for kernel, reason in failed},
    }


def device_facts(device: Device) -> dict[str, Any]:
    """Return the facts of driver, NVML and installed packages, without a context and without a GPU library."""
    state = None
    with contextlib.suppress(CubatchError):
        state = Monitor(device.uuid).snapshot() if device.uuid else None
    return {
        "device": device.to_mapping(),
        "environment": environment(device),
        "monitor": plain(state) if state else None,
    }


def libraries(_: Session) -> dict[str, Any]:
    """Return the versions of the vendor's libraries."""
    return dict(rivals.versions())


def timed(case: Case, session: Session, *, others: rivals.Ways = eager.WAYS) -> dict[str, Any]:
    result = measure.time_case(
        session.sized(case), session.target, session.contest, variants="ranked", without=session.without,
        others=others, seconds=CASE_SECONDS, copy_bytes_per_second=session.copy_bytes_per_second,
    )  # fmt: skip
    return {"status": _status(result), "result": result.to_mapping()}


def verified(case: Case, seed: int, session: Session) -> dict[str, Any]:
    result = measure.verify(case, session.target, seed=seed, without=session.without)
    return {"status": _status(result), "seed": seed, "result": result.to_mapping()}


def _status(result: Result) -> str:
    """Return "wrong" if a variant is wrong, "incomplete" if some did not run, else the status of the case."""
    statuses = {entry.status for entry in result.wrong}
    if "wrong" in statuses:
        return "wrong"
    return "incomplete" if statuses else result.status
