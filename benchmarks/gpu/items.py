"""
What the GPU pass does, thing by thing: each gives a mapping for the JSON.

What is needed of the GPU comes from the `Session`, and only where something runs, so that everything here can be
imported, listed and counted on any machine.
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

from benchmarks.gpu import small
from cubatch.bench import measure, rivals
from cubatch.bench.cases import Case, gemm, of_layer
from cubatch.bench.contest import Contest, Entrant
from cubatch.bench.guard import Guarded, begun
from cubatch.bench.records import Result
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
    What items share while a process runs them.

    Attributes:
        device: The GPU.
        deadline: On the monotone clock: when the stage's time is over.
        tell: Told which kernel is launched for the first time, and when it is through.
        without: Families of kernels that take no part.
        skipped: Names of kernels that are not launched, since a process ended over each.
        small: Whether everything is cut down, for a rehearsal on a simulated GPU.
        workers: Threads that compile: as many as there are cores.
    """

    device: Device
    deadline: float
    tell: Callable[..., None]
    without: Collection[str] = ()
    skipped: Collection[str] = ()
    small: bool = False
    workers: int = attrs.field(factory=lambda: len(os.sched_getaffinity(0)))

    def sized(self, case: Case) -> Case:
        """Give the case that is run in the place of one: itself, but for a rehearsal."""
        return small.cut(case) if self.small else case

    def seconds_left(self) -> float:
        """Seconds of the stage's time that are left."""
        return max(0.0, self.deadline - time.monotonic())

    @cached_property
    def target(self) -> Target:
        """Where cases run."""
        return attrs.evolve(on_gpu(self.device), trying=self.trying)

    @contextlib.contextmanager
    def trying(self, found: Kernel) -> Iterator[None]:
        """
        Say which kernel is launched, and wait until it is through: whoever listens knows what this process died of.

        Raises:
            DeviceFailed: Instead of launching one that an earlier process died of.
        """
        if found.name in self.skipped:
            raise DeviceFailed(f"kernel {found.name}", "the end of an earlier process", "See skipped_kernels.")
        self.tell(tries=found.name)
        try:
            yield
        finally:
            self.target.synchronize()  # raises where the kernel broke the context
            self.tell(tries="")

    def get_ready(self) -> None:
        """Import the libraries, make a context and compute something: from a cold disk this takes longer than items."""
        module = self.target.module
        with contextlib.suppress(OSError, RuntimeError):  # a broken PyTorch is for the items that need it
            rivals.torch_of(module)
        fill(module, gemm(8, 8, 8), 0)
        module.cuda.get_current_stream().synchronize()
        module.get_default_memory_pool().free_all_blocks()  # or a network's small arrays would keep what this took

    @cached_property
    def contest(self) -> Contest:
        """What times them."""
        return Contest(self.target.clock)

    @cached_property
    def copy_bytes_per_second(self) -> float:
        """The bandwidth of a copy, measured by this process."""
        return measure.copy_bandwidth(self.target, self.contest)


def session_here(seconds: float, tell: Callable[..., None], **options: Any) -> Session:
    """Open a session, with its options, on the first GPU of this machine; its time begins when it is ready."""
    session = Session(probe.resolve("cuda"), math.inf, tell, **options)
    session.get_ready()
    session.deadline = time.monotonic() + seconds
    return session


def units(arch: int) -> list[Kernel]:
    """Give one kernel of each compile unit that an architecture has."""
    first: dict[object, Kernel] = {}
    for found in variants.kernels():
        if found.runs_on(arch):
            first.setdefault((found.source, found.defines), found)
    return list(first.values())


def arch_of(device: Device) -> int:
    """Give a device's compute capability times ten."""
    return variants.arch_number(device.arch or "")


def compile_all(device: Device, workers: int, wanted: Iterable[Kernel] | None = None) -> list[tuple[Kernel, str]]:
    """Compile every unit for a device, or those of some kernels; give those that failed, with the reason."""

    def compiled(found: Kernel) -> tuple[Kernel, str]:
        try:
            compiler.compile_unit(found, device.arch or "")
        except CubatchError as error:
            return found, str(error)
        return found, ""

    with ThreadPoolExecutor(workers) as pool:
        return [pair for pair in pool.map(compiled, units(arch_of(device)) if wanted is None else wanted) if pair[1]]


def compile_units(session: Session) -> dict[str, Any]:
    begun = time.monotonic()
    failed = compile_all(session.device, session.workers)
    return {
        "status": "failed" if failed else "ok",
        "units": len(units(arch_of(session.device))),
        "seconds": time.monotonic() - begun,
        "failed": {found.name: reason for found, reason in failed},
    }


def device_facts(device: Device) -> dict[str, Any]:
    """What driver, NVML and installed packages say of a device, without a context and without a GPU library."""
    state = taken = None
    with contextlib.suppress(CubatchError):
        if device.uuid:
            monitor = Monitor(device.uuid)
            state, taken = monitor.snapshot(), pace_seconds(monitor)
    return {
        "device": device.to_mapping(),
        "environment": environment(device),
        "monitor": plain(state) if state else None,
        "pace_seconds": taken,
    }


