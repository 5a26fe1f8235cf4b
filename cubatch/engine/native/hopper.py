"""
Launches of kernels/hopper: tensor maps of the operands, and the order of a persistent grid over tiles and gemm_k.

`product` chooses the variant and calls `launch`; `tensor_map.can_gather` decides whether the maps exist. In tf32,
`product` first transposes operands that are not contiguous along gemm_k.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cubatch.engine.native.activation_functions import activation_code
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.operands import Operands
from cubatch.kernels import variant
from cubatch.kernels.cost_model import BOX_CHANNELS, tile_of, tiles
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import can_finish
from cubatch.kernels.tensor_map import ALIGNMENT, ROW_BYTES, TensorMap, Window, gathered, window_of
from cubatch.kernels.variant import Kernel, Tile
from cubatch.network.windows import ConvShape, Phase, phases, working_phases

_FEW_COLUMNS, _BAND = 4, 16
_STORED_ROWS = (16, 64)  # plain and swapped: WARP_ROWS of kernels/hopper/walk.cuh
_RELU = activation_code("relu")  # before it is no activation at all

# Walk of kernels/hopper/walk.cuh.
_FIELDS = (
    "m", "n", "tiles_m", "tiles_n", "band", "steps", "depth", "taps", "taps_w", "first_tap", "tap_step_h",
    "tap_step_w", "rows", "columns", "stride_h", "stride_w", "origin_h", "origin_w", "step_h", "step_w", "out_h",
    "out_w", "out_stride_h", "out_stride_w", "out_top", "out_left", "stores_tiles", "adds_tiles", "masks_tiles",
)  # fmt: skip
_WALK = np.dtype([(name, np.int32) for name in _FIELDS])
_PHASES = 4  # of a strided gradient, in a launch; PHASES there
_CONSUMERS = 2  # each has half of a tile's rows, or whole tiles in turn if they are swapped
_SUMMING_DTYPES = ("float16", "bfloat16")


Launch = tuple[TensorMap, TensorMap, dict[str, int]]
"""Tensor maps of A and B, and the fields of the kernel's structure Walk that are not zero, by name."""


