"""What the GPU pass does with whole networks: their memory, a training step beside PyTorch's, what autotune answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks import torch_network
from benchmarks.gpu import small
from benchmarks.gpu.items import Session
from cubatch.bench import rivals
from cubatch.bench.contest import Contest, Entrant
from cubatch.bench.guard import Guarded, begun
from cubatch.bench.records import OURS
from cubatch.bench.rivals import VENDOR
from cubatch.bench.target import Target
from cubatch.hardware.nvml import Monitor
from cubatch.measure.runner import Clock
from cubatch.measure.stopping import paired_interval
from cubatch.memory import parts
from cubatch.network import models
from cubatch.report.tables.common import plain

CHOICE_SECONDS = 6.0
STEP_SECONDS = 6.0
SPAN_SECONDS = 0.3
"""A timing spans several steps: the host waits for the device once in each of PyTorch's."""


def memory_of(name: str, mode: str, batch_size: int, dtype: str, library: str, session: Session) -> dict[str, Any]:
    """The plan beside what the engine took and what the driver says the process holds more than before."""
    name, batch_size = _sized(name, batch_size, session)
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "optimizer": "momentum", "library": library}
    planned = parts.footprint(models.build(name), batch_size=batch_size, device=session.device, **options)
    monitor = Monitor(session.device.uuid) if session.device.uuid else None
    before = monitor.snapshot().used_bytes if monitor else None
    runner = _runner(name, session, **options)
    try:
        runner.prepare(batch_size)
        runner.clock.time(runner.step, 1)
        after = monitor.snapshot().used_bytes if monitor else None
        return {
            "planned_bytes": planned.total,
            "held_bytes": runner.peak_bytes,
            "process_bytes": runner.peak_device_bytes,
            "device_bytes": None if before is None or after is None else after - before,
        }
    finally:
        runner.close()


def training_step(name: str, batch_size: int, dtype: str, session: Session) -> dict[str, Any]:
    """A training step of ours beside PyTorch's eager one, channels last and mixed precision; images per second."""
    name, batch_size = _sized(name, batch_size, session)
    runner = _runner(
        name, session, mode="training", dtype=dtype, optimizer="momentum", library="cubatch",
        choice_seconds=CHOICE_SECONDS,
    )  # fmt: skip
    try:
        runner.prepare(batch_size)
        entrants = [Entrant("cubatch", OURS, runner.step)]
        theirs = _theirs(name, batch_size, dtype, session.target)
        failure = theirs if isinstance(theirs, str) else None
        if isinstance(theirs, Guarded):
            entrants.append(Entrant("PyTorch eager, channels_last, AMP", VENDOR, theirs))
        found = compared_steps(entrants, batch_size, runner.clock)
        if isinstance(theirs, Guarded) and theirs.failure:  # in the middle: ours are still right
            failure = theirs.failure
            del found["images_per_second"][entrants[1].name], found["timings"][entrants[1].name]
            found |= {"ratio": None, "ratio_interval": None}
        return found | {"dtype": dtype, "network": name, "vendor_failure": failure}
    finally:
        runner.close()


def _theirs(name: str, batch_size: int, dtype: str, target: Target) -> Guarded | str | None:
    """Give PyTorch's step, done once; None where there is none, and why where it failed."""
    torch = rivals.torch_of(target.module)
    if torch is None:
        return None

    def bind() -> Callable[[], None]:
        rivals.set_precision(torch, dtype, benchmark=True)
        return torch_network.training_step(models.build(name), batch_size, dtype)

    return begun(bind, target)


def compared_steps(entrants: list[Entrant], batch_size: int, clock: Clock) -> dict[str, Any]:
    """
    Time steps in turns.

    Args:
        entrants: Ours, then the vendor's, if there is one.
        batch_size: Images of a step.
        clock: What times them.
    """
    Contest(clock, SPAN_SECONDS).run(entrants, STEP_SECONDS)
    found: dict[str, Any] = {
        "batch_size": batch_size,
        "images_per_second": {entrant.name: batch_size / (entrant.seconds or float("nan")) for entrant in entrants},
        "timings": {entrant.name: [plain(timing) for timing in entrant.timings] for entrant in entrants},
        "ratio": None,
        "ratio_interval": None,
    }
    if len(entrants) > 1:
        ours, theirs = ({timing.round: timing.seconds for timing in entrant.used} for entrant in entrants)
        interval = paired_interval(theirs, ours)
        found["ratio"] = (entrants[1].seconds or float("nan")) / (entrants[0].seconds or float("nan"))
        found["ratio_interval"] = None if interval is None else [math.exp(end) for end in interval]
    return found


def tuned(name: str, mode: str, dtype: str, library: str, session: Session) -> dict[str, Any]:
    """What autotune answers, beside every size around the answer."""
    import cubatch as cb

    name, most = _sized(name, None, session)
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "device": "cuda", "library": library, "store": False}
    budget = max(2.0, session.seconds_left() / 2)
    found = cb.autotune(name, budget=min(6.0, budget), max_batch_size=most, **options)
    answer = found.batch_size or 1
    largest = found.largest_batch_size or answer
    steps = {max(1, round(answer * 2 ** (step / 6))) for step in range(-9, 10)}
    sizes = sorted({size for size in steps | {answer - 1, answer, answer + 1} if 1 <= size <= largest})
    swept = cb.autotune(name, batch_sizes=sizes, budget=min(8.0, max(2.0, session.seconds_left())), **options)
    return {"found": found.to_mapping(), "swept": swept.to_mapping()}


def _sized(name: str, batch_size: int | None, session: Session) -> tuple[str, int | None]:
    """Give the network and batch that are run in the place of others: themselves, but for a rehearsal."""
    return (small.NETWORK, small.BATCH_SIZE) if session.small else (name, batch_size)


def _runner(name: str, session: Session, **options: Any) -> Any:
    from cubatch.measure.network_runner import network_runner

    spec = models.build(name).to_mapping()
    return network_runner(spec=spec, device=f"cuda:{session.device.index}", recompute=False, seed=0, **options)
