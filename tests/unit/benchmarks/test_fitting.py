"""Fitting the model of time, on rows made with constants and factors that are known."""

from __future__ import annotations

import functools
import math
import sys

import attrs
import numpy as np
import pytest

from benchmarks import fit_predictor
from benchmarks.predictor import fitting
from benchmarks.predictor.fitting import START, cross_validated, fit_constants, gpu_left_out
from benchmarks.predictor.published import CONV, GEMM, JUSTUS, NEUSIGHT, load
from cubatch.estimate.vendor.fitted import Fitted
from cubatch.hardware import catalogue
from cubatch.network.layers import Conv2d
from tests.unit.benchmarks.building import (
    CONV_ROW,
    FACTORS,
    GEMM_ROW,
    LAYERS,
    ONES,
    P100,
    V100,
    model_of,
    rows_of,
    write,
)


@pytest.fixture
def quick(monkeypatch):
    """Few steps of the search and few trees: enough for rows that the model explains."""
    monkeypatch.setattr(fitting, "fit_constants", functools.partial(fit_constants, evaluations=2))
    few = {"num_iterations": 12, "num_leaves": 6, "learning_rate": 0.3, "min_data_in_leaf": 5, "num_threads": 1}
    monkeypatch.setattr(fitting, "TREES", dict.fromkeys(fitting.TREES, few))


# --- constants and factors -----------------------------------------------------------------------------------


def test_the_factors_of_gpus_and_unusual_constants_are_recovered(monkeypatch):
    """
    96 rows without error give factors back to three per cent, and their times to two.

    With little pull towards the start: what all GPUs have in common is a constant of arithmetic as well as a factor,
    so the factors are planted with a product of one.
    """
    monkeypatch.setattr(fitting, "_WEIGHT", 0.02)
    rows = rows_of(constants=START | {"cost fused": 1.5, "cost 128x128": 1.4, "launch tiles": 12.0})
    model = fit_constants(rows, seed=0, evaluations=10)
    for slug, want in FACTORS.items():
        assert model.scales[slug] == pytest.approx(want, rel=0.03), slug
    assert fitting.analytic(model, rows) == pytest.approx(rows.seconds, rel=0.02)
    assert (model.name, model.transforms, model.trees) == (NEUSIGHT, True, None)


def test_few_rows_are_drawn_towards_the_start():
    """With the usual pull the factors of a few rows are nearer to one than the truth."""
    model = fit_constants(rows_of(layers=LAYERS[:6], batches=(8, 64)), seed=0, evaluations=3)
    for slug, want in FACTORS.items():
        for got, true in zip(model.scales[slug], want, strict=True):
            assert abs(math.log(got)) < abs(math.log(true))


def test_the_last_wave_takes_no_more_than_a_wave(monkeypatch):
    """A search that stands at one and a half waves gives one."""
    monkeypatch.setitem(fitting.START, "tail tiles", 1.5)
    rows = rows_of(layers=LAYERS[:2], batches=(4,), factors=ONES)
    assert fit_constants(rows, seed=0, evaluations=1).constants["tail tiles"] == 1


def test_many_rows_are_drawn_from_by_the_seed(monkeypatch):
    """More rows than the search can bear are sampled: the same for the same seed, others for another."""
    monkeypatch.setattr(fitting, "_MOST_ROWS", 20)
    rows = rows_of()
    first, again, other = (fit_constants(rows, seed=seed, evaluations=2) for seed in (1, 1, 2))
    assert (first.scales, first.constants) == (again.scales, again.constants)
    assert first.scales != other.scales


def test_what_the_harness_computes_itself_is_a_constant_times_its_bytes():
    """What it takes is counted in the bytes of the output at the bandwidth, of the rows that have an activation."""
    rows = rows_of(layers=LAYERS[:1], batches=(16,), activation=1.0, bias=0.0)
    (layer,) = LAYERS[:1]
    output = 16 * math.prod(layer.output_shape) * 4
    want = [3.0 * output / catalogue.find(slug).peak_bytes_per_second for slug in (V100, P100)]
    assert fitting.nuisance(rows, {"activation": 3.0, "bias": 5.0}).tolist() == pytest.approx(want)
    assert fitting.nuisance(rows_of(layers=LAYERS[:1], batches=(16,)), {}).tolist() == [0, 0]


