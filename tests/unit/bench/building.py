"""Cases that tests of the bench share."""

from __future__ import annotations

import numpy as np

from cubatch.bench import cases, check, target
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.unit import bench_fakes

LAYERS = [
    layers.Conv2d(h=9, w=7, c=6, k=10, r=3, s=2, stride=2, pad=[1, 0, 1, 1]),
    layers.Conv2d(h=9, w=7, c=6, k=12, r=3, s=3, groups=3, pad=1),
    layers.Conv2d(h=9, w=7, c=6, k=6, r=3, s=3, groups=6, pad=1, stride=2),
    layers.Linear(c=13, k=7),
    layers.MaxPool2d(h=7, w=6, c=5, r=3, s=3, stride=2, pad=1),
    layers.Concat(h=4, w=5, c=7, channels=[3, 4]),
    layers.Slice(h=4, w=5, c=7, start=2, end=5),
    layers.Dropout(h=7, w=6, c=5, p=0.3),
    layers.Softmax(h=2, w=3, c=11),
    layers.AvgPool2d(h=7, w=6, c=5, r=3, s=3, stride=2, pad=1),
    *(
        kind(h=7, w=6, c=5)
        for kind in (
            layers.GlobalAvgPool, layers.BatchNorm2d, layers.LayerNorm, layers.LayerScale, layers.Add,
            layers.Scale, layers.ReLU, layers.ReLU6,
            layers.Sigmoid, layers.SiLU, layers.HardSigmoid, layers.HardSwish, layers.GELU,
        )
    ),
    layers.Tokens(h=4, w=3, c=5),
    layers.ClassToken(h=13, w=1, c=5),
    layers.Attention(h=5, w=3, c=12, heads=2),
]  # fmt: skip


EVERY = [
    *(
        cases.of_layer(layer, pass_, 4, mode=mode)
        for layer in LAYERS for pass_ in Pass if cases.has_case(layer, pass_) for mode in cases.modes_of(layer, pass_)
    ),
    *(cases.of_layer(layer, pass_, 4, with_bias=True) for layer in LAYERS[:4] for pass_ in (Pass.FPROP, Pass.WGRAD)),
    *(cases.of_layer(LAYERS[-1], pass_, 4, with_bias=True) for pass_ in (Pass.FPROP, Pass.DGRAD)),
    cases.of_layer(LAYERS[-1], Pass.FPROP, 4, with_bias=True, mode="training"),
    *(cases.optimizer_step(name, 1000) for name in ("sgd", "momentum", "adam")),
    cases.cross_entropy(137, 11),
    cases.fold([5, 33], [True, False]),
    # Epilogues: all terms that a pass takes at once, and some of them.
    *(
        cases.of_layer(layer, pass_, 4, ending=ending, relu="residual" in ending and pass_ is Pass.FPROP)
        for layer in (*LAYERS[:2], LAYERS[3])
        for pass_, ending in (
            (Pass.FPROP, ["folded", "residual"]), (Pass.FPROP, ["folded"]),
            (Pass.DGRAD, ["residual", "positive"]), (Pass.DGRAD, ["positive"]),
        )
    ),
    *(
        cases.of_layer(layer, Pass.FPROP, 4, mode=mode, ending=["residual"], relu=True)
        for layer in LAYERS if isinstance(layer, layers.BatchNorm2d) for mode in ("training", "inference")
    ),
    *(
        cases.of_layer(layer, pass_, 4, activation=activation)
        for layer in LAYERS if isinstance(layer, layers.BatchNorm2d)
        for pass_, activation in ((Pass.FPROP, "silu"), (Pass.DGRAD, "silu"), (Pass.DGRAD, "relu"))
    ),
]  # fmt: skip


GEMM = cases.gemm(70, 50, 30)


def filled(case, seed=1):
    """The arrays of a case, and an Expected of all its results."""
    arrays = target.fill(np, case, seed)
    return arrays, check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)


class Paced:
    """A clock for steps that return their own seconds through a list."""

    def __init__(self):
        self.clock, self.order, self.mhz = 0.0, [], None

    def now(self):
        return self.clock

    def sleep(self, seconds):
        self.clock += seconds

    def time(self, step, repeats):
        seconds = step()
        self.clock += seconds * repeats
        self.order.append((step.name, repeats))
        return bench_fakes.Reading(seconds=seconds, sm_clock_mhz=self.mhz and self.mhz(len(self.order)))
