"""The HTML page of a tuning result."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

from cubatch.report.page import html
from cubatch.report.plots import style
from tests.unit.predictions import predicted
from tests.unit.tuned import measurement, result_of, tuned


def test_the_page_says_why_beneath_the_table_and_sizes_of_one_reason_together():
    """A sentence in a column of the table would make its row twenty lines tall."""
    long = "RuntimeError: " + "can't allocate memory; " * 20
    failed = [measurement(n, status="error", stop_reason=long) for n in (512, 1024)]
    text = html(result_of(measurements=[*tuned()["measurements"], *failed]))
    table, beneath = text.split("<tbody>")[1].split("</tbody>")[0], text.split("</tbody></table></div>")[1]

    assert "allocate" not in table
    assert "needs 1.20 GiB" not in table
    assert beneath.count("512, 1024: error: RuntimeError") == 1
    assert "<li>256: out of memory: needs 1.20 GiB, 1.00 GiB may be used</li>" in beneath


def test_the_page_tells_what_the_gpu_was_like_where_that_is_known():
    """The hottest size, not the answer, with its size; the answer's own power; without NVML not even the heading."""
    hot = measurement(128, 0.04, temperature_celsius=71.0, power_watts=500.0)
    cool = measurement(64, 0.02, temperature_celsius=61.0, power_watts=412.4, utilization_percent=97.0)
    text = html(result_of(measurements=[cool, hot]))

    for told in ("71 °C, at batch size 128", "412 W", "97 % of the time"):
        assert told in text
    assert "500 W" not in text
    assert "fullest" not in text
    assert "While measured" not in html(result_of())


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that every element is closed."""

    VOID = frozenset({"meta", "img"})

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


def figure_of(text):
    """The SVG of the page's only figure, and what it says for readers who cannot see it."""
    ((url, alt),) = re.findall('<img class="figure" src="data:image/svg.xml;base64,([^"]*)" alt="([^"]*)">', text)
    return base64.b64decode(url).decode(), alt


def test_a_page_has_the_figure_of_the_result_as_an_image():
    """With the recommendation in it; of one size nothing is the best, and an empty result has a page all the same."""
    svg, alt = figure_of(html(result_of()))
    assert "recommended: 64" in svg
    assert alt == "tiny-net, samples per second by batch size"
    assert svg == figure_of(html(result_of()))[0]
    nothing = {"batch_size": None, "fastest_batch_size": None, "tied_with": [], "decided_by": None}
    for measurements in ([], [measurement(32, 0.016), measurement(64, status="interrupted")]):
        assert "recommended" not in figure_of(html(result_of(measurements=measurements, **nothing)))[0]


def test_without_matplotlib_a_page_holds_all_but_the_figure(monkeypatch):
    """A line says what to install; reasons and table are there."""
    monkeypatch.setattr(style, "is_installed", lambda: False)
    text = html(result_of())
    assert "<img" not in text
    assert "pip install matplotlib" in text
    assert "The curve is flat from batch 64 on." in text
    assert "crest 2 of conv3_2" in text


def test_a_prediction_is_called_one_on_the_page():
    """In the warning and at the axis, and nothing is said to have been measured."""
    text = html(predicted())
    assert 'class="predicted"' in text
    assert "(predicted)" in figure_of(text)[0]
    assert "measured)" not in text.replace("not measured)", "")


def test_the_page_stands_alone_and_holds_the_reasons_the_curve_and_every_size():
    """No script, nothing fetched: the file can be mailed."""
    text = html(result_of())
    page = Page(text)

    assert not page.open
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    fetched = [attrs.get("src") or attrs.get("href") for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert all(url.startswith("data:") for url in fetched)
    assert "url(" not in text
    assert "@import" not in text
    assert "The curve is flat from batch 64 on." in page.text
    assert "needs 1.20 GiB, 1.00 GiB may be used" in page.text
    assert "color-scheme: light dark" in text
