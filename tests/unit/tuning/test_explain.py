"""
The sentences of a result: their figures and lengths; how they read as a whole is in `reasons.txt` of the golden files.
"""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest

from cubatch.errors import NothingMeasured
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import answer as answers, explain
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subject import SubjectFacts
from cubatch.units import format_objective, format_tenths
from tests.unit.tuning import explained
from tests.unit.tuning.ends import (
    ERROR,
    NO_MEMORY,
    NOT_RUN,
    PLANNED,
    Ended,
    answer_of,
    decide,
    rate,
    rounds,
    steady,
    too_slow,
)

MOST_WORDS = 25
BANNED = (
    "beside",
    "told",
    "whatever",
    "nobody",
    "anew",
    "nothing tells",
    "readings",
    "visit",
    "by itself",
    "what decided",
)


def numbers(text: str) -> list[float]:
    """Every number of a sentence."""
    return [float(found.replace(" ", "")) for found in re.findall(r"\d+(?: \d{3})*(?:\.\d+)?", text)]


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[str, ...]]:
    """The reasons of every case of the golden file."""
    return {name: make().reasons for name, make in explained.CASES.items()}


def test_sentences_are_plain_and_short(said: dict[str, tuple[str, ...]]) -> None:
    """At most 25 words, lists and foreign messages apart, and none of the words that the glossary replaces."""
    for text in itertools.chain.from_iterable(said.values()):
        plain = re.sub(r"\([^()]*\)", "", text)
        parts = re.split(r"(?<=[.;])\s|: ", plain)
        assert max(len(re.findall(r"[A-Za-z]+\S*|\d\S*", part)) for part in parts) <= MOST_WORDS, text
        assert not [word for word in BANNED if re.search(rf"\b{word}\b", text, re.IGNORECASE)], text
        assert text[-1] in ".)", text


def test_no_sentence_is_said_twice(said: dict[str, tuple[str, ...]]) -> None:
    """Each fact has one sentence."""
    for reasons in said.values():
        assert len(set(reasons)) == len(reasons)


def test_the_first_sentence_has_the_recommendation_its_value_and_how_sure_it_is() -> None:
    """The same figures as the row of the table."""
    for make in explained.CASES.values():
        result = make()
        if not isinstance(result, TuningResult) or result.batch_size is None:
            continue
        chosen = result.sizes[result.batch_size]
        value = chosen.value(result.objective)
        assert value is not None
        assert chosen.half_width is not None
        lead = result.reasons[0]
        assert result.batch_size in numbers(lead)
        assert format_objective(value[0], result.objective) in lead
        assert f"± {format_tenths(chosen.half_width)}" in lead
        assert f"± {format_tenths(chosen.half_width)}" in result.table()


def test_nothing_to_choose_from_says_how_every_size_ended() -> None:
    """The reason holds each status with its sizes; where all that ran raised errors no budget helps, nor a list."""
    outcomes = (
        Outcome(8, "error", "ValueError: no"),
        Outcome(16, "not_run", "too slow"),
        Outcome(32, "not_run", "slower"),
    )
    for some, remedy in ((outcomes, "state it with multiple_of."), (outcomes[:1], "was tried raised one.")):
        with pytest.raises(NothingMeasured) as caught:
            answers.answer([Candidate(o.batch_size) for o in some], Measured(outcomes=some), goal=Goal(), setting={})
        assert ("not run: 16 and 32 (16: too slow)" in caught.value.reason) == (some is outcomes)
        assert caught.value.reason.startswith("error: 8 (ValueError: no)")
        assert caught.value.remedy.startswith("Fix the error: every size that was tried raised one.")
        assert caught.value.remedy.endswith(remedy)


