"""What a prediction looks like in a table and in a picture."""

from __future__ import annotations

import pytest

from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
from cubatch.measure.records import Candidate
from cubatch.report.grid import WIDTH
from cubatch.report.plots import forecast_curves
from cubatch.report.tables import forecast as forecast_table
from cubatch.units import format_percent, format_seconds
from tests.unit.predictions import fastest_first, lines_of, one_pass, predicted
from tests.unit.tables import rows_of

# 64 samples take 31.25 ms.
LATE = {"max_batch_size": None, "memory_bytes": 2**30, "latency_seconds": 0.03}

# --- tables -------------------------------------------------------------------------------------------------------


def test_above_the_roofline_a_note_says_how_that_can_be():
    """Winograd's algorithm needs fewer operations, where it runs; with nothing above nothing is explained."""
    for algorithm, fraction, told in (
        ("winograd 4x4 64x64", 0.9, False),
        ("winograd 4x4 64x64", 1.2, True),
        ("fft 32", 1.2, True),
        ("conv2d_fprop_implicit_gemm_f16_mma_256x128x32_v8", 1.2, False),
    ):
        found = predicted(passes=(one_pass("fc", 1, 1, algorithm=algorithm),), roofline_seconds={32: fraction * 0.016})
        text = forecast_table.prediction(found).text()
        assert (format_percent(fraction) in text, "fewer operations" in text) == (True, told)


@pytest.mark.parametrize("factor", [1.001, 1.25, 3.0])
def test_no_candidate_takes_two_lines(factor):
    """However narrow or wide the intervals are, the reasons get what is left of the line."""
    reasons = ("0.75 of the memory limit", "coulom n=16", "crest 12 of layer1.0.conv1")
    found = predicted(factor=factor, limits=LATE, candidates=tuple(Candidate(n, reasons) for n in (16, 32, 64, 256)))
    shown = lines_of(forecast_table.prediction(found).text())
    assert len(shown) == 4
    assert max(map(len, shown)) <= WIDTH


@pytest.mark.parametrize("width", [80, 110])
def test_on_a_narrow_line_columns_go_before_lines_wrap(width):
    """Of GPUs side by side and of passes, who and the figure that decides stay, a line each."""
    found = [predicted(name) for name in ("Workstation GPU", "Other")]
    grid = forecast_table.compared(fastest_first(found), {"none": "why"})
    columns = grid.shown(width).columns
    assert {"device", "batch", "samples/s", "90 % interval", "status"} <= set(columns)
    assert ("of fastest" in columns) == (width == 110)
    passes = [
        one_pass("block2.downsample.conv", 0.01, 0.6, algorithm="gemm_f16_hopper_128x256x64"),
        one_pass("fc", 1, 0.4),
    ]
    explained = forecast_table.layers(predicted(passes=passes))
    columns = explained.shown(width).columns
    assert {"layer", "pass", "time", "runs as", "status"} <= set(columns)
    assert ("bound by" in columns) == (width == 110)
    for content, rows in ((grid, 3), (explained, 2)):
        shown = lines_of(content.text(width))
        assert len(shown) == rows
        assert max(map(len, shown)) <= width


def test_explain_adds_equal_passes_and_spreads_their_blocks():
    """Two equal passes are one line; 100 blocks on 80 SMs are 2 on the busiest, 62.5 % of their time, 160 all of it."""
    twice = [one_pass("conv1", 0.004, 0.25), one_pass("conv2", 0.004, 0.25), one_pass("conv3", 0.0064, 0.4, blocks=160)]
    rest = [one_pass(f"relu{n}", 0.0008, 0.05, algorithm="bytes", blocks=None, bound="memory") for n in range(2)]
    grid = forecast_table.layers(predicted(passes=[*rest, *reversed(twice)]))
    rows = rows_of(grid)
    assert [(row["layer"], row["time"], row["share"]) for row in rows] == [
        ("conv2, +1", "8.00 ms", "50.0 %"), ("conv3", "6.40 ms", "40.0 %"), ("relu0, +1", "1.60 ms", "10.0 %"),
    ]  # fmt: skip
    assert [(row["blocks"], row["busiest SM"], row["fill"]) for row in rows] == [
        (100, 2, "62.5 %"), (160, 2, "100 %"), (None, None, None),
    ]  # fmt: skip
    assert [row["runs as"] for row in rows] == ["128x128", "128x128", "bytes"]


