"""The answer in words, which claims no more than was measured."""

from __future__ import annotations

import pytest

from cubatch.report import answer as words
from cubatch.report import facts
from tests.unit.tuned import about, measurement, tuned


def test_the_answer_is_two_sentences_with_the_rule_and_the_deciding_limit():
    """First what to use and what it gives, then the rule of the contract and why the search ended."""
    assert words.answer(tuned()) == (
        "Use batch size 64 on Test GPU: 3 000 samples/s (± 2.00 %), 21.3 ms per batch. "
        "64 and 128 are about equally fast here, within the noise; 64 is the smallest within 1 % of the best, "
        "and larger batches gain no more than that."
    )
    assert words.answer(tuned(tied_with=[])).endswith(
        "It is the smallest size within 1 % of the fastest, batch 128, and larger batches gain no more than that."
    )


@pytest.mark.parametrize("disturbed", [True, False, None])
def test_the_headline_says_that_the_machine_was_busy(disturbed):
    """Whoever reads no further is to know; without an answer there is nothing to doubt."""
    said, answer = "The machine was busy with other work meanwhile", tuned(disturbed=disturbed)
    assert words.answer(answer).count(said) == bool(disturbed)
    assert said not in words.answer(answer | {"batch_size": None})


def test_a_sole_size_that_was_asked_for_is_the_answer():
    """Nothing was to be compared: the sentence says what was asked for."""
    alone = {"measurements": [measurement(64, 64 / 3000)], "batch_size": 64, "fastest_batch_size": 64}

    assert words.answer(tuned(**alone, decided_by="batch_sizes")).endswith("per batch. No other size was asked for.")


@pytest.mark.parametrize("decided_by", ["memory", "latency_limit"])
def test_a_sole_size_right_below_a_limit_is_the_answer(decided_by):
    """Nothing larger is possible: there is nothing that it should have been compared with."""
    result = tuned(
        measurements=[measurement(1, 11.5), measurement(2, status="out_of_memory")],
        batch_size=1, fastest_batch_size=1, tied_with=[], decided_by=decided_by,
    )  # fmt: skip

    assert "Use batch size 1 on Test GPU" in words.answer(result)
    assert "It is the only size that could be measured, and" in words.answer(result)


def test_a_size_that_was_compared_with_none_is_not_recommended():
    """A single size that happened to be measured, beside one that was not, is no recommendation."""
    sizes = [measurement(4, 0.1), measurement(8, None, "not_run")]
    result = tuned(batch_size=4, fastest_batch_size=4, tied_with=[], decided_by="budget", measurements=sizes)
    assert words.answer(result).startswith("Only batch size 4 could be measured in 60 s: no recommendation.")


FLAT = {16: 985.0, 48: 992.0, 96: 1000.0, 512: 995.0, 1536: 990.0, 4096: 700.0}


def test_a_size_over_the_latency_limit_was_measured_and_is_no_part_of_the_best():
    """64 in 0.1 s reach four times the rate of 8 in 0.05 s, which alone keeps the limit; a dash stands in its row."""
    sizes = [measurement(8, 0.05), measurement(64, 0.1, status="over_limit")]
    result = tuned(
        batch_size=8, fastest_batch_size=8, tied_with=[], decided_by="latency_limit", measurements=sizes,
        limits={"latency_seconds": 0.06},
    )  # fmt: skip
    assert "It is the only size within the limits, and larger batches take longer" in words.answer(result)
    assert facts.share_of_best(result) == {8: 1.0}


def test_ties_stand_in_the_headline_by_their_range_and_why_this_one():
    """Where everything between is equally fast the ends say it all, where something is not each is named."""
    answer = words.answer(about(FLAT, batch_size=48, tied_with=[48, 512, 1536]))
    said = "48 to 1536 are about equally fast here, within the noise; 48 is the smallest within 1 % of the best, and"
    assert said in answer

    answer = words.answer(about(FLAT, batch_size=48, tied_with=[48, 1536]))
    assert "48, 96 and 1536 are about equally fast here, within the noise; 48 is the smallest" in answer

    answer = words.answer(about(FLAT, batch_size=48, tied_with=[16, 48]))
    assert "16 to 96 are about equally fast here, within the noise; 48 is the smallest" in answer


def test_ties_by_latency_take_about_equally_long():
    """Then the answer is the largest within the tolerance of the lowest."""
    result = about({1: 100.0, 2: 199.0, 4: 300.0}, objective="latency", batch_size=2, fastest_batch_size=1,
                   tied_with=[2])  # fmt: skip

    said = "1 and 2 take about equally long here, within the noise; 2 is the largest within 1 % of the lowest, and"
    assert said in words.answer(result)


