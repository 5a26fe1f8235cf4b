"""Sizes of the ladder beside the fastest: what is believed of teeth is a guess where no model speaks of them."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.search import rules
from tests.fakes import FakeDevice
from tests.unit.search.walking import given, seek
from tests.unit.situations import record, view

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
READ = {1: 0.01, 8: 0.06, 16: 0.1, 32: 0.22}  # seconds: 16 is the fastest a sample

# Samples per second of a small decoder of language on two threads of an AMD EPYC, by PyTorch 2.13: beyond 24 samples
# its result is above what glibc's heap holds, and is given back in each step (benchmarks/README.md, page faults).
DECODER = {1: 182.3, 2: 246.6, 4: 331.7, 8: 352.6, 16: 368.1, 24: 410.7, 32: 348.8}


def test_the_rungs_within_a_factor_of_two_of_the_fastest_are_read_the_nearest_first():
    """Beside 16 there are 12 and 24, which is a little farther; 4 and 64 are too far."""
    assert rules.rungs(view(READ, ladder=LADDER)) == [12]
    assert rules.rungs(view({**READ, 12: 0.09}, ladder=LADDER)) == [24]
    assert rules.rungs(view({**READ, 12: 0.09, 24: 0.17}, ladder=LADDER)) == []


def test_a_rung_at_twice_the_fastest_counts_as_beside_it():
    """Powers of two alone: 8 and 32 are exactly a factor of two from 16."""
    found = rules.rungs(view({1: 0.01, 16: 0.1, 64: 0.6}, ladder=(1, 2, 4, 8, 16, 32, 64)))
    assert found == [8]


def test_a_rung_that_takes_more_than_a_tenth_of_what_is_left_is_not_read():
    """A visit to 12 takes about 0.8 s, to 24 about 1.5 s."""
    assert rules.rungs(view(READ, ladder=LADDER, left=9.0)) == [12]
    assert rules.rungs(view(READ, ladder=LADDER, left=5.0)) == []


@pytest.mark.parametrize(
    "known",
    [
        {"model": {n: 0.005 + 0.006 * n for n in LADDER}},
        {"goal": Goal(objective="latency")},
        {"extends": False},
        {"closed": (12, 24)},
        {"left": 0.0},
    ],
    ids=lambda known: next(iter(known)),
)
def test_no_rung_is_read_where_a_model_speaks_of_it_or_it_may_not_be_visited(known):
    """A model of time knows its teeth, latency has a rule of its own, and closed sizes are closed."""
    assert rules.rungs(view(READ, ladder=LADDER, **known)) == []


def test_by_energy_too_no_rung_is_read_where_there_is_a_model_of_time():
    """It says nothing of joules, but where it speaks the ladder has a rung for every crest, each a second or more."""
    goal, model = Goal(objective="energy"), {n: 0.005 + 0.006 * n for n in LADDER}
    read = {n: record(n, seconds, goal=goal, joules=seconds) for n, seconds in READ.items()}
    assert rules.rungs(view(read, ladder=LADDER, goal=goal)) == [12]
    assert rules.rungs(view(read, ladder=LADDER, goal=goal, model=model)) == []


def test_no_rung_is_read_that_is_expected_to_break_a_limit():
    """24 would take 0.16 s where 0.12 are allowed; above 18 and 20, which ran out of memory, it would do so too."""
    assert rules.rungs(view({**READ, 12: 0.09}, ladder=LADDER, goal=Goal(latency_limit=0.12))) == []
    below = {n: seconds for n, seconds in {**READ, 12: 0.09}.items() if n < 32}
    assert rules.rungs(view(below, ladder=LADDER, failed=[18, 20])) == []
    assert rules.rungs(view(below, ladder=LADDER)) == [24]


def test_a_peak_that_both_neighbours_hide_is_found():
    """At 16 and 32 the decoder is 10 and 15 % slower than at 24, between them."""
    at, rates = np.array(sorted(DECODER)), np.array([DECODER[n] for n in sorted(DECODER)])
    device = FakeDevice(lambda n: float(np.interp(n, at, at / rates)), noise=0.005)
    _, result = seek(device, given(1, 2, 3, 4, 6, 8, 12, 16, 24, 32), budget=30.0)
    assert result.batch_size == 24
