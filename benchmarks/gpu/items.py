"""
Items of the GPU pass: each returns a mapping for the JSON.

The GPU is used through the `Session` only, so that this module can be imported on any machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from benchmarks.gpu import cases, eager
from cubatch.bench import measure, rivals
from cubatch.bench.bench_results import Result
from cubatch.bench.cases import Case, gemm, of_layer
from cubatch.bench.contest import OURS, Contest, Entrant
from cubatch.bench.target import Target, fill, on_gpu, storage
from cubatch.engine import backend
from cubatch.engine.conditions import environment
from cubatch.engine.native import layout
from cubatch.engine.native.context import Context
from cubatch.engine.storage import encoded
from cubatch.errors import CubatchError, DeviceFailed
from cubatch.hardware import driver as cuda_driver
from cubatch.hardware import probe, waves
from cubatch.hardware.facts import Device
from cubatch.hardware.nvml import Monitor
from cubatch.kernels import variant as variants
from cubatch.kernels.launch import set_shared_memory
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.variant import Kernel
from cubatch.network.layers import ReLU
from cubatch.network.passes import Pass
from cubatch.report.tables.common import plain

CASE_SECONDS = 0.3
LAYOUTS = ("copy_channels", "transpose")
"""Operations that `layouts` checks."""

_PACES = 15
_COPIED_MIB = (1, 4, 16, 32, 64, 128, 256, 1024)


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
    """Compile every unit for a device, or those of `wanted` kernels; return those that failed, with the reason."""

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
    state = pace = None
    with contextlib.suppress(CubatchError):
        if device.uuid:
            monitor = Monitor(device.uuid)
            state, pace = monitor.snapshot(), pace_seconds(monitor)
    return {
        "device": device.to_mapping(),
        "environment": environment(device),
        "monitor": plain(state) if state else None,
        "pace_seconds": pace,
    }


def pace_seconds(monitor: Monitor) -> float:
    """Return the median seconds that NVML's queries take of every timing; they may be as long as the step."""
    seconds = []
    for _ in range(_PACES):
        start = time.perf_counter()
        monitor.pace()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def libraries(_: Session) -> dict[str, Any]:
    """Return the versions of the vendor's libraries."""
    return dict(rivals.versions())


def copies(session: Session) -> dict[str, Any]:
    """Time copies of several sizes by the runtime, and cubatch's elementwise kernel at the largest."""
    module, rows = session.target.module, []
    for size in _COPIED_MIB[:2] if session.small else _COPIED_MIB:
        source, target = (module.ones(size * 2**18, dtype="float32") for _ in range(2))
        entrant = Entrant(f"{size} MiB", OURS, lambda source=source, target=target: module.copyto(target, source))
        session.contest.run([entrant], 0.1)
        seconds = entrant.seconds or float("nan")
        rows.append({"mib": size, "seconds": seconds, "bytes_per_second": 2 * source.nbytes / seconds})
    ours = measure.time_case(
        session.sized(of_layer(ReLU(h=128, w=128, c=64), Pass.FPROP, 256)), session.target, session.contest,
        with_rivals=False, copy_bytes_per_second=rows[-1]["bytes_per_second"],
    )  # fmt: skip
    return {"copies": rows, "ours": ours.to_mapping()}


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


def layouts(session: Session) -> dict[str, Any]:
    """Check copies into other layouts, which are exact for numbers of 16 bits."""
    context, wrong = Context(session.device, session.target.launcher), []
    module, random = session.target.module, np.random.default_rng(0)
    for dtype, channels, padding in itertools.product(("float32", "float16", "bfloat16"), (3, 37), (0, 5)):
        numbers = encoded(random.integers(-127, 128, (231, channels)).astype(np.float32), storage(dtype))
        narrow, wide = module.asarray(numbers), module.empty((231, channels + padding), dtype=numbers.dtype)
        cut, turned = module.empty_like(narrow), module.empty((channels, 231), dtype=numbers.dtype)
        layout.copy_channels(context, narrow, out=wide)
        layout.copy_channels(context, wide, out=cut)
        layout.transpose(context, narrow, out=turned)
        for name, got, want in (
            ("copy_channels, wider", wide, np.pad(numbers, ((0, 0), (0, padding)))),
            ("copy_channels, narrower", cut, numbers),
            ("transpose", turned, numbers.T),
        ):
            if not np.array_equal(backend.to_host(got), want):
                wrong.append(f"{name}, {dtype}, {channels} channels padded by {padding}")
    return {"status": "wrong" if wrong else "ok", "wrong": wrong}


def occupancy(kernels: Sequence[Kernel], session: Session) -> dict[str, Any]:
    """Compare registers, shared memory and blocks per SM, as computed and as the driver reports them."""
    cupy = session.target.module  # makes a context, which the driver needs
    driver, rows = cuda_driver.load(), []
    for variant in kernels:
        compiled = compiler.compile_kernel(variant, session.device.arch or "")
        resources = compiled.resources[variant.entry]
        function = cupy.RawModule(path=str(compiled.path)).get_function(variant.entry)
        set_shared_memory(function, variant, resources, session.device.compute_capability or (0, 0))
        blocks = ctypes.c_int()
        status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks),
            ctypes.c_void_p(int(function.kernel.ptr)),
            variant.threads,
            ctypes.c_size_t(variant.dynamic_shared_bytes),
        )
        computed = waves.occupancy(
            compute_capability=session.device.compute_capability or (0, 0),
            threads_per_block=variant.threads,
            registers_per_thread=resources.registers,
            shared_bytes_per_block=resources.shared_bytes + variant.dynamic_shared_bytes,
        )
        attributes = function.attributes
        rows.append(
            {
                "kernel": variant.name,
                "driver_status": status,
                "blocks_per_sm": {"computed": computed.blocks_per_sm, "driver": blocks.value},
                "registers": {"computed": resources.registers, "driver": attributes["num_regs"]},
                "shared_bytes": {"computed": resources.shared_bytes, "driver": attributes["shared_size_bytes"]},
                "local_bytes": {"computed": resources.stack_bytes, "driver": attributes["local_size_bytes"]},
            }
        )
    names = ("blocks_per_sm", "registers", "shared_bytes", "local_bytes")
    differing = [row["kernel"] for row in rows if any(row[name]["computed"] != row[name]["driver"] for name in names)]
    return {"status": "differs" if differing else "ok", "differing": differing, "kernels": rows}
