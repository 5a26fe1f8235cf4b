"""Published rows and the models fitted to them, in the small."""

from __future__ import annotations

import csv
import itertools

import attrs
import numpy as np

from benchmarks.predictor.fitting import START
from benchmarks.predictor.published import NEUSIGHT, Rows, find_device
from cubatch.estimate.vendor.algorithms import algorithms, seconds
from cubatch.estimate.vendor.fitted import Fitted
from cubatch.hardware import catalogue
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from tests.unit.estimate.building import work_of

CONV_ROW = {
    "gpu": "Titan X (Pascal)", "suite": "train", "op": "conv", "precision": "fp32", "application": "", "w": 700,
    "h": 161, "c": 1, "n": 4, "k": 32, "r_filter_h": 5, "s_filter_w": 20, "pad_h": 0, "pad_w": 0, "stride_h": 2,
    "stride_w": 3, "out_h": 79, "out_w": 227, "fwd_ms": 0.132, "bwd_inputs_ms": 0.21, "bwd_params_ms": 0.28,
    "cuda": 8, "cudnn": 5,
}  # fmt: skip


GEMM_ROW = {
    "gpu": "Titan X (Pascal)", "suite": "train", "op": "gemm", "precision": "fp32", "application": "", "m": 1760,
    "n": 16, "k": 2048, "a_t": "N", "b_t": "N", "time_ms": 0.05, "tflops_published": 1.98, "cuda": 8, "cudnn": 5,
}  # fmt: skip


def write(path, base, *changes):
    """A CSV file of a base row with changes, one row each."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(base), extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**base, **change} for change in changes)


V100, P100 = "v100-pcie-16gb", "p100-pcie-16gb"


FACTORS = {V100: (1.25, 0.8), P100: (0.8, 1.25)}


ONES = dict.fromkeys(FACTORS, (1.0, 1.0))


LAYERS = [
    Conv2d(h=h, w=h, c=c, k=k, r=r, s=r, pad=r // 2)
    for (h, c), k, r in itertools.product([(56, 64), (28, 128), (14, 256), (7, 512)], [32, 256], [1, 3])
]


def rows_of(*, source=NEUSIGHT, layers=LAYERS, batches=(4, 32, 128), factors=FACTORS, constants=START):
    """Measurements without error: every layer, batch and GPU, at the time that the constants and factors give."""
    cases = [(layer, n, slug) for layer in layers for n in batches for slug in factors]
    rows = Rows(
        source=source,
        work=work_of(*((layer, Pass.FPROP, n) for layer, n, _ in cases)),
        devices={slug: find_device("Tesla K40") if slug == "k40" else catalogue.find(slug) for slug in factors},
        gpu=np.array([slug for _, _, slug in cases]),
        seconds=np.ones(len(cases)),
        overhead=np.zeros(len(cases)),
        shape=np.array([f"{layer.h}_{layer.c}_{layer.k}_{layer.r}" for layer, _, _ in cases]),
    )
    places = rows.places(factors)
    times = seconds(rows.work, places, constants, algorithms(rows.work, places.num_sms))
    return attrs.evolve(rows, seconds=times.min(axis=0))


def model_of(scales=None, **changes):
    """A model of the constants that the rows are made with."""
    return attrs.evolve(Fitted(NEUSIGHT, dict(START), ONES if scales is None else scales, None, 0.0, 0.0), **changes)
