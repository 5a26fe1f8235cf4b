"""The report of a tuning result: table, answer, page."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from cubatch.report.tables import result as result_table
from tests.unit.tuned import measurement, tuned

UNKNOWN = "\N{EN DASH}"


def row_of(text, batch_size):
    """Find the line of a batch size in a table."""
    return next(line for line in text.split("\n") if re.match(rf"\S?\s*{batch_size}\s", line))


def test_the_row_of_the_answer_is_marked_and_says_time_rate_and_share():
    """64 samples at 3000 per second take 21.3 ms, and 3000 is 99.3 % of 3020."""
    row = row_of(result_table.table(tuned()), 64)

    assert row.startswith("→")
    assert "21.3 ms" in row
    assert "3 000" in row
    assert "99.3 %" in row
    assert "± 2.0 %" in row
    assert "64.00 MiB" in row
    assert "coulom n=1, crest 2 of conv3_2" in row


def test_a_size_that_did_not_run_says_why_and_shows_no_figures():
    """What was not measured is a dash, never a zero."""
    row = row_of(result_table.table(tuned()), 256)

    assert "out of memory" in row
    assert row.count(UNKNOWN) == 4


def test_columns_in_which_all_is_unknown_are_left_out():
    """No measurement has real memory, a roofline or energy here."""
    head = result_table.table(tuned()).split("\n")[2]

    assert head.split("  ")[-1].strip() == "reasons"
    assert "memory plan" in head
    assert "memory real" not in head
    assert "roofline" not in head
    assert "samples/J" not in head


def test_the_answer_is_two_sentences_with_the_rule_and_the_deciding_limit():
    """First what to use and what it gives, then the rule of the contract and why the search ended."""
    assert result_table.answer(tuned()) == (
        "Use batch size 64 on Test GPU: 3 000 samples/s, 21.3 ms per batch. "
        "64 and 128 are about equally fast here; 64 is the smallest within 1 % of the best median, "
        "and larger batches gain no more than that."
    )
    assert result_table.answer(tuned(tied_with=[])).endswith(
        "It is the smallest size within 1 % of the fastest, batch 128, and larger batches gain no more than that."
    )


def test_a_sole_size_that_was_asked_for_is_the_answer():
    """Nothing was to be compared: the sentence says what was asked for."""
    alone = {"measurements": [measurement(64, 64 / 3000)], "batch_size": 64, "fastest_batch_size": 64}

    assert result_table.answer(tuned(**alone, decided_by="batch_sizes")).endswith(
        "per batch. No other size was asked for."
    )


@pytest.mark.parametrize(("status", "within"), [("not_run", " in 60 s"), ("error", ""), ("dropped", "")])
def test_a_sole_size_that_happened_to_be_measured_is_no_recommendation(status, within):
    """One timing among many sizes compares with nothing; the budget is named only where it ended the others."""
    result = tuned(
        measurements=[measurement(1, 11.5), *(measurement(n, status=status) for n in (2, 4, 8, 16))],
        batch_size=1, fastest_batch_size=1, tied_with=[], decided_by="budget",
    )  # fmt: skip
    text = result_table.table(result)

    assert result_table.answer(result).startswith(f"Only batch size 1 could be measured{within}: no recommendation.")
    assert "0.0870 samples/s, 11.5 s per batch on Test GPU" in result_table.answer(result)
    assert "→ the only size measured." in text
    assert not {"★", "▲"} & set(result_table.html(result))
    assert 'class="star"' not in result_table.html(result)
    assert not re.search("→ answer|Use batch", text)


@pytest.mark.parametrize("decided_by", ["memory", "latency_limit"])
def test_a_sole_size_right_below_a_limit_is_the_answer(decided_by):
    """Nothing larger is possible: there is nothing that it should have been compared with."""
    result = tuned(
        measurements=[measurement(1, 11.5), measurement(2, status="out_of_memory")],
        batch_size=1, fastest_batch_size=1, tied_with=[], decided_by=decided_by,
    )  # fmt: skip

    assert "Use batch size 1 on Test GPU" in result_table.answer(result)
    assert "It is the only size that could be measured, and" in result_table.answer(result)


def about(rates, *, few=(), wide=(), **more):
    """Lay out sizes by their samples per second, a few of them with 2 timings, others known to ± 30 % only."""
    measurements = []
    for n, rate in rates.items():
        spread = 0.3 if n in wide else 0.001
        facts = {"throughput_interval": [(1 - spread) * rate, (1 + spread) * rate]}
        if n in few:
            facts = {"throughput_interval": None, "latency_interval": None, "timings_seconds": [n / rate] * 2}
        measurements.append(measurement(n, n / rate, **facts))
    best = max(rates, key=lambda n: rates[n])
    return tuned(**{"measurements": measurements, "fastest_batch_size": best, "batch_size": best, "tied_with": [],
                    "decided_by": "peak"} | more)  # fmt: skip


FLAT = {16: 985.0, 48: 992.0, 96: 1000.0, 512: 995.0, 1536: 990.0, 4096: 700.0}


def test_ties_stand_in_the_headline_by_their_range_and_why_this_one():
    """Where everything between is equally fast the ends say it all, where something is not each is named."""
    answer = result_table.answer(about(FLAT, batch_size=48, tied_with=[48, 512, 1536]))
    assert "48 to 1536 are about equally fast here; 48 is the smallest within 1 % of the best median, and" in answer

    answer = result_table.answer(about(FLAT, batch_size=48, tied_with=[48, 1536]))
    assert "48, 96 and 1536 are about equally fast here; 48 is the smallest" in answer

    answer = result_table.answer(about(FLAT, batch_size=48, tied_with=[16, 48]))
    assert "16 to 96 are about equally fast here; 48 is the smallest" in answer


def test_ties_by_latency_take_about_equally_long():
    """Then the answer is the largest within the tolerance of the lowest median."""
    result = about({1: 100.0, 2: 199.0, 4: 300.0}, objective="latency", batch_size=2, fastest_batch_size=1,
                   tied_with=[2])  # fmt: skip

    said = "1 and 2 take about equally long here; 2 is the largest within 1 % of the lowest median, and larger batches"
    assert said in result_table.answer(result)


def test_a_larger_tie_forbids_to_say_that_larger_batches_are_slower():
    """Of 1536, a tie, that would be false; of the largest that was measured it is true."""
    result = about(FLAT, batch_size=48, tied_with=[48, 512, 1536])

    assert "larger batches are slower" not in result_table.answer(result)
    assert result_table.answer(result).endswith("and the largest measured, 4096, is slower.")
    assert result_table.answer(about(FLAT, batch_size=96, tied_with=[48])).endswith("and larger batches are slower.")


def test_by_latency_a_larger_tie_forbids_it_too():
    """What ties with the lowest latency does not take longer, as far as anybody knows."""
    latency = {"objective": "latency", "batch_size": 1, "fastest_batch_size": 1}
    said = {
        last: result_table.answer(about({1: 100.0, 2: 190.0, 4: 200.0}, tied_with=[2, *last], **latency))
        for last in ((), (4,))
    }

    assert said[()].endswith("and the largest measured, 4, takes longer.")
    assert said[(4,)].endswith("of the lowest median.")


def test_too_few_timings_are_never_called_the_fastest_without_saying_so():
    """Two timings have no interval: that is said, and that no smaller size comes near is not."""
    result = about({32: 500.0, 48: 1000.0, 96: 900.0}, few=[48])
    assert "It measured fastest, on 2 timings (too few for an interval), and" in result_table.answer(result)
    assert "no smaller" not in result_table.answer(result)

    result = about({48: 995.0, 96: 1000.0}, few=[96], batch_size=48)
    assert "batch 96, on 2 timings (too few for an interval), and" in result_table.answer(result)

    result = about({48: 995.0, 96: 1000.0}, few=[96], batch_size=48, tied_with=[48])
    assert "within 1 % of the best median, on 2 timings (too few for an interval), and" in result_table.answer(result)


def test_that_no_smaller_size_comes_near_is_said_only_where_there_is_a_smaller_one():
    """Of batch 1 it says nothing; and with the budget gone, of those that were measured only."""
    assert "It is the fastest size, and larger" in result_table.answer(about({1: 1000.0, 2: 500.0}))
    rule = "no smaller size comes within 1 % of it, and"
    assert f"It is the fastest size, {rule}" in result_table.answer(about({1: 500.0, 2: 1000.0}))
    assert f"It is the fastest size measured, {rule}" in result_table.answer(
        about({1: 500.0, 2: 1000.0}, decided_by="budget")
    )
    assert "It has the lowest latency, and larger" in result_table.answer(
        about({1: 1000.0, 2: 500.0}, objective="latency", batch_size=2, fastest_batch_size=2)
    )


def test_a_tie_far_behind_and_hardly_known_is_too_noisy_to_tell():
    """128 at 65 % and ± 30 % is no equal of 96; at 65 % and ± 0.1 % or at 91 % it keeps its mark."""
    noisy = about({48: 500.0, 96: 1000.0, 128: 650.0}, wide=[128], tied_with=[128])
    text = result_table.table(noisy)

    assert row_of(text, 128).startswith("~")
    assert text.endswith("→ answer, ~ too noisy to tell.")
    assert "It is the fastest size by its median, from which 128 is too noisy to tell." in result_table.answer(noisy)
    assert 'class="tie"' not in result_table.html(noisy)

    unknown = about({48: 500.0, 96: 1000.0, 128: 650.0}, few=[128], tied_with=[128])
    assert row_of(result_table.table(unknown), 128).startswith("~")  # too few timings for an interval

    for rate, wide in ((650.0, []), (910.0, [128])):
        known = about({48: 500.0, 96: 1000.0, 128: rate}, wide=wide, tied_with=[128])
        assert row_of(result_table.table(known), 128).startswith("≈")
        assert "96 and 128 are about equally fast" in result_table.answer(known)
        assert 'class="tie"' in result_table.html(known)


def test_a_plateau_under_noise_is_claimed_only_as_far_as_the_noise_allows():
    """At ± 30 % a gain of 1 % could not be seen."""
    quiet, busy = (
        about({48: 995.0, 96: 1000.0}, wide=wide, batch_size=48, decided_by="plateau") for wide in ([], [48])
    )

    assert result_table.answer(quiet).endswith("and larger batches gain no more than that.")
    assert result_table.answer(busy).endswith("gain no more than that, as far as a noise of ± 30.0 % lets it be seen.")


@pytest.mark.parametrize(
    "decided_by", ["peak", "plateau", "memory", "latency_limit", "max_batch_size", "batch_sizes", "budget"]
)
def test_every_deciding_limit_has_its_own_words(decided_by):
    """The seven values of decided_by in the contract each end the second sentence differently."""
    words = {limit: result_table.answer(tuned(decided_by=limit)).split(", and ")[-1] for limit in (decided_by, None)}

    assert len(set(words.values())) == 2


def test_latency_asks_for_the_largest_size_near_the_lowest_latency():
    """Under latency the rule runs the other way round."""
    result = tuned(objective="latency", batch_size=32, fastest_batch_size=16, tied_with=[], tolerance=0.05)

    rule = "It is the largest size within 5 % of the lowest latency, which is that of batch 16"
    assert result_table.answer(result).endswith(f"{rule}, and larger batches take longer.")
    assert "100 %" in row_of(result_table.table(result), 16)
    # 16 ms against 21.3 ms
    assert "75.0 %" in row_of(result_table.table(result), 64)


def test_energy_shows_samples_per_joule_and_ranks_by_it():
    """0.5 J per sample is 2 samples per joule, half of what 0.25 J gives."""
    result = tuned(
        objective="energy", batch_size=64, fastest_batch_size=64, tied_with=[],
        measurements=[measurement(32, 0.1, joules_per_sample=0.5), measurement(64, 0.1, joules_per_sample=0.25)],
    )  # fmt: skip

    text = result_table.table(result)

    assert "50.0 %" in row_of(text, 32)
    assert ", 2 samples/J." in result_table.answer(
        tuned(objective="energy", batch_size=32, measurements=result["measurements"])
    )
    assert "samples/J" in text


def test_reasons_ties_and_the_largest_batch_stand_beneath():
    """Every reason is a point of its own, and a tied size carries a mark that is explained."""
    tied = tuned(tied_with=[32])
    text = result_table.table(tied)

    assert "\n- The curve is flat from batch 64 on.\n" in text
    assert "- The largest batch size that fits, by the plan, is 200; the largest that ran is 128." in text
    assert row_of(text, 32).startswith("≈")
    assert text.endswith("→ answer, ▲ fastest, ≈ tied with the fastest.")


@pytest.mark.parametrize("width", [70, 80, 95, 110])
def test_the_table_keeps_to_its_width_with_one_line_for_each_size(width):
    """On a narrow terminal columns give way, lines do not break."""
    reasons = [f"crest {n} of layer{n}.0.very_long_name_of_a_convolution" for n in range(1, 9)]
    measurements = [measurement(2**k, 2**k / 1e6, peak_bytes=k * 10**9, reasons=reasons) for k in range(3, 21)]
    text = result_table.table(tuned(measurements=measurements, batch_size=64), width=width)

    assert max(len(line) for line in text.split("\n")) <= width
    rows = text.split("\n\n")[1].split("\n")
    assert sum(bool(re.match(r"[→▲≈]?\s*\d+ ", line)) for line in rows) == len(measurements)
    assert "+7" in row_of(text, 64)


def test_sizes_ruled_out_without_a_timing_share_a_line_beneath_the_table():
    """What tells nothing takes no row, on a terminal as on the page; the JSON keeps it all."""
    gone = [measurement(n, status="dropped", stop_reason="by 16 and 64") for n in (1, 2, 3)]
    result = tuned(measurements=[*gone, *tuned()["measurements"]])
    line = "3 sizes cannot be the answer: 1, 2, 3, by their neighbours' readings."
    text = result_table.table(result)

    assert [row for row in text.split("\n") if re.match(r"\s+[123]\s", row)] == []
    assert "dropped" in row_of(text, 16)  # it was measured
    assert line in text.split("\n\n")[1].split("\n")
    page = Page(result_table.html(result))
    assert line in page.text
    assert "by 16 and 64" not in page.text
    one = result_table.table(tuned(measurements=[gone[0], *tuned()["measurements"]]))
    assert "1 size cannot be the answer: 1, by its neighbours' readings." in one


@pytest.mark.parametrize(("count", "is_folded"), [(3, False), (4, True)])
def test_more_than_three_sizes_that_were_not_tried_share_a_line(count, is_folded):
    """Three rows can be read; of more the reasons are long and alike."""
    sizes = [2**k for k in range(9, 9 + count)]
    untried = [measurement(n, status="not_run", stop_reason=f"{n} would take too long") for n in sizes]
    result = tuned(measurements=[*tuned()["measurements"], *untried])
    line = f"{count} sizes not tried, for lack of time: {', '.join(map(str, sizes))}."

    assert (line in result_table.table(result)) == is_folded
    assert bool(re.search(r"\n\s+512 .*not run", result_table.table(result))) != is_folded
    assert ("512: not run: 512 would take too long" in Page(result_table.html(result)).text) != is_folded


def test_many_sizes_in_a_line_are_cut_off_with_their_number():
    """Twelve are shown; of thirteen the last takes no more room than the words for it."""
    for count, end in ((13, "13, by"), (14, "12 and 2 more, by")):
        gone = [measurement(n, status="dropped") for n in range(1, count + 1)]
        text = result_table.table(tuned(measurements=[*gone, measurement(64, 0.02)]), width=200)
        assert f"{end} their neighbours' readings." in text


def test_the_page_says_why_beneath_the_table_and_sizes_of_one_reason_together():
    """A sentence in a column of the table would make its row twenty lines tall."""
    long = "RuntimeError: " + "can't allocate memory; " * 20
    failed = [measurement(n, status="error", stop_reason=long) for n in (512, 1024)]
    many = measurement(2048, 2.0, reasons=[f"crest {n} of layer{n}.0.convolution" for n in range(1, 9)])
    text = result_table.html(tuned(measurements=[*tuned()["measurements"], *failed, many]))
    table, beneath = text.split("<tbody>")[1].split("</tbody>")[0], text.split("</tbody></table></div>")[1]

    assert "allocate" not in table
    assert "needs 1.20 GiB" not in table
    assert beneath.count("512, 1024: error: RuntimeError") == 1
    assert "<li>256: out of memory: needs 1.20 GiB, 1.00 GiB may be used</li>" in beneath
    assert max(len(cell) for cell in re.findall("<td[^>]*>(.*?)</td>", table)) <= 80


def test_over_limit_says_which_limit():
    """One was refused by the plan, the other measured and too slow."""
    refused = [measurement(512, status="over_limit"), measurement(1024, 2.0, status="over_limit")]
    text = result_table.table(tuned(measurements=[*tuned()["measurements"], *refused]))

    assert "over memory" in row_of(text, 512)
    assert "over latency" in row_of(text, 1024)


def test_a_phone_gets_a_figure_of_its_own_whose_ticks_do_not_touch():
    """Shown at 390 pixels its letters have 13, and no two numbers beneath the axis overlap."""
    text = result_table.html(tuned(measurements=[measurement(2**k, 2**k / 1000) for k in range(18)], batch_size=64))
    desk, phone = (text.split(f'<svg class="{style}"')[1].split("</svg>")[0] for style in ("wide-figure", "narrow"))
    ticks = re.findall(r'<text class="" x="([\d.]+)" y="307.0" text-anchor="middle">(\d+)</text>', phone)

    assert 'viewBox="0 0 400 340"' in phone
    assert desk.count("<circle") == phone.count("<circle")
    assert len(ticks) >= 4
    for (left, before), (right, after) in itertools.pairwise(ticks):
        assert float(right) - float(left) >= 7 * (len(before) + len(after)) / 2


def test_the_line_joins_all_that_was_measured():
    """Also what was dropped: a search that drops most of what it read would leave loose dots."""
    paths = re.findall(r'<polyline class="line" points="([^"]*)"', result_table.html(tuned()))

    assert [len(path.split()) for path in paths] == [4, 4]


def test_a_prediction_says_so_in_every_line():
    """Nobody may take a predicted figure for a measured one."""
    result = tuned(predicted=True, measurements=[measurement(32, 0.01), measurement(64, 0.02)], fastest_batch_size=64)
    text = result_table.table(result)

    assert text.startswith("Predicted: ")
    assert all("predicted" in row_of(text, size) for size in (32, 64))
    assert result_table.answer(result).startswith("Predicted, not measured: use batch size 64")
    assert "Predicted, not measured." in result_table.html(result)
    assert "measured)" not in result_table.html(result).replace("not measured)", "")


def test_a_partial_result_has_a_table_and_no_answer():
    """After Ctrl-C there may be timings and no answer; both are shown as they are."""
    result = tuned(batch_size=None, fastest_batch_size=None, tied_with=[], decided_by=None, largest_measured=32,
                   measurements=[measurement(32, 0.016), measurement(64, status="interrupted")])  # fmt: skip
    text = result_table.table(result)

    assert "There is no answer yet" in text
    assert "Interrupted; best so far: 32 (2 000 samples/s, " in text
    assert "1 size not reached before the interruption: 64." in text
    assert "→" not in text
    assert "There is no answer yet" in result_table.html(result)


def test_an_empty_result_can_be_shown():
    """Interrupted before the first timing: nothing to show is no reason to fail."""
    result = tuned(batch_size=None, fastest_batch_size=None, measurements=[], tied_with=[], decided_by=None)

    assert "There is no answer yet" in result_table.table(result)
    assert "<svg" in result_table.html(result)


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
    text = result_table.html(tuned())
    page = Page(text)

    assert not page.open
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert result_table.answer(tuned()) in page.text
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
    page = Page(result_table.html(result))

    assert "script" not in {tag for tag, _ in page.tags}
    assert all(not re.search(r"^on|^alert", name) for _, attrs in page.tags for name in attrs)
    assert page.text.count(bad) >= 10


@pytest.mark.parametrize(
    ("sizes", "allowed", "said"),
    [
        ((64, 128), 128, "max_batch_size allows none above 128"),
        ((32, 64), 64, "max_batch_size allows no larger one"),
        ((32, 64), 512, "what lies above 64, up to the 512 that max_batch_size allows, was judged by smaller sizes"),
    ],
)
def test_max_batch_size_is_said_to_rule_out_only_what_it_rules_out(sizes, allowed, said):
    """The answer may be the limit itself, or far below it where larger sizes were never run."""
    low, high = sizes
    result = tuned(batch_size=64, fastest_batch_size=64, tied_with=[], decided_by="max_batch_size",
                   limits={"max_batch_size": allowed}, largest_measured=high,
                   measurements=[measurement(low, low / 1000), measurement(high, high / 1001)])  # fmt: skip
    assert said in result_table.answer(result)
    assert "much larger batches" not in result_table.answer(result)
