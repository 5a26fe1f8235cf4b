"""Probes of the instructions that all architectures have, and of mma.sync: launches whose answers are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import probes_hopper
from benchmarks.gpu.conformance import WHOLE, Probe, blank, elements, hard_floats, random_for, twin_kernel


def probes(arch: int) -> list[Probe]:
    """
    List the probes of an architecture, Hopper's and the tensor cores' first.

    Args:
        arch: Compute capability times ten.
    """
    probes = [*(probes_hopper.probes() if arch == 90 else ()), *_mma(arch)]
    if arch >= 80:
        probes += _copies()
    return [*probes, *_plain()]


# --- mma -----------------------------------------------------------------------------------------------------------


def _mma(arch: int) -> Iterator[Probe]:
    entries = [("m16n8k8_f16", "float16", 8)] if arch >= 75 else []
    if arch >= 80:
        entries += [("m16n8k16_f16", "float16", 16), ("m16n8k16_bf16", "bfloat16", 16), ("m16n8k8_tf32", "tf32", 8)]
    if arch == 70:
        entries += [(f"m8n8k4_{a}_{b}", "float16", 4) for a in ("row", "col") for b in ("row", "col")]
    for (entry, dtype, k), whole in itertools.product(entries, (True, False)):
        random = random_for(entry)
        size = 4 if dtype == "tf32" else 8
        # Real numbers have bits below those of tf32, which shows how they are rounded.
        a, b = (elements(random, (32, size), dtype, whole=whole).view(np.uint32) for _ in range(2))
        c = elements(random, (32, 8), "float32", whole=whole)
        yield Probe(
            name=f"{entry}, {'whole' if whole else 'real'} numbers",
            kernel=twin_kernel("mma_twins.cu", entry, 32),
            arguments=lambda put, arrays=(a, b, c): [put(array) for array in arrays],
            outputs={2: WHOLE},
            # Each of k products and the sum may be cut off at 2^-23 of a largest one of at most 1 + k.
            slack=0.0 if whole else (k + 2) * (k + 1) * 2.0**-23,
        )
    if arch >= 75:
        rows, order = np.arange(64 * 8, dtype=np.uint16).view(np.uint32), random_for(5).permutation(64)[:32]
        yield Probe(
            name="ldmatrix, plain and transposed",
            kernel=twin_kernel("mma_twins.cu", "load_matrices", 32),
            arguments=lambda put: [put(rows), put(order.astype(np.int32)), *(put(blank((32, 4))) for _ in range(2))],
            outputs={2: WHOLE, 3: WHOLE},
        )
    if arch >= 80:
        x = hard_floats()
        yield Probe(
            name="rounding to tf32",
            kernel=twin_kernel("mma_twins.cu", "round_to_tf32", 128),
            grid=(-(-x.size // 128), 1, 1),
            arguments=lambda put: [put(x), put(np.zeros_like(x)), np.int32(x.size)],
            outputs={1: WHOLE},
        )


# --- all others ----------------------------------------------------------------------------------------------------


def _copies() -> Iterator[Probe]:
    x = np.arange(1, 897).astype(np.uint8) | 1
    for valid in (0, 1, 4, 7, 16):
        yield Probe(
            name=f"cp.async of 16, 8 and 4 bytes, {valid} of them valid",
            kernel=twin_kernel("twins.cu", "copies", 32),
            arguments=lambda put, valid=valid: [put(x), put(np.zeros(928, np.uint8)), np.int32(valid)],
            outputs={1: slice(896)},  # behind it is what was read before it was waited for
        )


def _plain() -> Iterator[Probe]:
    x, bits = hard_floats(), np.arange(0, 2**16, 13, dtype=np.uint16)
    yield Probe(
        name="rounding to 16 bits",
        kernel=twin_kernel("twins.cu", "round_trip", 128),
        grid=(-(-x.size // 128), 1, 1),
        arguments=lambda put: [
            put(x), *(put(blank(x.shape, kind)) for kind in (np.uint16, np.uint16, np.float32)), np.int32(x.size)
        ],
        outputs={1: WHOLE, 2: WHOLE, 3: WHOLE},
    )  # fmt: skip
    yield Probe(
        name="widening of 16 bits",
        kernel=twin_kernel("twins.cu", "widen", 128),
        grid=(-(-bits.size // 128), 1, 1),
        arguments=lambda put: [put(bits), put(bits), *(put(blank(bits.shape, np.float32)) for _ in range(2)),
                               np.int32(bits.size)],
        outputs={2: WHOLE, 3: WHOLE},
    )  # fmt: skip
    a, b = random_for("products").integers(0, 2**32, (2, 128), dtype=np.uint32)
    yield Probe(
        name="upper half of a product",
        kernel=twin_kernel("twins.cu", "products", 128),
        arguments=lambda put: [put(a), put(b), put(np.zeros_like(a))],
        outputs={2: WHOLE},
    )
    numbers = random_for("shuffles").integers(-99, 99, 64)
    types = (np.float32, np.float64, np.int32)
    for by in (0, 1, 5, 16, 31):
        yield Probe(
            name=f"shuffles by {by}",
            kernel=twin_kernel("twins.cu", "shuffles", 64),
            arguments=lambda put, by=by: [
                *(put(numbers.astype(kind)) for kind in types),
                *(put(np.zeros(64, kind)) for kind in types),
                np.int32(by),
            ],
            outputs={3: WHOLE, 4: WHOLE, 5: WHOLE},
        )  # fmt: skip
    narrow, wide = np.arange(1000, dtype=np.uint16), np.arange(448, dtype=np.float32)
    yield Probe(
        name="vectors of 2 to 16 bytes",
        kernel=twin_kernel("twins.cu", "vectors", 64),
        arguments=lambda put: [put(narrow), put(np.zeros(832, np.uint16)), put(wide), put(np.zeros_like(wide))],
        outputs={1: WHOLE, 3: WHOLE},
    )
