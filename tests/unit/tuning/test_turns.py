"""Threads of a process measure one after the other."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import uuid
import warnings

import pytest

from cubatch.tuning import turns
from cubatch.tuning.tune import autotune_callable
from tests.unit.tuning.small_runs import CHECKOUT


def test_who_waits_is_told_and_gets_its_turn():
    """A second thread is warned, and measures once the first is done."""
    order, holds, done = [], threading.Event(), threading.Event()

    def first():
        with turns.alone():
            holds.set()
            done.wait()
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    holds.wait()
    with pytest.warns(UserWarning, match="another thread is measuring"):
        threading.Timer(0.01, done.set).start()
        with turns.alone():
            order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_a_turn_ends_with_an_error():
    """The next one need not wait."""
    with pytest.raises(KeyError), turns.alone():
        raise KeyError
    found = []

    def next_one():
        with warnings.catch_warnings(record=True) as told, turns.alone():
            found.append(told)

    thread = threading.Thread(target=next_one)
    thread.start()
    thread.join()
    assert found == [[]]


@pytest.mark.filterwarnings("ignore:another thread is measuring")
def test_no_two_threads_step_at_once():
    """Of three that tune together, each has steps, and none begins while another's lasts."""
    inside, together, steps = threading.Lock(), [], []

    def make_step(batch_size):
        def step():
            together.append(not inside.acquire(blocking=False))
            steps.append(threading.get_ident())
            sum(range(1000 * batch_size))
            if not together[-1]:
                inside.release()

        return step

    threads = [
        threading.Thread(target=autotune_callable, args=(make_step,), kwargs={"max_batch_size": 4, "budget": 0.3})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(steps)) == len(threads)
    assert not any(together)


def test_processes_on_one_device_see_each_other():
    """Whoever came first and whoever came second, as long as the other is there; another device is another matter."""
    device = f"device {uuid.uuid4()}"
    script = (
        f"from cubatch.tuning import turns\nwith turns.seen_on({device!r}) as others:\n print(others(), flush=True)\n"
    )
    with turns.seen_on(device) as others:
        assert not others()
        with subprocess.Popen(
            [sys.executable, "-c", script + " input()\n"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=CHECKOUT,
        ) as child:  # fmt: skip
            assert child.stdout.readline() == "True\n"
            assert others()
            with turns.seen_on(f"another {device}") as elsewhere:
                assert not elsewhere()
            child.kill()
            child.wait()
        assert not others()
        with turns.seen_on(device) as again:  # a run within a run
            assert not again()


def test_a_result_says_that_another_process_measured_beside(monkeypatch):
    """In a note, whichever of both came first."""
    monkeypatch.setattr(turns, "seen_on", lambda device: contextlib.nullcontext(lambda: True))
    result = autotune_callable(lambda n: lambda: None, max_batch_size=2, device="cpu", budget=1.0)
    assert any("Another cubatch measured on this device" in reason for reason in result.reasons)
