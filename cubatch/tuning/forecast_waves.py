"""How the blocks of a predicted pass depend on the batch size, and which passes are predicted alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from cubatch.estimate.blocks import FUSED_PIXELS, Blocks, fused_winograd_blocks, num_blocks, winograd_blocks
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass
from cubatch.tuning.forecast_record import PassShare

_TILE = re.compile(r"(?:^|_| )(\d+)x(\d+)(?:x\d+)?(?:_v\d+)?$")


def alike(passes: Sequence[PassShare]) -> list[list[PassShare]]:
    """Return groups of passes with equal predictions, the group that takes longest first."""
    groups: dict[tuple[object, ...], list[PassShare]] = {}
    for share in passes:
        kind = share.pass_, share.algorithm, share.blocks, share.bound, share.seconds
        groups.setdefault(kind, []).append(share)
    return sorted(groups.values(), key=lambda group: -sum(share.share for share in group))


def blocks_by_batch_size(layer: Layer, pass_: Pass, algorithm: str, batch_size: int, blocks: int) -> Blocks | None:
    """Return the number of blocks of an algorithm as a function of the batch size; None without such a rule."""
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
