"""
The proof that the simulator finds bugs: each planted one is caught, and its correct twin passes everywhere.

Run under a sanitizer (`python -m tests.cpusim address tests/cpusim/test_planted_bugs.py`) the same table tells what
that sanitizer must report; test_sanitizers.py does so.
"""

from __future__ import annotations

import os
import re

import attrs
import numpy as np
import pytest

from cubatch.kernels.variant import Kernel
from tests.cpusim import building
from tests.cpusim.planting import CENTER_ROWS, EARLY, LATE, MODES, PLANTED, SGEMM, WRONG, not_in, planted
from tests.cpusim.simulator import SimulationError, Simulator

BUILD = os.environ.get("CUBATCH_CPUSIM", "plain")

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

PIPELINE = planted("pipeline", "pipeline.cu", 128, 2 * 3 * 8 * 64 * 4)
REVERSE_LANES = planted("reverse_lanes", "rows.cu", 128)

KERNELS = (SGEMM, PIPELINE, CENTER_ROWS, REVERSE_LANES)


@attrs.frozen
class Bug:
    """
    One mutant and what must catch it.

    Attributes:
        kernel: The kernel with the bug.
        mutant: Its name in the source.
        plain: Pattern of the outcome without a sanitizer; None where anything may come of it.
        modes: (schedule, copies) in which it must be seen without a sanitizer; with one, any mode will do.
        address: Pattern of AddressSanitizer's report; None where it sees no more than the plain build.
        thread: The same of ThreadSanitizer.
    """

    kernel: Kernel
    mutant: str
    plain: str | None = WRONG
    modes: tuple[tuple[str, str], ...] = MODES
    address: str | None = None
    thread: str | None = None

    @property
    def pattern(self):
        """What must come up in this run; None where its sanitizer sees no more than the plain build."""
        return getattr(self, BUILD)


def race(source, *texts):
    """Give a pattern of a data race between two lines of a planted source, each with one of the texts."""
    lines = (PLANTED / source).read_text().splitlines()
    numbers = [str(number) for number, line in enumerate(lines, 1) if any(text in line for text in texts)]
    assert len(numbers) >= len(texts)
    place = rf"{source}:(?:{'|'.join(numbers)})\b"
    return rf"(?s)data race.*{place}.*Previous.*{place}"


TILES = race("sgemm.cu", "a_tiles[slot", "b_tiles[slot")
RING = race("pipeline.cu", "cb_copy_wait<", "cb_copy_async<", "cb_read<")
PARTIALS = race("rows.cu", "partials[cb_warp()] = sum", "total += partials[i]")
SLOTS = race("rows.cu", "slots[cb_thread()] = value", "value = slots[")

