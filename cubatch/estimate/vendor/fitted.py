"""
A model fitted to one set of published measurements: constants, factors per GPU, and the learned correction.

`benchmarks/fit_predictor.py` writes the files in data/ from published measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import attrs
import numpy as np

from cubatch.estimate.vendor import trees as tree_model
from cubatch.estimate.vendor.algorithms import Algorithm, Array, Index, Places, Work, algorithms, seconds
from cubatch.estimate.vendor.gaussian_process import GaussianProcess
from cubatch.hardware import architectures, catalogue
from cubatch.hardware.architectures import Architecture
from cubatch.hardware.facts import Device

_DATA = Path(__file__).parents[2] / "data"
_WATTS_PER_TFLOPS = 15.0
_MOST_LANES = 128  # of a measured SM, except Kepler
LAUNCH_MICROSECONDS = 4.0
"""
Fixed time of a Tensor Core kernel on a GPU with queued work.  DeepBench's times include the host's calls, 10 us.

Chosen on 51 products in float16 on an H200 (benchmarks/predictor/score_launches.py), whose error fell from 51 to 10 %.
That of 136 convolutions, which had no part in it, fell from 29 to 16 %.
"""
_ARRAYS = ("depths", "feature", "number", "low", "high")
_POINTS = ("lengths", "points", "weights", "gpu", "kin", "shares")


@attrs.frozen(eq=False)
class Fitted:
    """The model of kernel times, with its constants and errors, fitted to one set of measurements."""

    name: str  # "neusight", "deepbench conv", ...
    constants: Mapping[str, float]  # constants of `algorithms.seconds`
    # factors on the time of arithmetic and of bytes, by the catalogue's name of the GPU
    scales: Mapping[str, tuple[float, float]]
    # the correction; None before it was fitted, and for sources with too few measurements
    trees: tree_model.Trees | None
    sd: float  # standard deviation of the logarithm of measured over predicted time, for shapes that were not fitted
    unseen_sd: float  # additional standard deviation for a GPU that was not measured
    transforms: bool = True  # whether there are other algorithms than tiled products: see `algorithms.algorithms`
    # the correction of sources with few shapes, which have no trees; None for other sources
    process: GaussianProcess | None = None

    def scale(self, device: Device) -> tuple[float, float, bool]:
        """
        Return the factors on a GPU's seconds of arithmetic and of bytes, and whether the GPU itself was measured.

        A GPU that was not measured takes the geometric mean of its kin, or of all GPUs.  Kin are GPUs whose SMs issue
        instructions alike: Maxwell with Pascal except the P100; Volta with Turing and the A100.  The factor by which
        its own power limit lowers the clock (`sustained`) replaces that of its kin.
        """
        own = self.scales.get(device.slug)
        if own is not None:
            return *own, True
        devices = {each.slug: each for each in catalogue.all_devices()}
        rows = [(devices[slug], scale) for slug, scale in self.scales.items() if slug in devices]
        kin = [row for row in rows if kin_of(row[0]) == kin_of(device)] or rows
        compute = [np.log(scale[0] * sustained(each)) for each, scale in kin]
        memory = [np.log(scale[1]) for _, scale in kin]
        return float(np.exp(np.mean(compute)) / sustained(device)), float(np.exp(np.mean(memory))), False

    def predict(self, work: Work, places: Places) -> tuple[Array, list[Algorithm], Index]:
        """
        Predict the time of each case by the vendor's library, with the learned correction.

        Args:
            work: The cases.
            places: Their GPUs, with their factors.

        Returns:
            Seconds of each case; the algorithms of the library; for each case the index of the fastest algorithm.
        """
        candidates = algorithms(work, places.num_sms, transforms=self.transforms)
        times = seconds(work, places, self.constants, candidates)
        predicted = times.min(axis=0)
        if self.trees is not None or self.process is not None:
            described = tree_model.features(work, places, candidates, times)
            if self.trees is not None:
                predicted = predicted * np.exp(self.trees(described))
            if self.process is not None:
                predicted = predicted * np.exp(self.process(described, places))
        return predicted, candidates, np.argmin(times, axis=0)

    def save(self, path: Path) -> None:
        """Write the model to an .npz file, without pickled objects; see `load`."""
        facts = {
            "name": self.name, "constants": {name: float(f"{value:.6g}") for name, value in self.constants.items()},
            "scales": {slug: [round(value, 5) for value in pair] for slug, pair in self.scales.items()},
            "sd": round(self.sd, 4), "unseen_sd": round(self.unseen_sd, 4),
            "transforms": self.transforms,
            "features": None if self.trees is None else self.trees.features,
        }  # fmt: skip
        arrays = {} if self.trees is None else {name: getattr(self.trees, name) for name in _ARRAYS}
        arrays |= {} if self.process is None else {name: getattr(self.process, name) for name in _POINTS}
        np.savez_compressed(path, facts=np.array(json.dumps(facts)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Fitted:
        """Return the model in a file that `save` wrote."""
        with np.load(path) as file:
            facts = json.loads(str(file["facts"]))
            arrays = {name: file[name] for name in _ARRAYS if name in file}
            points = {name: file[name] for name in _POINTS if name in file}
        trees = tree_model.Trees(tuple(facts["features"]), **arrays) if arrays else None
        scales = {slug: (pair[0], pair[1]) for slug, pair in facts["scales"].items()}
        return cls(
            facts["name"], facts["constants"], scales, trees, facts["sd"], facts["unseen_sd"], facts["transforms"],
            GaussianProcess(**points) if points else None,
        )  # fmt: skip


@cache
def shipped(name: str) -> Fitted:
    """
    Return the fitted model of this name from the files in cubatch/data: "neusight", "deepbench conv tensor", ...

    Launches of Tensor Core kernels take LAUNCH_MICROSECONDS instead of DeepBench's, which include the host's calls.
    """
    model = Fitted.load(_DATA / f"{name.replace(' ', '_')}.npz")
    if not name.endswith(" tensor"):
        return model
    launches = {key: LAUNCH_MICROSECONDS for key in model.constants if key.startswith("launch ")}
    return attrs.evolve(model, constants={**model.constants, **launches})


def sustained(device: Device) -> float:
    """
    Return the share of the boost clock that a GPU's power limit allows in float32 arithmetic, an estimate.

    Power grows about as the square of the clock.  GPUs of Pascal to Turing are assumed to need 15 W per TFLOP/s:
    min(1, sqrt(watts / TFLOP/s / 15)).  This fits the kernel times that NeuSight published of P4.  It is below 1 for
    small boards such as P4 (75 W) and T4 (70 W).  For other generations no figure is known, and the share is 1.
    """
    peak, watts = device.peak_flops_per_second.get("float32"), device.power_limit_watts
    if peak is None or watts is None or not _like(device).power_limited:
        return 1.0
    return min(1.0, float(np.sqrt(watts / (peak / 1e12) / _WATTS_PER_TFLOPS)))


def kin_of(device: Device) -> str:
    """Return the name of a GPU's group, whose SMs issue instructions alike, so that libraries use equal kernels."""
    return _like(device).kin


def lanes(device: Device) -> int:
    """
    Return the float32 lanes of an SM that the model assumes: 128 instead of 192 for Kepler, as it was fitted.

    Example:
        >>> lanes(Device(name="V100", compute_capability=(7, 0))), lanes(Device(name="K80", compute_capability=(3, 7)))
        (64, 128)
    """
    return min(_MOST_LANES, _like(device).float32_lanes)


def _like(device: Device) -> Architecture:
    """Return the architecture of a GPU; the oldest if its compute capability is unknown."""
    return architectures.like(device.compute_capability or (0, 0))
