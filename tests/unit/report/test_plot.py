"""Figures: the file is there, in its format, and says what it must."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.report import plot
from cubatch.report.plots import style
from tests.unit.tuned import measurement, result_of

pytest.importorskip("matplotlib")

MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".pdf": b"%PDF", ".svg": b"<?xml"}


def texts(path):
    """Every text of an SVG that Matplotlib wrote; it draws letters as paths and names them in comments."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))  # noqa: S314 - our own file
    root = ET.parse(path, parser).getroot()  # noqa: S314
    return [node.text.strip() for node in root.iter() if node.tag is ET.Comment]


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_the_ending_chooses_the_format(tmp_path, suffix):
    """Each of the three is a file of its kind, and not an empty one."""
    path = tmp_path / f"curve{suffix}"

    plot.tuning_curve(result_of(), path)

    assert path.read_bytes().startswith(MAGIC[suffix])
    assert path.stat().st_size > 5000


def test_the_figure_names_what_was_measured_where_and_the_answer(tmp_path):
    """Model, device, mode, dtype, library and date are in the title; the batch sizes are on the axis."""
    path = tmp_path / "curve.svg"

    plot.tuning_curve(result_of(), path)

    shown = texts(path)
    assert "tiny-net, samples per second by batch size" in shown
    assert "Test GPU, training, float32, library im2col, 2026-11-20" in shown
    assert "batch 64: 3 000 samples/s" in shown
    assert {
        "16",
        "32",
        "64",
        "128",
        "256",
        "recommended: 64",
        "fastest: 128",
        "out of memory",
        "tied with the fastest",
    } <= set(shown)
    assert "within 1 % of the best" in shown
    assert "largest that fits in 1.00 GiB: 200" in shown
    assert not [text for text in shown if "redicted" in text]


@pytest.mark.parametrize(
    "result",
    [
        result_of(measurements=[], batch_size=None, fastest_batch_size=None),
        result_of(measurements=[measurement(7, 0.1)], batch_size=7, fastest_batch_size=7, tied_with=[]),
        result_of(measurements=[measurement(7, status="not_run")], batch_size=None, fastest_batch_size=None),
        result_of(objective="latency", fastest_batch_size=16, batch_size=16),
        result_of(objective="latency", measurements=[measurement(2**k, 1e-4 * 2**k) for k in range(10)]),
    ],
    ids=["nothing", "one size", "none ran", "latency", "latency over decades"],
)
def test_a_result_with_little_in_it_is_drawn_all_the_same(tmp_path, result):
    """Partial results come from interrupted runs."""
    plot.tuning_curve(result, tmp_path / "curve.png")

    assert (tmp_path / "curve.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["curve", "curve.gif", "missing-folder/curve.png"])
def test_a_path_that_cannot_be_drawn_to_is_refused(tmp_path, name):
    """Bad endings, and folders that are not there, name the path."""
    with pytest.raises(InvalidArgument) as caught:
        plot.tuning_curve(result_of(), tmp_path / name)

    assert name in str(caught.value)


def test_without_matplotlib_the_install_line_is_given(tmp_path, monkeypatch):
    """The plot extra is optional; its absence is an error of ours with the remedy."""
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency) as caught:
        style.check(tmp_path / "curve.png")

    assert "pip install '.[plot]'" in str(caught.value)


def test_a_backend_that_matplotlib_refuses_is_an_argument_of_the_user():
    """Matplotlib checks the variable when it is imported, and raises a bare ValueError."""
    check = "from cubatch.report.plots import style; style.check('curve.png')"
    env = {**os.environ, "MPLBACKEND": "nonsense"}
    done = subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "InvalidArgument: MPLBACKEND must be" in done.stderr.splitlines()[-1]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw a result and give the figure's axes."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def draw(result):
        plot.tuning_curve(result, tmp_path / "a.png")
        (axes,) = figures[-1].axes
        return axes

    return draw


def test_batch_sizes_are_drawn_by_powers_of_two_and_rates_from_zero(drawn):
    """A curve that began at its lowest rate would look steeper than it is; the answer's label has room above."""
    axes = drawn(result_of())
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["16", "32", "64", "128", "256"]
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 1.02 * 3020
    assert axes.yaxis.get_major_formatter()(3000, 0) == "3 000"


def test_latencies_that_span_decades_are_drawn_by_powers(drawn):
    """From 0.1 to 51 ms the small ones would lie on the floor; from 16 to 42 ms nothing does."""
    far = [measurement(2**k, 1e-4 * 2**k) for k in range(10)]
    assert drawn(result_of(objective="latency", measurements=far)).get_yscale() == "log"
    assert drawn(result_of(objective="latency", fastest_batch_size=16)).get_yscale() == "linear"
