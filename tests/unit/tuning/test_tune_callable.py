"""`autotune_callable`: any step of anybody's, on the CPU."""

from __future__ import annotations

import functools
import gc
from concurrent.futures import Future

import numpy as np
import pytest

from cubatch import errors
from cubatch.measure.callable_runner import CallableRunner
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune import autotune_callable
from tests import virtual_time
from tests.unit.tuning.small_runs import statuses

pytestmark = pytest.mark.usefixtures("quiet")


def matmul(n):
    """A NumPy step whose time grows with n."""
    x, w = np.ones((n, 64)), np.ones((64, 64))
    return lambda: x @ w


call = functools.partial(
    autotune_callable, matmul, max_batch_size=64, device="cpu", batch_sizes=[1, 8, 64], budget=30.0
)


def test_a_numpy_callable_is_tuned(virtual):
    """The same result as of a network; what only a plan could know is None, and the clock is said."""
    result = call()
    assert [m.batch_size for m in result.measurements] == [1, 8, 64]
    seconds = {m.batch_size: m.latency_seconds for m in result.measurements}
    assert seconds == pytest.approx({1: 1.01e-3, 8: 1.08e-3, 64: 1.64e-3}, rel=0.005)  # the prior spread of a timing
    assert (result.batch_size, result.decided_by) == (64, "batch_sizes")
    assert (result.largest_batch_size, result.spec, result.largest_measured) == (None, None, 64)
    assert {m.predicted_peak_bytes for m in result.measurements} == {None}
    assert any("host's clock" in reason and "block_until_ready" in reason for reason in result.reasons)
    assert TuningResult.from_json(result.to_json()).to_mapping() == result.to_mapping()


def test_a_callable_that_runs_out_of_memory_at_some_size(virtual):
    """MemoryError, by type, at 40 and above: those are out_of_memory, the others answer, and the list decided."""

    def make_step(n):
        if n >= 40:
            raise MemoryError
        return matmul(n)

    result = autotune_callable(make_step, max_batch_size=64, device="cpu", batch_sizes=[1, 8, 48, 64], budget=30.0)
    assert statuses(result)[48] == statuses(result)[64] == "out_of_memory"
    assert (result.largest_measured, result.batch_size, result.decided_by) == (8, 8, "batch_sizes")
    with pytest.raises(errors.NothingMeasured, match="memory"):
        autotune_callable(make_step, max_batch_size=64, device="cpu", batch_sizes=[48, 64], budget=1.0)


def test_a_mistake_in_a_callable_is_an_error_not_an_out_of_memory(virtual):
    """An error whose text speaks of memory is judged by its type; the reason names it."""

    def make_step(n):
        def step():
            if n == 8:
                raise RuntimeError("CUDA out of memory, it says")

        return step

    result = autotune_callable(make_step, max_batch_size=8, device="cpu", batch_sizes=[1, 8], budget=30.0)
    assert statuses(result)[8] == "error"
    assert "RuntimeError" in result.measurements[1].stop_reason


async def _await_nothing():
    """A step that does nothing until it is awaited."""


@pytest.mark.parametrize(
    "step", [_await_nothing, Future, lambda: iter([1])], ids=["a coroutine", "a future", "an iterator"]
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_step_that_has_only_begun_is_refused(step):
    """Its time would be that of a call which does not wait: millions of samples per second."""
    with pytest.raises(errors.InvalidArgument, match=r"as by asyncio\.run.*'a step that returns a \w+'"):
        autotune_callable(lambda _: step, max_batch_size=8, device="cpu", batch_sizes=[1, 8], budget=5.0)


def test_a_step_whose_data_end_is_refused():
    """ssd.pytorch#214: next() of a loader's iterator raises StopIteration after an epoch, without a text."""

    def make_step(n):
        batches = iter([n])
        return lambda: next(batches) and None

    with pytest.raises(errors.InvalidArgument, match=r"itertools\.cycle.*StopIteration at batch size 1'"):
        autotune_callable(make_step, max_batch_size=1, device="cpu", batch_sizes=[1], budget=5.0)


@pytest.mark.parametrize(("short", "other"), [(1, 64), (64, 1)])
def test_one_requested_size_whose_data_end_leaves_the_others(virtual, short, other):
    """It ended the run if it happened to be the first: an epoch has few batches of that size."""

    def make_step(n):
        batches, step = iter([n] if n == short else [n] * 10**6), matmul(n)
        return lambda: next(batches) and step() is None

    result = autotune_callable(make_step, max_batch_size=64, device="cpu", batch_sizes=[1, 64], budget=30.0)
    assert statuses(result) == {short: "error", other: "ok"}
    with pytest.raises(errors.InvalidArgument, match="StopIteration"):  # both, so that it is the data of all
        autotune_callable(lambda n: lambda: next(iter([])), max_batch_size=8, device="cpu", batch_sizes=[1, 8])


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (3, "cannot be called: return the step as a function, and do not run it"),
        (lambda x: x, r"needs arguments: bind them, as in `lambda: step\(x\)`"),
    ],
    ids=["a result", "a function of an input"],
)
def test_a_value_that_is_no_step_ends_the_run_at_the_first_size(made, match):
    """All sizes were tried before, and the error listed each of them."""
    sizes = []
    with pytest.raises(errors.InvalidArgument, match=match) as caught:
        autotune_callable(lambda n: sizes.append(n) or made, max_batch_size=64, device="cpu", budget=5.0)
    assert caught.value.field == "make_step"
    assert len(sizes) == 1


