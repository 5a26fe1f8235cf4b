"""An operator that has no layer, kept as one of known extents, bytes and FLOP."""

from __future__ import annotations

import math

from cubatch.network.extents import Extents, printable
from cubatch.network.importers.axes import Atom, Dims, joined
from cubatch.network.importers.building import Builder, Value
from cubatch.network.importers.source import Step
from cubatch.network.layers import Opaque

_LAYOUTS = {1: "n", 2: "nc", 3: "nhc", 4: "nchw"}


def keep(build: Builder, step: Step) -> Value:
    """
    Make an opaque layer of a step; the extents of its output are what its shape most probably means.

    Axes are those of an input of as many axes, else as images, tokens or features usually lie.  Where there are more
    than four, or the batch is elsewhere than on the first alone, the last axis is channels and all others are rows.
    """
    if not step.reads:
        raise build.refusal(step, step.options.get("reason", "it reads nothing that depends on the network's input"))
    values = [build.values[name] for name in step.reads]
    samples = next((axis for axis, extent in enumerate(step.shape[:-1]) if extent % build.batch_size == 0), None)
    if step.shape[:1] == (build.batch_size,) and len(step.shape) in _LAYOUTS:
        layouts = [_layout(value.dims, len(step.shape)) for value in values]
        layout = next(filter(None, layouts), _LAYOUTS[len(step.shape)])
        sizes = dict(zip(layout, step.shape, strict=True))
        output: Extents = (sizes.get("h", 1), sizes.get("w", 1), sizes.get("c", 1))
        dims = build.axes(layout, output)
    elif samples is not None:
        output, dims = _rows(step.shape, build.batch_size, samples)
    else:
        raise build.refusal(step, f"its result of shape {step.shape} is of no batch of samples")
    layer = Opaque(
        operator=printable(step.operator), output=output, flop=step.flop // build.batch_size, weights=step.weights
    )
    value = build.add(step, layer, *values, dims=dims)
    build.kept.add(value.layer)
    return value


def _layout(dims: Dims, rank: int) -> str:
    """Return one of our axes for each axis of an input; nothing where that is not so."""
    labels = ["".join(dict.fromkeys(atom.label for atom in dim)) for dim in dims]
    is_plain = len(labels) == rank and set(map(len, labels)) == {1} and len(set(labels)) == rank and labels[0] == "n"
    return "".join(labels) if is_plain else ""


def _rows(shape: tuple[int, ...], batch_size: int, samples: int) -> tuple[Extents, Dims]:
    """Take the last axis as channels, all others as rows, and the batch as the outer part of one of them."""
    rows = math.prod(shape[:-1]) // batch_size
    found, stride = [], rows
    for axis, extent in enumerate(shape[:-1]):
        is_batch = axis == samples
        extent_of_rows = extent // batch_size if is_batch else extent
        stride //= extent_of_rows
        batch = [Atom("n", batch_size)] if is_batch else []
        found.append(joined([*batch, Atom("h", extent_of_rows, stride)]))
    return (rows, 1, shape[-1]), (*found, joined([Atom("c", shape[-1])]))
