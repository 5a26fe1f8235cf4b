"""Scores of the model of time, on rows whose errors are known."""

from __future__ import annotations

import json
import math
import sys

import attrs
import numpy as np
import pytest

from benchmarks import score_predictor
from benchmarks.fit_predictor import fingerprints
from benchmarks.predictor import fitting
from benchmarks.predictor.published import GEMM, find_device
from benchmarks.predictor.score_batches import cliffs, knee, knees
from benchmarks.predictor.score_networks import networks
from benchmarks.score_predictor import anchored, errors, owned, roofline, score_source, summary
from cubatch.estimate.roofline import layer_seconds
from cubatch.estimate.step import predict_step
from cubatch.hardware import catalogue
from cubatch.network import models
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from tests.unit.benchmarks.building import GEMM_ROW, LAYERS, model_of, rows_of, write

V100, P100, XP, TI = "v100-pcie-16gb", "p100-pcie-16gb", "titan-xp", "gtx-1080-ti"
TWO = {V100: (1.0, 1.0), P100: (1.0, 1.0)}


def test_errors_are_of_the_published_time():
    """What the harness added is in both: 1 + 3 predicted of 2 + 3 measured is 20 % too little, not 50."""
    rows = rows_of(layers=LAYERS[:1], batches=(4,), factors=TWO)
    rows = attrs.evolve(rows, seconds=np.array([2.0, 4.0]), overhead=np.array([3.0, 0.0]))
    assert errors(rows, np.array([1.0, 5.0])).tolist() == pytest.approx([20.0, 25.0])


def test_a_summary_counts_and_averages():
    """Mean, median and bias of errors by hand; a bootstrap of whole shapes lies around the mean."""
    rows = rows_of(layers=LAYERS[:4], batches=(4, 8), factors=TWO)
    # Two layers 10 % too long, one 20 % too short, one right.
    factor = np.repeat([1.1, 1.1, 0.8, 1.0], 4)
    found = summary(rows, rows.seconds * factor, seed=0)
    assert (found["rows"], found["shapes"], found["gpus"]) == (16, 4, [P100, V100])
    assert (found["mean"], found["median"], found["mean_without_overhead"]) == (10.0, 10.0, 10.0)
    assert found["bias"] == pytest.approx(100 * ((1.1 * 1.1 * 0.8) ** 0.25 - 1), abs=0.05)
    low, high = found["mean_interval"]
    # Means of four shapes drawn from (10, 10, 20, 0): at the ends, none or all of them is the bad one.
    assert 0 <= low < 10 < high <= 20
    alike = summary(rows, rows.seconds * 1.1, seed=0)
    assert (alike["mean_interval"], alike["median_interval"]) == ([10.0, 10.0], [10.0, 10.0])


def test_ten_known_rows_take_a_gpus_bias_away():
    """
    A GPU predicted twice too long is right once ten of its rows are known, if rows have no error of their own.

    If a row is as sure as the GPU was beforehand, ten parts of 10 + pi / 2 are taken, the variance of a median.
    """
    rows = rows_of(factors={V100: (1.0, 1.0)})
    assert anchored(rows, 2 * rows.seconds, sd=0.0, unseen_sd=0.2, seed=0)["mean"] == 0.0
    found = anchored(rows, 2 * rows.seconds, sd=0.2, unseen_sd=0.2, seed=0)
    assert found["mean"] == pytest.approx(100 * (2 ** (math.pi / 2 / (10 + math.pi / 2)) - 1), abs=0.01)
    assert (found["rows"], found["shapes"], found["draws"]) == (48, 16, 30)


def test_the_rooflines_rival_is_cubatchs_own_roofline():
    """The larger of arithmetic at the peak and bytes moved once, of every row."""
    layers = [
        Conv2d(h=14, w=14, c=64, k=99, r=3, s=3, pad=1, bias=False),
        Conv2d(h=56, w=56, c=8, k=8, r=1, s=1, bias=False),
    ]
    rows = rows_of(layers=layers, batches=(3, 64), factors=TWO)
    want = [
        layer_seconds(layer, Pass.FPROP, n, catalogue.find(slug), "float32")
        for layer in layers for n in (3, 64) for slug in TWO
    ]  # fmt: skip
    assert roofline(rows).tolist() == pytest.approx(want, rel=1e-12)


