"""A second rival is a function in RIVALS: whoever is there is timed and shown by name, and nothing else knows it."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest

from benchmarks.pages import gpu
from cubatch.bench import cases, figure, measure, records, rivals, tables
from cubatch.bench.contest import Contest
from cubatch.bench.rivals import Missing, Rival
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.unit import bench_fakes
from tests.unit.bench_fakes import World, enter

GEMM = cases.gemm(70, 50, 30)
CONV = attrs.evolve(cases.of_layer(layers.Conv2d(h=6, w=5, c=4, k=3, r=3, s=3), Pass.FPROP, 2), layers=("resnet50/a",))


@pytest.fixture
def world(monkeypatch):
    """Ours takes 1 ms, the vendor 0.9, the other 2 and no convolutions."""

    def other(case, module, *, benchmark):
        del module, benchmark
        if case.operation != "linear":
            return Missing("it only multiplies")

        def bind(arrays):
            def step():
                here.launched.append("other")
                np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])

            return step

        return Rival("other 1.0", bind)

    here = enter(World(), monkeypatch)
    here.seconds = {"vendor": 0.9e-3, "other": 2e-3}
    monkeypatch.setattr(rivals, "_torch", lambda: None)
    monkeypatch.setitem(rivals.RIVALS, "other", other)
    return here


@pytest.fixture
def results(world):
    """A product that both rivals do, and a convolution that none does."""
    return [measure.time_case(case, world.target(), Contest(world), seconds=10.0) for case in (GEMM, CONV)]


def test_every_rival_has_the_name_it_is_listed_by(world):
    """Its key heads its columns, whoever made it."""
    del world
    assert [each.name for case in (GEMM, CONV) for each in rivals.rivals(case, np)] == ["vendor", "other"] * 2


def test_ours_are_compared_with_each_in_the_same_rounds(results):
    """The slower of two rivals is not dropped: they do not compete with each other."""
    product, convolution = results
    assert [(entry.name, entry.side, entry.status) for entry in product.entries[1:]] == [
        ("numpy.matmul", "vendor", "ok"), ("other 1.0", "other", "ok"),
    ]  # fmt: skip
    assert {name: entry.seconds for name, entry in product.times.items()} == {
        "ours": 1e-3, "vendor": 0.9e-3, "other": 2e-3,
    }  # fmt: skip
    assert {name: ratio.value for name, ratio in product.best.ratios.items()} == pytest.approx(
        {"vendor": 0.9, "other": 2}
    )
    assert product.best.ratios["other"].interval == pytest.approx((2, 2))
    assert product.no_rival == ""
    assert dict(convolution.missing) == {"vendor": "PyTorch with CUDA is not installed", "other": "it only multiplies"}
    assert convolution.no_rival == "PyTorch with CUDA is not installed; it only multiplies"


def test_the_tables_have_its_columns(results):
    """A ratio for each way; time, ratio and a sum for each network."""
    assert tables.entries(results, title="t").columns[-3:] == ("ratio", "ratio to other", "note")
    summary = tables.summary(results, title="t")
    assert summary.columns[-5:] == ("vendor", "ratio", "other", "ratio to other", "note")
    assert [*summary.rows[0][-5:-1]] == ["900 µs", "0.90 (0.90 to 0.90)", "2.00 ms", "2.00 (2.00 to 2.00)"]
    notes = " ".join(summary.notes)
    assert "Where the vendor was timed too: 1.00 ms on ours, 900 µs on the vendor's; " in notes
    assert "Where other was timed too: 1.00 ms on ours, 2.00 ms on other's; " in notes
    assert "No other for some: it only multiplies." in notes
    assert "“ratio” is the vendor's time over ours" in notes
    assert "“ratio to other” is other's time over ours" in notes
    assert summary.text()


def test_the_json_has_it_beside_what_was_always_there(results):
    """The ratio of old is still that to the vendor."""
    facts = json.loads(json.dumps(results[0].to_mapping(), allow_nan=False))
    ours, *others = facts["entries"]
    assert ours["ratio"] == ours["ratios"]["vendor"]["value"] == pytest.approx(0.9)
    assert ours["ratios"]["other"] == {"value": pytest.approx(2), "interval": [pytest.approx(2)] * 2}
    assert [(entry["side"], entry["ratio"], entry["ratios"]) for entry in others] == [
        ("vendor", None, {}), ("other", None, {}),
    ]  # fmt: skip
    assert (facts["no_rival"], facts["missing"]) == ("", {})


def test_the_figure_has_its_bars(results, tmp_path):
    """As long as the share of the roofline that it reaches."""
    pytest.importorskip("matplotlib")
    floor = results[0].roofline_seconds
    assert figure.shares(results[:1]) == {
        name: {0: pytest.approx(floor / seconds)}
        for name, seconds in (("ours", 1e-3), ("vendor", 0.9e-3), ("other", 2e-3))
    }
    figure.rates(results, tmp_path / "f.svg", title="bench")
    assert "<!-- other -->" in (tmp_path / "f.svg").read_text()


def test_the_pages_of_a_pass_have_its_columns(results):
    """Those of an earlier pass, which knew the vendor alone, stay as they were."""
    items = [{"name": "x", "status": "ok", "result": result.to_mapping()} for result in results]
    passed = json.loads(json.dumps(page_of(items[:1])))
    assert "| cuBLAS | ratio | other | ratio to other |" in gpu.gemm(passed)
    assert "| 900 µs | 0.90 (0.90 to 0.90) | 2.00 ms | 2.00 (2.00 to 2.00) |" in gpu.gemm(passed)
    assert "| gemm | float32 | fake | 1 | 0.900 | 2.000 | 1 |" in gpu.families(passed)
    for entry in passed["stages"][0]["items"][0]["result"]["entries"]:
        del entry["ratios"]
    assert "| 900 µs | 0.90 (0.90 to 0.90) |\n" in gpu.gemm(passed) + "\n"


def test_who_is_not_asked_for_is_not_called(world, monkeypatch):
    """No rival of any name, and the reason."""
    monkeypatch.setitem(rivals.RIVALS, "other", None)
    result = measure.time_case(GEMM, world.target(), Contest(world), with_rivals=False)
    assert dict(result.missing) == {"vendor": records.NOT_ASKED, "other": records.NOT_ASKED}
    assert result.no_rival == "not asked for"


def page_of(items):
    """A pass of products on a device that there is not."""
    return {
        "schema": 1, "date": "2000-01-01", "commit": "0000000", "device": None, "environment": None,
        "stages": [{"name": "gemm", "status": "ok", "items": items, "skipped": []}],
    }  # fmt: skip


def test_whoever_adds_a_rival_can_see_its_columns_without_a_gpu(world, capsys):
    """By running the module of fakes, as the recipe says."""
    del world
    bench_fakes.main()
    shown = capsys.readouterr().out
    assert "ratio to other" in shown
    assert "No other for some: it only multiplies." in " ".join(shown.split())
