"""Probes of what Hopper alone has: tensor copies (TMA) plain and as im2col, wgmma, mbarriers, stmatrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.conformance import WHOLE, Array, Probe, blank, elements, hard_floats, random_for, twin_kernel
from cubatch.kernels.tensor_map import TensorMap, Window

_SHARED = 65536 + 64
_CORNER = np.dtype([(name, np.int32) for name in ("c", "w", "h", "n", "offset_w", "offset_h")])


def probes() -> Iterator[Probe]:
    """List the probes of tensor copies, wgmma and barriers."""
    yield from _tiles()
    yield from _gathered()
    yield from _overlapping()
    yield from _stores()
    yield from _products()
    for suffix in ("", "_transposed"):
        yield Probe(
            name=f"stmatrix{suffix.replace('_', ', ')}, rows in a drawn order",
            kernel=twin_kernel("hopper_twins.cu", f"store_matrices{suffix}", 128, _SHARED),
            arguments=lambda put: [
                put(np.arange(1, 513, dtype=np.uint32)),
                put(random_for("stmatrix").permutation(64)[:32].astype(np.uint32)),
                put(np.zeros(4096, np.uint8)),
            ],
            outputs={2: WHOLE},
        )
    yield Probe(
        name="mbarrier: 50 phases between two warps",
        kernel=twin_kernel("hopper_twins.cu", "hand_over", 64, 64),
        arguments=lambda put: [put(np.zeros((50, 32), np.int32)), np.int32(50)],
        outputs={0: WHOLE},
    )


def _loaded(
    name: str, entry: str, rows: int, described: Callable[[Any], TensorMap], *, x: Array, last: list[Any]
) -> Probe:
    return Probe(
        name=name,
        kernel=twin_kernel("hopper_twins.cu", entry, 128, _SHARED),
        arguments=lambda put: [described(put(x)), put(blank((rows * 128,), np.uint8)), np.int32(rows), *last],
        outputs={1: WHOLE},
    )


def _tiles() -> Iterator[Probe]:
    """Boxes inside of a matrix and over each of its edges, of all types; floats are rounded to tf32 on their way."""
    for dtype, (c0, c1) in itertools.product(("float16", "bfloat16", "tf32"), ((0, 0), (8, 3), (-8, -5), (72, 20))):
        each = 32 if dtype == "tf32" else 64
        x, rows = elements(random_for(dtype), (30, 80), dtype, whole=False), 24
        yield _loaded(
            f"TMA, {dtype} at {c0}, {c1}", "load_2d", rows,
            lambda x, dtype=dtype, each=each: TensorMap(x, dtype, (80, 30), (each, 24)), x=x,
            last=[np.int32(c0), np.int32(c1)],
        )  # fmt: skip
    ties = hard_floats()[: 8 * 32].reshape(8, 32)
    yield _loaded(
        "TMA, ties of tf32", "load_2d", 8, lambda x: TensorMap(x, "tf32", (32, 8), (32, 8)), x=ties,
        last=[np.int32(0)] * 2,
    )  # fmt: skip
    x = np.arange(1, 1 + 7 * 3 * 72, dtype=np.uint16).reshape(7, 3, 72)
    yield _loaded(
        "TMA, three axes", "load_3d", 10, lambda x: TensorMap(x, "float16", (72, 3, 7), (64, 2, 5)), x=x,
        last=[np.int32(number) for number in (16, 1, 4)],
    )  # fmt: skip


def _gathered() -> Iterator[Probe]:
    """Im2col of images higher than wide or wider than high, with strides, dilation and pads that differ by axis."""
    x = np.arange(1, 1 + 2 * 5 * 7 * 72, dtype=np.uint16).reshape(2, 5, 7, 72)
    for strides, dilations, lows, taps, (h, w) in (
        ((1, 1), (1, 1), (1, 1), (3, 3), (5, 7)),
        ((2, 1), (1, 1), (1, 0), (3, 2), (5, 7)),
        ((1, 2), (1, 2), (0, 1), (2, 3), (7, 5)),
        ((2, 3), (2, 1), (2, 1), (2, 2), (7, 5)),
        ((2, 2), (1, 1), (-1, -1), (1, 1), (5, 7)),  # a phase of a strided gradient: from the second row and column on
    ):
        images = x.reshape(2, h, w, 72)
        p, q = (
            (size + 2 * low - (tap - 1) * dilation - 1) // stride + 1
            for size, low, tap, dilation, stride in zip((h, w), lows, taps, dilations, strides, strict=True)
        )
        window = Window.along((w, h), (q, p), strides[::-1], (-lows[1], -lows[0]))
        for first, tap in (
            (0, (0, 0)),
            (q + 1, (taps[0] - 1, 0)),
            (p * q - 3, (0, taps[1] - 1)),
            (2 * p * q - 2, (1, 1)),
        ):
            image, row, column = first // (p * q), first // q % p, first % q
            place = (column * strides[1] - lows[1], row * strides[0] - lows[0], image)
            corner = np.array((8, *place, tap[1] * dilations[1], tap[0] * dilations[0]), _CORNER)[()]
            yield _loaded(
                f"im2col, {h}x{w}, filter {taps}, stride {strides}, dilation {dilations}, pad {lows}, tap {tap}, "
                f"pixel {first}", "load_im2col", 16,
                lambda x, size=(72, w, h, 2), window=window: TensorMap(x, "float16", size, (64, 16), window),
                x=images, last=[corner],
            )  # fmt: skip


def _overlapping() -> Iterator[Probe]:
    """Im2col of pixels that overlap: 64 elements each, 16 apart, of 2 images of 5 rows of 9 x 16 elements."""
    x = np.arange(1, 1 + 2 * 5 * 9 * 16, dtype=np.uint16).reshape(2, 5, 9 * 16)
    window = Window.along((6, 5), (6, 4), (1, 1), (0, 0))
    for first, tap in ((0, 0), (17, 1), (45, 1)):
        image, row, column = first // 24, first // 6 % 4, first % 6
        yield _loaded(
            f"im2col, overlapping pixels, tap {tap}, pixel {first}", "load_im2col", 16,
            lambda x: TensorMap(x, "float16", (64, 6, 5, 2), (64, 16), window, (32, 288, 1440)), x=x,
            last=[np.array((0, column, row, image, 0, tap), _CORNER)[()]],
        )  # fmt: skip


def _stores() -> Iterator[Probe]:
    tile = np.arange(1, 1 + 16 * 64, dtype=np.uint16).view(np.uint8)
    for c0, c1 in ((0, 0), (32, 5), (72, 12), (200, 0), (0, 30)):  # over each edge or beyond it; none starts before 0

        def arguments(put: Callable[[Any], Any], c0: int = c0, c1: int = c1) -> list[Any]:
            described = TensorMap(put(np.zeros((20, 88), np.uint16)), "float16", (88, 20), (64, 16))
            return [described, put(tile), np.int32(16), np.int32(c0), np.int32(c1)]

        yield Probe(
            name=f"TMA store at {c0}, {c1}",
            kernel=twin_kernel("hopper_twins.cu", "store_2d", 128, _SHARED),
            arguments=arguments,
            outputs={0: WHOLE},
        )


def _products() -> Iterator[Probe]:
    """Wgmma on swizzled tiles along k and along m and n, at two places of a tile."""
    for (entry, dtype, n, turned), step, whole in itertools.product(
        (
            ("multiply_f16_nt", "float16", 128, (False, False)),
            ("multiply_f16_nn", "float16", 128, (False, True)),
            ("multiply_f16_tn", "float16", 256, (True, True)),
            ("multiply_f16_tt", "float16", 256, (True, False)),
            ("multiply_bf16_nt", "bfloat16", 256, (False, False)),
            ("multiply_bf16_nn", "bfloat16", 192, (False, True)),
            ("multiply_tf32_nt", "tf32", 128, (False, False)),
        ),
        (0, 3),
        (True, False),
    ):
        k = 8 if dtype == "tf32" else 16
        random = random_for((entry, step))
        a, b = (elements(random, (32768 // (32 // k),), dtype, whole=whole).view(np.uint8) for _ in range(2))
        offsets = np.array(
            [number for turn in turned for number in (step * (2048 if turn else 32), 8192, 1024)], np.uint32
        )
        yield Probe(
            name=f"wgmma, {entry.removeprefix('multiply_')}, step {step}, {'whole' if whole else 'real'} numbers",
            kernel=twin_kernel("hopper_twins.cu", entry, 128, _SHARED),
            arguments=lambda put, given=(a, b, offsets), n=n: [
                put(given[0]), put(given[1]), put(blank((128, n // 2), np.float32)), put(given[2])
            ],
            outputs={2: WHOLE if whole else slice(8)},  # small enough to be kept
            slack=0.0 if whole else (k + 2) * (k + 1) * 2.0**-23,
        )  # fmt: skip