def pace_seconds(monitor: Monitor) -> float:
    """Give what NVML takes of every timing, the median of some: it may be as long as what is timed."""
    taken = []
    for _ in range(_PACES):
        begun = time.perf_counter()
        monitor.pace()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def libraries(_: Session) -> dict[str, Any]:
    """The vendor's libraries as they were loaded."""
    return dict(rivals.versions())


def copies(session: Session) -> dict[str, Any]:
    """A copy by the runtime at several sizes, and by our own elementwise kernel at the largest."""
    module, rows = session.target.module, []
    for size in _COPIED_MIB[:2] if session.small else _COPIED_MIB:
        source, target = (module.ones(size * 2**18, dtype="float32") for _ in range(2))
        entrant = Entrant(f"{size} MiB", "ours", lambda source=source, target=target: module.copyto(target, source))
        session.contest.run([entrant], 0.1)
        seconds = entrant.seconds or float("nan")
        rows.append({"mib": size, "seconds": seconds, "bytes_per_second": 2 * source.nbytes / seconds})
    ours = measure.time_case(
        session.sized(of_layer(ReLU(h=128, w=128, c=64), Pass.FPROP, 256)), session.target, session.contest,
        with_rivals=False, copy_bytes_per_second=rows[-1]["bytes_per_second"],
    )  # fmt: skip
    return {"copies": rows, "ours": ours.to_mapping()}


def gemm_ceiling(dtype: str, session: Session) -> dict[str, Any]:
    """The rate of the fastest library on a large product."""
    case = session.sized(gemm(8192, 8192, 8192, dtype=dtype))
    asked = rivals.rivals(case, session.target.module)
    arrays = fill(session.target.module, case, 0)
    reasons = [each.reason for each in asked if isinstance(each, rivals.Missing)]
    entrants: list[tuple[Entrant, Guarded]] = []
    for each in asked:
        if isinstance(each, rivals.Rival):
            step = begun(lambda each=each: each.bind(arrays), session.target)
            if isinstance(step, str):
                reasons.append(f"{each.library} failed with {step}")
            else:
                entrants.append((Entrant(each.library, each.name, step), step))
    session.contest.run([entrant for entrant, _ in entrants], 0.5)
    reasons += [f"{entrant.name} failed with {step.failure}" for entrant, step in entrants if step.failure]
    ran = [entrant for entrant, step in entrants if not step.failure]
    if not ran:
        return {"flops_per_second": None, "reason": "; ".join(reasons)}
    fastest = min(ran, key=lambda entrant: entrant.seconds or math.inf)
    return {
        "library": fastest.name,
        "flops_per_second": case.flops / (fastest.seconds or math.nan),
        "timings": [plain(timing) for timing in fastest.timings],
    }


def timed(case: Case, session: Session) -> dict[str, Any]:
    result = measure.time_case(
        session.sized(case), session.target, session.contest, variants="ranked", without=session.without,
        seconds=CASE_SECONDS, copy_bytes_per_second=session.copy_bytes_per_second,
    )  # fmt: skip
    return {"status": _status(result), "result": result.to_mapping()}


def verified(case: Case, seed: int, session: Session) -> dict[str, Any]:
    result = measure.verify(case, session.target, seed=seed, without=session.without)
    return {"status": _status(result), "seed": seed, "result": result.to_mapping()}


def _status(result: Result) -> str:
    """Say of a case whether a variant is wrong, or else whether some did not run: their entries say why."""
    found = {entry.status for entry in result.wrong}
    if "wrong" in found:
        return "wrong"
    return "incomplete" if found else result.status


def layouts(session: Session) -> dict[str, Any]:
    """Copies into other layouts: exact, for numbers that 16 bits hold."""
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


def occupancy(found: Sequence[Kernel], session: Session) -> dict[str, Any]:
    """Registers, shared memory and blocks per SM: what was computed beside what the driver says."""
    cupy = session.target.module  # and a context, in which alone the driver answers
    driver, rows = cuda_driver.load(), []
    for variant in found:
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
        theirs = function.attributes
        rows.append(
            {
                "kernel": variant.name,
                "driver_status": status,
                "blocks_per_sm": {"computed": computed.blocks_per_sm, "driver": blocks.value},
                "registers": {"computed": resources.registers, "driver": theirs["num_regs"]},
                "shared_bytes": {"computed": resources.shared_bytes, "driver": theirs["shared_size_bytes"]},
                "local_bytes": {"computed": resources.stack_bytes, "driver": theirs["local_size_bytes"]},
            }
        )
    names = ("blocks_per_sm", "registers", "shared_bytes", "local_bytes")
    differing = [row["kernel"] for row in rows if any(row[name]["computed"] != row[name]["driver"] for name in names)]
    return {"status": "differs" if differing else "ok", "differing": differing, "kernels": rows}
