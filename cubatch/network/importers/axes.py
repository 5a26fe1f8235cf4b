"""
Which of our axes an axis of a foreign tensor is, through every reshape and permutation.

Our activations are (h, w, c) per sample; foreign ones are (n, c, h, w), (n, tokens, c), flattened to (n, c h w).  Each
axis of a foreign tensor is a list of atoms, outermost first: pieces of our axes n, h, w and c.  A reshape or a
permutation only moves atoms about: it costs nothing and makes no layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cubatch.network.extents import Extents


class Atom(NamedTuple):
    """A piece of one of our axes: `size` positions that lie `stride` positions of that axis apart."""

    label: str
    size: int
    stride: int = 1


Dims = tuple[tuple[Atom, ...], ...]
"""The atoms of each axis of a foreign tensor."""


def laid_out(layout: str, batch_size: int, extents: Extents) -> Dims:
    """
    Return the axes of a tensor with one of our axes on each.

    Example:
        >>> laid_out("nc", 2, (1, 1, 64))
        ((Atom(label='n', size=2, stride=1),), (Atom(label='c', size=64, stride=1),))
    """
    sizes = dict(zip("nhwc", (batch_size, *extents), strict=True))
    return tuple(joined([Atom(label, sizes[label])]) for label in layout)


def joined(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """
    Bring atoms into one form: none of one position, and neighbours that are one piece as one.

    Example:
        >>> joined([Atom("c", 3, 64), Atom("h", 1), Atom("c", 64, 1)])
        (Atom(label='c', size=192, stride=1),)
    """
    found: list[Atom] = []
    for atom in atoms:
        if atom.size == 1:
            continue
        last = found[-1] if found else None
        if last is not None and last.label == atom.label and last.stride == atom.stride * atom.size:
            found[-1] = Atom(atom.label, last.size * atom.size, atom.stride)
        else:
            found.append(atom)
    return tuple(found)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """
    Cut the same elements, in the same order, into axes of other sizes; None where an atom cannot be cut so.

    Example:
        >>> reshaped(laid_out("nchw", 2, (7, 7, 4)), (2, 196)) == (
        ...     (Atom("n", 2),), (Atom("c", 4), Atom("h", 7), Atom("w", 7)))
        True
    """
    left = list(joined(itertools.chain(*dims)))
    found = []
    for extent in shape:
        taken, wanted = [], extent
        while wanted > 1:
            if not left:
                return None
            atom = left.pop(0)
            if atom.size > wanted:
                inner, rest = divmod(atom.size, wanted)
                if rest:
                    return None
                left.insert(0, Atom(atom.label, inner, atom.stride))
                atom = Atom(atom.label, wanted, atom.stride * inner)
            if wanted % atom.size:
                return None
            wanted //= atom.size
            taken.append(atom)
        found.append(joined(taken))
    return None if left else tuple(found)


def places(atoms: Sequence[Atom], extents: Extents) -> list[int]:
    """
    Say at which of our features, with h, w and c as one axis in this order, each position of a foreign axis lies.

    Example:
        >>> places([Atom("c", 2), Atom("h", 3)], (3, 1, 2))
        [0, 2, 4, 1, 3, 5]
    """
    _, w, c = extents
    strides = {"h": w * c, "w": c, "c": 1}
    steps = [[i * atom.stride * strides[atom.label] for i in range(atom.size)] for atom in atoms]
    return [sum(parts) for parts in itertools.product(*steps)]


def is_whole(atoms: Sequence[Atom], labels: str, extents: Extents) -> bool:
    """Whether an axis is all of some of our axes, in whatever order."""
    sizes = dict(zip("hwc", extents, strict=True))
    wanted = math.prod(sizes[label] for label in labels)
    return {atom.label for atom in atoms} <= set(labels) and math.prod(atom.size for atom in atoms) == wanted