@pytest.mark.case("titan-x-test-batch")
def test_the_reasons_say_how_full_a_gpu_is_at_the_answer() -> None:
    """Of 3 s at 0.5 and 1 s at 1.0 occupancy is 0.625, fill 0.75 x 0.6 + 0.25 x 1.0 = 0.7; nothing of other sizes."""
    rows = [
        {"occupancy": 0.5, "fill": 0.6, "predicted_seconds": 3.0},
        {"occupancy": 1.0, "fill": 1.0, "predicted_seconds": 1.0},
    ]
    taken = {8: [1.0] * 5, 16: [4.0] * 5}

    def said(layers: dict[int, list[dict[str, float]]], mhz: float | None) -> list[str]:
        timings = tuple(t for n, seconds in taken.items() for t in rounds(n, seconds, sm_clock_mhz=mhz))
        result = answers.answer(
            [Candidate(n) for n in taken], Measured(timings=timings, outcomes=(Outcome(8, "ok"), Outcome(16, "ok"))),
            goal=Goal(), setting={}, facts=SubjectFacts(layers=layers),
        )  # fmt: skip
        return [reason for reason in result.reasons if reason.startswith("At ")]

    assert [numbers(text) for text in said({8: rows}, 1417.0)] == [[8, 62.5, 70.0], [8, 1417]]
    assert [numbers(text) for text in said({8: rows}, None)] == [[8, 62.5, 70.0]]
    assert [numbers(text) for text in said({16: rows}, 1417.0)] == [[8, 1417]]
    assert said({16: rows}, None) == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [({1: 1.0, 2: 1.0, 64: 100.0}, True), ({3: 1.0, 4: 1.0, 64: 100.0}, False), ({1: 112.0, 2: 7.48, 4: 15.0}, False)],
)
def test_batches_that_cost_the_same_time_are_said_from_twice_the_smallest_on(
    seconds: dict[int, float], said: bool
) -> None:
    """Of 1 and 2 it is worth a sentence; not of 3 and 4, which differ, nor where the smallest was disturbed."""
    result = answer_of(steady(*seconds.items()))
    assert any("takes about the same time" in reason for reason in result.reasons) == said


def test_noise_is_no_floor() -> None:
    """Steps of 2 samples take 0.8 to 1.5 s: they may differ from the 1 s of one by more than a tenth."""
    found = answer_of({1: [1.0] * 7, 2: [1.5, 0.8, 1.5, 0.8, 1.1, 1.1, 1.1]}, goal=Goal(objective="latency"))
    assert (found.sizes[2].half_width or 0.0) > 0.1
    assert not any("about the same time" in reason for reason in found.reasons)


def test_a_tie_far_behind_with_a_wide_interval_is_called_too_noisy_to_tell() -> None:
    """Paired rounds hold 128 possible, its median is 40 % behind: it stays in tied_with, and is no equal in words."""
    noise = [1.0, 3.0, 1.0, 3.0, 1.3, 1.4, 1.0]
    result = answer_of({64: [0.64] * 7, 96: [0.96 * 1.1] * 7, 128: [1.28 * one for one in noise]}, {96: "ok"})
    assert result.tied_with == (128,)
    assert (result.ties, result.noisy_ties) == ((), (128,))
    assert any(numbers(reason)[:2] == [64, 128] for reason in result.reasons if reason.startswith("Too noisy"))


def test_a_size_that_ran_and_is_refused_for_memory_breaks_no_latency_limit() -> None:
    """A later visit is refused by what was learned meanwhile; with no limit of latency "0 s" was named."""
    for goal in (Goal(), Goal(latency_limit=0.05)):
        result = decide({1: Ended(0.01), 64: Ended(0.04, "over_limit", "memory", 2)}, goal)
        assert "over the memory limit: 64 (why of 64)" in " ".join(result.reasons)
        assert "latency" not in " ".join(result.reasons)
    with pytest.raises(NothingMeasured, match=r"over the memory limit.*Raise memory_limit\.$"):
        decide({64: Ended(0.04, "over_limit", "memory", 2)})


def test_a_latency_limit_that_the_smallest_size_breaks_is_the_only_thing_to_raise() -> None:
    """Whatever became of larger sizes, which take longer still: no budget and no memory helps."""
    ended = {1: too_slow(0.0576, 3), 2: NOT_RUN, 4: NO_MEMORY, 4096: PLANNED}
    with pytest.raises(NothingMeasured) as caught:
        decide(ended, Goal(latency_limit=1e-6))
    assert all(fact in str(caught.value) for fact in ("batch size 1 ", "57.6 ms", "3 timings", "1.00 µs"))
    assert caught.value.remedy == "Raise latency_limit."
    with pytest.raises(NothingMeasured, match=r"\(1 timing\).*Raise latency_limit or allow smaller batch sizes\.$"):
        decide({64: too_slow(0.0576, 1)}, Goal(latency_limit=1e-6))


def test_a_remedy_is_given_for_each_limit_that_was_broken_and_no_other() -> None:
    """Memory refuses 4096, latency 2, and 1 raised an error."""
    goal = Goal(latency_limit=1e-6)
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 2: too_slow(0.1), 4096: PLANNED}, goal)
    assert caught.value.remedy.endswith("batch_sizes. Raise memory_limit. Raise latency_limit.")
    assert "could be measured" not in str(caught.value)
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 2: too_slow(0.1)}, goal)
    assert caught.value.remedy.endswith("batch_sizes. Raise latency_limit.")
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 4096: PLANNED}, goal)
    assert caught.value.remedy.endswith("batch_sizes. Raise memory_limit.")
    assert "could be measured" in str(caught.value)


