"""
The sentences beneath a forecast: why this size, what the model cannot tell, what weighs most, what it rests on.

Only wording and the arithmetic of waves: what is said was decided in `forecast`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from cubatch.estimate.blocks import (
    FUSED_PIXELS,
    Blocks,
    crest_batch_size,
    fused_winograd_blocks,
    num_blocks,
    winograd_blocks,
)
from cubatch.estimate.step import COUNTED
from cubatch.hardware import architectures
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import busiest_sm_blocks, fill
from cubatch.network.extents import MAX_EXTENT
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass
from cubatch.tuning import ladder
from cubatch.tuning.anchors import Anchor
from cubatch.tuning.forecast_record import Forecast, PassShare
from cubatch.tuning.sharpen import Sharpened
from cubatch.units import format_objective, format_percent, format_seconds

_HEAVIEST = 3
_MAX_SIZES = 6
_TILE = re.compile(r"(?:^|_| )(\d+)x(\d+)(?:x\d+)?(?:_v\d+)?$")


def sentences(found: Forecast, network: Network, sharpened: Sharpened) -> tuple[str, ...]:
    """
    Say in words why the predicted answer is the answer.

    Args:
        found: The forecast, whose reasons are still missing.
        network: What was predicted.
        sharpened: What the anchors did to it.
    """
    heaviest = _heaviest(found)
    return (
        *_why(found),
        *_ties(found),
        _limit(found),
        *_weights(found, heaviest),
        *_wave(found, network, heaviest),
        *_anchors(found, sharpened),
    )


def notes(found: Forecast, known: Sequence[Anchor]) -> tuple[str, ...]:
    """
    Say what the figures of a forecast do not hold, after what the model itself says.

    Args:
        found: The forecast, with the model's notes.
        known: Its anchors: where they are of our kernels, it is not said that none was timed.
    """
    plan = "Memory is planned as cubatch's own engine takes it; a framework takes more, so that less fits."
    timed = ", ".join(anchor.origin for anchor in known if anchor.work.library == "cubatch")
    ours = f"Times of our kernels are clocks counted in the compiled code, mended by measurements of them: {timed}."
    told = (ours if timed and note in COUNTED.values() else note for note in found.notes)
    return (*told, *_taken_for(found.device), plan)


def _taken_for(device: Device) -> Iterator[str]:
    """Say whose SMs a GPU of an architecture that is not known is taken to have."""
    asked = device.compute_capability
    if asked is not None and asked not in architectures.known():
        like = architectures.like(asked)
        name, of = ("{}.{}".format(*each) for each in (asked, like.compute_capability))
        yield f"Compute capability {name} is not known: its SMs are taken for those of {of}, {like.name}."


def _why(found: Forecast) -> Iterator[str]:
    latency = found.objective == "latency"
    values = found.seconds if latency else found.samples_per_second
    quality, best_word, end = (
        found.objective,
        "lowest" if latency else "best",
        "largest" if latency else "smallest",
    )
    tolerance, n, fastest = f"{100 * found.tolerance:g} %", found.batch_size, found.fastest_batch_size
    best = format_objective(values[fastest], found.objective)
    if len(found.seconds) == 1:
        asked = "that was asked for" if found.candidates[-1].reasons == ladder.ASKED else "that could be looked at"
        yield f"{n} is the only batch size {asked if len(found.candidates) == 1 else 'asked for that fits'}: {best}."
        return
    if n == fastest:
        beyond = "larger" if latency else "smaller"
        yield f"{n} has the {best_word} predicted {quality}, {best}, and no {beyond} size is within {tolerance} of it."
        return
    share = values[fastest] / values[n] if latency else values[n] / values[fastest]
    value = format_objective(values[n], found.objective)
    yield (
        f"{n} is the {end} batch size whose predicted {quality} is within {tolerance} of the {best_word}: {value}, "
        f"{format_percent(share)} of it."
    )
    yield f"The {best_word} is predicted at {fastest}: {best}."


def _ties(found: Forecast) -> Iterator[str]:
    if not found.tied_with:
        return
    smaller = [n for n in found.tied_with if n < found.batch_size]
    sizes, fastest = _listed(found.tied_with), found.fastest_batch_size
    text = f"The model cannot tell whether {fastest} differs from {sizes}: what it predicts lies within its error"
    yield text + (f", so that {smaller[0]} may do as well; measuring would tell." if smaller else ".")


def _limit(found: Forecast) -> str:
    top, n = max(n for n in found.seconds if not found.why_not(n)), found.batch_size
    latency, largest = found.objective == "latency", found.largest_batch_size
    if latency and n < top and set(found.tied_with).issuperset(size for size in found.seconds if n < size <= top):
        peak = plateau = f"Larger batches, predicted up to {top}, take longer by no more than the model's error."
    elif latency:
        peak = f"Larger batches are predicted to take longer than {n}."
        plateau = f"The predicted latency stays flat up to {n} and rises beyond."
    else:
        peak = f"Beyond it the predicted throughput falls again (up to {top}): the optimum lies inside."
        plateau = f"Larger batches, predicted up to {top}, gain no more than {100 * found.tolerance:g} %: a plateau."
    if found.decided_by is None:
        return f"Nothing tells what decided: of the sizes above {top} that were looked at none fits."
    might = "might take no longer" if latency else "might be better"
    listed = f"{top} is the largest in it that fits"
    listed += f"; sizes up to {largest} would fit too, which {might}" if top < largest else ""
    if (late := min((n for n in found.seconds if n > top), default=None)) is not None:
        listed = f"it holds nothing between {top} and {late}, which {might}; {late} is {found.why_not(late)}"
    return {
        "peak": peak,
        "plateau": plateau,
        "memory": f"Memory decided: nothing larger than {largest} fits; with more a larger batch {might}.",
        "latency_limit": f"The latency limit decided: the next larger size is predicted to take longer than "
        f"{format_seconds(found.limits['latency_seconds'] or 0.0)}.",
        "max_batch_size": f"max_batch_size decided: nothing larger than {top} was allowed, which {might}.",
        "batch_sizes": f"The list of batch sizes decided: {listed}.",
    }[found.decided_by]


def _weights(found: Forecast, heaviest: Sequence[Sequence[PassShare]]) -> Iterator[str]:
    """Name what takes longest, and what bounds the whole."""
    words = [
        f"{_named(group[0])}{f' and {len(group) - 1} like it' if len(group) > 1 else ''} "
        f"({format_percent(sum(share.share for share in group))}{f', {group[0].bound}' if group[0].bound else ''})"
        for group in heaviest[:_HEAVIEST]
    ]
    yield f"Longest by prediction at batch {found.batch_size}: {', '.join(words)}."
    bound = format_percent(sum(share.share for share in found.passes if share.bound == "compute"))
    if all(share.bound for share in found.passes):
        yield f"{bound} of the predicted time goes to passes bound by arithmetic, the rest to passes bound by memory."


def _heaviest(found: Forecast) -> list[list[PassShare]]:
    """Put passes together that are predicted alike, as `tables.forecast.layers` does; longest first."""
    alike: dict[tuple[object, ...], list[PassShare]] = {}
    for share in found.passes:
        kind = share.pass_, share.algorithm, share.blocks, share.bound, share.seconds
        alike.setdefault(kind, []).append(share)
    return sorted(alike.values(), key=lambda group: -sum(share.share for share in group))


def _wave(found: Forecast, network: Network, heaviest: Sequence[Sequence[PassShare]]) -> Iterator[str]:
    """Do the arithmetic of waves for the products that take longest."""
    share = next((group[0] for group in heaviest if group[0].blocks), None)
    if share is None or share.blocks is None:
        return
    num_sms, n = found.device.num_sms or 1, found.batch_size
    busiest = busiest_sm_blocks(share.blocks, num_sms)
    text = (
        f"{_named(share)} is predicted to run as {share.algorithm} in {share.blocks} blocks: {busiest} on the busiest "
        f"of {num_sms} SMs, whose time is {format_percent(fill(share.blocks, num_sms))} filled"
    )
    layer = next(node.layer for node in network.nodes if node.name == share.layer)
    grid = _grid(layer, Pass(share.pass_), share.algorithm, n, share.blocks)
    if grid is not None and grid(1) < grid(MAX_EXTENT):
        text += f"; beyond batch {crest_batch_size(busiest, blocks=grid, num_sms=num_sms)} it has more"
    yield text + "."


def _grid(layer: Layer, pass_: Pass, algorithm: str, batch_size: int, blocks: int) -> Blocks | None:
    """Find the blocks of an algorithm as a function of the batch size; None where the general rule has none."""
    tile, counts = _TILE.search(algorithm), list[Blocks]()
    if "winograd" not in algorithm:
        if tile is not None:
            counts.append(partial(num_blocks, layer, pass_, tile=(int(tile[1]), int(tile[2]))))
    elif pass_ is Pass.WGRAD:
        return None  # its products sum over the pieces of the image, of which the rule counts blocks
    elif algorithm.startswith("winograd 4x4") and tile is not None:
        counts.append(partial(winograd_blocks, layer, pass_, tile=(int(tile[1]), int(tile[2]))))
    elif algorithm == "winograd 2x2":
        counts += [partial(fused_winograd_blocks, layer, pass_, pixels=pixels) for pixels in FUSED_PIXELS]
    return next((count for count in counts if count(batch_size) == blocks), None)


def _anchors(found: Forecast, sharpened: Sharpened) -> Iterator[str]:
    if not found.anchors:
        return
    took = ", ".join(f"{ratio:.2f} ({origin})" for origin, ratio in zip(found.anchors, sharpened.ratios, strict=True))
    yield (
        f"Measurements pull at this prediction; they took this many times as long as the model had predicted: {took}. "
        f"On {found.device} arithmetic is taken to need {sharpened.compute:.2f} times as long as by its data sheet, "
        f"bytes {sharpened.memory:.2f} times."
    )


def _named(share: PassShare) -> str:
    return share.layer if share.pass_ == Pass.FPROP.value else f"{share.layer} {share.pass_}"


def _listed(sizes: Sequence[int]) -> str:
    """
    Write sizes as a person would: all of a few, the ends of many.

    Example:
        >>> _listed([8]), _listed([1, 2, 4, 8, 16, 32]), _listed(range(1, 8))
        ('8', '1, 2, 4, 8, 16 and 32', '7 sizes between 1 and 7')
    """
    if len(sizes) > _MAX_SIZES:
        return f"{len(sizes)} sizes between {sizes[0]} and {sizes[-1]}"
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last