def test_a_larger_tie_forbids_to_say_that_larger_batches_are_slower():
    """Of 1536, a tie, that would be false; of the largest that was measured it is true."""
    result = about(FLAT, batch_size=48, tied_with=[48, 512, 1536])

    assert "larger batches are slower" not in words.answer(result)
    assert words.answer(result).endswith("and the largest measured, 4096, is slower.")
    assert words.answer(about(FLAT, batch_size=96, tied_with=[48])).endswith("and larger batches are slower.")


def test_by_latency_a_larger_tie_forbids_it_too():
    """What ties with the lowest latency does not take longer, as far as anybody knows."""
    latency = {"objective": "latency", "batch_size": 1, "fastest_batch_size": 1}
    said = {
        last: words.answer(about({1: 100.0, 2: 190.0, 4: 200.0}, tied_with=[2, *last], **latency))
        for last in ((), (4,))
    }

    assert said[()].endswith("and the largest measured, 4, takes longer.")
    assert said[(4,)].endswith("of the lowest.")


def test_too_few_timings_are_never_called_the_fastest_without_saying_so():
    """Two timings have no interval: that is said, and that no smaller size comes near is not."""
    result = about({32: 500.0, 48: 1000.0, 96: 900.0}, few=[48])
    assert "It measured fastest, on 2 timings, and" in words.answer(result)
    assert "no smaller" not in words.answer(result)

    result = about({48: 995.0, 96: 1000.0}, few=[96], batch_size=48)
    assert "batch 96, on 2 timings, and" in words.answer(result)

    result = about({48: 995.0, 96: 1000.0}, few=[96], batch_size=48, tied_with=[48])
    assert "within 1 % of the best, on 2 timings, and" in words.answer(result)


def test_that_no_smaller_size_comes_near_is_said_only_where_there_is_a_smaller_one():
    """Of batch 1 it says nothing; and with the budget gone, of those that were measured only."""
    assert "It is the fastest size, and larger" in words.answer(about({1: 1000.0, 2: 500.0}))
    rule = "no smaller size comes within 1 % of it, and"
    assert f"It is the fastest size, {rule}" in words.answer(about({1: 500.0, 2: 1000.0}))
    assert f"It is the fastest size measured, {rule}" in words.answer(about({1: 500.0, 2: 1000.0}, decided_by="budget"))
    assert "It has the lowest latency, and larger" in words.answer(
        about({1: 1000.0, 2: 500.0}, objective="latency", batch_size=2, fastest_batch_size=2)
    )


def test_a_plateau_under_noise_is_claimed_only_as_far_as_the_noise_allows():
    """At ± 30 % a gain of 1 % could not be seen."""
    quiet, busy = (
        about({48: 995.0, 96: 1000.0}, wide=wide, batch_size=48, decided_by="plateau") for wide in ([], [48])
    )

    assert words.answer(quiet).endswith("and larger batches gain no more than that.")
    assert words.answer(busy).endswith("gain no more than that, as far as a noise of ± 30.0 % lets it be seen.")


@pytest.mark.parametrize(
    "decided_by", ["peak", "plateau", "memory", "latency_limit", "max_batch_size", "batch_sizes", "budget"]
)
def test_every_deciding_limit_has_its_own_words(decided_by):
    """The seven values of decided_by in the contract each end the second sentence differently."""
    ends = {limit: words.answer(tuned(decided_by=limit)).split(", and ")[-1] for limit in (decided_by, None)}

    assert len(set(ends.values())) == 2


def test_a_size_that_ran_out_of_memory_is_not_said_to_fit():
    """The plan was wrong about it: both stand there, and which is the largest that ran."""
    result = tuned()
    assert words.points(result)[-1] == (
        "The largest batch size that fits, by the plan, is 200; the largest that ran is 128."
    )
    result["measurements"] = [*result["measurements"], {"batch_size": 200, "status": "out_of_memory"}]
    assert words.points(result)[-1] == "By the plan 200 fits, but it ran out of memory; the largest that ran is 128."
    result["measurements"] += [{"batch_size": size, "status": "out_of_memory"} for size in (64, 160)]
    assert words.points(result)[-1] == "By the plan 200 fits, but 160 ran out of memory; the largest that ran is 128."


@pytest.mark.parametrize(("half", "disturbed", "said"), [(1.37, False, True), (0.4, False, False), (1.37, True, False)])
def test_an_answer_whose_timings_differ_by_more_than_half_is_called_a_guess(half, disturbed, said):
    """Nothing compared by it is certain; where others were busy that is said in its place."""
    result = tuned(disturbed=disturbed)
    (chosen,) = (m for m in result["measurements"] if m["batch_size"] == result["batch_size"])
    rate = chosen["samples_per_second"]
    chosen["throughput_interval"] = [(1 - half) * rate, (1 + half) * rate]
    assert words.answer(result).endswith("is a guess: a quiet machine or a larger budget tells.") == said
    assert ("Timings of one size differ so much (± 137 %)" in words.answer(result)) == said