def test_a_copied_input_is_counted_by_its_own_bytes():
    """Padding is copied with the input, which has another size than the output."""
    rows = rows_of(layers=[Conv2d(h=8, w=8, c=16, k=512, r=3, s=3)], batches=(2,), copied=1.0)
    want = [5.0 * 2 * 8 * 8 * 16 * 4 / catalogue.find(slug).peak_bytes_per_second for slug in (V100, P100)]
    assert fitting.nuisance(rows, {"copied": 5.0}).tolist() == pytest.approx(want)


def test_the_trees_know_the_harness_and_correct_both(quick):
    """They are told its share of the time, and what they add is added to the whole that they were fitted to."""
    rows = rows_of(source=JUSTUS, layers=LAYERS[:8], factors=ONES, activation=1.0)
    model = model_of(constants=START | {"activation": 50.0}, name=JUSTUS)
    share = fitting.columns(model, rows)["share"]
    added = fitting.nuisance(rows, model.constants)
    assert share == pytest.approx(added / (added + rows.seconds), rel=1e-9)
    whole = fitting.analytic(model, rows)
    fitted = fitting.fit_trees(model, attrs.evolve(rows, seconds=whole * np.exp(0.3)), seed=0)
    assert fitting.predict(fitted, rows) == pytest.approx(whole * np.exp(0.3), rel=1e-6)
    assert "share" not in fitting.columns(model_of(), rows_of(factors=ONES))


def test_sources_with_a_harness_have_their_columns_in_the_model(quick):
    """Each of its own operations has a constant, and no other column has."""
    found = fitting.fit_constants(rows_of(source=JUSTUS, activation=1.0, bias=1.0, same=1.0), seed=0)
    assert found.constants.keys() - START.keys() == {"activation", "bias"}
    assert fitting.fit_constants(rows_of(source=CONV), seed=0).constants.keys() == START.keys()


# --- the residual --------------------------------------------------------------------------------------------


def test_trees_learn_what_the_constants_cannot(quick):
    """Layers of 28 x 28 take a third longer for no reason the arithmetic knows: the trees see it, in range."""
    rows = rows_of(factors=ONES, batches=(4, 16, 64, 256))
    odd = rows.work.h == 28
    slow = attrs.evolve(rows, seconds=np.where(odd, rows.seconds * 1.35, rows.seconds))
    model = fitting.fit_trees(model_of(), slow, seed=0)
    gap = np.log(fitting.predict(model, slow) / slow.seconds)
    plain = np.log(fitting.analytic(model, slow) / slow.seconds)
    assert np.abs(plain[odd]).mean() == pytest.approx(np.log(1.35), rel=1e-9)
    assert np.abs(gap).mean() < 0.3 * np.abs(plain).mean()
    sizes = dict(zip(model.trees.features, zip(model.trees.low, model.trees.high, strict=True), strict=True))
    assert sizes["c"] == pytest.approx((np.log(64), np.log(512)))
    assert sizes["n"] == (-np.inf, np.inf)
    assert not [name for name in sizes if name.startswith("n mod")]  # all batches are powers of two


def test_tensor_cores_have_too_few_rows_for_trees(quick):
    """Of one GPU's rows only the constants are fitted, of tiles alone."""
    rows = attrs.evolve(rows_of(factors={V100: (1.0, 1.0)}), dtype="float16", tensor=True)
    model = fitting.fit(rows, seed=0)
    assert (model.name, model.trees, model.transforms) == ("neusight tensor", None, False)
    assert fitting.fit(rows_of(layers=LAYERS[:8]), seed=0).trees is not None


# --- what a model has not seen -------------------------------------------------------------------------------


def test_nothing_of_a_held_out_fold_is_used(quick):
    """A thousandfold error planted in one fold changes no prediction of its rows, and those of the other fold."""
    rows = rows_of(batches=(4, 64))
    fold = rows.folds(2)
    assert 0 < fold.sum() < len(fold)
    planted = attrs.evolve(rows, seconds=np.where(fold == 1, 1000 * rows.seconds, rows.seconds))
    for honest, spoilt in zip(
        cross_validated(rows, seed=0, folds=2), cross_validated(planted, seed=0, folds=2), strict=True
    ):
        assert (honest > 0).all()
        assert spoilt[fold == 1].tolist() == honest[fold == 1].tolist()
        assert (spoilt[fold == 0] > honest[fold == 0]).mean() > 0.9


@pytest.fixture
def taught(monkeypatch):
    """A model that is not fitted, and the rows that it would have been fitted to."""
    found = []

    def fit(rows, *, seed):
        found.append(rows)
        return model_of({str(slug): (1.0, 1.0) for slug in np.unique(rows.gpu)})

    monkeypatch.setattr(fitting, "fit", fit)
    return found


