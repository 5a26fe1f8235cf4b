"""
A model fitted to one body of published measurements: constants, what each GPU adds to them, and the learned residual.

The files in data/ are written by `benchmarks/fit_predictor.py`, from measurements that others published.
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
_MOST_LANES = 128  # of an SM that was measured, but for Kepler
_ARRAYS = ("depths", "feature", "number", "low", "high")
_POINTS = ("lengths", "points", "weights", "gpu", "kin", "shares")


@attrs.frozen(eq=False)
class Fitted:
    """
    What was learned from one body of measurements.

    Attributes:
        name: "neusight", "deepbench conv", ...
        constants: Of `algorithms.seconds`.
        scales: Factors on the time of arithmetic and of bytes, by the catalogue's name of the GPU.
        trees: The residual; None before it was fitted, and where too little was published to learn one.
        sd: Standard deviation of the logarithm of measured over predicted time, of shapes not fitted.
        unseen_sd: What a GPU that was not measured adds to it.
        transforms: Whether there are other algorithms than tiles: see `algorithms.algorithms`.
        process: The residual of sources of few shapes, which have no trees.
    """

    name: str
    constants: Mapping[str, float]
    scales: Mapping[str, tuple[float, float]]
    trees: tree_model.Trees | None
    sd: float
    unseen_sd: float
    transforms: bool = True
    process: GaussianProcess | None = None

    def scale(self, device: Device) -> tuple[float, float, bool]:
        """
        Return a GPU's factors on arithmetic and bytes, and whether it was measured itself.

        That of a GPU that was not is the geometric mean of those of its kin, the GPUs whose SMs issue instructions
        alike (Maxwell with Pascal but the P100; Volta with Turing and the A100), or of all where there are none, with
        the power that holds its clock down (`sustained`) in place of theirs.
        """
        known = self.scales.get(device.slug)
        if known is not None:
            return *known, True
        devices = {one.slug: one for one in catalogue.all_devices()}
        rows = [(devices[slug], scale) for slug, scale in self.scales.items() if slug in devices]
        kin = [row for row in rows if kin_of(row[0]) == kin_of(device)] or rows
        compute = [np.log(scale[0] * sustained(one)) for one, scale in kin]
        memory = [np.log(scale[1]) for _, scale in kin]
        return float(np.exp(np.mean(compute)) / sustained(device)), float(np.exp(np.mean(memory))), False

    def predict(self, work: Work, places: Places) -> tuple[Array, list[Algorithm], Index]:
        """
        Predict the time of each case.

        Args:
            work: The cases.
            places: Their GPUs, with their factors.

        Returns:
            Seconds; what the library could run; which of it is the shortest.
        """
        found = algorithms(work, places.num_sms, transforms=self.transforms)
        times = seconds(work, places, self.constants, found)
        predicted = times.min(axis=0)
        if self.trees is not None or self.process is not None:
            described = tree_model.features(work, places, found, times)
            if self.trees is not None:
                predicted = predicted * np.exp(self.trees(described))
            if self.process is not None:
                predicted = predicted * np.exp(self.process(described, places))
        return predicted, found, np.argmin(times, axis=0)

    def save(self, path: Path) -> None:
        """Write the model to one file of plain arrays."""
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
        """Read what `save` wrote."""
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
    """Return a model that comes with cubatch: "neusight", "deepbench conv tensor", ...; see data/."""
    return Fitted.load(_DATA / f"{name.replace(' ', '_')}.npz")


def sustained(device: Device) -> float:
    """
    Estimate the share of the boost clock that a GPU's power lets it hold in float32 arithmetic.

    Power grows about as the square of the clock, and GPUs of Pascal to Turing are taken to need 15 W for each 10^12
    FLOP/s, a judgement that P4's published times bear out: min(1, sqrt(watts / TFLOP/s / 15)).  It is below 1 for small
    boards such as P4 (75 W) and T4 (70 W); of other
    generations no such figure is known here, and 1 is taken.

    Example:
        >>> from cubatch.hardware.catalogue import find
        >>> round(sustained(find("t4")), 2), sustained(find("gtx-1080-ti"))
        (0.76, 1.0)
    """
    peak, watts = device.peak_flops_per_second.get("float32"), device.power_limit_watts
    if peak is None or watts is None or not _like(device).power_limited:
        return 1.0
    return min(1.0, float(np.sqrt(watts / (peak / 1e12) / _WATTS_PER_TFLOPS)))


def kin_of(device: Device) -> str:
    """Return the GPUs whose SMs issue instructions as this GPU's do: libraries have one set of kernels for all."""
    return _like(device).kin


def lanes(device: Device) -> int:
    """
    Return the float32 lanes of an SM, as the model knows them: 128 of Kepler's 192, since it was fitted with that.

    Example:
        >>> lanes(Device(name="V100", compute_capability=(7, 0))), lanes(Device(name="K80", compute_capability=(3, 7)))
        (64, 128)
    """
    return min(_MOST_LANES, _like(device).float32_lanes)


def _like(device: Device) -> Architecture:
    """Return the architecture that a GPU is taken to be of; one that does not say counts as old."""
    return architectures.like(device.compute_capability or (0, 0))
