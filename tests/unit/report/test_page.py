"""The HTML page of a tuning result."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

from cubatch.report.page import html
from cubatch.report.plots import style
from tests.unit.predictions import predicted
from tests.unit.tuned import measurement, result_of


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


def test_the_page_escapes_every_text_that_comes_from_outside():
    """A model name, a reason, a device, a setting: markup in them stays text."""
    bad = "<script>alert('x')</script>&\""
    result = result_of(
        spec={"name": bad}, mode=bad, library=bad, reasons=[bad], decided_by="plateau", created=bad,
        device={"name": bad, "kind": bad}, environment={bad: bad},
        measurements=[measurement(1, 1.0, reasons=[bad]), measurement(8, status="error", stop_reason=bad)],
        batch_size=1, fastest_batch_size=1,
    )  # fmt: skip
    page = Page(html(result))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(bad) >= 8
