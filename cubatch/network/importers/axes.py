"""
The axes of foreign tensors in terms of cubatch's axes, through every reshape and permutation.

Activations of cubatch are (h, w, c) per sample. Foreign ones are (n, c, h, w), (n, tokens, c) or (n, c h w). Each axis
of a foreign tensor is a list of atoms, outermost first: pieces of the axes n, h, w and c. A reshape or a permutation
only moves atoms: it costs nothing and makes no layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cubatch.network.extents import Extents


class Atom(NamedTuple):
    """A piece of the axis n, h, w or c: `size` positions, each `stride` positions after the one before."""

    label: str
    size: int
    stride: int = 1


Dims = tuple[tuple[Atom, ...], ...]
"""The atoms of each axis of a foreign tensor."""


def laid_out(layout: str, batch_size: int, extents: Extents) -> Dims:
    """
    Return the pieces (atoms) of each axis of a tensor whose axes are the letters of `layout`, such as "nc" or "nhwc".

    Example:
        >>> laid_out("nc", 2, (1, 1, 64))
        ((Atom(label='n', size=2, stride=1),), (Atom(label='c', size=64, stride=1),))
    """
    sizes = dict(zip("nhwc", (batch_size, *extents), strict=True))
    return tuple(joined([Atom(label, sizes[label])]) for label in layout)


def joined(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """
    Return the pieces of an axis in normal form: without those of one position, and with adjoining ones joined.

    Example:
        >>> joined([Atom("c", 3, 64), Atom("h", 1), Atom("c", 64, 1)])
        (Atom(label='c', size=192, stride=1),)
    """
    normal: list[Atom] = []
    for atom in atoms:
        if atom.size == 1:
            continue
        last = normal[-1] if normal else None
        if last is not None and last.label == atom.label and last.stride == atom.stride * atom.size:
            normal[-1] = Atom(atom.label, last.size * atom.size, atom.stride)
        else:
            normal.append(atom)
    return tuple(normal)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Return the axes after a reshape; None where the shape does not fit or would cut a piece of an axis unevenly."""
    left = list(joined(itertools.chain(*dims)))
    axes = []
    for extent in shape:
        taken, missing = [], extent
        while missing > 1:
            if not left:
                return None
            atom = left.pop(0)
            if atom.size > missing:
                inner, rest = divmod(atom.size, missing)
                if rest:
                    return None
                left.insert(0, Atom(atom.label, inner, atom.stride))
                atom = Atom(atom.label, missing, atom.stride * inner)
            if missing % atom.size:
                return None
            missing //= atom.size
            taken.append(atom)
        axes.append(joined(taken))
    return None if left else tuple(axes)


def places(atoms: Sequence[Atom], extents: Extents) -> list[int]:
    """
    Return for each position of an axis of an imported tensor its index in a flattened (h, w, c) sample.

    Example:
        >>> places([Atom("c", 2), Atom("h", 3)], (3, 1, 2))
        [0, 2, 4, 1, 3, 5]
    """
    _, w, c = extents
    strides = {"h": w * c, "w": c, "c": 1}
    steps = [[i * atom.stride * strides[atom.label] for i in range(atom.size)] for atom in atoms]
    return [sum(parts) for parts in itertools.product(*steps)]


def is_whole(atoms: Sequence[Atom], labels: str, extents: Extents) -> bool:
    """Return whether an axis holds all positions of the axes in `labels` and nothing else, in any order."""
    sizes = dict(zip("hwc", extents, strict=True))
    positions = math.prod(sizes[label] for label in labels)
    return {atom.label for atom in atoms} <= set(labels) and math.prod(atom.size for atom in atoms) == positions
