"""The sentences beside an answer, and in the place of one: what they name and what they leave out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cubatch.errors import NothingMeasured
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import answer as answers
from tests.unit.tuning.ends import (
    DROPPED,
    ERROR,
    NO_MEMORY,
    NOT_RUN,
    PLANNED,
    Ended,
    answer_of,
    decide,
    rounds,
    steady,
    too_slow,
)


def test_the_reasons_by_latency_give_the_share_of_the_lowest() -> None:
    """1.25 s are 80 % as fast as 1 s, which no larger size is near."""
    result = answer_of(steady((8, 1.0), (16, 1.25), (32, 2.0)), goal=Goal(objective="latency", tolerance=0.3))
    assert result.reasons[:2] == (
        "16 is the largest batch size whose latency is within 30 % of the lowest: 1.25 s, 79.9 % of it.",
        "The lowest is 1000 ms at 8.",
    )


def test_nothing_to_choose_from_says_how_every_size_ended() -> None:
    """The reason holds each status with its sizes; where all that ran raised errors no budget helps, nor a list."""
    outcomes = (
        Outcome(8, "error", "ValueError: no"),
        Outcome(16, "not_run", "too slow"),
        Outcome(32, "not_run", "slower"),
    )
    with pytest.raises(NothingMeasured) as caught:
        answers.answer([Candidate(n) for n in (8, 16, 32)], Measured(outcomes=outcomes), goal=Goal(), setting={})
    assert caught.value.reason == "error: 8 (ValueError: no); not run: 16 and 32 (16: too slow)"
    assert caught.value.remedy == "Mend what the error names: every size that was tried raised one."


@pytest.mark.case("small-batch-floor")
def test_the_reasons_name_the_answer_the_fastest_and_the_limit() -> None:
    """A person reads why 32 and not 64 without looking at the table."""
    result = answer_of({1: [1.0] * 5, 16: [1.0] * 5, 32: [1.0] * 5, 33: [1.2] * 5, 64: [1.99] * 5}, notes=["a note"])
    smallest, best, *rest = result.reasons
    assert smallest.startswith("32 is the smallest batch size whose throughput is within 1 % of the best: ")
    assert best.startswith("The best is ")
    assert "Larger batches, measured up to 64, gain no more than 1 %: a plateau." in rest
    assert any(reason.startswith("Up to 32 samples a batch costs about the same time (") for reason in rest)
    assert any(reason.startswith("Powers of two against their neighbours: 32 is ") for reason in rest)
    assert rest[-1] == "a note"


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
            goal=Goal(), setting={}, layers=layers,
        )  # fmt: skip
        return [reason for reason in result.reasons if reason.startswith("At ")]

    counted = "our kernels, by count, fill 62.5 % of the warps that the SMs can hold (occupancy)"
    filled = "keep 70.0 % of the SMs at work until the busiest is done (fill), on average by time"
    assert said({8: rows}, 1417.0) == [f"At 8 {counted} and {filled}; the SMs ran at 1417 MHz."]
    assert said({8: rows}, None) == [f"At 8 {counted} and {filled}."]
    assert said({16: rows}, 1417.0) == ["At 8 the SMs ran at 1417 MHz."]
    assert said({16: rows}, None) == []


@pytest.mark.case("power-of-two")
def test_powers_of_two_are_called_tied_when_they_are() -> None:
    """64 and 63 cost the same per sample within a noise of either sign."""
    sign = np.array([1, -1, 1, -1, 1, -1])
    result = answer_of({63: (63 * (1 + 0.002 * sign)).tolist(), 64: (64 * (1 - 0.002 * sign)).tolist()})
    assert "Powers of two against their neighbours: 64 and 63 are tied." in result.reasons
    failed = answer_of(steady((63, 63.0), (64, 64.0)), {63: "error"})
    assert not any("neighbours" in reason for reason in failed.reasons)


@pytest.mark.parametrize(("factor", "said"), [(0.8, "faster"), (1.25, "slower")])
def test_a_comparison_of_powers_of_two_gives_its_interval(factor: float, said: str) -> None:
    """64 takes 0.8 or 1.25 times as long per sample as 63: a quarter, drawn to its neighbor; smaller end first."""
    noise = [1.025, 1 / 1.025, 1.025, 1 / 1.025, 1.025, 1 / 1.025]
    result = answer_of({63: [63.0] * 6, 64: [64 * factor * one for one in noise]})
    pattern = rf"64 is ([\d.]+) % to ([\d.]+) % {said} per sample than 63"
    (low, high) = next(found.groups() for reason in result.reasons if (found := re.search(pattern, reason)))
    assert 12.5 < float(low) < float(high) < 30.0


def test_sizes_that_did_not_run_are_named_in_the_reasons() -> None:
    """What could not take part is said with its status."""
    result = answer_of({8: [1.0] * 5, 16: []}, {16: "timeout"})
    assert result.reasons[-1] == "No answer could come from: timeout: 16."
    result = answer_of({8: [1.0] * 5, 16: [], 32: []}, {16: "timeout", 32: "not_run"})
    assert result.reasons[-2:] == (
        "Not tried, for lack of time: 32. A larger budget tries them.",
        "No answer could come from: timeout: 16.",
    )
    failed = dict.fromkeys(range(2, 10), "timeout")
    result = answer_of({1: [1.0] * 5, **{n: [] for n in failed}}, failed)
    assert result.reasons[-1] == "No answer could come from: timeout: 2, 3, 4, 5, 6, 7 and 2 more."


@pytest.mark.parametrize(("l2", "said"), [("cold", "L2 cache is cold"), ("warm", "back to back"), (None, None)])
def test_what_the_cache_held_is_said(l2: str | None, said: str | None) -> None:
    """One sentence of the two, or none where nobody knows."""
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=(Outcome(8, "ok"),))
    result = answers.answer([Candidate(8)], measured, goal=Goal(), setting={"l2": l2})
    assert [words for words in ("L2 cache is cold", "back to back") if words in " ".join(result.reasons)] == (
        [said] if said else []
    )


def test_a_busy_machine_is_said() -> None:
    """A median that lies anywhere within a fifth of itself is no ground for a confident answer."""
    quiet = answer_of({8: [1.0, 1.01, 1.0, 1.01, 1.0, 1.01]})
    busy = answer_of({8: [1.0, 1.6, 1.0, 1.6, 1.3, 1.3]})
    assert not any("spread widely" in reason for reason in quiet.reasons)
    (said,) = (reason for reason in busy.reasons if "spread widely" in reason)
    spread = re.search(r"± [\d.]+ %", said)
    assert spread is not None
    assert spread[0] in busy.table().split("spread widely")[0]  # the same measure as in the table


def test_batches_that_cost_the_same_time_are_said_from_twice_the_smallest_on() -> None:
    """Of 1 and 2 it is worth a sentence; of 3 and 4 every size differs somehow."""
    for sizes, said in (((1, 2), True), ((3, 4), False)):
        result = answer_of(steady(*((n, 1.0) for n in sizes), (64, 100.0)))
        assert any("costs about the same time" in reason for reason in result.reasons) == said


def test_the_three_powers_of_two_nearest_the_answer_are_compared_with_their_nearest_neighbours() -> None:
    """Within an eighth, 72 for 64 included; of two as near, the smaller; 16, the fourth, is left out."""
    cheap = {64: 0.5}  # the fastest per sample
    sizes = (16, 17, 32, 33, 36, 64, 72, 127, 128, 129)
    result = answer_of(steady(*((n, n * cheap.get(n, 1.0)) for n in sizes)))
    assert result.batch_size == 64
    (said,) = (reason for reason in result.reasons if reason.startswith("Powers of two against"))
    assert re.search(r": 64 is .* faster per sample than 72; 32 .* 33.*; 128 .* 127", said)


def test_a_disturbed_smallest_size_gives_no_floor() -> None:
    """Where batch 1 took longer than batch 2, nothing is said of sizes that cost the same time."""
    result = answer_of(steady((1, 112.0), (2, 7.48), (4, 15.0)))
    assert not any("about the same time" in reason for reason in result.reasons)


def test_larger_sizes_that_failed_are_named() -> None:
    """Where everything larger raised an error or hung, memory is not blamed for it."""
    for more in ({"largest_batch_size": 1000}, {"largest_batch_size": 1000, "asked": True}, {}):
        result = answer_of({**steady((8, 1.0)), 16: [], 32: []}, {16: "error", 32: "timeout"}, **more)
        said = [reason for reason in result.reasons if reason.startswith("No limit decided but a failure: ")]
        assert len(said) == 1
        assert "the largest that ran is 8; 16 fails" in said[0]
        assert result.decided_by is None


def test_by_latency_a_larger_tie_is_named_where_larger_batches_take_longer() -> None:
    """2 takes 10 % longer by its median, and its timings spread too widely to tell it from 1."""
    result = answer_of({1: [1.0] * 7, 2: [1.5, 0.8, 1.5, 0.8, 1.1, 1.1, 1.1]}, goal=Goal(objective="latency"))
    assert "Larger batches take longer than 1, as far as the noise tells: 2 is tied." in result.reasons


def test_a_plateau_under_noise_is_said_to_be_one_as_far_as_can_be_told() -> None:
    """Where timings spread by a fifth nobody knows whether larger batches gain 1 %."""
    busy = [1.0, 1.6, 1.0, 1.6, 1.3, 1.3]
    result = answer_of({8: busy, 16: [2.4 * one for one in busy]})
    assert any("a plateau, as far as timings that spread by ± " in reason for reason in result.reasons)


def test_a_tie_far_behind_with_a_wide_interval_is_called_too_noisy_to_tell() -> None:
    """Paired rounds hold 128 possible, its median is 40 % behind: it stays in tied_with, and is no equal in words."""
    noise = [1.0, 3.0, 1.0, 3.0, 1.3, 1.4, 1.0]
    result = answer_of({64: [0.64] * 7, 96: [0.96 * 1.1] * 7, 128: [1.28 * one for one in noise]}, {96: "ok"})
    assert result.tied_with == (128,)
    assert any(reason.startswith("Too noisy to compare with 64: 128 (") for reason in result.reasons)
    assert not any("The noise does not tell" in reason for reason in result.reasons)


def test_a_sole_measured_size_is_compared_with_nothing() -> None:
    """Of the best and of smaller sizes nothing is said where nothing else was measured."""
    result = decide({1: Ended(11.5, times=1), 2: NOT_RUN, 4: NOT_RUN})
    assert result.reasons[0] == "Only 1 was measured, so there is nothing to compare it with."
    assert not any("best" in reason for reason in result.reasons)


def test_few_timings_are_said_beside_the_best() -> None:
    """No sentence that claims the best leaves out that two timings are no interval."""
    result = answer_of({8: [1.0] * 2, 16: [1.0] * 2, 32: [8.0] * 5})
    assert result.reasons[0].endswith(", on 2 timings.")
    result = answer_of({16: [1.0] * 2, 32: [1.995] * 5})
    assert result.reasons[0].endswith("% of it, on 2 timings.")


def test_what_untried_sizes_might_gain_is_said() -> None:
    """The most that any of them could; without the fact nothing is guessed."""
    result = decide({1: Ended(1.0), 2: Ended(1.0), 8: Ended(status="not_run", could_gain=0.08),
                     16: Ended(status="not_run", could_gain=0.034), 32: NOT_RUN})  # fmt: skip
    assert (
        "Not tried, for lack of time, with up to 8 % to gain: 8, 16 and 32. A larger budget tries them."
        in result.reasons
    )
    assert (
        "The budget decided: 3 larger sizes were not tried, since it held no visit to them, and might be better."
        in result.reasons
    )
    result = decide({1: Ended(1.0), 2: Ended(1.0), 8: NOT_RUN})
    assert "Not tried, for lack of time: 8. A larger budget tries them." in result.reasons


def test_refusals_are_told_apart_by_their_limit() -> None:
    """64 took too long and 4096 does not fit: each with its sizes, and whose median it is."""
    result = decide({1: Ended(0.01), 64: too_slow(0.0605, 3), 96: too_slow(0.09, 3), 4096: PLANNED},
                    Goal(latency_limit=0.05), largest_batch_size=4000)  # fmt: skip
    assert result.reasons[-1] == (
        "No answer could come from: above the latency limit: 64 and 96 (64 already takes 60.5 ms (3 timings), "
        "above the latency limit of 50.0 ms); over the memory limit: 4096 (why of 4096)."
    )


def test_a_size_that_ran_and_is_refused_for_memory_breaks_no_latency_limit() -> None:
    """A later visit is refused by what was learned meanwhile; with no limit of latency "0 s" was named."""
    for goal in (Goal(), Goal(latency_limit=0.05)):
        result = decide({1: Ended(0.01), 64: Ended(0.04, "over_limit", "memory", 2)}, goal)
        assert result.reasons[-1] == "No answer could come from: over the memory limit: 64 (why of 64)."
    with pytest.raises(NothingMeasured, match=r"over the memory limit.*Raise memory_limit\.$"):
        decide({64: Ended(0.04, "over_limit", "memory", 2)})


def test_a_long_message_is_cut_in_a_sentence_and_kept_in_the_measurement() -> None:
    """Foreign libraries write paragraphs."""
    outcomes = (Outcome(8, "ok"), Outcome(16, "error", "RuntimeError: " + "no " * 200))
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=outcomes)
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(), setting={})
    assert len(result.reasons[-1]) < 220
    assert result.reasons[-1].endswith("no no …).")
    assert len(result.measurements[1].stop_reason) > 600


def test_a_latency_limit_that_the_smallest_size_breaks_is_the_only_thing_to_raise() -> None:
    """Whatever became of larger sizes, which take longer still: no budget and no memory helps."""
    ended = {1: too_slow(0.0576, 3), 2: NOT_RUN, 4: NO_MEMORY, 4096: PLANNED}
    with pytest.raises(NothingMeasured) as caught:
        decide(ended, Goal(latency_limit=1e-6))
    assert str(caught.value) == (
        "no batch size can be the answer: batch size 1 already takes 57.6 ms (3 timings), above the latency "
        "limit of 1.00 µs. Raise latency_limit."
    )
    with pytest.raises(NothingMeasured, match=r"\(1 timing\).*Raise latency_limit or allow smaller batch sizes\.$"):
        decide({64: too_slow(0.0576, 1)}, Goal(latency_limit=1e-6))


def test_no_size_is_to_be_left_out_where_every_one_that_was_tried_raised() -> None:
    """Larger ones are dropped for those that failed: without the sizes that raised nothing is left."""
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 2: ERROR, 4: DROPPED})
    assert caught.value.remedy == "Mend what the error names: every size that was tried raised one."


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


def test_the_budget_decided_with_what_a_visit_would_have_taken() -> None:
    """24 would have taken 34 s where 3.5 s were left, or 25 s of 50 s by a guess; a gain above 100 % is no bound."""

    def said(needed: float, left: float) -> list[str]:
        facts = {"limit": "budget", "could_gain": 2.3, "needed_seconds": needed, "left_seconds": left}
        measured = Measured(
            timings=tuple(timing for n in (8, 16) for timing in rounds(n, [1.0] * 6)),
            outcomes=(Outcome(8, "ok"), Outcome(16, "ok"), Outcome(24, "not_run", "", facts)),
        )
        return answers.answer([Candidate(n) for n in (8, 16, 24)], measured, goal=Goal(), setting={}).reasons

    short, guess = said(34.1, 3.5), said(25.0, 50.0)
    assert any("since a visit to 24 would take about 34.1 s and 3.50 s were left, " in reason for reason in short)
    assert any("50.0 s were left, too little for a guess that far" in reason for reason in guess)
    assert not any("to gain" in reason for reason in short)


def test_only_a_budget_that_stopped_it_is_said_to_help_against_noise() -> None:
    """Where the search ended by itself, measuring longer changes nothing."""
    noisy = [1.0, 1.6, 1.0, 1.6, 1.0, 1.6, 1.0]
    result = answer_of({8: noisy, 16: noisy})
    assert result.decided_by != "budget"
    text = " ".join(result.reasons)
    assert "Measure again on a quiet one." in text
    assert "larger budget" not in text


@pytest.mark.parametrize(("kind", "said"), [("cpu", False), ("cuda", True)])
def test_nothing_is_said_of_the_l2_cache_on_a_cpu(kind: str, *, said: bool) -> None:
    """A callable there may be no work of a GPU at all."""
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=(Outcome(8, "ok"),))
    setting = {"l2": "warm", "device": {"kind": kind}}
    result = answers.answer([Candidate(8)], measured, goal=Goal(), setting=setting)
    assert any("L2 cache" in reason for reason in result.reasons) is said
