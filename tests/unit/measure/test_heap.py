"""What is kept for good between large blocks does not make the heap grow, once blocks lie apart in the first step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from cubatch.measure import heap

MIB = 2**20
NUM_BLOCKS = 40
# Each shape's first step frees large blocks and keeps some kilobytes between them; those of the next are larger.
STEPS = f"""
import ctypes, sys
from cubatch.measure import heap
from cubatch.measure.memory_meter import ResidentMeter

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)

def step(size, kept):
    blocks = []
    for _ in range({NUM_BLOCKS}):
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
        libc.malloc(kept)
    for block in blocks:
        libc.free(block)

libc.free(libc.malloc(31 * {MIB}))  # from now on glibc has blocks of up to so much lie in the heap
meter = ResidentMeter()
if sys.argv[1] == "in order":
    meter.tidy()
meter.start()
for size in (4 * {MIB}, 5 * {MIB}, 6 * {MIB}):
    step(size, 40000)
    meter.settle()
    step(size, 0)
    meter.restart()
    step(size, 0)
    print(meter.peak())
    if meter._is_tidy:
        heap.apart()
"""
# Two blocks are written and freed in each step: below what lies in a raised heap, above what glibc begins with.
FIRST_STEPS = f"""
import ctypes, resource, sys
from cubatch.measure.memory_meter import ResidentMeter

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
if sys.argv[1] == "settled":
    ResidentMeter().settle()

def step():
    blocks = [libc.malloc(10 * {MIB}) for _ in range(2)]
    for block in blocks:
        ctypes.memset(block, 1, 10 * {MIB})
    for block in blocks:
        libc.free(block)

step()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
def test_a_heap_in_order_takes_what_its_blocks_take():
    """Left to itself it takes the blocks of earlier shapes too; in order, within what it need not give back."""

    def peaks(how):
        done = subprocess.run((sys.executable, "-c", STEPS, how), capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    loose, tidy = peaks("as it is"), peaks("in order")
    for size, peak in zip((4, 5, 6), tidy, strict=True):
        assert peak <= NUM_BLOCKS * size * MIB + 2 * 32 * MIB
    assert loose[-1] > 1.4 * tidy[-1]


def test_bounds_that_the_user_has_chosen_stay(monkeypatch):
    """Whoever tunes glibc has their process measured as it is."""
    for name in (*heap._CHOICES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert heap.is_movable() == ("glibc" in os.confstr("CS_GNU_LIBC_VERSION"))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")
    assert not heap.is_movable()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert not heap.is_movable()


@pytest.mark.skipif(shutil.which("cc") is None or not hasattr(os, "confstr"), reason="no C compiler")
def test_another_allocator_is_not_taken_for_glibcs(tmp_path):
    """One that is loaded before it, as jemalloc is, hears nothing of mallopt, and glibc's variables are not its own."""
    (tmp_path / "other.c").write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t size) { return __libc_malloc(size); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, check=True)
    ask = "from cubatch.measure import heap; print(heap.is_movable(), heap.settings())"
    library = str(tmp_path / "other.so")
    clean = {name: value for name, value in os.environ.items() if name not in (*heap._CHOICES, "GLIBC_TUNABLES")}
    said = subprocess.run(
        [sys.executable, "-c", ask], env={**clean, "LD_PRELOAD": library}, capture_output=True, text=True, check=True
    ).stdout
    assert said == f"False LD_PRELOAD={library}\n"


def test_what_the_user_has_said_of_memory_is_told_whole(monkeypatch):
    """Kept timings apply only where it is the same."""
    for name in (*heap._CHOICES, "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    raised = heap.spelt(heap.RAISED) if heap.is_movable() else None
    assert (heap.settings(), heap.is_kept()) == (raised, False)
    for name, value in heap.KEPT.items():
        monkeypatch.setenv(name, value)
    assert sorted(heap.settings().split()) == sorted(heap.spelt(heap.KEPT).split())
    assert heap.is_kept()
    assert not heap.is_movable()


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
def test_a_step_meets_the_same_heap_whatever_ran_before():
    """Blocks of 10 MiB cost page faults in a process that freed nothing larger, and none once bounds are raised."""

    def faults(how, **variables):
        done = subprocess.run(
            (sys.executable, "-c", FIRST_STEPS, how), capture_output=True, text=True, check=True,
            env={**os.environ, **variables},
        )  # fmt: skip
        return int(done.stdout)

    assert faults("as it is") >= 10  # of huge pages, where the system has them; else 5 120
    assert faults("settled") <= 1
    assert faults("as it is", **heap.RAISED) <= 1  # what users are told to set does the same


def test_whoever_has_the_bounds_that_are_advised_is_told_nothing(monkeypatch):
    """They are measured as without them, and no more is said; other choices are the user's."""
    for name in (*heap._CHOICES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if not heap.is_movable():
        pytest.skip("no glibc")
    (said,) = heap.told()
    assert heap.spelt(heap.RAISED) in said
    kept_as = heap.settings()
    for name, value in heap.RAISED.items():
        monkeypatch.setenv(name, value)
    assert (heap.told(), heap.is_movable(), heap.is_apart(), heap.settings()) == ([], True, False, kept_as)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert (heap.told(), heap.is_movable(), heap.is_apart()) == ([], False, True)


def test_only_tunables_that_say_where_blocks_lie_count(monkeypatch):
    """Each is a variable of the same meaning; how many arenas there are is none of them."""
    for name in (*heap._CHOICES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    is_movable = heap.is_movable()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0")
    assert (heap.is_movable(), heap.is_kept(), heap.is_apart()) == (is_movable, False, False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_max=0")
    assert (heap.is_movable(), heap.is_kept(), heap.is_apart()) == (False, True, False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")
    assert (heap.is_movable(), heap.is_kept(), heap.is_apart()) == (False, False, is_movable)