@pytest.mark.parametrize(
    ("timed", "untried", "is_known"),
    [((8, 16, 32), 64, True), ((8, 16), 32, False), ((8, 16, 32), 512, False)],
    ids=["nearby", "of two sizes", "far away"],
)
def test_a_gain_is_named_only_where_timings_tell_it(timed, untried, is_known) -> None:
    """Of two sizes, or for sizes far beyond them, it is a guess: 22 times as fast was "up to 35 % to gain"."""
    facts = {"limit": "budget", "could_gain": 0.35, "needed_seconds": 9.0, "left_seconds": 1.0}
    measured = Measured(
        timings=tuple(timing for n in timed for timing in rounds(n, [1.0] * 6)),
        outcomes=(*(Outcome(n, "ok") for n in timed), Outcome(untried, "not_run", "", facts)),
    )
    said = answers.answer([Candidate(n) for n in (*timed, untried)], measured, goal=Goal(), setting={}).reasons
    assert any("35 % to gain" in reason for reason in said) == is_known


@pytest.mark.parametrize(
    ("seconds", "current", "best"),
    [
        ({8: [1.0] * 7, 16: [1.94] * 7, 32: []}, None, 16),
        ({8: [], 16: [1.0] * 7, 32: [1.94] * 7}, None, 32),
        ({8: [1.0] * 7, 16: [2.0, 1.99] * 4, 32: []}, None, 16),
        ({8: [1.0] * 7, 16: [1.94] * 7, 32: []}, 8, 16),
        ({8: [1.0, 1.4] * 4, 16: [2.0, 2.2] * 4, 32: []}, 8, 16),
    ],
    ids=["larger", "smaller", "tied", "current", "current and noisy"],
)
def test_the_first_sentence_says_which_sizes_were_compared(seconds, current, best) -> None:
    """If the budget held no trial of a size, larger or smaller, the first sentence counts the measured sizes."""
    untried = {n: "not_run" for n, taken in seconds.items() if not taken}
    found = answer_of(seconds, untried, Goal(tolerance=0.05), current=current)
    assert found.fastest_batch_size == best
    assert found.batch_size < best
    assert "of the 2 sizes that were measured within the budget" in found.reasons[0]


def test_the_memory_limit_is_named_once_and_as_planned() -> None:
    """196 ran and the plan has memory for 199: nothing larger than 199 fits; or 198 ran out of memory all the same."""
    ran = steady((8, 1.0), (196, 2.0))
    (planned,) = (text for text in answer_of(ran, largest_batch_size=199).reasons if "199" in text)
    assert planned.startswith("Memory is the limit: nothing larger than 199 fits")
    failed = answer_of({**ran, 198: []}, {198: "out_of_memory"}, largest_batch_size=199)
    assert [sorted(numbers(text)) for text in failed.reasons[1:] if "196" in text] == [[196, 198, 199]]


def test_a_size_with_timings_is_not_listed_without_a_result() -> None:
    """36 takes longer than the limit, which is one sentence; 8, the best so far, was interrupted after a timing."""
    slow = decide({35: Ended(1.0), 36: too_slow(1.2)}, Goal(latency_limit=1.1))
    assert sum("1.20 s" in text for text in slow.reasons) == 1
    cut = answer_of({8: [1.0], 16: []}, {8: "interrupted", 16: "interrupted"}, partial=True)
    assert [8.0 in numbers(text) for text in cut.reasons] == [True, False]


@pytest.mark.parametrize(("given", "named"), [(16, True), (64, False), (None, False)])
def test_an_argument_that_was_not_given_is_no_limit(given: int | None, *, named: bool) -> None:
    """Below max_batch_size, or without it, sizes end by the data set, `multiple_of` or `divides`."""
    setting = {"limits": {"max_batch_size": given}}
    found = explained.measured(steady((8, 1.0), (16, 1.5)), setting=setting, largest_allowed=16)
    assert found.decided_by == "max_batch_size"
    assert any("max_batch_size is the limit" in text for text in found.reasons) == named
    assert any("divides" in text for text in found.reasons) != named


@pytest.mark.parametrize(("seconds", "is_faster"), [(0.25, True), (0.5, False)])
def test_the_fastest_is_so_within_the_limits_if_a_faster_size_is_over_them(seconds: float, *, is_faster: bool) -> None:
    """64 takes longer than 0.2 s: with 256 samples/s it is faster than 32 with 180, with 128 it is slower."""
    found = decide({16: rate(100, 16), 32: rate(180, 32), 64: too_slow(seconds)}, Goal(latency_limit=0.2))
    assert found.batch_size == found.fastest_batch_size == 32
    assert ("the fastest within the limits" in found.reasons[0]) == is_faster