def test_a_fold_is_predicted_by_the_rest(taught):
    """Each of the five models is taught the other four folds, whole."""
    rows = rows_of(factors=ONES)
    whole, plain = cross_validated(rows, seed=0)
    assert whole.tolist() == plain.tolist() == pytest.approx(rows.seconds.tolist())
    assert len(taught) == 5
    shapes = [set(part.shape) for part in taught]
    assert all(shapes.count(one) < 5 for one in shapes)
    for shape in set(rows.shape):
        assert sum(shape in one for one in shapes) == 4


def test_siblings_are_left_out_together(taught):
    """Boards of one chip say the same: neither teaches the other; Kepler only teaches."""
    boards = ("titan-xp", "gtx-1080-ti", "titan-x-pascal", V100, "k40")
    rows = rows_of(layers=LAYERS[:2], factors=dict.fromkeys(boards, (1.0, 1.0)))
    left = gpu_left_out(rows, seed=0)
    assert [sorted(set(part.gpu)) for part in taught] == [
        ["k40", V100],
        ["gtx-1080-ti", "k40", "titan-x-pascal", "titan-xp"],
    ]
    assert np.isnan(left[rows.gpu == "k40"]).all()
    assert np.isfinite(left[rows.gpu != "k40"]).all()


def test_a_gpu_without_others_is_not_left_out(taught):
    """Nothing would be left to learn from."""
    rows = rows_of(layers=LAYERS[:2], factors={"titan-xp": (1.0, 1.0), "gtx-1080-ti": (1.0, 1.0)})
    assert np.isnan(gpu_left_out(rows, seed=0)).all()
    assert taught == []


def test_a_gpu_that_was_left_out_goes_by_its_kin(quick):
    """A model knows the GPUs of the rows that it was fitted to, and no other."""
    rows = rows_of(layers=LAYERS[:6], factors={**FACTORS, "titan-xp": (1.0, 1.0)})
    model = fitting.fit_constants(rows.take(rows.gpu != "titan-xp"), seed=0)
    assert model.scales.keys() == {V100, P100}
    compute, _, known = model.scale(catalogue.find("titan-xp"))
    assert not known
    assert compute == pytest.approx(math.sqrt(model.scales[V100][0] * model.scales[P100][0]))


# --- the command ---------------------------------------------------------------------------------------------


def test_what_is_unknown_of_a_gpu_is_what_leaving_each_out_shows(monkeypatch, taught):
    """GPUs a fifth slower and a tenth faster than the model without them: the root of the mean square."""
    rows = rows_of(factors=ONES)
    rows = attrs.evolve(rows, seconds=rows.seconds * np.exp(np.where(rows.gpu == V100, 0.2, -0.1)))
    monkeypatch.setattr(fitting, "fit_constants", fitting.fit)
    noise = np.random.default_rng(2).normal(0, 0.15, len(rows))
    monkeypatch.setattr(fitting, "cross_validated", lambda rows, **_: (rows.seconds * np.exp(noise), None))
    model = fit_predictor.fitted(rows, 0)
    assert model.unseen_sd == pytest.approx(math.sqrt((0.2**2 + 0.1**2) / 2))
    assert model.sd == pytest.approx(np.quantile(np.abs(noise), 0.9) / 1.6449)


def test_the_spread_of_normal_errors_is_their_deviation():
    """Nine of ten gaps lie within 1.645 standard deviations; one row far off changes nothing."""
    measured = np.random.default_rng(1).uniform(1e-5, 1e-2, 20_000)
    gaps = np.random.default_rng(2).normal(0, 0.2, 20_000)
    gaps[0] = 50.0
    # A quantile of 20 000 draws is sure to sqrt(0.9 x 0.1 / 20 000) / density, here about 1.0 %; three of these.
    assert fit_predictor.spread(measured * np.exp(gaps), measured) == pytest.approx(0.2, rel=0.031)


def test_rows_are_known_by_their_number():
    """The same row has the same number wherever it stands; another batch, GPU, pass, shape or arithmetic another."""
    rows = rows_of(batches=(4, 32))
    numbers = fit_predictor.fingerprints(rows)
    assert len(set(numbers)) == len(rows)
    part = np.arange(len(rows)) % 3 == 0
    assert fit_predictor.fingerprints(rows.take(part)).tolist() == numbers[part].tolist()
    for other in (
        attrs.evolve(rows, dtype="float16", tensor=True), attrs.evolve(rows, source=JUSTUS),
        attrs.evolve(rows, work=attrs.evolve(rows.work, pass_=rows.work.pass_ + 1)),
    ):  # fmt: skip
        assert not set(numbers) & set(fit_predictor.fingerprints(other))


