"""
The ladder: the list of batch sizes that are worth measuring, each with its reasons.

Wave quantization makes throughput a sawtooth of the batch size. It rises while blocks fill the SMs, and falls when one
more block makes the busiest SM work longer. The peaks follow from the network and the number of SMs. The ladder has
these sizes, sizes of common advice to compare with, and the limits. `explain` shows the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch import checks
from cubatch.choices import Dtype, Library, Mode, Optimizer
from cubatch.errors import InvalidArgument
from cubatch.estimate.expected import step_seconds
from cubatch.hardware.arithmetic import tensor_core_multiple
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit, memory_limit as memory_limit_of
from cubatch.measure.records import Candidate
from cubatch.memory import fit
from cubatch.memory.plan import plan
from cubatch.network.models import SpecLike
from cubatch.shown import Shown
from cubatch.tuning.notes import Note
from cubatch.tuning.request import Request
from cubatch.tuning.wave_peaks import Proposal, coulom, interleaved, slowest, wave_peaks
from cubatch.units import visible
from cubatch.workload import Workload

MOST = 40
ASKED = ("asked for",)
CURRENT = "current batch size"


class Candidates(list[Candidate], Shown):
    """A list of candidates with a title above its table."""

    def __init__(self, candidates: Iterable[Candidate], title: str) -> None:
        super().__init__(candidates)
        self.title = title


def candidates(
    spec: SpecLike,
    *,
    device: Device | str | None = None,
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    batch_sizes: Iterable[int] | None = None,
    optimizer: Optimizer = "sgd",
    library: Library = "auto",
    recompute: bool = False,
) -> list[Candidate]:
    """
    List the batch sizes worth measuring, each with its reasons.

    On a GPU these are, up to the limit:

    - Coulom's sizes of the three distinct convolutions with most FLOP, for n = 1 to 8, then doubling;
    - wave peaks (`"crest"`) of the three layer passes with most predicted time and different grids: the largest batch
      for each `busiest_sm_blocks` = 1 to 8, then doubling, and the batch just past the first two; tiles are 128 x 128
      without split-K; passes whose blocks do not grow with the batch are left out;
    - each of those rounded down to a multiple of 8 (float16, bfloat16) or 4 (tf32), if the GPU has Tensor Cores for
      the dtype;
    - powers of two; the largest batch that fits in memory, 0.9 and 0.75 of it; `max_batch_size` itself.

    On a CPU: powers of two, 1.5 times them, and the sizes by memory and `max_batch_size` as on a GPU.

    At most 40 are returned, selected in three steps. First the smallest, the largest, every limit, and the first of
    each kind of reason. Then, from the smallest up, wherever the next one is more than twice as large, the largest
    within a factor of two. Then the kinds take turns in the order of their proposals, until there are 40.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        device: The GPU or CPU, present or not; None is that of this machine.
        mode: "inference" or "training".
        dtype: "float32", "tf32", "float16" or "bfloat16".
        max_batch_size: No candidate is above it.
        memory_limit: Bytes, "8GiB" or "80%" of the free memory; no plan is above it. None is the free memory.
        batch_sizes: Return exactly these; those that do not fit are marked `over_limit`.
        optimizer, library, recompute: As for `footprint`; they decide what fits, the last two also predicted times.

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
    work = Workload.of(
        spec, device, mode=mode, dtype=dtype, optimizer=optimizer, library=library, recompute=recompute
    )  # fmt: skip
    request = Request.of(batch_sizes=batch_sizes, max_batch_size=max_batch_size)
    memory = memory_limit_of(work.device, memory_limit)
    ladder = timed(work, propose(work, request, memory, fit.largest(work, max(1, memory.bytes))))
    return Candidates(
        ladder.candidates, f"{visible(work.name)}, {mode}, {dtype}, {work.device}: batch sizes worth measuring"
    )


