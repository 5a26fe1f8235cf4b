"""An operator that has no layer, kept as one of known extents, bytes and FLOP."""

from __future__ import annotations

from cubatch.network.importers.building import Builder, Value
from cubatch.network.importers.source import Step


def keep(build: Builder, step: Step) -> Value:
    """Make an opaque layer of a step."""
    raise build.refusal(step, "not written yet")
