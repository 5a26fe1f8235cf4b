"""Extents and parameters of layers against PyTorch's own, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from cubatch.network.layer import Layer
from cubatch.network.layers import AvgPool2d, BatchNorm2d, Conv2d, LayerNorm, Linear, MaxPool2d

torch = pytest.importorskip("torch")

SMALL = st.integers(1, 5)
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def run(module: Any, layer: Layer) -> tuple[int, int, int]:
    """Give PyTorch's output of one sample of the layer's input as (h, w, c)."""
    h, w, c = layer.input_shape
    with torch.no_grad():
        _, k, p, q = module(torch.zeros(1, c, h, w)).shape
    return p, q, k


def parameters(module: Any) -> int:
    """Count a module's trainable parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@settings(deadline=None)
@given(
    h=st.integers(1, 14), w=st.integers(1, 14), r=SMALL, s=SMALL, stride=PAIRS, dilation=PAIRS,
    pad=st.tuples(st.integers(0, 3), st.integers(0, 3)), groups=st.integers(1, 3), bias=st.booleans(),
)  # fmt: skip
def test_convolutions_have_pytorchs_extents_and_parameters(groups: int, bias: bool, **values: Any) -> None:
    """Every drawn convolution gives the shape and the number of parameters of torch.nn.Conv2d."""
    for extent, taps, i in ((values["h"], values["r"], 0), (values["w"], values["s"], 1)):
        assume(extent + 2 * values["pad"][i] >= (taps - 1) * values["dilation"][i] + 1)
    layer = Conv2d(c=2 * groups, k=3 * groups, groups=groups, bias=bias, **values)
    module = torch.nn.Conv2d(
        2 * groups, 3 * groups, (values["r"], values["s"]), stride=values["stride"], padding=values["pad"],
        dilation=values["dilation"], groups=groups, bias=bias,
    )  # fmt: skip
    assert run(module, layer) == layer.output_shape
    assert parameters(module) == layer.parameters


@settings(deadline=None)
@given(
    h=st.integers(1, 14), w=st.integers(1, 14), r=SMALL, s=SMALL, stride=PAIRS,
    pad=st.tuples(st.integers(0, 2), st.integers(0, 2)), ceil=st.booleans(), largest=st.booleans(),
)  # fmt: skip
def test_pools_have_pytorchs_extents(ceil: bool, largest: bool, **values: Any) -> None:
    """Every drawn pool, rounded down or up, gives the shape of PyTorch's (which takes pads to half a window)."""
    assume(values["pad"][0] <= values["r"] // 2 and values["pad"][1] <= values["s"] // 2)
    assume(values["h"] + 2 * values["pad"][0] >= values["r"] and values["w"] + 2 * values["pad"][1] >= values["s"])
    layer = (MaxPool2d if largest else AvgPool2d)(c=2, ceil=ceil, **values)
    kind = torch.nn.MaxPool2d if largest else torch.nn.AvgPool2d
    module = kind((values["r"], values["s"]), stride=values["stride"], padding=values["pad"], ceil_mode=ceil)
    assert run(module, layer) == layer.output_shape


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        (Linear(c=10, k=3), torch.nn.Linear(10, 3)),
        (Linear(c=10, k=3, bias=False), torch.nn.Linear(10, 3, bias=False)),
        (BatchNorm2d(h=2, w=2, c=7), torch.nn.BatchNorm2d(7)),
        (LayerNorm(h=2, w=1, c=7), torch.nn.LayerNorm(7)),
    ],
    ids=lambda value: value.type if isinstance(value, Layer) else "",
)
def test_parameters_and_state_are_pytorchs(layer: Layer, module: Any) -> None:
    """Trained parameters and running statistics are as many as PyTorch's."""
    assert parameters(module) == layer.parameters
    running = sum(buffer.numel() for name, buffer in module.named_buffers() if name.startswith("running"))
    assert running == sum(math.prod(shape) for shape in layer.state_shapes.values())
