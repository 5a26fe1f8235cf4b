"""
Which batch sizes deserve a measurement, and why each.

Throughput against batch size is a saw: it climbs while blocks fill the SMs and falls when one block
too many makes the busiest SM work longer.  The teeth are known beforehand from the network and the
number of SMs, so the ladder has a rung on their crests, rungs of common advice beside them to be
compared with, and rungs at the limits.  `explain` shows the arithmetic behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.estimate import expected as expectation
from cubatch.hardware import arithmetic, probe
from cubatch.hardware import room as hardware_room
from cubatch.hardware.arithmetic import tensor_core_multiple
from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.memory import fit
from cubatch.memory.plan import plan
from cubatch.network import models
from cubatch.network.graph import Spec
from cubatch.network.models import SpecLike
from cubatch.tuning.crests import Proposal, by_turns, coulom, crests, slowest

MOST = 40
ASKED = ("asked for",)


def candidates(
    spec: SpecLike,
    *,
    device: Device | str | None = None,
    mode: str = "inference",
    dtype: str = "float32",
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    batch_sizes: Iterable[int] | None = None,
    optimizer: str = "sgd",
    library: str = "auto",
    recompute: bool = False,
) -> list[Candidate]:
    """
    List the batch sizes worth measuring, each with every reason for it.

    On a GPU these are, up to the limit:

    - Coulom's sizes of the three distinct convolutions with most FLOP, for n = 1 to 8, then doubling;
    - crests of the three layer passes with most predicted time whose grids differ: the largest batch for each
      `busiest_sm_blocks` = 1 to 8, then doubling, where there is one, and the batch just past the
      first two; tiles are 128 x 128 without split-K; passes whose blocks do not grow with the batch are left out;
    - each of those rounded down to a multiple of 8 (float16, bfloat16) or 4 (tf32), where the GPU has
      Tensor Cores for the dtype;
    - powers of two; the memory limit, 0.9 and 0.75 of it; `max_batch_size` itself.

    On a CPU: powers of two, 1.5 times them, and the limits.

    More than 40 are cut by this rule.  The smallest and the largest are kept, every limit, and the first of each
    kind of reason.  Then, from the smallest up: where the next one kept is more than twice as
    large, the largest within a factor of two is kept as well.  Then the kinds take turns, each in the order in
    which it was proposed (level by level, the layers with most work first), until 40 are kept.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        device: The GPU or CPU, which need not be in this machine; None is this machine's.
        mode: "inference" or "training".
        dtype: "float32", "tf32", "float16" or "bfloat16".
        max_batch_size: No candidate is above it.
        memory_limit: Bytes, "8GiB" or "80%" (of what is free); no candidate's plan is above it. None is
            what the device has to give.
        batch_sizes: Give exactly these, those whose plan is above the memory limit marked `over_limit`.
        optimizer, library, recompute: As for `footprint`; they decide what fits, the last two also what a step takes.

    Returns:
        list[Candidate]: Ascending; `reasons`, the memory plan's `predicted_peak_bytes`, and `predicted_seconds`:
        by the model of `predict` on a GPU of known facts, else the roofline (None where not even its peaks are known).

    Raises:
        DoesNotFit: If not even one sample fits (also a MemoryError).
        InvalidArgument: If an argument cannot be used (also a ValueError).

    Example:
        >>> go = candidates("go-net", device="v100-sxm2-16gb")
        >>> [c.batch_size for c in go if "coulom n=3" in c.reasons]
        [85]
    """
    found, resolved = probe.resolve(device, live=False), models.resolve(spec)
    arithmetic.check_dtype(found, dtype)
    steps, _ = within(
        resolved,
        found,
        room=hardware_room.memory_limit(found, memory_limit).bytes,
        mode=mode,
        dtype=dtype,
        max_batch_size=max_batch_size,
        batch_sizes=batch_sizes,
        optimizer=optimizer,
        library=library,
        recompute=recompute,
    )
    return timed(steps, resolved, found, mode=mode, dtype=dtype, library=library, recompute=recompute)


def within(
    resolved: Spec,
    found: Device,
    *,
    room: int,
    mode: str,
    dtype: str,
    max_batch_size: int | None,
    batch_sizes: Iterable[int] | None,
    optimizer: str,
    library: str,
    recompute: bool,
    crests_of: str | None = None,
) -> tuple[list[Candidate], int]:
    """
    List the candidates as `candidates` does, for so many bytes of memory; also give the largest batch that fits.

    Free memory changes from one look to the next, so whoever needs both must look once.  What a step takes is not
    said yet: see `timed`.  `crests_of` is the library whose tiles make the crests, where it is not the one planned for.
    """
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "optimizer": optimizer, "device": found}
    top = None if max_batch_size is None else checks.check_batch_size(max_batch_size, "max_batch_size")
    library = arithmetic.resolve_library(library, found, dtype)
    largest = fit.max_batch_size(resolved, max(1, room), recompute=recompute, library=library, **options)
    if batch_sizes is None:
        kept = _ladder(_proposals(resolved, found, mode, dtype, crests_of or library, largest, top))
    else:
        kept = asked_for(batch_sizes, top)

    def planned(size: int) -> int:
        return plan(resolved, batch_size=size, recompute=recompute, library=library, **options).total

    steps = [
        attrs.evolve(
            candidate,
            predicted_peak_bytes=planned(candidate.batch_size),
            over_limit=candidate.batch_size > largest,
        )
        for candidate in kept
    ]
    return steps, largest


def timed(
    steps: Sequence[Candidate],
    resolved: Spec,
    found: Device,
    *,
    mode: str,
    dtype: str,
    library: str,
    recompute: bool,
) -> list[Candidate]:
    """Write what one step should take into candidates: see `outlook.step_seconds`."""
    library, sizes = arithmetic.resolve_library(library, found, dtype), [step.batch_size for step in steps]
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "library": library, "recompute": recompute}
    expected = expectation.step_seconds(resolved, sizes, found, **options)
    return [attrs.evolve(step, predicted_seconds=seconds) for step, seconds in zip(steps, expected, strict=True)]


def plain_candidates(max_batch_size: int, *, batch_sizes: Iterable[int] | None = None) -> list[Candidate]:
    """
    List batch sizes for something of which nothing is known: powers of two, 1.5 times them, the limit.

    Args:
        max_batch_size: The largest that may be tried.
        batch_sizes: Give exactly these.

    Returns:
        list[Candidate]: Ascending, at most 40 (by the rule of `candidates`) unless asked for.

    Raises:
        InvalidArgument: If a size is not a whole number of at least 1, or one asked for is above the limit.

    Example:
        >>> [candidate.batch_size for candidate in plain_candidates(14)]
        [1, 2, 3, 4, 6, 8, 12, 14]
    """
    top = checks.check_batch_size(max_batch_size, "max_batch_size")
    if batch_sizes is not None:
        return asked_for(batch_sizes, top)
    return _ladder([*_plain(top), Proposal(top, "max_batch_size", "max_batch_size")])


def _proposals(
    spec: Spec, device: Device, mode: str, dtype: str, library: str, largest: int, top: int | None
) -> list[Proposal]:
    """Everything that speaks for some batch size from 1 to the limit, in the order of the kinds."""
    limit = largest if top is None else min(largest, top)
    limits = [
        Proposal(size, reason, reason)
        for size, reason in (
            (largest, "memory limit"),
            (largest * 9 // 10, "0.9 of the memory limit"),
            (largest * 3 // 4, "0.75 of the memory limit"),
            (top or 0, "max_batch_size"),
        )
        if 1 <= size <= limit
    ]
    if device.kind == "cpu":
        return [*_plain(limit), *limits]
    teeth: list[Proposal] = []
    if device.num_sms is not None:
        teeth += coulom(spec, device.num_sms, limit)
        teeth += crests(slowest(spec, device, mode, dtype, limit, library), device.num_sms, limit)
    multiple = tensor_core_multiple(device, dtype)
    if multiple:
        rounded = [tooth.batch_size // multiple * multiple for tooth in teeth]
        text = f"tensor-core multiple of {multiple}"
        teeth += [Proposal(size, "tensor-core multiple", text) for size in rounded if size]
    return [*teeth, *_powers(limit), *limits]


def _powers(limit: int) -> list[Proposal]:
    return [Proposal(2**i, "power of two", "power of two") for i in range(limit.bit_length())]


def _plain(limit: int) -> list[Proposal]:
    text = "1.5 times a power of two"
    between = [Proposal(3 * 2**i, text, text) for i in range(limit.bit_length()) if 3 * 2**i <= limit]
    return [*_powers(limit), *between]


def asked_for(batch_sizes: Iterable[int], top: int | None) -> list[Candidate]:
    """Make candidates of exactly these sizes, each once and ascending; none may be above `top`."""
    if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Iterable):
        raise InvalidArgument("batch_sizes", batch_sizes, "a list of whole numbers")
    sizes = sorted({checks.check_batch_size(size, "batch_sizes") for size in batch_sizes})
    if not sizes:
        raise InvalidArgument("batch_sizes", [], "a list of at least one batch size, or None")
    if top is not None and sizes[-1] > top:
        raise InvalidArgument("batch_sizes", sizes[-1], f"at most max_batch_size={top}", "Leave max_batch_size out.")
    return [Candidate(size, ASKED) for size in sizes]


def _ladder(proposals: Sequence[Proposal]) -> list[Candidate]:
    """Merge proposals into candidates with all their reasons, ascending, and cut them as `candidates` says."""
    reasons: dict[int, dict[str, None]] = {}
    for proposal in proposals:
        reasons.setdefault(proposal.batch_size, {})[proposal.reason] = None
    sizes = sorted(reasons)
    kept = set(sizes) if len(sizes) <= MOST else _cut(sizes, proposals)
    return [Candidate(size, tuple(reasons[size])) for size in sizes if size in kept]


def _cut(sizes: Sequence[int], proposals: Sequence[Proposal]) -> set[int]:
    """
    Choose 40 sizes by the rule in the docstring of `candidates`.

    What is kept before the turns cannot be more than 40: closing gaps adds at most one size between two
    powers of two, of which there are 31, and limits and first ones are at most 7 more.
    """
    turns: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        turns.setdefault(proposal.kind, []).append(proposal)
    kept = {sizes[0], sizes[-1], *(queue[0].batch_size for queue in turns.values())}
    size = sizes[0]
    while size != sizes[-1]:
        following = min(other for other in kept if other > size)
        if following > 2 * size:
            following = max(other for other in sizes if other <= 2 * size)
            kept.add(following)
        size = following
    for proposal in by_turns(list(turns.values())):
        if len(kept) < MOST:
            kept.add(proposal.batch_size)
    return kept


def between(size: int, steps: Sequence[Candidate]) -> Candidate:
    """
    Make a candidate of a size that the search adds, saying what it lies between.

    Example:
        >>> between(113, [Candidate(96), Candidate(128)]).reasons
        ('between 96 and 128',)
    """
    sizes = [step.batch_size for step in steps]
    below, above = (max(n for n in sizes if n < size), min(n for n in sizes if n > size))
    return Candidate(size, (f"between {below} and {above}",))