def test_an_owned_gpu_is_right_where_time_is_a_multiple_of_the_roofline():
    """Scaled by the ratio of rooflines it then has no error; boards of one chip are no sources for each other."""
    rows = rows_of(layers=LAYERS[:4], factors=dict.fromkeys((V100, P100, XP, TI), (1.0, 1.0)))
    # Twice the roofline, but Pascal's largest three times: by hand, each wrong by a factor of 1.5 or right.
    slow = np.where(np.isin(rows.gpu, (XP, TI)), 3.0, 2.0)
    rows = attrs.evolve(rows, seconds=slow * roofline(rows))
    # Of 12 rows of each, the P100 lacks two.
    rows = rows.take((rows.gpu != P100) | (rows.work.n != 4) | (rows.shape == rows.shape[0]) | (rows.work.r == 3))
    common = int((rows.gpu == P100).sum())
    assert common < (rows.gpu == V100).sum() == 12
    found = owned(rows)
    assert found[V100] == (P100, 0.0, 50.0, common)  # of 0, 50 and 50 per cent
    assert found[P100] == (V100, 0.0, 50.0, common)
    for board in (XP, TI):
        source, best, middle, count = found[board]
        assert (best, middle, count) == (33.33, 33.33, {V100: 12, P100: common}[source])


@pytest.mark.parametrize(
    ("throughput", "want"),
    [((50, 94.9, 100, 100), 4), ((50, 95.1, 100, 99), 2), ((100, 100, 100, 100), 1), ((10, 20, 40, 80), 8)],
)
def test_the_knee_is_the_smallest_batch_near_the_best(throughput, want):
    """Nineteen parts of twenty of the best throughput are near."""
    sizes = np.array([1.0, 2, 4, 8])
    assert knee(sizes, sizes / np.array(throughput)) == want


def test_knees_are_counted_and_so_is_always_taking_the_largest():
    """Two sweeps, of which the model finds one; its error of scaling is that of neighbouring batches."""
    rows = rows_of(layers=LAYERS[:1], batches=(4, 8, 16), factors=TWO)
    first = rows.gpu == V100
    n = rows.work.n
    measured = attrs.evolve(rows, seconds=np.where(first, n, np.where(n == 16, 16.0, 2 * n)))  # knees at 4 and 16
    assert knees(measured, measured.seconds, seed=0) == {
        "sweeps": 2, "exact": 100.0, "exact_interval": [100.0, 100.0], "exact_of_largest": 50.0, "scaling_error": 0.0,
    }  # fmt: skip
    found = knees(measured, n, seed=0)
    assert (found["exact"], found["exact_of_largest"]) == (50.0, 50.0)
    # One of four steps is predicted as a doubling and stays the same.
    assert found["scaling_error"] == pytest.approx(math.log(2) / 4, abs=5e-4)


SWEEP = {
    "gpu": "RTX 2080 Super", "sm_count": 48, "net": "lc0 10x128, 8x8 board", "board_points_hw": 64, "channels_c": 128,
    "precision": "", "backend": "lc0", "batch": 96, "throughput": 91984.9, "unit": "nps",
}  # fmt: skip
# https://github.com/LeelaChessZero/lc0/pull/1101
CHESS = ((97, 65376.4), (96, 91984.9), (192, 101279), (193, 81690.4))


def test_published_cliffs_are_named_by_the_law_of_waves(tmp_path):
    """At 97 and 193 boards on 48 SMs, in whatever order the rows stand; from 97 to 192 is no neighbour."""
    rows = ({"batch": n, "throughput": nps} for n, nps in CHESS)
    write(tmp_path / "batch_sweeps_game_nets.csv", SWEEP, *rows)
    found = cliffs(tmp_path)
    assert found == {
        "pairs": 2,
        "named_and_measured": ["RTX 2080 Super, 96 to 97", "RTX 2080 Super, 192 to 193"],
        "only_measured": [],
        "only_named": [],
    }


NETWORK = {
    "gpu_name_reported": "Tesla P100-PCIE-16GB", "n_gpus": 1, "model": "resnet18", "mode": "inference",
    "precision": "fp32", "batch_total": 12, "median_ms": 1.0,
}  # fmt: skip


def test_whole_networks_are_compared_with_what_was_published(tmp_path):
    """Three times as long as predicted is two thirds too little; what is no such network on one GPU is left out."""
    want = predict_step(models.resolve("resnet18"), [12], find_device("Tesla P100-PCIE-16GB")).seconds[0] * 1e3
    write(
        tmp_path / "pytorch_gpu_benchmark_ryujaehun.csv", NETWORK,
        {"median_ms": want}, {"median_ms": 3 * want}, {"median_ms": 9 * want},  # repeats, of which the median counts
        {"n_gpus": 2}, {"model": "shufflenet"}, {"gpu_name_reported": "Voodoo 2"}, {"precision": "fp64"},
        {"mode": "training", "model": "VGG16", "gpu_name_reported": "GeForce GTX 1080 Ti"},
    )  # fmt: skip
    found = networks(tmp_path)
    assert found.keys() == {"networks, inference, float32", "networks, training, float32"}
    (one, other) = found.values()
    assert one == {"cases": 1, "mean_error": 66.7, "bias_of_network": -66.7, "inside_interval": 0.0}
    assert (other["cases"], other["inside_interval"]) == (1, 0.0)