def test_a_time_is_that_of_the_size_in_front_of_it() -> None:
    """Of 64 and 96, which are too slow, only the time of 64 is named."""
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 64: too_slow(0.0605, 3), 96: too_slow(0.09, 3)}, Goal(latency_limit=0.05))
    assert "64 and 96 (64: 60.5 ms" in caught.value.reason


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_a_size_that_was_compared_with_none_has_a_remedy(status: str) -> None:
    """No other size of the list ran, so that another list is needed; the failed sizes are counted."""
    alone = answer_of({1: [1.0] * 5, 2: [], 3: []}, {2: status, 3: status}, is_listed=True)
    assert alone.batch_size is None
    assert "2 other sizes failed" in alone.reasons[0]
    assert "batch_sizes" in alone.reasons[0]


def test_a_message_of_a_failure_is_given_once() -> None:
    """16 raised an error: what it said is in one sentence, not in that on the limit too."""
    said = decide({4: rate(50, 4), 8: rate(100, 8), 16: ERROR}).reasons
    assert sum("why of 16" in text for text in said) == 1


@pytest.mark.parametrize(("size", "is_named"), [(16, True), (64, False)])
def test_the_first_sentence_names_the_failure_that_ends_the_sizes(size: int, *, is_named: bool) -> None:
    """Larger sizes than 8 are unknown if 16 failed; where 32 ran and is slower, a failure above decides nothing."""
    ran = {4: rate(50, 4), 8: rate(100, 8)} | ({} if is_named else {16: rate(60, 16), 32: rate(50, 32)})
    found = decide({**ran, size: ERROR})
    assert found.batch_size == 8
    assert (float(size) in numbers(found.reasons[0])) == is_named


def test_a_missing_reference_step_has_a_remedy() -> None:
    """Drift of the host is in the comparison: a larger budget takes more timings, and may hold a reference step."""
    (missing,) = (text for text in explained.CASES["a CPU without a reference step"]().reasons if "reference" in text)
    assert "larger budget" in missing


def test_one_timed_size_says_nothing_of_larger_ones() -> None:
    """ "Larger sizes gain at most 1 % (measured up to 1, estimated up to 4)" followed from a single size."""
    alone = answer_of({1: [1.0] * 7, 2: [], 4: []}, {2: "dropped", 4: "dropped"})
    assert (alone.batch_size, alone.recommended) == (None, False)
    assert not any("Larger sizes" in reason for reason in alone.reasons)


def test_only_a_budget_that_stopped_it_is_said_to_help_against_noise() -> None:
    """Where the search ended by itself, measuring longer changes nothing."""
    noisy = [1.0, 1.6, 1.0, 1.6, 1.0, 1.6, 1.0]
    assert not any("budget" in reason for reason in answer_of({8: noisy, 16: noisy}).reasons)
    cut = answer_of({8: noisy, 16: noisy, 32: []}, {32: "not_run"})
    assert any("larger budget" in reason for reason in cut.reasons)


@pytest.mark.parametrize(("second", "word"), [((), "one timing"), ((5.0,), "vary widely")])
def test_a_single_timing_is_not_said_to_vary(second: tuple[float, ...], word: str) -> None:
    """The interval of the only timing comes from the scatter of other sizes."""
    noisy = [1.0, 1.6, 1.0, 1.6, 1.0, 1.6, 1.0]
    found = answer_of(
        {8: noisy, 16: [2.0, 1.5, 3.0], 64: [3.0, *second], 128: []}, {128: "not_run"}, Goal(tolerance=0.0)
    )
    (sentence,) = (reason for reason in found.reasons if "other sizes may be as good" in reason)
    assert found.fastest_batch_size == 64
    assert word in sentence


def test_a_trial_that_would_have_fitted_is_explained():
    """A step of uncertain length may use part of the time left; a trial longer than that needs no such sentence."""
    for left, is_explained in ((50.0, True), (5.0, False)):
        outcomes = {64: Outcome(64, "not_run", facts={"needed_seconds": 20.0, "left_seconds": left})}
        sizes = {64: SimpleNamespace(status="not_run")}
        sentences = explain._untried(SimpleNamespace(sizes=sizes, batch_size=8), outcomes)
        assert any("uncertain length" in sentence for sentence in sentences) == is_explained
