"""What a notebook shows of each answer: the figures of its text, in an element that concerns nothing around it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import cubatch as cb

GPU = "titan-x-pascal"
NETWORK = cb.Network(name="<net>", input_shape=(8, 8, 3), layers=[cb.Conv2d(k=8, r=3, s=3, pad=1), cb.ReLU()])
SHOWN = {
    "result": lambda: cb.autotune(NETWORK, device="cpu", batch_sizes=[4, 32], budget=0.5, store=False, isolate=False),
    "forecast": lambda: cb.predict(NETWORK, device=GPU, batch_sizes=[8, 16]),
    "footprint": lambda: cb.footprint(NETWORK, batch_size=8, mode="training", device=GPU),
    "candidates": lambda: cb.candidates(NETWORK, device=GPU, batch_sizes=[8, 16]),
    "comparison": lambda: cb.compare(NETWORK, ["t4", "a40"], prices={"t4": 0.35}),
}


class Seen(HTMLParser):
    """The elements of an output, its rules of style, and the text of each cell of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.style, self._in = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note it."""
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        """Leave it."""
        self._in = ""

    def handle_data(self, data):
        """Collect the text of cells and the style."""
        if self._in == "style":
            self.style += data
        elif self._in in ("td", "th"):
            self.cells[-1] += data


class Printer:
    """Stands in for IPython's printer."""

    def __init__(self):
        self.shown = ""

    def text(self, text):
        """Collect it."""
        self.shown += text


@pytest.fixture(scope="module", params=SHOWN)
def answer(request):
    """An answer of each kind."""
    return SHOWN[request.param]()


def test_an_output_holds_what_the_text_says(answer):
    """Every figure of the text, which is what IPython prints in a terminal, is in a cell of its tables too."""
    printer = Printer()
    answer._repr_pretty_(printer, False)
    assert isinstance(answer, list) or printer.shown == str(answer)
    rows = re.findall(r"^(?:-+  )+-+\n((?:.+\n)+)", printer.shown, re.MULTILINE)
    tables = "".join(re.findall(r"<table><thead>.*?</table>", answer._repr_html_(), re.DOTALL))
    figures = re.findall(r"[\d.]+ (?:ms|µs|MiB|KiB)", "".join(rows))
    assert len(figures) >= 2
    assert set(figures) <= {*Seen(tables).cells}


def test_an_output_disturbs_no_notebook(answer):
    """No script, no id, nothing fetched, no heading; each rule is for what lies in an element of our class."""
    page = Seen(answer._repr_html_())
    assert page.tags[0] == ("div", {"class": "cubatch"})
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "h1", "h2", "h3", "body", "html")
        assert not {"id", "href", "onclick", "onload"} & set(attributes)
        assert attributes.get("src", "data:").startswith("data:")
    selectors = re.findall(r"^([^@\n]*)\{", page.style.partition("*/")[2], re.MULTILINE)
    assert all("cubatch" in one for rule in [".cubatch", *selectors] for one in rule.split(","))
    assert page.style.lstrip().startswith(".cubatch {")  # in which the rules before the comment are nested
    assert "url(" not in page.style


def test_an_output_is_light_and_dark(answer):
    """By what the reader's system says, and by the theme of the notebook where that says something else."""
    style = Seen(answer._repr_html_()).style
    assert "color-scheme: light dark" in style
    for theme in ('data-jp-theme-light="false"', "vscode-dark", 'theme="dark"'):
        assert theme in style
