"""Fitting the model of time: constants by least squares, each GPU's factors with them, then the residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import lightgbm
import numpy as np
from scipy.optimize import least_squares

from benchmarks.predictor import published
from benchmarks.predictor.gaussian_process import fit_gaussian_process
from benchmarks.predictor.published import Rows
from cubatch.estimate.vendor import trees as tree_model
from cubatch.estimate.vendor.algorithms import FAMILIES, SLICED, Array, algorithms, seconds
from cubatch.estimate.vendor.fitted import Fitted

# Where the search starts, and what it is drawn to: data sheets' rates, published tiles, bytes moved once.
START = {
    "dgrad": 1.1, "wgrad": 1.1, "wgrad winograd": 1.1, "scattered": 4.0, "partial": 1.0, "alone": 1.0,
    "cost 128x128": 1.15, "cost 128x64": 1.2, "cost 128x32": 1.3, "cost 64x64": 1.3, "cost 32x32": 1.8,
    "cost direct": 4.0, "cost fused": 1.2, "cost winograd 64x64": 1.2, "cost winograd 32x128": 1.2, "cost fft": 1.3,
}  # fmt: skip
# Launches in microseconds, depth added to every block's, and how often input, output and filter are moved.
_MOVES = (
    (8, 30, 1, 1, 1),
    (10, 30, 1, 1, 1),
    (8, 0.01, 1, 1, 1),
    (8, 30, 1, 1, 4),
    (15, 30, 8, 4, 25),
    (30, 10, 2, 2, 2),
)
for _family, _values in zip(FAMILIES, _MOVES, strict=True):
    for _name, _value in zip(("launch", "extra", "x", "y", "w"), _values, strict=True):
        START[f"{_name} {_family}"] = float(_value)
    START[f"tail {_family}"] = 0.55
for _family, _name in SLICED.items():
    START |= {f"{kind} {_name}": START[f"{kind} {_family}"] for kind in ("launch", "extra", "x", "y", "w", "tail")}
# Winograd transforms input and output there as it does the input of a forward pass; the products, 36 for 9 taps, are
# written and read, and the filter is written.
START |= {"y winograd sliced": START["x winograd"], "w winograd sliced": 2 * 36 / 9 + 1}

_WEIGHT = 0.15  # of the pull towards START: about the spread of what the constants leave
_SD, _SCALE_SD = 0.7, 0.2
_ROBUST = 0.15
_MOST_ROWS = 8000

# Beyond alpha an error counts by its size, not by its square: a library's odd choices are no reason to bend the rest.
_MANY = {
    "objective": "huber", "alpha": 0.05, "num_iterations": 1200, "num_leaves": 48, "learning_rate": 0.05,
    "min_data_in_leaf": 10,
}  # fmt: skip
TREES: Mapping[str, Mapping[str, object]] = {
    published.NEUSIGHT: _MANY,
}
SHARED: Mapping[str, Sequence[str]] = {published.CONV: ("all", "kin"), published.GEMM: ("all", "kin", "gpu")}
"""What GPUs share in the residual of sources of few shapes, which is a process, not trees."""
_SAMPLING = {"bagging_fraction": 0.7, "bagging_freq": 1, "feature_fraction": 0.5}


def fit_constants(rows: Rows, *, seed: int, evaluations: int = 25) -> Fitted:
    """Fit the constants and each GPU's factors to rows, without the trees."""
    if len(rows) > _MOST_ROWS:
        rows = rows.take(np.random.default_rng(seed).permutation(len(rows)) < _MOST_ROWS)
    names, slugs = list(START), sorted(rows.devices)
    index = np.searchsorted(slugs, rows.gpu)
    places = rows.places({})
    known = [each for each in algorithms(rows.work, places.num_sms, transforms=not rows.tensor) if each.usable.any()]
    measured = np.log(rows.seconds)
    first = np.r_[np.log([START[name] for name in names]), np.zeros(2 * len(slugs))]
    spread = np.r_[np.full(len(names), _SD), np.full(2 * len(slugs), _SCALE_SD)]

    def unpack(x: Array) -> tuple[dict[str, float], Array]:
        constants = {name: float(value) for name, value in zip(names, np.exp(x), strict=False)}
        constants |= {name: min(value, 1.0) for name, value in constants.items() if name.startswith("tail")}
        return constants, np.exp(x[len(names) :]).reshape(-1, 2)

    def gaps(x: Array) -> Array:
        constants, scales = unpack(x)
        placed = attrs.evolve(places, compute=scales[index, 0], memory=scales[index, 1])
        predicted = seconds(rows.work, placed, constants, known).min(axis=0)
        gap = np.log(predicted) - measured
        return np.r_[gap / np.sqrt(1 + np.abs(gap) / _ROBUST), _WEIGHT * (x - first) / spread]

    constants, scales = unpack(least_squares(gaps, first, max_nfev=evaluations).x)
    by_gpu = {slug: (float(pair[0]), float(pair[1])) for slug, pair in zip(slugs, scales, strict=True)}
    return Fitted(rows.name, constants, by_gpu, None, 0.0, 0.0, not rows.tensor)


