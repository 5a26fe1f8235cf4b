"""Errors of the measuring process, as the other side raises them."""

from __future__ import annotations

import json

import pytest

from cubatch.errors import InvalidArgument, OutOfMemory, WorkerFailed
from cubatch.measure import remote, replies


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no")


def described(error):
    """Send an error from one side to the other."""
    return replies.rebuild_error(json.loads(json.dumps(replies.describe_error(error))), "batch size 8", "Retry.")


def test_errors_of_ours_arrive_as_themselves_and_others_as_what_they_mean():
    """Class and facts of ours; a foreign one is out of memory or a failure of the worker, with its words."""
    ours = InvalidArgument("k", 0, "at least 1", "Raise it.")
    assert described(ours).args == ours.args
    assert isinstance(described(MemoryError("host")), OutOfMemory)
    assert str(described(ValueError("\x1b[31mred"))).startswith(r"the measuring process failed: batch size 8 raised "
                                                                 r"ValueError: \x1b[31mred")  # fmt: skip


def test_an_exception_that_cannot_be_printed_is_still_told():
    """The worker goes on, and the user reads its type."""
    assert "raised Mute: <Mute without a message>" in str(described(Mute()))


@pytest.mark.parametrize(
    ("name", "args"),
    [("UnknownName", ["a", 5, 7]), ("OutOfMemory", ["x", "many"]), ("OutOfMemory", []), ("difflib", ["a"]),
     ("sys", None), ("CubatchError", None), ("near_names", ["a", ["b"]]), ("no such", [])],
)  # fmt: skip
def test_an_error_that_cannot_be_made_again_is_a_failure_of_the_worker(name, args):
    """Arguments that no such error has, and names that are of something else."""
    facts = {"type": name, "args": args, "text": "said", "traceback": "T", "out_of_memory": False}
    error = replies.rebuild_error(facts, "batch size 8", "Retry.")
    assert type(error) is WorkerFailed
    assert str(error).endswith(f"raised {name}: said. Retry.")


@pytest.mark.parametrize(
    ("code", "words", "is_memory"),
    [(1, "OpenBLAS error: Memory allocation still failed after 10 attempts, giving up.", True),
     (1, "OpenBLAS warning: precompiled NUM_THREADS exceeded", False),
     (None, "OpenBLAS error: Memory allocation still failed after 10 attempts, giving up.", False)],
)  # fmt: skip
def test_openblas_without_memory_is_out_of_memory(code, words, is_memory):
    """It ends the process by exit(1), and its last words are the only sign of why."""
    runner = object.__new__(remote.RemoteRunner)
    runner._doing, runner._remedy, runner._end = "batch size 8", "", lambda **_: (code, words)
    assert isinstance(runner._death(0), OutOfMemory) == is_memory
