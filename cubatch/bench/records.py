"""What measuring a case gives: who took part, how fast each was, whether its results were right; plain JSON."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.bench.cases import Case
from cubatch.bench.contest import Entrant
from cubatch.bench.implementations import Launch
from cubatch.bench.rivals import RIVALS, VENDOR
from cubatch.errors import MissingDependency
from cubatch.hardware import waves
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.resources import Figures, recorded_figures
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.variant import Kernel
from cubatch.measure.records import Timing
from cubatch.measure.stopping import paired_interval

OURS = "ours"
NOT_ASKED = "not asked for"
"""Why a rival is missing that was not requested."""


@attrs.frozen(kw_only=True)
class LaunchFacts:
    """
    How one launch falls on a device; what is not known is None.

    Attributes:
        kernel: The variant's name.
        grid: Blocks in x, y and z.
        threads: Of a block.
        registers, spill_bytes: Per thread, as compiled; None where it was not.
        shared_bytes: Of a block, static and dynamic.
        blocks_per_sm, occupancy, limiters: See `waves.occupancy`.
        tiles: What the blocks share among them, where that is not one for each.
        busiest_sm_blocks, fill: See `waves.busiest_sm_blocks`; of tiles where blocks share them.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    limiters: tuple[str, ...] = ()
    tiles: int | None = None
    busiest_sm_blocks: int | None = None
    fill: float | None = None


def launch_facts(launch: Launch, device: Device, *, compiled: bool = True, tiles: int | None = None) -> LaunchFacts:
    """
    Say how a launch falls on a device.

    Args:
        launch: The kernel and its grid.
        device: What it is for.
        compiled: Whether to compile the kernel, which gives registers and occupancy; those recorded with the sources
            do where there is no compiler, and where there is neither, these are unknown.
        tiles: What its blocks share among them; None where each has one.

    Raises:
        CompileError: If the kernel does not compile.
    """
    kernel, pieces = launch.kernel, launch.blocks if tiles is None else tiles
    facts: dict[str, Any] = {}
    figures = _figures(kernel, device.arch) if compiled and device.arch else None
    if figures is not None and device.compute_capability:
        shared = figures.shared_bytes + kernel.dynamic_shared_bytes
        found = waves.occupancy(
            compute_capability=device.compute_capability,
            threads_per_block=kernel.threads,
            registers_per_thread=figures.registers,
            shared_bytes_per_block=shared,
        )
        facts = {
            "registers": figures.registers, "spill_bytes": figures.spill_bytes, "shared_bytes": shared,
            "blocks_per_sm": found.blocks_per_sm, "occupancy": found.occupancy, "limiters": found.limiters,
        }  # fmt: skip
    if device.num_sms:
        facts["busiest_sm_blocks"] = waves.busiest_sm_blocks(pieces, device.num_sms)
        facts["fill"] = waves.fill(pieces, device.num_sms)
    return LaunchFacts(kernel=kernel.name, grid=launch.grid, threads=kernel.threads, tiles=tiles, **facts)


@functools.cache
def _figures(kernel: Kernel, arch: str) -> Figures | None:
    """Compile a kernel once in a process: finding it in the cache of cubins takes milliseconds."""
    try:
        found = compiler.compile_kernel(kernel, arch).resources[kernel.entry]
    except MissingDependency:
        return recorded_figures().figures.get(kernel.name, {}).get(variant.arch_number(arch))
    return Figures(found.registers, found.shared_bytes, found.spill_bytes)


@attrs.frozen
class Ratio:
    """
    How much longer a rival takes: above 1 we are faster.

    Attributes:
        value: Its median over ours.
        interval: Where the ratio lies with 90 %, from the rounds that both have; None with too few.
    """

    value: float
    interval: tuple[float, float] | None = None


