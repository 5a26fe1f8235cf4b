"""Results of measuring a case: the entrants, their times, and whether their results were right; plain JSON."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import attrs

from cubatch.bench.calls import Case
from cubatch.bench.contest import OURS, Entrant, time_ratio
from cubatch.bench.implementations import Launch
from cubatch.errors import MissingDependency
from cubatch.hardware import waves
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.resources import Figures, needs_of, recorded_figures
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.variant import Kernel
from cubatch.measure.records import Timing
from cubatch.report.tables.common import plain

NOT_ASKED = "not requested"
"""Reason for no rival."""


@attrs.frozen(kw_only=True)
class LaunchFacts:
    """A kernel launch on a device: its grid, resources and occupancy; `None` for a value that is unknown."""

    kernel: str  # name of the variant
    grid: tuple[int, int, int]  # blocks in x, y and z
    threads: int  # threads of a block
    registers: int | None = None  # registers, spill_bytes: per thread, as compiled
    spill_bytes: int | None = None
    shared_bytes: int | None = None  # per block, static and dynamic
    blocks_per_sm: int | None = None  # blocks_per_sm, occupancy, limiters: see `waves.occupancy`
    occupancy: float | None = None
    limiters: tuple[str, ...] = ()
    tiles: int | None = None  # tiles that the blocks share, unless each has one
    # busiest_sm_blocks, fill: see `waves.busiest_sm_blocks`; of the tiles if blocks share them
    busiest_sm_blocks: int | None = None
    fill: float | None = None


def launch_facts(launch: Launch, device: Device, *, compiled: bool = True, tiles: int | None = None) -> LaunchFacts:
    """
    Return the grid of a launch on a device, and the resources and occupancy of its kernel.

    Args:
        launch: The kernel and its grid.
        compiled: Whether to compile the kernel, which gives registers and occupancy. Without a compiler, the values
            recorded with the sources are used, if there are any.
        tiles: Tiles that its blocks share; `None` if each has one.
    """
    kernel, pieces = launch.kernel, launch.blocks if tiles is None else tiles
    facts: dict[str, Any] = {}
    figures = _figures(kernel, device.arch) if compiled and device.arch else None
    if figures is not None and device.compute_capability:
        needs = needs_of(kernel, figures, None)
        held = needs.on(device.compute_capability)
        facts = {
            "registers": figures.registers, "spill_bytes": figures.spill_bytes, "shared_bytes": needs.shared_bytes,
            "blocks_per_sm": held.blocks_per_sm, "occupancy": held.occupancy, "limiters": held.limiters,
        }  # fmt: skip
    if device.num_sms:
        facts["busiest_sm_blocks"] = waves.busiest_sm_blocks(pieces, device.num_sms)
        facts["fill"] = waves.fill(pieces, device.num_sms)
    return LaunchFacts(kernel=kernel.name, grid=launch.grid, threads=kernel.threads, tiles=tiles, **facts)


@functools.cache
def _figures(kernel: Kernel, arch: str) -> Figures | None:
    """
    Return the registers of a thread, the shared bytes of a block and the spilled bytes of a thread of a kernel.

    The compiler reports them for `arch` ("sm_90"). Without a compiler the recorded values are returned, or None.
    """
    try:
        resources = compiler.compile_kernel(kernel, arch).resources[kernel.entry]
    except MissingDependency:
        return recorded_figures().figures.get(kernel.name, {}).get(variant.arch_number(arch))
    return Figures(resources.registers, resources.shared_bytes, resources.spill_bytes)


@attrs.frozen(kw_only=True)
class Entry:
    """An implementation of a case, with its check and its times."""

    name: str  # the main kernel of cubatch, or the library of a rival
    label: str = ""  # family, tile and vector of the kernel
    side: str = OURS  # `OURS` or `VENDOR`
    # "ok", "dropped" (clearly slower), "wrong" (results are wrong; not timed), "error" (did not run) or "planned"
    status: str = "planned"
    reason: str = ""  # why measuring it ended, or the error
    launches: tuple[LaunchFacts, ...] = ()  # its kernels in order; empty for a rival
    worst_error: float | None = None  # largest error of a result in units of its bound; `None` if it was not checked
    timings: tuple[Timing, ...] = ()  # by round
    # seconds, interval: median with its 90 % confidence interval; `None` if it was not timed
    seconds: float | None = None
    interval: tuple[float, float] | None = None
    # flops_per_second, bytes_per_second: FLOP and bytes of the case, divided by the seconds; None if it was not timed.
    # The FLOP per second are also None for a case that only moves data
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    # least time by the data sheet, divided by the seconds; None if either is unknown
    roofline_fraction: float | None = None
    # share of the bandwidth of a plain copy, measured in the same run; None if either was not measured
    copy_fraction: float | None = None
    # time of the vendor's fastest entry divided by that of this one: above 1 cubatch is faster; `None` for a rival
    ratio: float | None = None
    # its 90 % confidence interval from the rounds of both; `None` for too few rounds
    ratio_interval: tuple[float, float] | None = None


@attrs.frozen(kw_only=True)
class Result:
    """The results of a case on a device."""

    case: Case  # the call
    entries: tuple[Entry, ...] = ()  # cubatch kernels in the order of their rank, then the rivals
    # roofline_seconds, bound: least time by the data sheet, and what limits it: "compute" or "memory". None if the
    # device's rate of either is unknown
    roofline_seconds: float | None = None
    bound: str | None = None
    sets: int = 0  # number of sets of arrays that timed steps used in turn; 0 if nothing was measured
    l2: str | None = None  # "cold" if the sets exceed the L2, else "warm"; None if nothing was measured
    no_rival: str = ""  # why the vendor has no entry; empty if it has one
    status: str = "ok"  # "ok", or "out_of_memory" if the arrays did not fit

    @property
    def times(self) -> Mapping[str, Entry]:
        """By side (`OURS` or `VENDOR`), the fastest timed entry with right results; without sides that have none."""
        fastest: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.status == "ok" and entry.seconds is not None:
                before = fastest.get(entry.side, entry)
                fastest[entry.side] = min(before, entry, key=lambda each: each.seconds or math.inf)
        return fastest

    @property
    def best(self) -> Entry | None:
        """The fastest cubatch kernel with right results; without timings, the first planned kernel; else None."""
        planned = (entry for entry in self.entries if entry.side == OURS and entry.status == "planned")
        return self.times.get(OURS) or next(planned, None)

    @property
    def wrong(self) -> tuple[Entry, ...]:
        """Entries of cubatch whose status is "wrong" or "error"."""
        return tuple(entry for entry in self.entries if entry.side == OURS and entry.status in {"wrong", "error"})

    def to_mapping(self) -> dict[str, Any]:
        """Return the attributes by name, with all timings, as a dict that JSON can hold."""
        mapping: dict[str, Any] = plain(attrs.asdict(self, recurse=False) | {"case": self.case.to_mapping()})
        return mapping


def entered(
    entry: Entry,
    entrant: Entrant,
    case: Case,
    *,
    roofline_seconds: float | None,
    copy_bytes_per_second: float | None,
    rival: Entrant | None,
) -> Entry:
    """
    Return the entry with status, timings and rates of its entrant.

    Rates are also given as shares of the roofline and of the bandwidth of a plain copy, None if these are unknown. The
    ratio of a cubatch entry is seconds of `rival` / its own. `rival` is the vendor's fastest entrant, or None.
    """
    seconds = entrant.seconds
    if entrant.status == "error":
        return attrs.evolve(entry, status="error", reason=entrant.reason)
    if seconds is None:
        return attrs.evolve(entry, status="error", reason="no timing was taken")
    moved = case.moved_bytes / seconds
    ratio, ratio_interval = time_ratio(rival, entrant) if rival and entrant.side == OURS else (None, None)
    return attrs.evolve(
        entry,
        status=entrant.status,
        reason=entrant.reason,
        timings=tuple(entrant.timings),
        seconds=seconds,
        interval=entrant.interval,
        flops_per_second=case.flops / seconds if case.flops else None,
        bytes_per_second=moved,
        roofline_fraction=None if roofline_seconds is None else roofline_seconds / seconds,
        copy_fraction=None if copy_bytes_per_second is None else moved / copy_bytes_per_second,
        ratio=ratio,
        ratio_interval=ratio_interval,
    )