def test_explain_sums_up_what_hardly_counts():
    """Beyond 95 % of the time, or 24 lines, passes are one line for products and one for bytes, and nothing is lost."""
    passes = [one_pass(f"conv{n}", 2.0**-n, 2.0**-n) for n in range(1, 11)]
    rows = rows_of(forecast_table.layers(predicted(passes=passes)))
    assert [row["layer"] for row in rows] == ["conv1", "conv2", "conv3", "conv4", "conv5", "5 more"]
    assert (rows[-1]["time"], rows[-1]["share"]) == (format_seconds(2**-5 - 2**-10), format_percent(2**-5 - 2**-10))
    assert (rows[-1]["pass"], rows[-1]["runs as"]) == (None, "products")
    passes = [one_pass(f"conv{n}", 1 + n / 1024, 1 / 40) for n in range(30)]
    passes += [one_pass(f"relu{n}", 0.5 + n / 1024, 1 / 40, algorithm="bytes", blocks=None) for n in range(10)]
    rows = rows_of(forecast_table.layers(predicted(passes=passes)))
    assert [(row["layer"], row["share"], row["runs as"]) for row in rows[24:]] == [
        ("6 more", format_percent(6 / 40), "products"), ("10 more", format_percent(10 / 40), "bytes"),
    ]  # fmt: skip


def test_kernels_of_ours_are_named_by_family_and_tile():
    """The JSON holds the whole name, which is too long for a line."""
    for one in variant.kernels():
        if one.tile is not None:
            found = predicted(passes=[one_pass("fc", 1.0, 1.0, algorithm=one.name)])
            (row,) = rows_of(forecast_table.layers(found))
            assert row["runs as"] == f"{one.family} {one.tile_name}"


def test_by_latency_the_shortest_step_comes_first():
    """What is ordered, and what of the fastest means, is the objective's."""
    quick = predicted("Quick", objective="latency", batch_size=16, rates=((16, 1000), (64, 1000)))
    slow = predicted("Slow", objective="latency", batch_size=64, rates=((16, 1000), (64, 2000)))
    grid = forecast_table.compared(fastest_first([slow, quick]), {})
    assert [(row["device"], row["of fastest"]) for row in rows_of(grid)] == [("quick", "100 %"), ("slow", "50.0 %")]
    assert "quick is the fastest, 16.0 ms with batch 16, 2.00 times as fast as slow" in grid.notes[0]


def test_the_cheapest_is_certain_only_beyond_the_interval_of_the_ratio():
    """1.32 times the cost is within it, 1.33 times is not; a single price is compared with none."""
    found = fastest_first([predicted(name, rates=((32, rate),)) for name, rate in (("A", 2000), ("B", 1550))])

    def sentence(forecasts=found, **costs):
        return forecast_table.compared(forecasts, {}, costs=costs).notes[1]

    assert sentence(a=1.32, b=1.0) == (
        "The cheapest at these prices may be b: the model cannot tell its cost from that of a."
    )
    assert sentence(a=1.33, b=1.0) == "The cheapest at these prices is b."
    assert sentence(b=1.0) == "Only b has a price."
    assert "price" not in sentence(found[:1], a=1.0)


def test_gpus_that_the_model_cannot_tell_apart_are_marked():
    """
    Each rate is known to a factor of 1.25, and a fifth of the variance is common: their ratio is to one of 1.33.

    1550 and 2000 samples/s are within it; 1490 is not, though its interval meets that of 2000.
    """
    found = [predicted(name, rates=((32, rate),)) for name, rate in (("A", 2000), ("B", 1550), ("C", 1490))]
    grid = forecast_table.compared(fastest_first(found), {})
    assert [row[0] for row in grid.rows] == ["→", "≈", ""]
    assert grid.notes[0].endswith("The model cannot tell it from b.")
    apart = forecast_table.compared(fastest_first([found[0], found[2]]), {})
    assert apart.notes[0].endswith("is the fastest, 2 000 samples/s with batch 32, 1.34 times as fast as c.")
    assert grid.marked == {0}
    assert "≈" in grid.notes[-1]
    assert "≈" not in forecast_table.compared(found[:1], {}).notes[-1]


