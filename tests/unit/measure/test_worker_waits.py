"""Whoever waits for a worker waits no longer than the budget deserves, knows what for, and has a new one in the end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
import types
from pathlib import Path

import pytest

from cubatch.errors import TimedOut, WorkerDied
from cubatch.measure import remote
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.measure.remote import RemoteRunner, prepare_limit
from cubatch.measure.runner import FactoryRef
from cubatch.search import loop


def fake(habits=None, at="prepare", path=""):
    return FactoryRef("tests.unit.worker_fakes:make", {"habits": habits or {}, "at": at, "path": str(path)})


def suspend(pid):
    """Stop a process, and see that it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def test_a_suspended_worker_is_no_hang_of_what_it_did(start):
    """Somebody sent it SIGSTOP: at its deadline it is ended as one that died, and the next one works."""
    runner = start(fake())
    runner.prepare(2)
    suspend(runner.worker_pid)
    runner.step_seconds = 0.1
    with pytest.raises(WorkerDied, match="it was suspended at batch size 2"):
        runner.step()
    assert runner.worker_pid is None
    runner.step_seconds = None
    runner.prepare(2)
    runner.step()


@pytest.mark.parametrize("ask", ["peak_bytes", "release"])
def test_what_is_only_asked_or_given_back_has_a_short_deadline(start, monkeypatch, ask):
    """Asking for memory and giving it back take no time: a worker that does not answer holds nobody for minutes."""
    monkeypatch.setattr(remote, "ASK_SECONDS", 0.1)
    runner = start(fake())
    runner.prepare(2)
    suspend(runner.worker_pid)
    with pytest.raises(WorkerDied, match="suspended"):
        _ = getattr(runner, ask) if ask == "peak_bytes" else runner.release()
    assert runner.worker_pid is None


def test_a_worker_that_hangs_in_prepare_has_a_deadline(start):
    """What it was given when it was started; it is a timeout, and the next prepare has a new worker."""
    runner = start(fake({"2": "hang"}), prepare_seconds=60.0)
    runner._prepare_seconds = 0.1
    with pytest.raises(TimedOut, match="prepare of batch size 2"):
        runner.prepare(2)
    runner._prepare_seconds = 60.0
    runner.prepare(1)


@pytest.mark.parametrize(
    ("budget", "seconds", "compiling"),
    [(0.5, 30.0, 120.0), (10.0, 30.0, 120.0), (20.0, 60.0, 120.0), (60.0, 180.0, 180.0)],
)
def test_deadlines_follow_the_budget(budget, seconds, compiling):
    """No wait for one size is longer than three times the budget, or 30 s; two minutes where kernels are compiled."""
    assert prepare_limit(budget) == seconds
    assert prepare_limit(budget, compiles=True) == compiling


def test_who_waits_is_told_what_for(start, monkeypatch, caplog):
    """Once for each thing that takes longer than ten seconds, with the limit, and whether somebody suspended it."""
    monkeypatch.setattr(remote, "WARN_SECONDS", 0.0)
    runner = start(fake())
    runner.prepare(2)
    suspend(runner.worker_pid)
    runner.step_seconds = 1.0
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(WorkerDied):
        runner.step()
    (message,) = caplog.messages
    assert message.startswith("waiting for time of batch size 2 in the measuring process, 1 s at most. It is suspended")


def test_a_process_that_was_suspended_has_not_waited(start, monkeypatch):
    """Ctrl-Z and fg jump over a deadline: what the worker did meanwhile is taken, however late it is read."""
    jumps = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(remote, "time", types.SimpleNamespace(monotonic=lambda: next(jumps), sleep=time.sleep))
    runner = start(fake({"2": "nap"}, "step"))
    runner.prepare(2)
    runner.step_seconds = 30.0
    assert runner.time(1).seconds == (0.1 + 0.2) * 2
    assert runner.suspended_seconds > 900
    assert runner.clock.now() == next(jumps) - 1000 - runner.suspended_seconds  # such seconds are not of the budget


def test_an_interrupt_does_not_end_a_worker(start):
    """SIGINT is blocked in the worker from its start on, and not in this process."""
    runner = start(fake())
    pid = runner.worker_pid
    os.kill(pid, signal.SIGINT)
    runner.prepare(2)
    runner.step()
    assert runner.worker_pid == pid
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("at", ["prepare", "step"])
def test_a_fault_that_stays_in_the_process_ends_with_it(at):
    """After an illegal access every call of that context fails: the size is an error, the others have a new worker."""
    measured = loop.Search(
        factory=functools.partial(RemoteRunner, fake({"4": "sticky"}, at)),
        ladder=[Candidate(n) for n in (1, 4, 16)],
        goal=Goal(),
        budget=600.0,
        seed=0,
    ).run()
    statuses = {outcome.batch_size: outcome.status for outcome in measured.outcomes}
    assert statuses == {1: "ok", 4: "error", 16: "ok"}
