"""
Launches of kernels/winograd: filter and source transformed, products next to each other, results transformed back.

`product` chooses the variant and calls `launch`. `kernels.winograd.cut` decides whether it takes a problem, and cuts a
batch into parts whose tiles fit the scratch memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.native.arrays import floats, take_workspace
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant, winograd_plan
from cubatch.kernels.cost_model import tiles
from cubatch.kernels.problem import Problem
from cubatch.kernels.structs import CONV, OUTPUT, PRODUCT, TILES
from cubatch.kernels.variant import Kernel

_THREADS = 256  # of kernels/winograd/transforms.cu, one for a tile and channel
_NO_CONV = np.zeros((), dtype=CONV)[()]
_NOTHING = (None,) * 7  # bias, scale, shift, residual, mask, statistics, partials


def launch(
    context: Context, chosen: Kernel, problem: Problem, a: Any, b: Any, *, ends: tuple[Any, ...], output: Any,
    conv: Any, workspace: Any,
) -> None:  # fmt: skip
    """
    Launch a variant of kernels/winograd.

    Args:
        context: Where it runs.
        chosen: The variant.
        problem: Extents.
        a: The convolved array: x, or the output's gradient.
        b: The filter.
        ends: out, bias, scale, shift, residual, mask.
        output: A record `structs.OUTPUT`.
        conv: The convolution's `product.geometry`.
        workspace: 1-D uint8 array; None allocates one.
    """
    how = winograd_plan.cut(problem, chosen)
    if how is None:
        raise InvalidArgument(
            "kernel", chosen.name, "one for a 3x3 convolution of stride 1, whose filter is not too large"
        )
    held = min(how.most, how.tiles) * how.points
    workspace = take_workspace(workspace, ends[0], how.workspace_bytes)
    u = floats(workspace, how.filter_floats)
    v = floats(workspace, held * how.channels, start=how.filter_floats)
    m = floats(workspace, held * how.filters, start=how.filter_floats + held * how.channels)
    turned = problem.operation == "conv2d_dgrad"
    source, result = ("pqk", "hwc") if turned else ("hwc", "pqk")
    # A gradient's windows begin as far before a pixel as the filter reaches beyond the padding.
    before = [np.int32(winograd_plan.TAPS - 1 - conv[side] if turned else conv[side]) for side in ("top", "left")]
    transforms = {
        name: variant.find(f"winograd_{name}", problem.dtype, OUTPUTS=how.outputs)
        for name in ("filter", "source", "result")
    }

    grid = _grid(how.filters * how.channels)
    context.launch(transforms["filter"], grid, (b, u, conv["k"], conv["c"], np.int32(turned)))
    for first, count in how.parts():
        image, number = divmod(first, how.rows * how.columns)
        part = np.array((image, number, count, how.rows, how.columns), dtype=TILES)[()]
        context.launch(
            transforms["source"], _grid(count * how.channels), (a, v, part, *(conv[axis] for axis in source), *before)
        )
        side_by_side = winograd_plan.product(problem, chosen, count)
        tiles_m, tiles_n = tiles(side_by_side, chosen)
        extents = (count, how.channels, how.filters, how.points, tiles_m, tiles_n, 1, 0)
        plain = (how.points * count * how.filters, how.filters, 0, 1, 1)
        product, products = np.array(extents, dtype=PRODUCT)[()], np.array(plain, dtype=OUTPUT)[()]
        context.launch(
            chosen, (tiles_m * tiles_n, 1, how.points), (v, u, m, *_NOTHING, product, products, _NO_CONV)
        )  # fmt: skip
        rows, columns = (conv[axis] for axis in result[:2])
        context.launch(transforms["result"], _grid(count * how.filters), (m, *ends, part, rows, columns, output))


def _grid(items: int) -> tuple[int, int, int]:
    return -(-items // _THREADS), 1, 1
