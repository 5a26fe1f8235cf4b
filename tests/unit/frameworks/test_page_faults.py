"""What the system takes for memory that steps give back and fetch anew is told, with what helps."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cubatch.frameworks import heap, page_faults
from cubatch.frameworks.page_faults import PageFaults, describe

# Steps that write blocks which are above glibc's largest threshold, and free them.
STEPS = """
import ctypes
from cubatch.frameworks.page_faults import PageFaults, describe

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
size = 40 * 2**20

def step():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)

step()
faults = PageFaults()
faults.begin()
for _ in range(20):
    step()
faults.end(7, 20)
print(*[row["faults"] for row in faults.rows])
print(*describe(faults.rows, [7]))
"""


@pytest.fixture
def of_the_system(monkeypatch):
    """Have the system say what it took: CPU seconds of the process and its own, and page faults."""
    monkeypatch.setattr(heap, "is_movable", lambda: True)

    def said(*usages):
        rows = iter(usages)

        def getrusage(_):
            user, system, faults = next(rows)
            return SimpleNamespace(ru_utime=user, ru_stime=system, ru_minflt=faults)

        monkeypatch.setattr(page_faults.resource, "getrusage", getrusage)

    return said


def test_the_size_with_the_largest_share_is_told(of_the_system):
    """Of 8 and 16 samples whose steps took 10 % and 25 % of the CPU time, the latter, with its faults a step."""
    of_the_system((1.0, 1.0, 0), (1.9, 1.1, 50_000), (2.0, 2.0, 60_000), (2.75, 2.25, 160_000))
    faults = PageFaults()
    for batch_size, steps in ((8, 5), (16, 4)):
        faults.begin()
        faults.end(batch_size, steps)
    (said,) = describe(faults.rows, [8, 16])
    assert said.startswith("At batch size 16 the system took 25 % of the CPU time for 25 000 page faults a step")
    assert heap.format_variables(heap.KEPT) in said


@pytest.mark.parametrize(("timed", "named"), [([8, 16], 16), ([8, 32], 8), ([32], None)])
def test_only_sizes_of_the_result_are_named(monkeypatch, timed, named):
    """One that was stepped to learn of memory stands in no row of its table, whatever it took."""
    monkeypatch.setattr(heap, "is_movable", lambda: True)
    rows = [{"batch_size": n, "share": share, "faults": 1000} for n, share in ((8, 0.1), (16, 0.2))]
    assert [said.startswith(f"At batch size {named} ") for said in describe(rows, timed)] == [True] * (
        named is not None
    )


@pytest.mark.parametrize(
    ("after", "why"),
    [((0.97, 0.03, 10_000), "a small share"), ((0.89, 0.11, 10_000), "11 us a fault: it did something else")],
    ids=["small", "something else"],
)
def test_what_is_not_worth_saying_is_not_said(of_the_system, after, why):
    """Advice that would not help is none."""
    of_the_system((0.0, 0.0, 0), after)
    faults = PageFaults()
    faults.begin()
    faults.end(8, 10)
    assert describe(faults.rows, [8]) == [], why


def test_what_took_as_long_as_page_faults_may_is_said(of_the_system):
    """9 us each, where 2 to 3 were met."""
    of_the_system((0.0, 0.0, 0), (0.91, 0.09, 10_000))
    faults = PageFaults()
    faults.begin()
    faults.end(8, 10)
    assert len(describe(faults.rows, [8])) == 1


def test_without_steps_there_is_nothing_to_tell(of_the_system):
    """A size that ended before its first step, or in it."""
    of_the_system((0.0, 0.0, 0), (0.0, 1.0, 10**6))
    faults = PageFaults()
    faults.end(8, -1)
    faults.begin()
    faults.end(8, 0)
    assert faults.rows == []


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
def test_what_is_advised_helps():
    """Blocks that glibc gives back cost page faults in every step, and none with the variables that are named."""

    def run(**variables):
        done = subprocess.run(
            (sys.executable, "-c", STEPS), capture_output=True, text=True, check=True, env={**os.environ, **variables}
        )
        faults, said = done.stdout.split("\n")[:2]
        return int(faults or 0), said

    given_back, said = run()
    kept, nothing = run(**heap.KEPT)
    assert given_back >= 20  # of huge pages, where the system has them; else 10 240
    assert kept <= 1
    assert "At batch size 7" in said or given_back < 10_240
    assert nothing == ""
