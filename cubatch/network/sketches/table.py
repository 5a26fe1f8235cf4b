"""The named networks."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cubatch.network.extents import Extents
from cubatch.network.sketches import chains, mobile, residual, transformers
from cubatch.network.sketches.sketch import Sketch

_IMAGENET = (224, 224, 3)
_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_RESNET = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_FIRST_BOTTLENECK = 50


def _imagenet(make: Callable[[Sketch], None]) -> tuple[Callable[[Sketch], None], Extents, int]:
    return make, _IMAGENET, 1000


SKETCHES: dict[str, tuple[Callable[[Sketch], None], Extents, int | None]] = {
    "mlp": (chains.mlp, (1, 1, 1000), 10),
    "mnist-cnn": (chains.mnist_cnn, (28, 28, 1), 10),
    "lenet5": (chains.lenet5, (28, 28, 1), 10),
    "alexnet": _imagenet(chains.alexnet),
    **{f"vgg{depth}": _imagenet(functools.partial(chains.vgg, repeats=counts)) for depth, counts in _VGG.items()},
    "googlenet": _imagenet(chains.googlenet),
    **{
        f"resnet{depth}": _imagenet(
            functools.partial(residual.resnet, repeats=counts, bottleneck=depth >= _FIRST_BOTTLENECK)
        )
        for depth, counts in _RESNET.items()
    },
    "densenet121": _imagenet(functools.partial(residual.densenet, repeats=(6, 12, 24, 16))),
    "mobilenet-v3-large": _imagenet(mobile.mobilenet_v3_large),
    "efficientnet-b0": _imagenet(mobile.efficientnet_b0),
    "convnext-tiny": _imagenet(functools.partial(residual.convnext, repeats=(3, 3, 9, 3), widths=(96, 192, 384, 768))),
    "deit-tiny": _imagenet(functools.partial(transformers.vision_transformer, width=192, heads=3)),
    "vit-small": _imagenet(functools.partial(transformers.vision_transformer, width=384, heads=6)),
    "vit-base": _imagenet(functools.partial(transformers.vision_transformer, width=768, heads=12)),
    "go-net": (chains.go_net, (19, 19, 128), None),
}
"""Function that builds each network, its usual input shape, and its usual number of classes."""
