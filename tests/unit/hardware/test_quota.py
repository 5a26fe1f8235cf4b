"""What is said of a CPU quota that held up what was measured."""

from __future__ import annotations

import pytest

from cubatch.hardware import quota


@pytest.mark.parametrize(
    ("before", "after", "is_said"),
    [
        ({"job": (100, 7)}, {"job": (200, 9)}, True),  # a fiftieth
        ({"job": (100, 7)}, {"job": (200, 8)}, False),
        ({"job": (100, 7)}, {"job": (109, 16)}, False),  # nine periods
        ({"job": (100, 7)}, {"job": (110, 17)}, True),
        ({"job": (100, 7)}, {"job": (100, 7)}, False),  # no period has ended
        ({"job": (100, 0), "top": (100, 0)}, {"job": (200, 0), "top": (200, 60)}, True),  # the others in it used it up
        ({}, {"job": (200, 50)}, False),  # set meanwhile
        ({"job": (100, 7)}, {}, False),
    ],
)
def test_a_quota_is_told_that_held_up_a_fiftieth_of_the_periods(before, after, is_said):
    """The share of the group that was held up most."""
    assert (quota.held_up(before, after) is not None) is is_said
