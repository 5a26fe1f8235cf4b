"""
The devices that batch-size finders are compared on: seeded, of stated classes, with a known truth.

The first classes are callables of which nothing is known, the others networks with a memory plan on
a GPU whose waves can be counted.  Every device takes 5 to 150 ms to prepare a size and has an
ordinary cold start.  No class was made with a strategy in mind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.search import plain, waves
from benchmarks.search.cases import Case

Make = Callable[[str, random.Random], Case]

KINDS: dict[str, Make] = dict.fromkeys(plain.CLASSES, plain.make) | dict.fromkeys(waves.CLASSES, waves.make)
"""Every class of devices, and who makes it."""


def make(seed: int, index: int) -> Case:
    """
    Make device `index` of a comparison; the classes take turns.

    Args:
        seed: Of the whole comparison.
        index: Number of the device.
    """
    kind = list(KINDS)[index % len(KINDS)]
    return KINDS[kind](kind, random.Random(f"{seed}/{index}"))


def numbers(devices: int, kinds: Sequence[str] | None = None) -> list[int]:
    """Return numbers of devices whose classes take turns; a number names the same device for any choice (None: all)."""
    places = [place for place, kind in enumerate(KINDS) if kinds is None or kind in kinds]
    if not places:
        return []
    return [turn // len(places) * len(KINDS) + places[turn % len(places)] for turn in range(devices)]