BUGS = [
    Bug(SGEMM, "NO_FIRST_BARRIER", thread=TILES),
    Bug(SGEMM, "NO_SECOND_BARRIER", thread=TILES),
    Bug(SGEMM, "SHARED_OVERRUN", plain=None, address=r"(?s)global-buffer-overflow.*sgemm\.cu:\d+.*b_tiles"),
    Bug(SGEMM, "GLOBAL_OVERRUN", plain=None, address=r"(?s)heap-buffer-overflow.*sgemm\.cu:\d+"),
    Bug(SGEMM, "GLOBAL_WRITE_OVERRUN", plain=None, address=r"(?s)heap-buffer-overflow.*sgemm\.cu:\d+"),
    Bug(SGEMM, "MISALIGNED", plain=r"thread \d+: misaligned vector load at tests/cpusim/planted/sgemm\.cu:\d+"),
    Bug(PIPELINE, "NO_BARRIER", thread=RING),
    Bug(PIPELINE, "WEAK_WAIT", modes=LATE, thread=RING),
    Bug(PIPELINE, "WRONG_STAGE", thread=RING),
    Bug(PIPELINE, "ISSUE_BEFORE_BARRIER", modes=EARLY, thread=RING),
    Bug(PIPELINE, "NO_DRAIN", plain=r"still under way when its thread returns at .*pipeline\.cu:\d+"),
    Bug(PIPELINE, "NO_ZERO_FILL"),
    Bug(CENTER_ROWS, "NO_BARRIER", thread=PARTIALS),
    Bug(CENTER_ROWS, "NO_TRAILING_BARRIER", modes=not_in("reversed"), thread=PARTIALS),
    Bug(CENTER_ROWS, "ALL_LANES_WRITE", modes=not_in("reversed"), thread=PARTIALS),
    Bug(CENTER_ROWS, "UNWRITTEN"),
    Bug(CENTER_ROWS, "DIVERGENT_BARRIER", plain=r"divergent barrier: threads 0-63 .*rows\.cu:\d+; threads 64"),
    Bug(CENTER_ROWS, "HALF_WARP_SHUFFLE", plain=r"divergent warp operation: thread \d+ in a shuffle at .*rows\.cu:\d+"),
    Bug(CENTER_ROWS, "TWO_SHUFFLES", plain=r"divergent warp operation: thread \d+ in a shuffle at .*rows\.cu:\d+"),
    Bug(CENTER_ROWS, "EARLY_RETURN", plain=r"returned"),
    Bug(CENTER_ROWS, "EXITED_LANE", plain=r"returned"),
    Bug(CENTER_ROWS, "BLOCK_ORDER"),
    Bug(REVERSE_LANES, "NO_WARP_BARRIER", thread=SLOTS),
    Bug(REVERSE_LANES, "NO_TRAILING_WARP_BARRIER", thread=SLOTS),
]  # fmt: skip


def with_bug(kernel, mutant):
    """Give the kernel as compiled with a mutant of its source."""
    return attrs.evolve(kernel, defines=(("MUTANT", mutant),))


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    needed = [(bug.kernel, bug.mutant) for bug in BUGS if bug.pattern] + [(kernel, "CORRECT") for kernel in KERNELS]
    building.precompile((with_bug(*pair) for pair in needed), 80, BUILD)


def problem(kernel):
    """Give a kernel's grid, inputs, extents and result: integers, whose sums are exact in any order."""
    random = np.random.default_rng(7)

    def integers(*shape):
        return random.integers(-4, 5, shape).astype(np.float32)

    if kernel is CENTER_ROWS:
        x = integers(7, 125)
        return (3, 1, 1), [x], x.shape, x - x.sum(axis=1, keepdims=True)
    if kernel is REVERSE_LANES:
        x = integers(128)
        return (1, 1, 1), [x], (3,), x.reshape(-1, 32)[:, ::-1].reshape(-1)
    a, b = integers(100, 44), integers(44, 92)
    return (2, 2, 1), [a if kernel is SGEMM else a.T.copy(), b], (100, 92, 44), a @ b


def outcome(kernel, mutant, mode):
    """Run a mutant: "right", WRONG, or the error."""
    grid, inputs, extents, want = problem(kernel)
    y = np.full_like(want, np.nan)
    simulator = Simulator(80, BUILD, schedule=mode[0], copies=mode[1], seed=3)
    try:
        simulator.launch(with_bug(kernel, mutant), grid, [*inputs, y, *map(np.int32, extents)])
    except SimulationError as error:
        return str(error)
    return "right" if np.array_equal(y, want) else WRONG


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_correct_kernel_passes(kernel, mode):
    """No false alarm: results are exact and nothing is reported, in any order of threads, blocks and copies."""
    assert outcome(kernel, "CORRECT", mode) == "right"


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.pattern], ids=lambda bug: f"{bug.kernel.name}-{bug.mutant}")
def test_the_bug_is_caught(bug):
    """Without a sanitizer it shows in every mode that the table names, and a sanitizer's report in any."""
    missed = []
    for mode in bug.modes:
        text = outcome(bug.kernel, bug.mutant, mode)
        if not re.search(bug.pattern, text):
            missed.append((*mode, text))
        elif BUILD != "plain":
            return  # the same report does not come twice in a process
    assert not missed