@attrs.frozen(kw_only=True)
class Entry:
    """
    A way to do a case, with its check and its times.

    Attributes:
        name: The variant of ours that does the main part, or a rival's library.
        label: The same among its kind: family, tile, vector.
        side: OURS or the name of a rival.
        status: "ok"; "dropped": clearly slower than another variant; "wrong": its results are not right, so it was not
            timed; "error": it did not run; "planned": nothing was measured.
        reason: Why measuring it ended, or what went wrong.
        launches: Its kernels in order; empty for a rival's.
        worst_error: In units of the bound of our kernels, at most 1 where they are right and its slack where a rival
            is; None where it was not checked.
        timings: By round.
        seconds, interval: Median and where it lies with 90 %; None where it was not timed.
        flops_per_second, bytes_per_second: What it computed and moved in that time.
        roofline_fraction: Share of the speed that the device's data sheet allows.
        copy_fraction: Share of the bandwidth that a plain copy reaches on this device, measured in the same run.
        ratios: By name, every rival's time over this one's; empty for a rival's.
    """

    name: str
    label: str = ""
    side: str = OURS
    status: str = "planned"
    reason: str = ""
    launches: tuple[LaunchFacts, ...] = ()
    worst_error: float | None = None
    timings: tuple[Timing, ...] = ()
    seconds: float | None = None
    interval: tuple[float, float] | None = None
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    roofline_fraction: float | None = None
    copy_fraction: float | None = None
    ratios: Mapping[str, Ratio] = attrs.field(factory=dict)

    @property
    def ratio(self) -> float | None:
        """The vendor's time over this one's; None where it was not timed."""
        return self.ratios[VENDOR].value if VENDOR in self.ratios else None

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """Where that lies with 90 %."""
        return self.ratios[VENDOR].interval if VENDOR in self.ratios else None

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain mappings, for JSON: the ratio to the vendor also by itself."""
        facts = attrs.asdict(self)
        ratios = facts.pop("ratios")
        found: dict[str, Any] = _plain(facts | {"ratio": self.ratio, "ratio_interval": self.ratio_interval})
        return found | {"ratios": _plain(ratios)}


@attrs.frozen(kw_only=True)
class Result:
    """
    The results of a case on a device.

    Attributes:
        case: What was called.
        entries: Ours, in the order they were ranked; then the rivals'.
        roofline_seconds, bound: The lower bound by the data sheet, and which roof it is.
        sets: Sets of buffers that were rotated over; 0 where nothing was measured.
        l2: "cold" where the sets are more than the L2 holds, "warm" otherwise.
        missing: Why a rival has no entry, by name.
        status: "ok", or "out_of_memory" where the arrays did not fit.
    """

    case: Case
    entries: tuple[Entry, ...] = ()
    roofline_seconds: float | None = None
    bound: str | None = None
    sets: int = 0
    l2: str | None = None
    missing: Mapping[str, str] = attrs.field(factory=dict)
    status: str = "ok"

    @property
    def times(self) -> Mapping[str, Entry]:
        """What was timed, by name: the fastest of ours that was right under OURS, then the rivals."""
        found: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.status == "ok" and entry.seconds is not None:
                found[entry.side] = min(found.get(entry.side, entry), entry, key=lambda each: each.seconds or math.inf)
        return found

    @property
    def best(self) -> Entry | None:
        """The fastest of ours that was right; where nothing was measured, the first."""
        planned = (entry for entry in self.entries if entry.side == OURS and entry.status == "planned")
        return self.times.get(OURS) or next(planned, None)

    @property
    def no_rival(self) -> str:
        """Why there is none; empty where there is one."""
        has_one = any(entry.side != OURS for entry in self.entries)
        return "" if has_one else "; ".join(dict.fromkeys(self.missing.values()))

    @property
    def wrong(self) -> tuple[Entry, ...]:
        """Entries of ours whose results were not right, or that did not run."""
        return tuple(e for e in self.entries if e.side == OURS and e.status in {"wrong", "error"})

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain mappings, timings included, for JSON."""
        facts: dict[str, Any] = attrs.asdict(self, recurse=False)
        status, missing = facts.pop("status"), dict(facts.pop("missing"))
        return facts | {
            "case": self.case.to_mapping(),
            "entries": [entry.to_mapping() for entry in self.entries],
            "no_rival": self.no_rival,
            "status": status,
            "missing": missing,
        }


def names_of(results: Iterable[Result]) -> list[str]:
    """Name the rivals that took part in any of some results, in the order of RIVALS."""
    found = {entry.side for result in results for entry in result.entries}
    return [name for name in RIVALS if name in found]


def entered(
    entry: Entry, entrant: Entrant, case: Case, roofline_seconds: float | None, copy_bytes_per_second: float | None
) -> Entry:
    """Fill in what timing an entry gave."""
    seconds = entrant.seconds
    if seconds is None:
        return attrs.evolve(entry, status="error", reason="no timing was taken")
    moved = case.moved_bytes / seconds
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
    )


def compared(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Compare every entry of ours with each rival's fastest, round by round."""
    others: dict[str, Entry] = {}
    for entry in entries:
        if entry.side != OURS and entry.seconds:
            others[entry.side] = min(others.get(entry.side, entry), entry, key=lambda each: each.seconds or math.inf)
    return tuple(
        attrs.evolve(entry, ratios={side: _ratio(other, entry) for side, other in others.items()})
        if entry.side == OURS and entry.seconds
        else entry
        for entry in entries
    )


def _ratio(theirs: Entry, ours: Entry) -> Ratio:
    interval = paired_interval(_by_round(theirs), _by_round(ours))
    return Ratio(
        (theirs.seconds or math.nan) / (ours.seconds or math.nan),
        interval and (math.exp(interval[0]), math.exp(interval[1])),
    )


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """
    Return the geometric mean of ratios, None of none.

    Example:
        >>> geometric_mean([2.0, 0.5]), geometric_mean([])
        (1.0, None)
    """
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios)) if ratios else None


def _by_round(entry: Entry) -> dict[int, float]:
    used = [timing for timing in entry.timings if not timing.throttled] or entry.timings
    return {timing.round: timing.seconds for timing in used}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
