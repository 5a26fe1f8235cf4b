"""Small networks with a branch and with depthwise layers, data for them, and a few steps of training."""

from __future__ import annotations

import attrs
import numpy as np

from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network.graph import Network
from cubatch.network.layers import (
    GELU,
    Add,
    Attention,
    AvgPool2d,
    BatchNorm2d,
    ClassToken,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    LayerNorm,
    LayerScale,
    Linear,
    MaxPool2d,
    ReLU,
    ReLU6,
    Scale,
    Sigmoid,
    SiLU,
    Tokens,
)

HERE = probe.device("cpu")


def cpu(threads):
    """This machine's CPU with so many threads."""
    return attrs.evolve(HERE, threads=threads)


def branched(p=0.0):
    """Branches of every kind: in place, shared, concatenated, pooled in all three ways."""
    return Network(
        input_shape=(6, 7, 3),
        layers=[
            Conv2d(name="stem", k=4, r=3, s=3, pad=1),
            BatchNorm2d(name="norm"),
            ReLU(name="a"),
            Conv2d(name="left", k=4, r=3, s=2, pad=[1, 1, 0, 1], groups=2, bias=False),
            ReLU(name="left2"),
            Add(name="sum", inputs=["left2", "a"]),
            Conv2d(name="thin", k=4, r=3, s=3, pad=1, groups=4),
            Add(name="sum2", inputs=["a", "sum", "thin"]),
            Concat(name="both", inputs=["sum2", "sum"]),
            Dropout(p=p),
            MaxPool2d(name="max", r=3, s=3, stride=2, pad=1),
            AvgPool2d(name="mean", inputs=["both"], r=2, s=3, stride=2, pad=[1, 0, 1, 1], ceil=True),
            Conv2d(name="down", inputs=["both"], k=8, r=3, s=3, stride=2, pad=1),
            BatchNorm2d(name="norm2"),
            Add(name="sum3", inputs=["norm2", "max"]),
            ReLU(),
            GlobalAvgPool(name="pooled"),
            Flatten(name="flat", inputs=["mean"]),
            Linear(name="wide", k=8),
            ReLU(name="wide2"),
            Add(name="sum4", inputs=["wide2", "pooled"]),
            Linear(k=5),
        ],
        name="branched",
    )


def mobile(p=0.0):
    """Squeeze-and-excite twice, by either gate, and every activation function: in place, beside its input, in a row."""
    return Network(
        input_shape=(7, 6, 3),
        layers=[
            Conv2d(k=4, r=3, s=3, stride=2, pad=1, bias=False),
            BatchNorm2d(),
            HardSwish(name="stem"),
            Conv2d(k=8, r=1, s=1, bias=False),
            BatchNorm2d(),
            ReLU6(),
            Conv2d(k=8, r=3, s=3, pad=1, groups=8, bias=False),
            BatchNorm2d(),
            SiLU(name="wide"),
            GlobalAvgPool(),
            Conv2d(k=4, r=1, s=1),
            ReLU(),
            Conv2d(k=8, r=1, s=1),
            HardSigmoid(name="gate"),
            Scale(name="excited", inputs=["wide", "gate"]),
            Conv2d(k=4, r=1, s=1),
            Add(name="sum", inputs=["stem", "layer16"]),
            GlobalAvgPool(),
            Linear(k=4),
            Sigmoid(name="gate2"),
            Scale(inputs=["sum", "gate2"]),
            Flatten(),
            Linear(k=9),
            Sigmoid(),
            ReLU6(),
            HardSwish(),
            HardSigmoid(),
            Dropout(p=p),
            Linear(k=5),
        ],
        name="mobile",
    )


def transformer(p=0.0):
    """A block of ConvNeXt, then one of a vision transformer, each layer norm and branch where those have them."""
    return Network(
        input_shape=(9, 6, 3),
        layers=[
            Conv2d(k=8, r=3, s=3, stride=3),
            LayerNorm(name="stem"),
            Conv2d(k=8, r=3, s=3, pad=1, groups=8),
            LayerNorm(eps=1e-3),
            Linear(k=12),
            GELU(),
            Linear(k=8),
            LayerScale(name="scaled"),
            Add(name="image", inputs=["stem", "scaled"]),
            Tokens(name="tokens"),
            LayerNorm(),
            Attention(name="attention", heads=2),
            Dropout(p=p, name="dropped"),
            Add(name="attended", inputs=["tokens", "dropped"]),
            LayerNorm(),
            Linear(k=10),
            GELU(),
            Linear(k=8, name="mlp"),
            Add(name="block", inputs=["attended", "mlp"]),
            LayerNorm(),
            Attention(heads=4, bias=False),
            ClassToken(),
            GELU(),
            Linear(k=5),
        ],
        name="transformer",
    )


def narrow(network, factor):
    """The network's graph with a `factor` th of every width, the classes too."""
    mapping = network.to_mapping()
    for layer in mapping["layers"]:
        if "k" in layer:
            layer["k"] //= factor
        if layer.get("groups", 1) > 1:
            layer["groups"] //= factor
    return Network(**mapping)


def deal(network, n, seed=0):
    """Random images and labels."""
    random = np.random.default_rng(seed)
    images = random.standard_normal((n, *network.input_shape))
    return images, random.integers(0, network.output_shape[2], n)


def flat(parameters):
    """All parameters, gradients or statistics as one array, copied."""
    return np.concatenate([array.ravel() for layer in parameters.values() for array in layer.values()])


def trained(network, n, *, steps=1, device=HERE, **options):
    """Losses, last gradients and parameters of a few steps in float64, each on data of its own."""
    losses = []
    options = {"dtype": "float64", "learning_rate": 0.1} | options
    with Model(network, device=device, mode="training", **options) as model:
        model.prepare(n)
        for step in range(steps):
            model.load(*deal(network, n, step))
            model.step()
            losses.append(model.loss())
        return np.array(losses), flat(model.gradients), flat(model.parameters), {**model.states}