@attrs.frozen
class Ladder:
    """The candidate batch sizes of a run, and the memory limit for which they were proposed."""

    candidates: tuple[Candidate, ...]  # ascending; those that do not fit are marked `over_limit`
    largest: int | None  # the largest batch that fits, by the plan; None without a plan
    memory_bytes: int | None  # bytes that a step may take; None: no limit, as a callable has by default
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # what else is cached with the candidates, as JSON
    notes: tuple[Note, ...] = ()  # what a user should know about how they were chosen

    @property
    def most_planned_bytes(self) -> int:
        """Peak bytes of the largest memory plan of the candidates that fit; 0 without a plan."""
        return max((step.predicted_peak_bytes or 0 for step in self.candidates if not step.over_limit), default=0)

    def within(self, memory: MemoryLimit, largest: int) -> Ladder:
        """
        Return the candidates, each marked `over_limit` if its memory plan is above the limit `memory`.

        `largest` is the largest batch size that fits the limit.
        """
        again = tuple(
            step
            if (planned := step.predicted_peak_bytes) is None
            else attrs.evolve(step, over_limit=planned > memory.bytes)
            for step in self.candidates
        )
        is_whole = self.memory_bytes is not None and again == self.candidates  # the same are refused
        return self if is_whole else attrs.evolve(self, candidates=again, largest=largest, memory_bytes=memory.bytes)


def propose(
    work: Workload, request: Request, memory: MemoryLimit, largest: int, *, tiles_of: Workload | None = None
) -> Ladder:
    """
    Return the candidates that `candidates` describes, with planned memory but without predicted times.

    `largest` is the largest batch whose plan fits. `tiles_of` is the workload whose tiles make the wave peaks; None:
    `work`.
    """
    if request.batch_sizes is None:
        proposals = _proposals(tiles_of or work, largest, request.max_batch_size)
        steps = _ladder([*_accepted(request, largest, proposals), *_current(request)])
    else:
        steps = asked_for(request.batch_sizes)
    return _bounded(steps, memory, largest, lambda size: plan(work, size).total)


def of_memory(request: Request, memory: MemoryLimit, largest: int, peak_bytes: Callable[[int], int | None]) -> Ladder:
    """
    Return round sizes and the limits as candidates of a step of which only the memory is known.

    `largest` is the largest size that fits, and `peak_bytes` returns the peak memory of a size.
    """
    steps = asked_for(request.batch_sizes or ())
    if request.batch_sizes is None:
        top = request.max_batch_size
        proposals = [*_plain(min(largest, top or largest)), *_limits(largest, top)]
        steps = _ladder([*_accepted(request, largest, proposals), *_current(request)])
    return _bounded(steps, memory, largest, peak_bytes)


def _bounded(
    steps: Iterable[Candidate], memory: MemoryLimit, largest: int, peak_bytes: Callable[[int], int | None]
) -> Ladder:
    planned = (
        attrs.evolve(step, predicted_peak_bytes=peak_bytes(step.batch_size), over_limit=step.batch_size > largest)
        for step in steps
    )
    return Ladder(tuple(planned), largest, memory.bytes)


def timed(work: Workload, ladder: Ladder) -> Ladder:
    """Return the candidates with predicted seconds of a step added to each."""
    expected = step_seconds(work, [step.batch_size for step in ladder.candidates])
    pairs = zip(ladder.candidates, expected, strict=True)
    return attrs.evolve(
        ladder, candidates=tuple(attrs.evolve(step, predicted_seconds=seconds) for step, seconds in pairs)
    )


def added(work: Workload, ladder: Ladder, batch_size: int) -> Candidate:
    """Return a candidate of a batch size between two of `ladder`, with planned bytes and predicted seconds."""
    step = attrs.evolve(
        between(batch_size, ladder.candidates), predicted_peak_bytes=plan(work, batch_size).total
    )  # fmt: skip
    return timed(work, attrs.evolve(ladder, candidates=(step,))).candidates[0]


def plain(request: Request) -> list[Candidate]:
    """Return candidates for a callable step: the user's list, or powers of two, 1.5 times these, and the maximum."""
    if request.batch_sizes is not None:
        return asked_for(request.batch_sizes)
    top = request.max_batch_size or checks.MAX_BATCH_SIZE
    proposals = [*_plain(top), Proposal(top, "max_batch_size", "max_batch_size")]
    return _ladder([*_accepted(request, top, proposals), *_current(request)])