class WithForward:
    """A step of a batch size whose `forward` takes an input, as that of a module does."""

    def __init__(self, n):
        self.run = matmul(n)

    def forward(self, x):
        """Never called with an input by the search."""
        return x

    def __call__(self):
        """Run a step."""
        self.run()


def with_settings(function):
    """Return a function that adds an argument of its own."""
    return functools.wraps(function)(lambda *arguments: function({}, *arguments))


@pytest.mark.parametrize(
    "make_step",
    [
        WithForward,
        with_settings(lambda settings, n: matmul(n)),
        lambda n: with_settings(lambda settings: matmul(n)()),
    ],
    ids=["an object with forward", "a decorated function", "a decorated step"],
)
def test_what_can_be_called_is_a_step_although_its_parts_need_arguments(virtual, make_step):
    """Neither `forward` of an object nor the function inside a decorator is called by the search."""
    result = autotune_callable(make_step, max_batch_size=2, device="cpu", batch_sizes=[1, 2], budget=1.0)
    assert "error" not in statuses(result).values()


def test_a_value_that_is_no_step_closes_one_size_if_others_ran(virtual):
    """A size that ran shows that `make_step` is right in general."""
    result = autotune_callable(
        lambda n: matmul(n) if n < 8 else n, max_batch_size=8, device="cpu", batch_sizes=[1, 2, 8], budget=5.0
    )
    assert (statuses(result)[8], result.batch_size) == ("error", 2)


FALLS = "No recommendation: the larger the batch, the less time a step took, "
STAYS = "Check that the step uses its batch size: one of "


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        (lambda n: 64e-3 / max(1, n) + 1e-3, f"{FALLS}2.00 ms of 64 samples and 65.0 ms of 1."),
        (lambda n: 1e-3 * (-(-64 // max(1, n)) + n / 32), f"{FALLS}3.00 ms of 64 samples and 64.0 ms of 1."),
        (lambda _: 1e-3, f"{STAYS}48 samples took 1.00 ms, one of 4 1.00 ms. If so: Use batch size 64: "),
        (lambda n: 1e-3 * {64: 1.5}.get(n, 1), f"{STAYS}48 samples took 1.00 ms, one of 4 1.00 ms. If so: Use "),
        (lambda n: 1e-3 * {1: 0.6, 4: 1.5, 8: 1.5}.get(n, 1), f"{STAYS}48 samples took 1.00 ms, one of 4 1.50 ms."),
        (lambda n: 1e-3 * {1: 29, 4: 48, 8: 36, 48: 0.8}.get(n, 0.5), f"{STAYS}64 samples took 500 µs, one of 8 "),
        (lambda n: 1e-3 * (1 + n / 64), "Use batch size 64: "),
        (lambda n: 1e-3 * {1: 3, 4: 1.0, 8: 1.1}.get(n, 2), "Use batch size 64: "),
    ],
    ids=[
        "a whole data set", "in batches rounded up", "constant", "one large size disturbed", "small sizes disturbed",
        "only the last quiet", "growing", "growing, one small size disturbed",
    ],
)  # fmt: skip
def test_a_step_whose_time_does_not_grow_is_reported(monkeypatch, seconds, first):
    """transformers#14125: pipeline(texts, batch_size=n) runs all texts, in less time the larger n is."""
    virtual_time.install(monkeypatch, seconds)
    result = call(batch_sizes=[1, 4, 8, 48, 64])
    assert result.reasons[0].startswith(first)
    assert result.recommended == (result.batch_size in {48, 64}) == ("Use batch size " in result.reasons[0])


def test_one_step_and_the_reference_live_at_a_time(virtual):
    """The memory of a size is let go of before the next is made, and after the last; only the reference stays."""
    alive = []

    class Step:
        def __init__(self, n):
            alive.append(n)
            self.n = n
            assert len(alive) <= 1 + (64 in alive)  # no step is longer than that of 64, which is the reference

        def __call__(self):
            sum(range(self.n))

        def __del__(self):
            alive.remove(self.n)

    autotune_callable(Step, max_batch_size=64, device="cpu", batch_sizes=[1, 8, 64], budget=30.0)
    gc.collect()
    assert alive == []


def test_a_memory_limit_that_nobody_watches_is_said():
    """On the CPU neither CuPy nor PyTorch tells what a step holds."""

    def asked(**limit):
        result = autotune_callable(lambda _: lambda: None, max_batch_size=1, device="cpu", budget=1.0, **limit)
        return ["not watched" in reason for reason in result.reasons].count(True)

    assert (asked(memory_limit="1KiB"), asked()) == (1, 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_batch_size": None}, "max_batch_size"),
        ({"batch_sizes": [128]}, "batch_sizes"),
        ({"device": "tpu"}, "device"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_callable_are_refused_by_name(options, field, monkeypatch):
    """As for a network, before the callable is asked for anything."""
    monkeypatch.setattr(CallableRunner, "prepare", None)
    with pytest.raises(errors.InvalidArgument) as caught:
        call(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "wrong", [3, lambda: None, lambda n, device: None], ids=["a number", "a step", "two arguments"]
)
def test_what_cannot_be_called_with_a_batch_size_is_refused(wrong):
    """A step instead of make_step is the likeliest mistake."""
    with pytest.raises(errors.InvalidArgument, match="make_step must be a function of one argument"):
        autotune_callable(wrong, max_batch_size=8)


def test_energy_of_a_callable_on_the_cpu_is_an_error(monkeypatch):
    """No reading of energy, no answer: it is said before a step is made."""
    monkeypatch.setattr(CallableRunner, "prepare", None)
    with pytest.raises(errors.EnergyNotAvailable):
        call(objective="energy", batch_sizes=[1])