def analytic(model: Fitted, rows: Rows) -> Array:
    """Predict the layers of rows without the residual."""
    return attrs.evolve(model, trees=None, process=None).predict(rows.work, rows.places(model.scales))[0]


def columns(model: Fitted, rows: Rows) -> dict[str, Array]:
    """Describe rows to the residual."""
    places = rows.places(model.scales)
    known = algorithms(rows.work, places.num_sms, transforms=model.transforms)
    return tree_model.features(rows.work, places, known, seconds(rows.work, places, model.constants, known))


def fit_trees(model: Fitted, rows: Rows, *, seed: int) -> Fitted:
    """Fit the residual to what the constants leave."""
    described = columns(model, rows)
    # Where every batch is a power of two, its remainders would tell batches apart that they know nothing of.
    doubled = np.all(np.log2(rows.work.n) % 1 == 0)
    names = tuple(name for name in described if not (doubled and name.startswith("n mod")))
    table = np.stack([np.asarray(described[name], np.float32) for name in names], axis=1)
    settings = {"seed": seed, "deterministic": True, "force_col_wise": True, "verbose": -1}
    gaps = np.log(rows.seconds / analytic(model, rows))
    learned = lightgbm.train({**TREES[rows.source], **_SAMPLING, **settings}, lightgbm.Dataset(table, gaps))
    sizes = tree_model.logarithmic(names)
    low = np.where(sizes, table.min(axis=0), -np.inf)
    high = np.where(sizes, table.max(axis=0), np.inf)
    return attrs.evolve(model, trees=flatten(learned.dump_model()["tree_info"], names, low, high))


def flatten(trees: Sequence[Mapping[str, object]], names: tuple[str, ...], low: Array, high: Array) -> tree_model.Trees:
    """Lay the nodes of all trees level by level in arrays, those of the deepest tree first."""

    def depth(node: Mapping[str, object]) -> int:
        return 1 + max(depth(node["left_child"]), depth(node["right_child"])) if "split_feature" in node else 0

    level = sorted((tree["tree_structure"] for tree in trees), key=depth, reverse=True)
    depths, nodes = [depth(root) for root in level], []
    while level:
        nodes += level
        level = [node[side] for node in level if "split_feature" in node for side in ("left_child", "right_child")]
    return tree_model.Trees(
        features=names, depths=np.array(depths, np.int16),
        feature=np.array([node.get("split_feature", -1) for node in nodes], np.int16),
        number=np.array([node.get("threshold", node.get("leaf_value")) for node in nodes], np.float32),
        low=low.astype(np.float32), high=high.astype(np.float32),
    )  # fmt: skip


def predict(model: Fitted, rows: Rows) -> Array:
    """Predict rows by a model that has factors of each of their GPUs, or of a similar one."""
    model = attrs.evolve(model, scales={slug: model.scale(device)[:2] for slug, device in rows.devices.items()})
    return model.predict(rows.work, rows.places(model.scales))[0]


def fit(rows: Rows, *, seed: int) -> Fitted:
    """Fit constants, factors and, where enough was published, the residual."""
    model = fit_constants(rows, seed=seed)
    if rows.tensor:
        return model
    if rows.source in SHARED:
        gaps, places = np.log(rows.seconds / analytic(model, rows)), rows.places(model.scales)
        return attrs.evolve(
            model, process=fit_gaussian_process(columns(model, rows), rows, places, gaps, SHARED[rows.source])
        )
    return fit_trees(model, rows, seed=seed)


def cross_validated(rows: Rows, *, seed: int, folds: int = 5) -> tuple[Array, Array]:
    """Predict every row by models that saw no row of its shape: with the residual, and by arithmetic alone."""
    fold = rows.folds(folds)
    whole, plain = np.zeros(len(rows)), np.zeros(len(rows))
    for number in range(folds):
        model, left = fit(rows.take(fold != number), seed=seed), rows.take(fold == number)
        whole[fold == number] = predict(model, left)
        plain[fold == number] = analytic(model, left)
    return whole, plain


def siblings(rows: Rows) -> np.ndarray:
    """Return each row's group of sibling boards, which are left out together."""
    return np.array([published.SIBLINGS.get(str(slug), str(slug)) for slug in rows.gpu])


def gpu_left_out(rows: Rows, *, seed: int) -> Array:
    """Predict every row by models that saw no GPU of its group; a group that is alone stays nan."""
    groups = siblings(rows)
    out = np.full(len(rows), np.nan)
    for group in np.unique(groups):
        alone = groups == group
        if group != "Kepler" and not alone.all():
            out[alone] = predict(fit(rows.take(~alone), seed=seed), rows.take(alone))
    return out