@pytest.fixture
def refitted(monkeypatch):
    """Models fitted anew are right but for a tenth too much, without a GPU for a fifth; what was fitted."""
    found = {}

    def cross_validated(rows, *, seed):
        found["shapes"] = rows
        return 1.1 * rows.seconds, 1.3 * rows.seconds

    def gpu_left_out(rows, *, seed):
        found["gpus"] = rows
        return np.where(rows.gpu == V100, np.nan, 1.2 * rows.seconds)

    monkeypatch.setattr(fitting, "cross_validated", cross_validated)
    monkeypatch.setattr(fitting, "gpu_left_out", gpu_left_out)
    return found


def test_rows_that_were_fitted_are_predicted_anew_and_others_by_the_model(refitted):
    """Fitted rows never meet the model that saw them; of held-out rows those of unknown GPUs are apart."""
    rows = rows_of(batches=(4, 8), factors={**TWO, XP: (1.0, 1.0)})
    known = rows.work.n == 4
    # The model itself, which knows two GPUs, has all constants right: on what it is asked it makes no error.
    model = model_of(TWO, sd=0.1, unseen_sd=0.2)
    rows = attrs.evolve(rows, seconds=np.where(known, 1.0, rows.seconds))
    found = score_source(rows, model, known, seed=0)
    assert len(refitted["shapes"]) == len(refitted["gpus"]) == known.sum() == 48
    assert set(refitted["shapes"].work.n) == {4}
    scores = {name: (one["rows"], one["mean"]) for name, one in found.items() if "mean" in one}
    of_model = fitting.predict(model, rows.take(~known))
    assert of_model == pytest.approx(rows.seconds[~known], rel=1e-9)
    assert scores == {
        "neusight, unseen shapes": (48, 10.0),
        "neusight, unseen shapes, arithmetic alone": (48, 30.0),
        "neusight, unseen shapes, roofline": scores["neusight, unseen shapes, roofline"],
        "neusight, unseen GPU": (32, 20.0),
        f"neusight, unseen GPU, {P100}": (16, 20.0),
        f"neusight, unseen GPU, {XP}": (16, 20.0),
        "neusight, unseen GPU, 10 anchors": scores["neusight, unseen GPU, 10 anchors"],
        "neusight, unseen shapes, held out": (32, 0.0),
        "neusight, unseen shapes, held out, roofline": scores["neusight, unseen shapes, held out, roofline"],
        "neusight, unseen GPU, held out": (16, 0.0),
        f"neusight, unseen GPU, held out, {XP}": (16, 0.0),
        "neusight, unseen GPU, held out, 10 anchors": (16, 0.0),
    }
    assert scores["neusight, unseen GPU, 10 anchors"][1] < 20


def products(folder, results):
    """Twelve products of a V100 and a P100 each, of which those of the V100 were fitted; a model that knows it."""
    changes = [
        {"gpu": gpu, "m": 512 * m, "n": n, "k": 1024, "a_t": "T", "time_ms": 0.1 * m}
        for gpu in ("Tesla V100", "Tesla P100") for m in (1, 2, 3) for n in (16, 32, 64, 128)
    ]  # fmt: skip
    write(folder / "deepbench_gemm.csv", GEMM_ROW, *changes)
    (rows,) = score_predictor.published.load(folder, GEMM)
    of = rows.gpu == find_device("Tesla V100").slug
    np.savez_compressed(results / "rows.npz", fitted=fingerprints(rows.take(of)))
    model_of({str(rows.gpu[of][0]): (1.0, 1.0)}, name=GEMM, sd=0.1, unseen_sd=0.2).save(results / "deepbench_gemm.npz")


def test_the_command_scores_what_the_folder_has(tmp_path, monkeypatch, capsys, refitted):
    """Fitted rows are known by their numbers; scores of other sources stay."""
    monkeypatch.setattr(score_predictor, "RESULTS", tmp_path)
    monkeypatch.setattr(score_predictor, "path_of", lambda name: tmp_path / f"{name.replace(' ', '_')}.npz")
    out = tmp_path / "scores.json"
    out.write_text(json.dumps({"scores": {"neusight, unseen shapes": {"mean": 1.0}}}))
    products(tmp_path, tmp_path)
    monkeypatch.setattr(sys, "argv", ["score", "--data", str(tmp_path), "--out", str(out), "--only", GEMM])
    score_predictor.main()
    found = json.loads(out.read_text())
    assert found["benchmark"] == "predictor"
    assert found["scores"]["neusight, unseen shapes"] == {"mean": 1.0}  # of a source that was not asked for
    assert set(refitted["shapes"].gpu) == {find_device("Tesla V100").slug}
    assert found["scores"]["deepbench gemm, unseen shapes"]["rows"] == 12
    assert found["scores"]["deepbench gemm, unseen GPU, held out"]["rows"] == 12
    assert "deepbench gemm, unseen shapes, held out" not in found["scores"]
    assert "deepbench gemm, unseen shapes: 10.0" in capsys.readouterr().out
