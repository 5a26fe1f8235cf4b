"""
Learned correction of the analytic model for sources with few shapes: a Gaussian process as plain arrays.

The logarithm of measured over predicted time is normal with mean zero.  Its covariance falls with the distance of two
cases in the logarithms of a few extents and ratios:

    covariance = exp(-distance^2 / 2) * (all + kin [GPUs with the same instruction issue] + gpu [the same GPU])

So the errors of a related GPU's library carry over, and those of others do not.  The posterior mean is a weighted sum
over the measurements, and zero far from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.estimate.vendor.algorithms import Array, Places

FEATURES = ("m", "columns", "depth", "r", "s", "stride_h", "waves 128x64", "intensity", "dgrad", "wgrad")
"""Names of columns of `trees.features`; the last two are passes."""

_CHUNK = 512


@attrs.frozen(eq=False)
class GaussianProcess:
    """A correction of the logarithm of predicted times by a Gaussian process, a sum over similar measurements."""

    lengths: NDArray[np.float32]  # length scales of FEATURES
    points: NDArray[np.float32]  # features of the measurements, as from `table`, divided by `lengths`
    weights: NDArray[np.float32]  # weight of each measurement
    gpu: NDArray[np.str_]  # gpu, kin: GPU of each measurement, as in Places
    kin: NDArray[np.str_]
    # variances of the parts of the error that all GPUs share, that a group of similar GPUs shares, and of one GPU
    shares: NDArray[np.float32]

    def __call__(self, columns: Mapping[str, Array], places: Places) -> Array:
        """
        Return the correction of each case, which is added to the logarithm of its time.

        Args:
            columns: The result of `trees.features` for the cases.
            places: The GPU of each case.
        """
        at = (table(columns) / self.lengths).astype(np.float32)
        given = np.zeros(len(at))
        names, place = np.unique(np.stack([places.gpu, places.kin]), axis=1, return_inverse=True)
        for number, (gpu, kin) in enumerate(names.T):
            weights = self.weights * (
                self.shares @ np.stack([np.ones(len(self.gpu)), self.kin == kin, self.gpu == gpu])
            )
            of = np.flatnonzero(place == number)
            for part in np.split(of, range(_CHUNK, len(of), _CHUNK)):
                given[part] = near(at[part], self.points) @ weights
        return given


def near(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return exp(-distance^2 / 2) for each row of a and each row of b, as an array (rows of a, rows of b)."""
    square = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None] - 2 * a @ b.T
    alike: NDArray[np.floating] = np.exp(np.maximum(square, 0) / -2)
    return alike


def table(columns: Mapping[str, Array]) -> Array:
    """Return the FEATURES of each case as an array (cases, features), from the columns of `trees.features`."""
    passes = {"dgrad": columns["pass"] == 1, "wgrad": columns["pass"] == 2}  # noqa: PLR2004
    return np.stack([np.asarray(passes[name] if name in passes else columns[name], float) for name in FEATURES], axis=1)
