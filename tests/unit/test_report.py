"""The report of a tuning result: table, answer, page."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from cubatch import report
from tests.unit.tuned import measurement, tuned

UNKNOWN = "\N{EN DASH}"


def row_of(text, batch_size):
    """Find the line of a batch size in a table."""
    return next(line for line in text.split("\n") if re.match(rf"\S?\s*{batch_size}\s", line))


def test_the_row_of_the_answer_is_marked_and_says_time_rate_and_share():
    """64 samples at 3000 per second take 21.3 ms, and 3000 is 99.3 % of 3020."""
    row = row_of(report.table(tuned()), 64)

    assert row.startswith("→")
    assert "21.3 ms" in row
    assert "3 000" in row
    assert "99.3 %" in row
    assert "± 2.0 %" in row
    assert "64.00 MiB" in row
    assert "coulom n=1, crest 2 of conv3_2" in row


def test_a_size_that_did_not_run_says_why_and_shows_no_figures():
    """What was not measured is a dash, never a zero."""
    row = row_of(report.table(tuned()), 256)

    assert "out of memory" in row
    assert row.count(UNKNOWN) == 4


def test_columns_in_which_all_is_unknown_are_left_out():
    """No measurement has real memory, a roofline or energy here."""
    head = report.table(tuned()).split("\n")[2]

    assert head.split("  ")[-1].strip() == "reasons"
    assert "memory plan" in head
    assert "memory real" not in head
    assert "roofline" not in head
    assert "samples/J" not in head


def test_the_answer_is_two_sentences_with_the_rule_and_the_deciding_limit():
    """First what to use and what it gives, then the rule of the contract and why the search ended."""
    assert report.answer(tuned()) == (
        "Use batch size 64 on Test GPU: 3 000 samples/s, 21.3 ms per batch. "
        "It is the smallest size within 1 % of the fastest, batch 128, and larger batches gain no more than that."
    )


def test_a_sole_size_is_called_the_fastest_of_none():
    """Nothing was compared: the sentence says what was asked for; one that the budget ended at says that."""
    alone = {"measurements": [measurement(64, 64 / 3000)], "batch_size": 64, "fastest_batch_size": 64}

    assert report.answer(tuned(**alone, decided_by="batch_sizes")).endswith("per batch. No other size was asked for.")
    assert "the budget was spent" in report.answer(tuned(**alone, decided_by="budget"))


@pytest.mark.parametrize(
    "decided_by", ["peak", "plateau", "memory", "latency_limit", "max_batch_size", "batch_sizes", "budget"]
)
def test_every_deciding_limit_has_its_own_words(decided_by):
    """The seven values of decided_by in the contract each end the second sentence differently."""
    words = {limit: report.answer(tuned(decided_by=limit)).split(", and ")[-1] for limit in (decided_by, None)}

    assert len(set(words.values())) == 2


def test_latency_asks_for_the_largest_size_near_the_lowest_latency():
    """Under latency the rule runs the other way round."""
    result = tuned(objective="latency", batch_size=32, fastest_batch_size=16, tied_with=[], tolerance=0.05)

    rule = "It is the largest size within 5 % of the lowest latency, which is that of batch 16"
    assert report.answer(result).endswith(f"{rule}, and larger batches take longer.")
    assert "100 %" in row_of(report.table(result), 16)
    # 16 ms against 21.3 ms
    assert "75.0 %" in row_of(report.table(result), 64)


def test_energy_shows_samples_per_joule_and_ranks_by_it():
    """0.5 J per sample is 2 samples per joule, half of what 0.25 J gives."""
    result = tuned(
        objective="energy", batch_size=64, fastest_batch_size=64, tied_with=[],
        measurements=[measurement(32, 0.1, joules_per_sample=0.5), measurement(64, 0.1, joules_per_sample=0.25)],
    )  # fmt: skip

    text = report.table(result)

    assert "50.0 %" in row_of(text, 32)
    assert ", 2 samples/J." in report.answer(
        tuned(objective="energy", batch_size=32, measurements=result["measurements"])
    )
    assert "samples/J" in text


def test_reasons_ties_and_the_largest_batch_stand_beneath():
    """Every reason is a point of its own, and a tied size carries a mark that is explained."""
    tied = tuned(tied_with=[32])
    text = report.table(tied)

    assert "\n- The curve is flat from batch 64 on.\n" in text
    assert "- The largest batch size that fits, by the plan, is 200; the largest that ran is 128." in text
    assert row_of(text, 32).startswith("≈")
    assert text.endswith("→ answer, ▲ fastest, ≈ tied with the fastest.")


@pytest.mark.parametrize("width", [70, 80, 95, 110])
def test_the_table_keeps_to_its_width_with_one_line_for_each_size(width):
    """On a narrow terminal columns give way, lines do not break."""
    reasons = [f"crest {n} of layer{n}.0.very_long_name_of_a_convolution" for n in range(1, 9)]
    measurements = [measurement(2**k, 2**k / 1e6, peak_bytes=k * 10**9, reasons=reasons) for k in range(3, 21)]
    text = report.table(tuned(measurements=measurements, batch_size=64), width=width)

    assert max(len(line) for line in text.split("\n")) <= width
    assert sum(bool(re.match(r"[→▲≈]?\s*\d+ ", line)) for line in text.split("\n")) == len(measurements)
    assert "+7" in row_of(text, 64)


def test_a_phone_gets_a_figure_of_its_own_whose_ticks_do_not_touch():
    """Shown at 390 pixels its letters have 13, and no two numbers beneath the axis overlap."""
    text = report.html(tuned(measurements=[measurement(2**k, 2**k / 1000) for k in range(18)], batch_size=64))
    desk, phone = (text.split(f'<svg class="{style}"')[1].split("</svg>")[0] for style in ("wide-figure", "narrow"))
    ticks = re.findall(r'<text class="" x="([\d.]+)" y="307.0" text-anchor="middle">(\d+)</text>', phone)

    assert 'viewBox="0 0 400 340"' in phone
    assert desk.count("<circle") == phone.count("<circle")
    assert len(ticks) >= 4
    for (left, before), (right, after) in itertools.pairwise(ticks):
        assert float(right) - float(left) >= 7 * (len(before) + len(after)) / 2


def test_a_prediction_says_so_in_every_line():
    """Nobody may take a predicted figure for a measured one."""
    result = tuned(predicted=True, measurements=[measurement(32, 0.01), measurement(64, 0.02)], fastest_batch_size=64)
    text = report.table(result)

    assert text.startswith("Predicted: ")
    assert all("predicted" in row_of(text, size) for size in (32, 64))
    assert report.answer(result).startswith("Predicted, not measured: use batch size 64")
    assert "Predicted, not measured." in report.html(result)
    assert "measured)" not in report.html(result).replace("not measured)", "")


def test_a_partial_result_has_a_table_and_no_answer():
    """After Ctrl-C there may be timings and no answer; both are shown as they are."""
    result = tuned(batch_size=None, fastest_batch_size=None, tied_with=[], decided_by=None, largest_measured=32,
                   measurements=[measurement(32, 0.016), measurement(64, status="interrupted")])  # fmt: skip
    text = report.table(result)

    assert "There is no answer yet" in text
    assert "interrupted" in row_of(text, 64)
    assert "→" not in text
    assert "There is no answer yet" in report.html(result)


def test_an_empty_result_can_be_shown():
    """Interrupted before the first timing: nothing to show is no reason to fail."""
    result = tuned(batch_size=None, fastest_batch_size=None, measurements=[], tied_with=[], decided_by=None)

    assert "There is no answer yet" in report.table(result)
    assert "<svg" in report.html(result)


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


def test_the_page_stands_alone_and_holds_the_answer_the_curve_and_every_size():
    """No script, nothing fetched: the file can be mailed; the four measured sizes are points, on desk and phone."""
    text = report.html(tuned())
    page = Page(text)

    assert not page.open
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert report.answer(tuned()) in page.text
    assert "The curve is flat from batch 64 on." in page.text
    assert "needs 1.20 GiB, 1.00 GiB may be used" in page.text
    assert sum(tag == "circle" and attrs["class"] in ("dot", "out") for tag, attrs in page.tags) == 2 * 4
    assert "prefers-color-scheme: dark" in text


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
    page = Page(report.html(result))

    assert "script" not in {tag for tag, _ in page.tags}
    assert all(not re.search(r"^on|^alert", name) for _, attrs in page.tags for name in attrs)
    assert page.text.count(bad) >= 10
