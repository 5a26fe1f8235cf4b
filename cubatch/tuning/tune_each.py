"""Tuning once for each of several values, with equal shares of one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cubatch import checks
from cubatch.errors import CubatchError
from cubatch.tuning.results import TuningResult

_Result = TypeVar("_Result")


def tune_each(
    values: Sequence[int],  # extents or numbers of threads
    tune_one: Callable[[int, float], TuningResult],  # tunes with a value, within its seconds of measuring
    # makes the common result of the tuning results and the messages of errors, both by value
    make_result: Callable[[Mapping[int, TuningResult], Mapping[int, str]], _Result],
    *,
    budget: Any,  # seconds of measuring at most, for all values together
) -> _Result:
    """
    Return the common result of tuning with each value, one after the other, each with an equal share of the budget.

    Raises:
        InvalidArgument: If the budget is no finite number above 0.
        CubatchError: The error of the first value, if tuning failed with all values.
        KeyboardInterrupt, or an exception that `progress` raises: `partial` is the common result so far, if any.
    """
    share = checks.check_number("budget", budget, above=0.0) / len(values)
    results, errors = dict[int, TuningResult](), dict[int, CubatchError]()

    def common() -> _Result:
        return make_result(results, {value: str(error) for value, error in errors.items()})

    for value in values:
        try:
            results[value] = tune_one(value, share)
        except CubatchError as error:
            errors[value] = error
        except BaseException as stop:
            if (partial := getattr(stop, "partial", None)) is not None:
                results[value] = partial
            if results:
                stop.partial = common()  # type: ignore[attr-defined]
            raise
    if not results:
        raise next(iter(errors.values()))
    return common()
