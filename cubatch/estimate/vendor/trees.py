"""
Learned correction of the analytic model: an ensemble of regression trees as plain arrays.

The trees see only ratios, never a GPU's clock, bandwidth or number of SMs, from which they could not generalize to
other GPUs.  Outside the range of the training data the correction fades to zero.
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
_FAR = 3.0  # an algorithm that takes e^3 times as long does not matter
_MANY_WAVES = 64.0
_FADE = np.log(4.0)
_CHUNK = 128  # cases whose features and nodes fit a CPU's caches


@attrs.frozen(eq=False)
class Trees:
    """
    An ensemble of regression trees; the arrays list the nodes of all trees, level by level.

    The roots come first, that of the deepest tree first.  Each level then has the two successors of each split.
    """

    features: tuple[str, ...]  # names of the features, by number
    depths: NDArray[np.int16]  # splits from a root to the deepest leaf, by tree, in descending order
    feature: NDArray[np.int16]  # feature of a node's split; -1 for a leaf
    # threshold of a split: a case goes to its first successor if the feature is at most this. Of a leaf, the value that
    # it adds to the correction
    number: NDArray[np.float32]
    # low, high: range of each feature in the training data; infinite if leaving it is harmless
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    def __call__(self, columns: Mapping[str, Array]) -> Array:
        """Return the correction of each case, which is added to the logarithm of its time."""
        table = np.stack([np.asarray(columns[name], np.float32) for name in self.features], axis=1)
        return self._sums(table) * self.trust(table)

    def trust(self, table: NDArray[np.float32]) -> Array:
        """Return the weight of each row's correction: 1 in the training range, 0 if a feature is 4 times beyond it."""
        beyond = np.maximum(self.low - table, table - self.high).max(axis=1)
        faded: Array = np.clip(1 - beyond / _FADE, 0.0, 1.0).astype(float)
        return faded

    def _sums(self, table: NDArray[np.float32]) -> Array:
        asks = self.feature >= 0
        # A leaf is its own successor.
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


def features(work: Work, places: Places, candidates: Sequence[Algorithm], times: Array) -> dict[str, Array]:
    """
    Return the features of each case for the trees and the Gaussian process.

    Most are logarithms: of extents, of ratios of predicted seconds, of blocks per SM, and of arrays' bytes relative to
    the L2. Others are remainders of extents, or the index of the fastest group of algorithms.

    Args:
        work: The cases.
        places: The GPU of each case.
        candidates: The result of `algorithms` for the cases.
        times: Seconds as an array (algorithms, cases).

    Returns:
        dict: By each feature's name, an array with one entry per case.
    """
    best = times.min(axis=0)
    groups: dict[str, Array] = {}
    for algorithm, time in zip(candidates, times, strict=True):
        groups[algorithm.group] = np.minimum(groups.get(algorithm.group, np.inf), time)
    columns = {f"ratio {name}": np.minimum(np.log(time / best), _FAR) for name, time in groups.items()}
    columns["best"] = np.argmin(np.array(list(groups.values())), axis=0)
    ordered = np.sort(times, axis=0)
    columns["margin"] = np.minimum(np.log(ordered[1] / best), 1.0)
    for algorithm in candidates:
        if algorithm.name in SHOWN:
            share = algorithm.blocks / places.num_sms
            columns[f"waves {algorithm.name}"] = np.log(share)
            columns[f"rounding {algorithm.name}"] = _rounding(share)
            columns[f"waste {algorithm.name}"] = 2 * algorithm.blocks * algorithm.tile * algorithm.depth / work.flops
        if algorithm.family == "fused":
            columns |= {name: np.where(algorithm.usable, column, 0.0) for name, column in _fused(work, places).items()}
    columns |= {name: np.log(getattr(work, name)) for name in _EXTENTS}
    columns |= {"stride_h": work.stride_h, "stride_w": work.stride_w, "pass": work.pass_.astype(float)}
    for name, moduli in _REMAINDERS.items():
        columns |= {f"{name} mod {modulus}": getattr(work, name) % modulus for modulus in moduli}
    sizes = {part: getattr(work, f"{part}_elements") * places.element_bytes for part in ("input", "output", "filter")}
    columns["intensity"] = np.log(work.flops / sum(sizes.values()) / (places.peak / places.bandwidth))
    columns |= {f"{part} in L2": np.log(size / places.l2_bytes) for part, size in sizes.items()}
    return columns | {"launches": np.log(best / 1e-5), "lanes": places.lanes}


def _rounding(share: Array) -> Array:
    """Return the blocks of the busiest SM divided by the mean number per SM, `share`; 1 from 64 blocks per SM on."""
    return np.where(share < _MANY_WAVES, np.ceil(share) / share, 1.0)


def _fused(work: Work, places: Places) -> dict[str, Array]:
    """Return features of each block shape of the vendor's fused F(2x2, 3x3), by name; no library has them all."""
    high, wide, _, outputs, _ = image(work)
    filters, columns = np.ceil(outputs / FUSED_FILTERS), {}
    for block in FUSED_PIXELS:
        images, r, s = block
        pieces, name = np.ceil(work.n / images) * np.ceil(high / r) * np.ceil(wide / s), "{}x{}x{}".format(*block)
        columns[f"waste {name}"] = pieces * np.prod(block) / (work.n * high * wide)
        columns[f"rounding {name}"] = _rounding(pieces * filters / places.num_sms)
    return columns


def logarithmic(names: Sequence[str]) -> NDArray[np.bool_]:
    """Return for each feature's name whether it is the logarithm of a size; these are not extrapolated."""
    sizes = {*_EXTENTS, "intensity"} - {"n"}
    return np.array([name in sizes for name in names])
