"""A network with a layer of every kind that the engine runs, small."""

from __future__ import annotations

from cubatch.network import layers
from cubatch.network.graph import Network

EVERY_KIND = Network(
    input_shape=(19, 18, 3),
    layers=[
        layers.Conv2d(k=16, r=3, s=3, stride=2, pad=1, bias=False),
        layers.BatchNorm2d(),
        layers.ReLU(name="stem"),
        layers.Conv2d(k=16, r=3, s=3, pad=1),
        layers.BatchNorm2d(name="branch"),
        layers.Add(inputs=["stem", "branch"]),
        layers.ReLU(name="sum"),
        layers.Conv2d(k=16, r=3, s=3, pad=1, groups=16),
        layers.BatchNorm2d(),
        layers.HardSwish(name="wide"),
        layers.GlobalAvgPool(),
        layers.Conv2d(k=8, r=1, s=1),
        layers.SiLU(),
        layers.Conv2d(k=12, r=1, s=1),
        layers.GELU(),
        layers.Conv2d(k=16, r=1, s=1),
        layers.HardSigmoid(name="gate"),
        layers.Scale(name="excited", inputs=["wide", "gate"]),
        layers.Concat(name="both", inputs=["sum", "excited"]),
        layers.Slice(name="first", inputs=["both"], end=12),
        layers.Slice(name="others", inputs=["both"], start=12, end=28),
        layers.Concat(inputs=["others", "first"]),
        layers.MaxPool2d(r=3, s=3, stride=2, pad=1),
        layers.Conv2d(k=12, r=3, s=3, groups=2),
        layers.Sigmoid(),
        layers.AvgPool2d(r=2, s=2),
        layers.LayerNorm(),
        layers.LayerScale(),
        layers.Tokens(),
        layers.Attention(heads=3),
        layers.ClassToken(),
        layers.Dropout(p=0.3),
        layers.Flatten(),
        layers.Linear(k=20),
        layers.ReLU6(),
        layers.Linear(k=10),
        layers.Softmax(),
        layers.Linear(k=7),
    ],
)
