"""Every kind of layer, one record each."""

from __future__ import annotations

from cubatch.network.layer import Layer
from cubatch.network.layers.activation_layers import (
    GELU,
    Dropout,
    HardSigmoid,
    HardSwish,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
)
from cubatch.network.layers.joining import Add, Concat, Flatten, Scale, Slice
from cubatch.network.layers.norm_layers import BatchNorm2d, LayerNorm, LayerScale
from cubatch.network.layers.opaque_layer import Opaque
from cubatch.network.layers.pooling_layers import AvgPool2d, GlobalAvgPool, MaxPool2d
from cubatch.network.layers.product_layers import Conv2d, Linear
from cubatch.network.layers.transformer import Attention, ClassToken, Tokens

__all__ = [
    "GELU", "LAYERS", "Add", "Attention", "AvgPool2d", "BatchNorm2d", "ClassToken", "Concat", "Conv2d", "Dropout",
    "Flatten", "GlobalAvgPool", "HardSigmoid", "HardSwish", "LayerNorm", "LayerScale", "Linear", "MaxPool2d", "Opaque",
    "ReLU", "ReLU6", "Scale", "SiLU", "Sigmoid", "Slice", "Softmax", "Tokens",
]  # fmt: skip

LAYERS: dict[str, type[Layer]] = {
    cls.type: cls
    for cls in (
        Conv2d, Linear, MaxPool2d, AvgPool2d, GlobalAvgPool, BatchNorm2d, LayerNorm, LayerScale, ReLU, ReLU6, HardSwish,
        HardSigmoid, Sigmoid, SiLU, GELU, Softmax, Dropout, Flatten, Add, Scale, Concat, Slice, Tokens, ClassToken,
        Attention, Opaque,
    )
}  # fmt: skip