def launch(context: Context, chosen: Kernel, operands: Operands, *, partials: Any, output: Any) -> int:
    """
    Launch a variant of kernels/hopper: once, or for the gradient of an input once for every four phases of the stride.

    Phases that no filter tap reads are left out if the gradient is only added to the values that its output holds.
    `partials` receives the sums of each slice of gemm_k; None if it is not split. `output` is a record
    `structs.OUTPUT`. In tf32, B is contiguous along gemm_k.

    Returns:
        Number of row tiles for which the launch computes `Fused.sums`; 0 without sums, if no variant computes them, or
        if the copy engine does not store the output.
    """
    problem, shape, ends, a, b = operands.problem, operands.shape, operands.ends, operands.a, operands.b
    needed: tuple[Phase, ...] = ()
    if shape is None or problem.operation.startswith("gemm"):
        launches = [_gemm(chosen, problem, a, b)]
    elif problem.operation == "conv2d_fprop":
        launches = [_fprop(chosen, problem, a, b, shape)]
    elif problem.operation == "conv2d_wgrad":
        launches = [_wgrad(chosen, problem, a, b, shape)]
    else:
        # Where no tap reads, zeros would be added to what is there.
        needed = working_phases(shape) if _adds_to_itself(context, ends, output) else phases(shape)
        launches = [_dgrad(chosen, a, b, shape, phase) for phase in needed]
    tile, cluster, _ = _tile(chosen)
    tiles_n = tiles(problem, chosen)[1]
    windows: list[Window | None] = [None] * len(launches)
    if apart := shape is not None and chosen.finishes_phases:
        windows = [_pixels_of(shape, phase) for phase in needed]
    is_encodable = all(window is None or window.is_encodable for window in windows)
    finishes = is_encodable and _finishes(context, problem, ends, output, chosen)
    (added, mask), sums = ends[-2:] if finishes else (None, None), operands.fused.sums
    summing = summing_variant(chosen, sums.curve or "sums") if finishes and not apart and sums is not None else None
    more: tuple[Any, ...] = ()
    if summing is not None and sums is not None:
        chosen, mask = summing, None if sums.gamma is not None else mask
        more = (_rows(sums.x, output, tile.m), sums.partials, sums.mean, sums.inv_std, sums.gamma, sums.beta)
    stored = _rows(ends[0] if finishes and not apart else None, output, _STORED_ROWS[bool(tile.swapped)])
    terms = [[_rows(array, output, tile.m, window) for window in windows] for array in (added, mask)]
    together = _PHASES if problem.operation == "conv2d_dgrad" else 1
    for first in range(0, len(launches), together):
        part = launches[first : first + together]
        walks, clusters = np.zeros((), dtype=[("of", _WALK, (together,))]), 0
        for record, (_, _, walk) in zip(walks["of"], part, strict=False):
            tiles_m = -(-walk["m"] // tile.m)
            laid_out = {
                "tiles_m": tiles_m, "tiles_n": tiles_n, "band": 1 if tiles_n <= _FEW_COLUMNS else _BAND // cluster,
                "stores_tiles": finishes, "adds_tiles": added is not None, "masks_tiles": mask is not None, **walk,
            }  # fmt: skip
            for name, value in laid_out.items():
                record[name] = value
            clusters += -(-tiles_m // cluster) * tiles_n * int(output["slices"])
        blocks = min(clusters, max(1, (context.device.num_sms or 1) // cluster)) * cluster
        a_map, b_map, _ = part[0]  # a map that is not looked at has to be one all the same
        a_maps = [map_ for map_, _, _ in part] + [a_map] * (together - len(part))
        each = [[map_ or a_map for map_ in maps[first : first + together]] for maps in terms]
        others = [map_ for maps in each for map_ in [*maps[1:], *[a_map] * (together - len(maps))]] if apart else []
        more = (more[0] or a_map, *more[1:]) if more else ()
        maps = (*a_maps, b_map, stored or a_map, each[0][0], each[1][0])
        context.launch(chosen, (blocks, 1, 1), (*maps, *ends, partials, *others, *more, walks[()], output))
    return -(-problem.m // (tile.m if tile.swapped else tile.m // _CONSUMERS)) if more else 0


def summing_variant(kernel: Kernel, kind: str = "sums") -> Kernel | None:
    """
    Return the variant with the same tile that also computes sums for a batch norm; None if there is none.

    `kind` may also be the type of an activation: then the variant, of a "gemm_nn", applies its slope instead.
    """
    if kernel.dtype not in _SUMMING_DTYPES or (kind != "sums" and kernel.operation != "gemm_nn"):
        return None
    return variant.find(f"{kernel.operation}_{kind}", kernel.dtype, family=kernel.family, tile=kernel.tile_name)


def _adds_to_itself(context: Context, ends: tuple[Any, ...], output: Any) -> bool:
    """
    Return whether a gradient is only added to the values that its output holds: no mask, and gemm_k is not split.

    `ends` are the output and its terms, of which the last two are residual and mask.
    """
    out, *_, residual, mask = ends
    is_whole = residual is not None and mask is None and output["slices"] == 1
    return is_whole and context.address(residual) == context.address(out)


def _finishes(context: Context, problem: Problem, ends: tuple[Any, ...], output: Any, chosen: Kernel) -> bool:
    """
    Return whether sums are finished in registers, after the copy engine has loaded a residual and a mask.

    The output must have rows of 16 bytes and no activation but a ReLU, the residual and the mask elements of 16 bits.
    """
    out, *_, residual, mask = ends
    terms = [array for array in (residual, mask) if array is not None]
    is_aligned = all(context.aligned(array, ALIGNMENT) for array in (out, *terms))
    is_plain = output["activation"] <= _RELU and output["wide"]
    return is_aligned and is_plain and can_finish(problem, chosen, int(output["slices"]), has_terms=bool(terms))


def _rows(array: Any, output: Any, count: int, window: Window | None = None) -> TensorMap | None:
    """
    Return the tensor map of an array with the rows and columns of a product's output; None if the array is None.

    A box of the map has `count` rows. With a window, the array is images, whose rows are the pixels in it; None: a
    matrix.
    """
    if array is None:
        return None
    columns, box = int(output["columns"]), (ROW_BYTES // array.itemsize, count)
    extents = (columns, int(output["elements"]) // columns) if window is None else array.shape[::-1]
    return TensorMap(array, dtype_of(array), extents, box, window)


def _pixels_of(shape: ConvShape, phase: Phase) -> Window:
    """Return the window of the pixels of dx, the input's gradient, that a phase of the stride computes."""
    v, h = shape.vertical, shape.horizontal
    out = phase.horizontal.out, phase.vertical.out
    return Window.along((h.size, v.size), out, (h.stride, v.stride), (phase.left, phase.top))


def _tile(chosen: Kernel) -> tuple[Tile, int, int]:
    """Return a variant's tile, the number of blocks of a cluster, and the columns of B that each block loads."""
    tile = tile_of(chosen)
    cluster = tile.cluster or 1
    return tile, cluster, tile.n // cluster


def _gemm(chosen: Kernel, problem: Problem, a: Any, b: Any) -> Launch:
    tile, _, share = _tile(chosen)

    def matrix(array: Any, outer: int, rows: int, *, turned: bool) -> TensorMap:
        """Return a tensor map of a matrix (outer, k), or (k, outer) where it is turned, in tiles of a step along k."""
        if turned:
            return TensorMap(array, chosen.dtype, (outer, problem.k), (BOX_CHANNELS, tile.k))
        return TensorMap(array, chosen.dtype, (problem.k, outer), (tile.k, rows))

    a_map = matrix(a, problem.m, tile.m, turned=problem.operation[-2] == "t")
    b_map = matrix(b, problem.n, share, turned=problem.operation[-1] == "n" and chosen.dtype != "tf32")
    return a_map, b_map, {"m": problem.m, "n": problem.n, "steps": -(-problem.k // tile.k)}


def _fprop(chosen: Kernel, problem: Problem, x: Any, w: Any, shape: ConvShape) -> Launch:
    tile, _, share = _tile(chosen)
    wide, pitch = gathered(shape)
    depth = -(-wide.c // tile.k)
    walk = {"m": problem.m, "n": shape.k, "steps": wide.taps * depth, "depth": depth}
    filters = TensorMap(w, chosen.dtype, (wide.c, wide.taps, shape.k), (tile.k, 1, share))
    image, window = _image(chosen, x, wide.c, wide, (tile.k, tile.m), pitch=pitch)
    return image, filters, walk | window


def _wgrad(chosen: Kernel, problem: Problem, dy: Any, x: Any, shape: ConvShape) -> Launch:
    box = (BOX_CHANNELS, tile_of(chosen).k)
    wide, pitch = gathered(shape)
    walk = {"m": shape.k, "n": wide.c, "steps": -(-problem.k // box[1]), "depth": -(-wide.c // BOX_CHANNELS)}
    image, window = _image(chosen, x, wide.c, wide, box, pitch=pitch)
    return TensorMap(dy, chosen.dtype, (shape.k, problem.k), box), image, walk | window


def _dgrad(chosen: Kernel, dy: Any, w: Any, shape: ConvShape, phase: Phase) -> Launch:
    """Return maps and loop extents of one phase: a convolution of dy at stride 1 with the taps that the phase reads."""
    tile, _, share = _tile(chosen)
    depth = -(-shape.k // tile.k)
    taps_w = shape.horizontal.taps
    walk = {
        "m": len(dy) * phase.vertical.out * phase.horizontal.out, "n": shape.c, "steps": phase.taps * depth,
        "depth": depth, "first_tap": phase.rows.start * taps_w + phase.columns.start,
        "tap_step_h": (phase.rows.step or 0) * taps_w, "tap_step_w": phase.columns.step or 0,
        "out_h": shape.vertical.size, "out_w": shape.horizontal.size, "out_stride_h": shape.vertical.stride,
        "out_stride_w": shape.horizontal.stride, "out_top": phase.top, "out_left": phase.left,
    }  # fmt: skip
    gradient, window = _image(chosen, dy, shape.k, phase, (tile.k, tile.m), pitch=shape.k)
    if chosen.dtype == "tf32":
        filters = TensorMap(w, chosen.dtype, (shape.k, shape.c, shape.taps), (tile.k, share, 1))
    else:
        filters = TensorMap(w, chosen.dtype, (shape.c, shape.taps, shape.k), (BOX_CHANNELS, 1, tile.k))
    return gradient, filters, walk | window


def _image(
    chosen: Kernel, array: Any, channels: int, window: ConvShape | Phase, box: tuple[int, int], *, pitch: int
) -> tuple[TensorMap, dict[str, int]]:
    """
    Return the tensor map that gathers an image's pixels under the taps of a window, and the extents of that loop.

    `pitch` is the number of elements from one pixel to the next of a row.
    """
    v, h = window.vertical, window.horizontal
    pixels = window_of(v, h) if window.taps else Window((1, 1), (0, 0), (0, 0))  # without taps nothing is copied
    walk = {
        "taps": window.taps, "taps_w": h.taps or 1, "rows": v.out, "columns": h.out, "stride_h": v.stride,
        "stride_w": h.stride, "origin_h": v.offset, "origin_w": h.offset, "step_h": v.step, "step_w": h.step,
    }  # fmt: skip
    strides = tuple(array.itemsize * each for each in (pitch, math.prod(array.shape[2:]), math.prod(array.shape[1:])))
    return TensorMap(array, chosen.dtype, (channels, h.size, v.size, len(array)), box, pixels, strides), walk