def test_what_bounds_a_gpu_is_what_most_time_lies_under():
    """0.625 + 0.03125 under the roof of compute."""
    (row,) = rows_of(forecast_table.compared([predicted()], {}))
    assert row["bound by"] == f"compute {format_percent(0.65625)}"
    passes = [one_pass("conv", 0.9, 0.9, bound=None), one_pass("fc", 0.1, 0.1, bound="memory")]
    (row,) = rows_of(forecast_table.compared([predicted(passes=passes)], {}))
    assert row["bound by"] == "memory 10.0 %"  # of the rest nobody knows


def test_gpus_side_by_side_keep_their_notes():
    """Each is said once, after the GPUs that it holds for unless it holds for all, whatever a GPU is called in it."""
    found = [
        predicted(name, notes=["Of all.", *([f"No measurement of {name}."] if name != "A" else [])])
        for name in ("A", "B", "C")
    ]
    told = forecast_table.compared(found, {}).notes[1]
    assert told == ("Of all.", "b, c: No measurement of this GPU.")
    assert all(isinstance(note, str) for note in forecast_table.compared([predicted(notes=[])], {}).notes)


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw predictions and give the figure's axes and its legend's texts."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def draw(*found):
        forecast_curves.curves(found, tmp_path / "a.png")
        (axes,) = figures[-1].axes
        return axes, [text.get_text() for text in figures[-1].legends[0].get_texts()]

    return draw


def test_the_picture_holds_curve_band_answer_and_limit(drawn):
    """In data coordinates: the rates, their intervals, the star, and the line at the largest batch that fits."""
    axes, legend = drawn(predicted())
    curve = axes.lines[0]
    assert [*zip(curve.get_xdata(), curve.get_ydata(), strict=True)] == [(16, 1000), (32, 2000), (64, 2048)]
    corners = {tuple(corner) for corner in axes.collections[0].get_paths()[0].vertices}
    assert {(16, 800), (16, 1250), (32, 1600), (32, 2500), (64, 1638.4), (64, 2560)} <= corners
    (star,) = (line for line in axes.lines if line.get_marker() == "*")
    assert (*star.get_xdata(), *star.get_ydata()) == (32, 2000)
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [200]
    assert legend == ["Test GPU; recommended: batch 32: 2 000 samples/s; up to 200 fit in 1.00 GiB"]


def test_the_picture_says_that_it_is_predicted(drawn):
    """A picture travels without its caption: the title and the axis say it."""
    axes, _ = drawn(predicted())
    assert axes.get_title(loc="left") == "Predicted: tiny-net, samples per second by batch size"
    assert axes.get_ylabel() == "samples/s (predicted)"
    assert "Test GPU, training, float32, library vendor" in axes.texts[0].get_text()


def test_every_gpu_has_a_curve_in_a_look_of_its_own(drawn):
    """More GPUs than colours get other dashes; the axis spans all of them."""
    found = [predicted(f"GPU {n}", rates=((2**n, 1000), (2 ** (n + 1), 1000 + n)), batch_size=2**n) for n in range(9)]
    axes, legend = drawn(*found)
    curves = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert len({(line.get_color(), line.get_linestyle()) for line in curves}) == len(legend) == 9
    low, high = axes.get_xlim()
    assert low < 1
    assert high > 2**9
    assert "GPU" not in axes.texts[0].get_text()


@pytest.mark.parametrize(("rate", "scale"), [(2000, "linear"), (40_000, "log")])
def test_gpus_far_apart_are_drawn_on_a_logarithmic_axis(drawn, rate, scale):
    """20 times as fast would leave the slower one on the floor."""
    axes, _ = drawn(predicted("A"), predicted("B", rates=((32, rate),)))
    assert axes.get_yscale() == scale


def test_sizes_over_the_latency_limit_are_hollow(drawn):
    """They have a predicted time, and cannot be the answer."""
    axes, _ = drawn(predicted(limits=LATE, fastest_batch_size=32))
    (hollow,) = (line for line in axes.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata()))
    assert list(hollow.get_xdata()) == [64]
    assert list(axes.lines[0].get_xdata()) == [16, 32]


def test_a_figure_that_cannot_be_written_says_so(tmp_path):
    """The folder went away after it was looked for."""
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgument, match="plot file"):
        forecast_curves.curves([predicted()], tmp_path / "no" / "a.png")
