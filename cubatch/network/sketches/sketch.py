"""
The builder of named networks.

Definitions and layer names are those of torchvision and timm, without auxiliary heads. So their published counts of
parameters and multiply-adds apply. Every network ends in its logits: training adds the loss, and inference needs no
softmax.
"""

from __future__ import annotations

from typing import Any

from cubatch.errors import InvalidSpec
from cubatch.network.extents import Extents
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.layers import AvgPool2d, BatchNorm2d, Conv2d, GlobalAvgPool, Linear, ReLU, Scale


class Sketch:
    """A network under construction; `add` and similar methods add layers and return the name of the last."""

    def __init__(self, shape: Extents, name: str, classes: int) -> None:
        self.shape, self.name, self.classes = shape, name, classes
        self.layers: list[Layer] = []

    def add(self, name: str, kind: type[Layer], *inputs: str, **values: Any) -> str:
        """
        Add a layer of class `kind`, whose fields are `values`; return its name.

        It reads the layers named in `inputs`, or without names the layer before it.
        """
        self.layers.append(kind(name=name, inputs=inputs or None, **values))
        return name

    def conv(self, name: str, k: int, size: int, *inputs: str, **values: Any) -> str:
        """Add a convolution with `k` filters of size x size, by default padded to keep the extents; return its name."""
        return self.add(name, Conv2d, *inputs, **{"k": k, "r": size, "s": size, "pad": size // 2, **values})

    def conv_norm(self, name: str, k: int, size: int, *inputs: str, norm: dict[str, float], **values: Any) -> str:
        """Add a convolution without bias, then a batch norm with the fields `norm`; return the batch norm's name."""
        self.conv(f"{name}.conv", k, size, *inputs, bias=False, **values)
        return self.add(f"{name}.bn", BatchNorm2d, **norm)

    @property
    def output_shape(self) -> Extents:
        """(h, w, c) after the layers so far."""
        return Network(input_shape=self.shape, layers=self.layers).output_shape

    def pool_to(self, extent: int) -> None:
        """Average the pixels to extent x extent; raise InvalidSpec unless they divide into equal windows."""
        h, w, _ = self.output_shape
        if h % extent or w % extent:
            raise InvalidSpec("features", (h, w), f"multiples of {extent} in front of the classifier")
        if (h, w) != (extent, extent):
            self.add("avgpool", AvgPool2d, r=h // extent, s=w // extent)

    def dense(self, *widths: int) -> None:
        """Add a linear layer and a ReLU for each width, and then a linear layer with one output per class."""
        for i, width in enumerate(widths, start=1):
            self.add(f"fc{i}", Linear, k=width)
            self.add(f"fc{i}.relu", ReLU)
        self.add(f"fc{len(widths) + 1}", Linear, k=self.classes)

    def squeeze_excite(
        self, name: str, path: str, *, width: int, squeezed: int, act: type[Layer], gate: type[Layer]
    ) -> str:
        """
        Multiply each channel of layer `path` by a gate that two small layers compute from its mean; return `name`.

        `width` is the number of channels, `squeezed` that of outputs of the first small layer. `act` and `gate` are the
        activations of the first and the second.
        """
        self.add(f"{name}.avgpool", GlobalAvgPool)
        self.conv(f"{name}.fc1", squeezed, 1)
        self.add(f"{name}.act", act)
        self.conv(f"{name}.fc2", width, 1)
        factor = self.add(f"{name}.gate", gate)
        return self.add(name, Scale, path, factor)
