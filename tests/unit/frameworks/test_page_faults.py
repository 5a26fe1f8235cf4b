"""What the system takes for memory that steps give back and fetch anew is told, with what helps."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cubatch.frameworks import heap, page_faults
from cubatch.frameworks.page_faults import PageFaults
from cubatch.tuning.notes import of_remark, sentence

# Steps that write blocks which are above glibc's largest threshold, and free them.
STEPS = """
import ctypes
from cubatch.frameworks.page_faults import PageFaults
from cubatch.tuning.notes import of_remark, sentence

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
size = 40 * 2**20

def step():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)

step()
faults = PageFaults()
faults.begin(1)
for _ in range(20):
    step()
faults.end(7, 21)
print(*[faults for _, faults in faults._worst.values()])
print(*map(sentence, map(of_remark, faults.remarks)))
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
        faults.begin(1)
        faults.end(batch_size, 1 + steps)
    said = sentence(of_remark(*faults.remarks))
    assert said.startswith("At batch size 16 the system took 25 % of the CPU time for 25 000 page faults a step")
    assert heap.format_variables(heap.KEPT) in said


@pytest.mark.parametrize(
    ("after", "why"),
    [((0.97, 0.03, 10_000), "a small share"), ((0.89, 0.11, 10_000), "11 us a fault: it did something else")],
    ids=["small", "something else"],
)
def test_what_is_not_worth_saying_is_not_said(of_the_system, after, why):
    """Advice that would not help is none."""
    of_the_system((0.0, 0.0, 0), after)
    faults = PageFaults()
    faults.begin(0)
    faults.end(8, 10)
    assert faults.remarks == [], why


def test_what_took_as_long_as_page_faults_may_is_said(of_the_system):
    """9 us each, where 2 to 3 were met."""
    of_the_system((0.0, 0.0, 0), (0.91, 0.09, 10_000))
    faults = PageFaults()
    faults.begin(0)
    faults.end(8, 10)
    assert len(faults.remarks) == 1


def test_without_steps_there_is_nothing_to_tell(of_the_system):
    """A size that ended before its first step, or in it."""
    of_the_system((0.0, 0.0, 0), (0.0, 1.0, 10**6))
    faults = PageFaults()
    faults.end(8, 0)
    faults.begin(1)
    faults.end(8, 1)
    assert faults.remarks == []


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
