"""Passes, measured places and constants that tests of the vendor's times are made of."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cubatch.estimate.vendor.algorithms import (
    FAMILIES,
    PASSES,
    SLICED,
    Places,
    Work,
)
from cubatch.estimate.vendor.trees import Trees
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass

COSTS = ("128x128", "128x64", "128x32", "64x64", "32x32", "direct", "fused", "winograd 64x64", "winograd 32x128", "fft")


def work_of(*cases):
    """A table with a row for each (convolution or linear layer, pass, batch size)."""
    rows = []
    for layer, _, n in cases:
        (h, w, c), (p, q, k) = layer.input_shape, layer.output_shape
        conv = isinstance(layer, Conv2d)
        window = (layer.r, layer.s, *layer.stride, max(layer.dilation), layer.groups) if conv else (1,) * 6
        rows.append((n, h, w, c, k, p, q, *window))
    names = ("n", "h", "w", "c", "k", "p", "q", "r", "s", "stride_h", "stride_w", "dilation", "groups")
    columns = dict(zip(names, np.array(rows, float).T, strict=True))
    return Work.of(np.array([PASSES.index(pass_) for _, pass_, _ in cases]), **columns)


def places_of(size, **changes):
    """Every case on a GPU of 48 SMs with 64 lanes at 1.8 GHz, 500 GB/s and 4 MiB of L2."""
    facts = {
        "peak": 48 * 64 * 2 * 1.8e9, "bandwidth": 500e9, "num_sms": 48, "l2_bytes": 2**22, "lanes": 64,
        "element_bytes": 4, "compute": 1, "memory": 1,
    }  # fmt: skip
    names = {name: np.full(size, changes.pop(name, "")) for name in ("gpu", "kin")}
    return Places(**names, **{name: np.full(size, float(value)) for name, value in (facts | changes).items()})


def constants_of(**changes):
    """Constants of a model without launches, bytes and waiting: all time is whole waves of arithmetic."""
    found = {"dgrad": 1.0, "wgrad": 1.0, "wgrad winograd": 1.0, "scattered": 0.0, "partial": 0.0, "alone": 0.0}
    found |= {f"cost {name}": 1.0 for name in COSTS}
    for family in (*FAMILIES, *SLICED.values()):
        found |= {f"{name} {family}": 0.0 for name in ("launch", "extra", "x", "y", "w")} | {f"tail {family}": 1.0}
    return found | {name.replace("_", " "): float(value) for name, value in changes.items()}


@st.composite
def convolutions(draw, *, filters=(1, 2, 3, 5, 7), strides=(1, 2, 3), groups=(1, 1, 2, 4)):
    """Convolutions of every kind that a library is asked for."""
    parts, r = draw(st.sampled_from(groups)), draw(st.sampled_from(filters))
    spread = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3), (2, 1)]))
    reach = [(r - 1) * distance + 1 for distance in spread]
    return Conv2d(
        h=draw(st.integers(reach[0], 40)), w=draw(st.integers(reach[1], 40)), c=parts * draw(st.integers(1, 60)),
        k=parts * draw(st.integers(1, 80)), r=r, s=r, pad=draw(st.integers(0, r // 2)),
        stride=(draw(st.sampled_from(strides)), draw(st.sampled_from(strides))), dilation=spread, groups=parts,
        bias=False,
    )  # fmt: skip


# Every other one has what Winograd's algorithms ask for, but for its dilation.
LAYERS = convolutions() | convolutions(filters=(3, 5), strides=(1,), groups=(1,))


CASES = st.lists(st.tuples(LAYERS, st.sampled_from(list(Pass)), st.integers(1, 300)), min_size=1, max_size=8)


def stump(feature, threshold, below, above):
    """A tree of one question, trusted everywhere."""
    return Trees(
        features=(feature,),
        depths=np.array([1], np.int16),
        feature=np.array([0, -1, -1], np.int16),
        number=np.array([threshold, below, above], np.float32),
        low=np.array([-np.inf], np.float32),
        high=np.array([np.inf], np.float32),
    )
