"""Which workers of a cluster count as having the same device, and what each kind of device is called."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from cubatch.units import format_bytes


@attrs.frozen
class Kind:
    """What is alike in all workers that count as having the same device."""

    name: str
    is_cpu: bool
    memory_bytes: int | None
    threads: int | None
    mig: str | None
    power_limit_watts: float | None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Kind:
        """Read it from what a worker says of itself."""
        device = facts["device"]
        is_cpu = device["kind"] == "cpu"
        return cls(
            name=device["name"],
            is_cpu=is_cpu,
            memory_bytes=_rounded(facts["memory_bytes"] or 0) or None if is_cpu else device["memory_bytes"],
            threads=facts["blas_threads"] if is_cpu else None,
            mig=device["mig"],
            power_limit_watts=device["power_limit_watts"],
        )

    def described(self) -> str:
        """Tell it from others of its name."""
        watts = None if self.power_limit_watts is None else f"{self.power_limit_watts:g} W"
        threads = None if self.threads is None else f"{self.threads} thread{'s' * (self.threads != 1)}"
        memory = None if self.memory_bytes is None else format_bytes(self.memory_bytes)
        return ", ".join(filter(None, (self.name, self.mig, threads, memory, watts)))


def grouped(workers: Mapping[str, Mapping[str, Any]]) -> dict[Kind, dict[str, Mapping[str, Any]]]:
    """Group workers by what they have."""
    kinds: dict[Kind, dict[str, Mapping[str, Any]]] = {}
    for address, facts in workers.items():
        kinds.setdefault(Kind.of(facts), {})[address] = facts
    return kinds


def names(kinds: Iterable[Kind], before: Mapping[Kind, str]) -> dict[Kind, str]:
    """Name each kind that has no name yet, by more than its device's name where others have the same, or a number."""
    taken = Counter(kind.name for kind in {*kinds, *before})
    found: dict[Kind, str] = {}
    for kind in kinds:
        if kind not in before:
            name = kind.name if taken[kind.name] == 1 else kind.described()
            numbered = itertools.chain([name], (f"{name}, {number}" for number in itertools.count(2)))
            found[kind] = next(one for one in numbered if one not in {*before.values(), *found.values()})
    return found


def _rounded(memory_bytes: int) -> int:
    """Round to seven binary digits, about 1 %: limits of equal hosts differ by pages."""
    step = 1 << max(0, memory_bytes.bit_length() - 7)
    return round(memory_bytes / step) * step
