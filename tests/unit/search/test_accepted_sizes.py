"""Workloads that take some batch sizes only: an error closes one size, and the others are found."""

from __future__ import annotations

import pytest

from cubatch.errors import InvalidArgument
from cubatch.tuning import ladder
from cubatch.tuning.request import Request
from tests.fakes import Fails, FakeDevice, affine
from tests.unit.search.walking import seek, statuses


def test_divisors_of_a_number_are_found() -> None:
    """A queue of 512: the largest divisor is the best, and few of the other sizes are tried."""
    others = [n for n in range(1, 513) if 512 % n]
    device = FakeDevice(affine(0.02, 1e-5), behaviours=(Fails(others),))
    measured, result = seek(device, 512)
    assert result.batch_size in {256, 512}
    assert sum(status == "error" for status in statuses(measured).values()) <= 4


def test_a_candidate_with_a_new_factor_is_tried() -> None:
    """Divisors of 1000: 6 raises an error, and no size that ran is a multiple of 25, but the user's maximum is."""
    device = FakeDevice(affine(0.02, 1e-5), behaviours=(Fails([n for n in range(1, 1001) if 1000 % n]),))
    _, result = seek(device, 1000)
    assert result.batch_size == 1000


def test_multiples_of_a_number_are_found() -> None:
    """Groups of 8: no size between that is no multiple is made up after the first error among sizes that ran."""
    device = FakeDevice(affine(0.02, 1e-5), behaviours=(Fails([n for n in range(1, 513) if n % 8]),))
    _, result = seek(device, 500)
    assert result.batch_size % 8 == 0
    assert result.batch_size >= 256


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [({"divides": 100}, [1, 2, 4, 5, 10, 20, 25, 50]), ({"multiple_of": 10}, [10, 20, 30, 40, 60, 70]),
     ({"divides": 100, "multiple_of": 5}, [5, 10, 20, 25, 50])],
)  # fmt: skip
def test_what_the_user_states_is_proposed(limits: dict[str, int], sizes: list[int]) -> None:
    """All divisors, and multiples as powers of two are; with the largest of them."""
    assert [step.batch_size for step in ladder.plain(Request.of(max_batch_size=75, **limits))] == sizes


@pytest.mark.parametrize(
    "wrong",
    [{"multiple_of": 0}, {"divides": -1}, {"multiple_of": 3, "divides": 16}, {"multiple_of": 100},
     {"divides": 64, "current": 24}],
)  # fmt: skip
def test_contradictions_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(reversed(wrong)) if "current" in wrong else next(iter(wrong))):
        Request.of(max_batch_size=75, **wrong)
