"""
What the analytic model gets wrong, learned: an ensemble of regression trees as plain arrays.

The trees see ratios only, never a GPU's clock, bandwidth or number of SMs by itself, from which they would draw
conclusions about GPUs that they have never seen.  Outside what was seen the correction fades to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.estimate.block_counts import FUSED_FILTERS, FUSED_PIXELS
from cubatch.estimate.vendor.algorithms import Algorithm, Array, Places, Work, image

SHOWN = (
    "128x128",
    "128x64",
    "64x128",
    "64x64",
    "128x32",
    "32x128",
    "winograd 2x2",
    "winograd 4x4 64x64",
    "winograd 4x4 32x128",
)
"""Algorithms whose grids are features, usable or not."""

_EXTENTS = ("n", "c", "k", "h", "w", "p", "q", "r", "s", "m", "columns", "depth")
_REMAINDERS = {"c": (2, 4, 8, 32), "k": (4, 8, 32, 64), "p": (2, 4, 8), "q": (2, 4, 8), "n": (2, 4, 8), "w": (4,)}
_FAR = 3.0  # an algorithm that would take e^3 times as long has no say
_MANY_WAVES = 64.0
_FADE = np.log(4.0)
_CHUNK = 128  # cases whose features, and whose places in all trees, a CPU's caches hold


@attrs.frozen(eq=False)
class Trees:
    """
    An ensemble of regression trees, the nodes of all trees level by level.

    First come the roots, the deepest tree's first; then, level by level, the two nodes that follow each question.

    Attributes:
        features: Names of the features, by number.
        depths: Questions from a root to the deepest leaf, by tree: in no tree more than in the one before.
        feature: Feature that a node asks for; -1 of a leaf.
        number: A question sends a case to the first of its two nodes if its feature is at most this; of a leaf, what
            it adds.
        low, high: Range of each feature that was seen; infinite where leaving it is harmless.
    """

    features: tuple[str, ...]
    depths: NDArray[np.int16]
    feature: NDArray[np.int16]
    number: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    def __call__(self, columns: Mapping[str, Array]) -> Array:
        """
        Return the correction of each case, to be added to the logarithm of its time.

        Args:
            columns: `features` of the cases.
        """
        table = np.stack([np.asarray(columns[name], np.float32) for name in self.features], axis=1)
        return self._sums(table) * self.trust(table)

    def trust(self, table: NDArray[np.float32]) -> Array:
        """Return 1 for cases inside what was seen, less outside, and 0 from a factor of four beyond it."""
        beyond = np.maximum(self.low - table, table - self.high).max(axis=1)
        faded: Array = np.clip(1 - beyond / _FADE, 0.0, 1.0).astype(float)
        return faded

    def _sums(self, table: NDArray[np.float32]) -> Array:
        asks = self.feature >= 0
        # A leaf follows itself, whatever the case.
        after = np.where(asks, len(self.depths) + 2 * np.cumsum(asks) - 2, np.arange(len(asks)))
        threshold = np.where(asks, self.number, np.float32(np.inf))
        asking = [int((self.depths > level).sum()) for level in range(max(self.depths, default=0))]
        out = np.zeros(len(table))
        for begun in range(0, len(table), _CHUNK):
            part = np.ascontiguousarray(table[begun : begun + _CHUNK].T)
            cases = np.arange(part.shape[1])
            first = np.where(asks, self.feature, 0).astype(np.intp) * len(cases)
            node = np.repeat(np.arange(len(self.depths))[:, None], len(cases), axis=1)
            for count in asking:
                deep = node[:count]
                second = part.take(first.take(deep) + cases) > threshold.take(deep)
                node[:count] = after.take(deep) + second
            out[begun : begun + _CHUNK] = self.number.take(node).sum(axis=0, dtype=float)
        return out


def features(work: Work, places: Places, found: Sequence[Algorithm], times: Array) -> dict[str, Array]:
    """
    Describe each case to the trees or the Gaussian process, by ratios.

    Args:
        work: The cases.
        places: Their GPUs.
        found: `algorithms` of the work.
        times: `seconds` of them.

    Returns:
        dict: Columns by name.
    """
    best = times.min(axis=0)
    groups: dict[str, Array] = {}
    for one, time in zip(found, times, strict=True):
        groups[one.group] = np.minimum(groups.get(one.group, np.inf), time)
    columns = {f"ratio {name}": np.minimum(np.log(time / best), _FAR) for name, time in groups.items()}
    columns["best"] = np.argmin(np.array(list(groups.values())), axis=0)
    ordered = np.sort(times, axis=0)
    columns["margin"] = np.minimum(np.log(ordered[1] / best), 1.0)
    for one in found:
        if one.name in SHOWN:
            share = one.blocks / places.num_sms
            columns[f"waves {one.name}"] = np.log(share)
            columns[f"rounding {one.name}"] = _rounding(share)
            columns[f"waste {one.name}"] = 2 * one.blocks * one.tile * one.depth / work.flops
        if one.family == "fused":
            columns |= {name: np.where(one.usable, column, 0.0) for name, column in _fused(work, places).items()}
    columns |= {name: np.log(getattr(work, name)) for name in _EXTENTS}
    columns |= {"stride_h": work.stride_h, "stride_w": work.stride_w, "pass": work.pass_.astype(float)}
    for name, moduli in _REMAINDERS.items():
        columns |= {f"{name} mod {modulus}": getattr(work, name) % modulus for modulus in moduli}
    sizes = {part: getattr(work, f"{part}_elements") * places.element_bytes for part in ("input", "output", "filter")}
    columns["intensity"] = np.log(work.flops / sum(sizes.values()) / (places.peak / places.bandwidth))
    columns |= {f"{part} in L2": np.log(size / places.l2_bytes) for part, size in sizes.items()}
    return columns | {"launches": np.log(best / 1e-5), "lanes": places.lanes}


def _rounding(share: Array) -> Array:
    """Return the blocks of the busiest SM over its fair share."""
    return np.where(share < _MANY_WAVES, np.ceil(share) / share, 1.0)


def _fused(work: Work, places: Places) -> dict[str, Array]:
    """Describe each block of the vendor's fused F(2x2, 3x3); no GPU's library has all blocks."""
    high, wide, _, outputs, _ = image(work)
    filters, columns = np.ceil(outputs / FUSED_FILTERS), {}
    for block in FUSED_PIXELS:
        images, r, s = block
        pieces, name = np.ceil(work.n / images) * np.ceil(high / r) * np.ceil(wide / s), "{}x{}x{}".format(*block)
        columns[f"waste {name}"] = pieces * np.prod(block) / (work.n * high * wide)
        columns[f"rounding {name}"] = _rounding(pieces * filters / places.num_sms)
    return columns


def logarithmic(names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which features are logarithms of sizes, outside whose range nothing was learned."""
    kept = {*_EXTENTS, "intensity"} - {"n"}
    return np.array([name in kept for name in names])
