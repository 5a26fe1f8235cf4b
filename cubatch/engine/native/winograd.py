"""
Launches of kernels/winograd: filter and source transformed, products next to each other, results transformed back.

`product` chooses the variant and calls `launch`. `kernels.winograd_plan.cut` decides whether it takes a problem, and
cuts a batch into parts whose tiles fit the scratch memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.native.arrays import floats, take_workspace
from cubatch.engine.native.context import Context
from cubatch.engine.native.operands import NO_CONV, Operands
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant, winograd_plan
from cubatch.kernels.cost_model import tiles
from cubatch.kernels.structs import OUTPUT, PRODUCT, TILES
from cubatch.kernels.variant import Kernel

_THREADS = 256  # of kernels/winograd/transforms.cu, one for a tile and channel
_NOTHING = (None,) * 7  # bias, scale, shift, residual, mask, statistics, partials


def launch(context: Context, chosen: Kernel, operands: Operands, output: Any) -> None:
    """
    Launch the kernels of a variant of Winograd's algorithm.

    `output` is a record `structs.OUTPUT`.

    Raises:
        InvalidArgument: If the algorithm cannot run the problem, or the workspace is too small.
    """
    problem, conv = operands.problem, operands.conv
    how = winograd_plan.cut(problem, chosen)
    if how is None:
        raise InvalidArgument(
            "kernel", chosen.name, "one for a 3x3 convolution of stride 1, whose filter is not too large"
        )
    held = min(how.most, how.tiles) * how.points
    workspace = take_workspace(operands.workspace, operands.out, how.workspace_bytes)
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
    context.launch(transforms["filter"], grid, (operands.b, u, conv["k"], conv["c"], turned))
    for first, count in how.parts():
        image, number = divmod(first, how.rows * how.columns)
        part = np.array((image, number, count, how.rows, how.columns), dtype=TILES)[()]
        extents = (*(conv[axis] for axis in source), *before)
        context.launch(transforms["source"], _grid(count * how.channels), (operands.a, v, part, *extents))
        tiles_m, tiles_n = tiles(winograd_plan.product(problem, chosen, count), chosen)
        product = (count, how.channels, how.filters, how.points, tiles_m, tiles_n, 1, 0)
        plain = (how.points * count * how.filters, how.filters, 0, 1, 1)
        structs = np.array(product, dtype=PRODUCT)[()], np.array(plain, dtype=OUTPUT)[()], NO_CONV
        context.launch(chosen, (tiles_m * tiles_n, 1, how.points), (v, u, m, *_NOTHING, *structs))
        rows, columns = (conv[axis] for axis in result[:2])
        grid = _grid(count * how.filters)
        context.launch(transforms["result"], grid, (m, *operands.ends, part, rows, columns, output))


def _grid(items: int) -> tuple[int, int, int]:
    return -(-items // _THREADS), 1, 1
