"""The HTML page of a tuning result."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from cubatch.report import answer as words
from cubatch.report.page import html
from tests.unit.tuned import about, measurement, tuned


def test_the_page_says_why_beneath_the_table_and_sizes_of_one_reason_together():
    """A sentence in a column of the table would make its row twenty lines tall."""
    long = "RuntimeError: " + "can't allocate memory; " * 20
    failed = [measurement(n, status="error", stop_reason=long) for n in (512, 1024)]
    many = measurement(2048, 2.0, reasons=[f"crest {n} of layer{n}.0.convolution" for n in range(1, 9)])
    text = html(tuned(measurements=[*tuned()["measurements"], *failed, many]))
    table, beneath = text.split("<tbody>")[1].split("</tbody>")[0], text.split("</tbody></table></div>")[1]

    assert "allocate" not in table
    assert "needs 1.20 GiB" not in table
    assert beneath.count("512, 1024: error: RuntimeError") == 1
    assert "<li>256: out of memory: needs 1.20 GiB, 1.00 GiB may be used</li>" in beneath
    assert max(len(cell) for cell in re.findall("<td[^>]*>(.*?)</td>", table)) <= 80


def test_the_page_tells_what_the_gpu_was_like_where_that_is_known():
    """The hottest size, not the answer, with its size; the answer's own power; without NVML not even the heading."""
    hot = measurement(128, 0.04, temperature_celsius=71.0, power_watts=500.0)
    cool = measurement(64, 0.02, temperature_celsius=61.0, power_watts=412.4, utilization_percent=97.0)
    text = html(tuned(measurements=[cool, hot]))

    for told in ("71 °C, at batch size 128", "412 W", "97 % of the time"):
        assert told in text
    assert "500 W" not in text
    assert "fullest" not in text
    assert "While measured" not in html(tuned())


def test_a_phone_gets_a_figure_of_its_own_whose_ticks_do_not_touch():
    """Shown at 390 pixels its letters have 13, and no two numbers beneath the axis overlap."""
    text = html(tuned(measurements=[measurement(2**k, 2**k / 1000) for k in range(18)], batch_size=64))
    desk, phone = (text.split(f'<svg class="{style}"')[1].split("</svg>")[0] for style in ("wide-figure", "narrow"))
    ticks = re.findall(r'<text class="" x="([\d.]+)" y="307.0" text-anchor="middle">(\d+)</text>', phone)

    assert 'viewBox="0 0 400 340"' in phone
    assert desk.count("<circle") == phone.count("<circle")
    assert len(ticks) >= 4
    for (left, before), (right, after) in itertools.pairwise(ticks):
        assert float(right) - float(left) >= 7 * (len(before) + len(after)) / 2


