"""A module in a worker: what is asked of it between the steps of a walk."""

from __future__ import annotations

import os
import signal

import pytest

from cubatch.errors import WorkerDied
from cubatch.frameworks.remote_bounded_runner import RemoteBoundedRunner
from cubatch.measure.runner import FactoryRef
from cubatch.tuning.request import Request
from cubatch.tuning.tune_module import _drawn_sizes


def test_a_worker_that_died_between_two_visits_predicts_nothing_and_steps_again():
    """Killed while nothing is asked of it: no bytes are said, and the next size is prepared in another worker."""
    runner = RemoteBoundedRunner(FactoryRef("tests.unit.worker_fakes:make"), prepare_seconds=30.0, remedy="")
    try:
        runner.prepare(1)
        assert runner.compile_seconds == 0
        first = runner.worker_pid
        os.kill(first, signal.SIGKILL)
        assert runner.predicted(8) is None
        runner.prepare(8)
        assert runner.compile_seconds > 0, "the start of a process does not count towards the budget"
        assert runner.time(1).seconds > 0
        assert runner.worker_pid != first
    finally:
        runner.close()


def test_a_worker_that_dies_in_a_step_names_its_batch_size():
    """Also after a question in between, such as for the seconds of compiling that follows each `prepare`."""
    factory = FactoryRef("tests.unit.worker_fakes:make", {"habits": {"8": "crash"}, "at": "step"})
    runner = RemoteBoundedRunner(factory, prepare_seconds=30.0, remedy="")
    try:
        runner.prepare(8)
        with pytest.raises(WorkerDied, match="at batch size 8"):
            runner.time(1)
    finally:
        runner.close()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"divides": 7},
        {"divides": 49, "multiple_of": 7},
        {"divides": 2 * 50021},
        {"max_batch_size": 2},
        {"max_batch_size": 5},
        {"multiple_of": 7, "max_batch_size": 14},
        {"batch_sizes": [4096, 8192]},
    ],
)
def test_a_function_is_called_at_small_sizes_that_the_workload_accepts(given):
    """
    The sizes of the request come after these: a batch of 8192 samples may not fit.

    Last come multiples of 12, for functions that take multiples of 3 only.
    """
    request = Request.of(**given)
    sizes = _drawn_sizes(request)
    first = sizes[: 2 if len(sizes) == 2 else 3]
    assert len(first) > 1
    assert all(request.accepts(n) and n <= min(64, request.max_batch_size or n) for n in first)
    listed = list(request.batch_sizes or ())
    assert sizes[3 : 3 + len(listed)] == listed
    last = sizes[3 + len(listed) :]
    assert all(request.accepts(n) and n <= (request.max_batch_size or n) for n in last)
    assert all(n % (12 * request.multiple_of) == 0 for n in last)
    assert last or request.divides or request.max_batch_size


@pytest.mark.parametrize("given", [{"max_batch_size": 1}, {"divides": 7, "multiple_of": 7}])
def test_a_function_is_called_at_two_sizes_where_only_one_is_allowed(given):
    """What grows shows at two sizes at least."""
    request = Request.of(**given)
    assert len(set(_drawn_sizes(request))) == 2


@pytest.mark.parametrize("habit", ["hang", "kill"])
def test_a_size_that_ends_the_first_look_at_memory_is_not_the_end(habit):
    """DeepSpeed#4100: the steps of small sizes hang or die, and the trace alone bounds memory, in another worker."""
    factory = FactoryRef("tests.unit.worker_fakes:make_look", {"habit": habit})
    runner = RemoteBoundedRunner(factory, prepare_seconds=30.0, remedy="")
    runner._prepare_seconds = 0.5
    try:
        first = runner.worker_pid
        assert runner.look(seconds=1.0, top=8, trace_seconds=0.5) == {"largest": 8, "seconds": 0.5}
        assert runner.worker_pid != first
    finally:
        runner.close()


@pytest.mark.parametrize("seconds", [1.0, 0.0])
def test_a_trace_that_ends_the_process_is_not_the_end(seconds):
    """A module that exits in larger batches does so in the trace too, and later workers trace nothing."""
    factory = FactoryRef("tests.unit.worker_fakes:make_traced", {"habit": "exit", "untraced": None})
    runner = RemoteBoundedRunner(factory, prepare_seconds=30.0, remedy="")
    try:
        look = runner.look(seconds=seconds, top=8, trace_seconds=0.5)
        assert look["largest"] == 8
        assert "exit status 3" in look["why_not"]
        runner.restart()
        assert runner.look(seconds=0.0, top=8, trace_seconds=0.5) == look
    finally:
        runner.close()


def test_a_hang_of_the_first_look_takes_no_longer_than_one_of_a_size(monkeypatch):
    """A size that hangs did so twice: for 35 s in the steps that predict memory, and for 30 s when it was prepared."""
    waits = []
    monkeypatch.setattr(RemoteBoundedRunner, "call", lambda _, method, within=None, **__: waits.append(within))
    runner = RemoteBoundedRunner(FactoryRef("tests.unit.worker_fakes:make"), prepare_seconds=30.0, remedy="")
    try:
        runner.look(seconds=0.25, top=8, trace_seconds=5.0)
    finally:
        runner.close()
    assert waits[0] == pytest.approx(15.0)