def test_of_one_gpu_nothing_says_how_others_differ(monkeypatch, taught):
    """On Tensor Cores of one GPU alone an unseen GPU is as unsure as the worst of other sources."""
    rows = attrs.evolve(rows_of(factors={V100: (1.0, 1.0)}), dtype="float16", tensor=True)
    monkeypatch.setattr(fitting, "cross_validated", lambda rows, **_: (rows.seconds * math.exp(0.3), None))
    model = fit_predictor.fitted(rows, 0)
    assert (model.sd, model.unseen_sd) == (pytest.approx(0.3 / 1.6449), fit_predictor.ONE_GPU_SD)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where files are read from, models and results are written to; what is fitted is known by its sd."""
    found = [tmp_path / name for name in ("csv", "data", "results")]
    for folder in found[:2]:
        folder.mkdir()
    monkeypatch.setattr(fit_predictor, "DATA", found[1])
    monkeypatch.setattr(fit_predictor, "RESULTS", found[2])
    monkeypatch.setattr(fit_predictor, "fitted", lambda rows, seed: model_of(name=rows.name, sd=0.1 + rows.tensor))
    return found


def command(folder, *options):
    """The words of the command line."""
    return ["fit_predictor", "--data", str(folder), *options]


def test_the_command_writes_a_model_for_each_source_that_is_there(folders, monkeypatch, capsys):
    """float32 and Tensor Cores have a file each, stored float16 none; the rows that were used are written down."""
    folder, data, results = folders
    sizes = {"fp32": (16, 32), "fp16_storage (16b in": (48, 64, 80), "fp16_mixed_tensorop (16b in": (16, 32)}
    changes = ({"gpu": "Tesla V100", "precision": kind, "n": n} for kind, batches in sizes.items() for n in batches)
    write(folder / "deepbench_gemm.csv", GEMM_ROW, *changes)
    monkeypatch.setattr(sys, "argv", command(folder))
    fit_predictor.main()
    assert sorted(path.name for path in data.iterdir()) == ["deepbench_gemm.npz", "deepbench_gemm_tensor.npz"]
    assert Fitted.load(data / "deepbench_gemm_tensor.npz").sd == 1.1
    assert fit_predictor.path_of(GEMM) == data / "deepbench_gemm.npz"
    assert fit_predictor.path_of(f"{GEMM} tensor") == data / "deepbench_gemm_tensor.npz"
    assert fit_predictor.path_of(JUSTUS) == results / "justus.npz"
    single, stored, tensor = load(folder, GEMM)
    with np.load(results / "rows.npz") as file:
        used = file["fitted"]
    assert sorted(used) == sorted([*fit_predictor.fingerprints(single), *fit_predictor.fingerprints(tensor)])
    assert not set(used) & set(fit_predictor.fingerprints(stored))
    assert "deepbench gemm tensor: 2 rows, 1 shapes, 1 GPUs" in capsys.readouterr().out


def test_sources_that_were_not_asked_for_stay_as_they_are(folders, monkeypatch):
    """No model of theirs is written, but their rows are still known as fitted."""
    folder, data, results = folders
    write(folder / "deepbench_gemm.csv", GEMM_ROW, {})
    write(folder / "deepbench_conv.csv", CONV_ROW, {})
    monkeypatch.setattr(sys, "argv", command(folder, "--only", CONV))
    fit_predictor.main()
    assert [path.name for path in data.iterdir()] == ["deepbench_conv.npz"]
    want = np.concatenate([fit_predictor.fingerprints(load(folder, source)[0]) for source in (CONV, GEMM)])
    with np.load(results / "rows.npz") as file:
        assert sorted(file["fitted"]) == sorted(want)


def test_a_folder_without_files_is_refused(folders, monkeypatch, capsys):
    """A mistyped folder is said to hold nothing, and what is known of earlier fits is not overwritten."""
    folder, data, results = folders
    monkeypatch.setattr(sys, "argv", command(folder))
    with pytest.raises(SystemExit) as caught:
        fit_predictor.main()
    assert caught.value.code == 2
    assert f"{folder} holds none of the files" in capsys.readouterr().err
    assert [*data.iterdir(), *results.glob("*.npz")] == []