def test_the_line_joins_all_that_was_measured():
    """Also what was dropped: a search that drops most of what it read would leave loose dots."""
    paths = re.findall(r'<polyline class="line" points="([^"]*)"', html(tuned()))

    assert [len(path.split()) for path in paths] == [4, 4]


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that every element is closed."""

    VOID = frozenset({"meta", "line", "rect", "circle", "path", "polygon", "polyline"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Open it."""
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Note it; it is closed already."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        """Close it, and the void elements in it."""
        while self.open[-1] != tag:
            assert self.open.pop() in self.VOID
        self.open.pop()

    def handle_data(self, data):
        """Collect the text."""
        self.text += data


def test_what_has_no_row_and_why_stands_beneath_the_table():
    """As on a terminal: sizes ruled out share a line, whose reason is in it; more than three not tried another."""
    gone = [measurement(n, status="dropped", stop_reason="by 16 and 64") for n in (1, 2, 3)]
    page = Page(html(tuned(measurements=[*gone, *tuned()["measurements"]])))
    assert "3 sizes are not expected to be better: 1, 2, 3, by their neighbours' readings." in page.text
    assert "by 16 and 64" not in page.text
    for sizes, is_folded in (((512, 1024, 2048), False), ((512, 1024, 2048, 4096), True)):
        untried = [measurement(n, status="not_run", stop_reason=f"{n} would take too long") for n in sizes]
        page = Page(html(tuned(measurements=[*tuned()["measurements"], *untried])))
        assert ("512: not run: 512 would take too long" in page.text) != is_folded


def test_a_result_without_a_comparison_has_no_star_and_an_empty_one_no_curve():
    """Of one size nothing is the best; interrupted before the first timing there is a page all the same."""
    sole = tuned(measurements=[measurement(1, 11.5), measurement(2, status="not_run")], batch_size=1,
                 fastest_batch_size=1, tied_with=[], decided_by="budget")  # fmt: skip
    assert 'class="star"' in html(tuned())
    assert 'class="star"' not in html(sole)
    assert not {"★", "▲"} & set(html(sole))
    nothing = {"batch_size": None, "fastest_batch_size": None, "tied_with": [], "decided_by": None}
    for measurements in ([], [measurement(32, 0.016), measurement(64, status="interrupted")]):
        text = html(tuned(measurements=measurements, **nothing))
        assert words.answer(tuned(measurements=measurements, **nothing)) in text
        assert "<svg" in text


def test_a_prediction_is_called_one_on_the_page():
    """In the warning and at the axis, and nothing is said to have been measured."""
    text = html(tuned(predicted=True))
    assert 'class="predicted"' in text
    assert "(predicted)" in text
    assert "measured)" not in text.replace("not measured)", "")


def test_a_tie_that_is_only_noise_has_no_ring():
    """Far behind and hardly known it is no equal of the fastest."""
    rates = {48: 500.0, 96: 1000.0, 128: 650.0}
    assert 'class="tie"' not in html(about(rates, wide=[128], tied_with=[128]))
    assert 'class="tie"' in html(about(rates, tied_with=[128]))


def test_the_page_stands_alone_and_holds_the_answer_the_curve_and_every_size():
    """No script, nothing fetched: the file can be mailed; the four measured sizes are points, on desk and phone."""
    text = html(tuned())
    page = Page(text)

    assert not page.open
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert words.answer(tuned()) in page.text
    assert "The curve is flat from batch 64 on." in page.text
    assert "needs 1.20 GiB, 1.00 GiB may be used" in page.text
    assert sum(tag == "circle" and attrs["class"] in ("dot", "out") for tag, attrs in page.tags) == 2 * 4
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"launches": 660, "graph": True, "refusal": None}, "660, in one CUDA graph"),
        ({"launches": 660, "graph": False, "refusal": "no <room>"}, "660, one by one: no <room>"),
        ({"launches": None, "graph": False, "refusal": "by CuPy"}, "unknown, one by one: by CuPy"),
    ],
)
def test_the_page_says_how_a_step_was_launched(launch, said):
    """A row of what the run was made with."""
    page = Page(html(tuned(environment={"launch": launch})))
    assert "launches a step" in page.text
    assert said in page.text


def test_the_page_escapes_every_text_that_comes_from_outside():
    """A model name, a reason, a device: whatever they hold stays text."""
    bad = "<script>alert('x')</script>&\""
    result = tuned(
        spec={"name": bad}, mode=bad, library=bad, reasons=[bad], decided_by="plateau", created=bad,
        device={"name": bad, "kind": bad}, environment={bad: bad},
        measurements=[
            measurement(1, 1.0, reasons=[f"crest {bad}"]), measurement(2, 1e-3, reasons=[f"crest {bad}"]),
            measurement(4, 1.0, reasons=[bad]), measurement(8, status="error", stop_reason=bad),
        ],
        batch_size=4, fastest_batch_size=4,
    )  # fmt: skip
    page = Page(html(result))

    assert "script" not in {tag for tag, _ in page.tags}
    assert all(not re.search(r"^on|^alert", name) for _, attrs in page.tags for name in attrs)
    assert page.text.count(bad) >= 10