def _proposals(work: Workload, largest: int, top: int | None) -> list[Proposal]:
    """
    Return all proposed batch sizes, grouped by the kind of reason.

    They are from 1 to `largest`, the largest size that fits in memory, and up to `top`, the user's maximum; None: no
    maximum.
    """
    limit = largest if top is None else min(largest, top)
    limits = _limits(largest, top)
    if work.device.kind == "cpu":
        return [*_plain(limit), *limits]
    peaks: list[Proposal] = []
    if (num_sms := work.device.num_sms) is not None:
        peaks += coulom(work.spec, num_sms, limit)
        peaks += wave_peaks(slowest(work, limit), num_sms, limit)
    multiple = tensor_core_multiple(work.device, work.dtype)
    if multiple:
        rounded = [peak.batch_size // multiple * multiple for peak in peaks]
        text = f"tensor-core multiple of {multiple}"
        peaks += [Proposal(size, "tensor-core multiple", text) for size in rounded if size]
    return [*peaks, *_powers(limit), *limits]


def _limits(largest: int, top: int | None) -> list[Proposal]:
    return [
        Proposal(size, reason, reason)
        for size, reason in (
            (largest, "memory limit"),
            (largest * 9 // 10, "0.9 of the memory limit"),
            (largest * 3 // 4, "0.75 of the memory limit"),
            (top or 0, "max_batch_size"),
        )
        if 1 <= size <= min(largest, top or largest)
    ]


def _accepted(request: Request, largest: int, proposals: Sequence[Proposal]) -> list[Proposal]:
    """
    Return the proposals that `multiple_of` and `divides` accept, then more accepted batch sizes up to the limit.

    Raises:
        InvalidArgument: If no accepted size is within the limit.
    """
    multiple, divides = request.multiple_of, request.divides
    if multiple == 1 and divides is None:
        return list(proposals)
    top = min(largest, request.max_batch_size or largest)
    if top < multiple:
        raise InvalidArgument("multiple_of", multiple, f"at most {top}, the largest batch size that is allowed or fits")
    accepted = [each for each in proposals if request.accepts(each.batch_size)]
    if divides is not None:
        sizes = {size for d in range(1, math.isqrt(divides) + 1) if divides % d == 0 for size in (d, divides // d)}
        text = f"divides {divides}"
    else:
        sizes = {multiple * each.batch_size for each in _plain(top // multiple)} | {top // multiple * multiple}
        text = f"multiple of {multiple}"
    return [*accepted, *(Proposal(size, text, text) for size in sorted(sizes) if size <= top and request.accepts(size))]


def _current(request: Request) -> list[Proposal]:
    """Return a proposal of the user's current batch size, also if it does not fit; an empty list if there is none."""
    return [] if request.current is None else [Proposal(request.current, CURRENT, CURRENT)]


def _powers(limit: int) -> list[Proposal]:
    return [Proposal(2**i, "power of two", "power of two") for i in range(limit.bit_length())]


def _plain(limit: int) -> list[Proposal]:
    text = "1.5 times a power of two"
    between = [Proposal(3 * 2**i, text, text) for i in range(limit.bit_length()) if 3 * 2**i <= limit]
    return [*_powers(limit), *between]


def asked_for(sizes: Iterable[int]) -> list[Candidate]:
    """Return candidates of exactly these batch sizes, which the user gave."""
    return [Candidate(size, ASKED) for size in sizes]


def _ladder(proposals: Sequence[Proposal]) -> list[Candidate]:
    """Return at most 40 candidates, ascending, each with the reasons of all its proposals."""
    reasons: dict[int, dict[str, None]] = {}
    for proposal in proposals:
        reasons.setdefault(proposal.batch_size, {})[proposal.reason] = None
    sizes = sorted(reasons)
    chosen = set(sizes) if len(sizes) <= MOST else _cut(sizes, proposals)
    return [Candidate(size, tuple(reasons[size])) for size in sizes if size in chosen]


def _cut(sizes: Sequence[int], proposals: Sequence[Proposal]) -> set[int]:
    """
    Return the 40 batch sizes that the rule in the docstring of `candidates` selects.

    The first two steps select at most 40. Closing gaps adds at most one size between two of the 31 powers of two. The
    limits and the first sizes of each kind of reason are at most 7 more.
    """
    turns: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        turns.setdefault(proposal.kind, []).append(proposal)
    chosen = {sizes[0], sizes[-1], *(queue[0].batch_size for queue in turns.values())}
    size = sizes[0]
    while size != sizes[-1]:
        following = min(other for other in chosen if other > size)
        if following > 2 * size:
            following = max((other for other in sizes if size < other <= 2 * size), default=following)
            chosen.add(following)
        size = following
    for proposal in interleaved(list(turns.values())):
        if len(chosen) < MOST:
            chosen.add(proposal.batch_size)
    return chosen


def between(size: int, steps: Sequence[Candidate]) -> Candidate:
    """Return a candidate of a batch size between two candidates in `steps`; its reason names both."""
    sizes = [step.batch_size for step in steps]
    below, above = (max(n for n in sizes if n < size), min(n for n in sizes if n > size))
    return Candidate(size, (f"between {below} and {above}",))
