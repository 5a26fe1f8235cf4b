"""The heap in which steps are timed: the same whatever ran before, and kept from growing where memory matters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cubatch.frameworks import heap

MIB = 2**20
NUM_BLOCKS = 40
# Each shape's first step frees large blocks and keeps some kilobytes between them; those of the next are larger.
STEPS = f"""
import ctypes, sys
from cubatch.frameworks import heap
from cubatch.frameworks.memory_meter import HostMeter

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
heap.own_process()
meter = HostMeter()
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
        meter._held = heap.keep_apart()
"""
# Large blocks of an earlier step are free, and small ones that a library keeps lie between them.
HOLES = f"""
import ctypes, threading
from cubatch.frameworks import heap
from cubatch.frameworks.memory_meter import HostMeter

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)

libc.free(libc.malloc(31 * {MIB}))  # from now on glibc has blocks of up to so much lie in the heap
threading.Thread(target=dict).start()  # glibc has several arenas from now on
blocks = [(libc.malloc(8 * {MIB}), libc.malloc(40000)) for _ in range({NUM_BLOCKS})]
for block, _ in blocks:
    libc.free(block)

def is_between_them():
    block = libc.malloc(4 * {MIB})
    libc.free(block)
    return min(blocks)[0] <= block <= max(blocks)[0]

heap.own_process()
meter = HostMeter()
meter.tidy()
for _ in range(2):  # steps of a module that is loaded start it twice
    meter.start()
print(is_between_them(), meter.peak() < 2 * {MIB})
meter.settle()
print(is_between_them())
"""
# Blocks of 60 MiB together are freed in each step: glibc keeps 40 of them by itself, once it has met one.
FIRST_STEPS = f"""
import ctypes, resource, sys
from cubatch.frameworks import heap
from cubatch.frameworks.memory_meter import HostMeter

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
exec(sys.argv[1], dict(globals()))

def step():
    blocks = [libc.malloc(20 * {MIB}) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, 20 * {MIB})
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
    """With raised bounds alone it takes the blocks of earlier shapes too; in order, what it need not give back."""

    def peaks(how):
        done = subprocess.run((sys.executable, "-c", STEPS, how), capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    loose, tidy = peaks("as it is"), peaks("in order")
    for size, peak in zip((4, 5, 6), tidy, strict=True):
        assert peak <= NUM_BLOCKS * size * MIB + 2 * 32 * MIB
    assert loose[-1] > 1.4 * tidy[-1]


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
def test_what_earlier_steps_left_free_is_no_place_for_a_first_step():
    """A block takes what is free before it becomes a mapping of its own, whatever the threshold; later steps may."""
    done = subprocess.run((sys.executable, "-c", HOLES), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_bounds_that_the_user_has_chosen_stay(monkeypatch, malloc_is_not_chosen):
    """Whoever tunes glibc has their process measured as it is."""
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
    ask = "from cubatch.frameworks import heap; print(heap.is_movable(), heap.settings('cpu'))"
    library = str(tmp_path / "other.so")
    clean = {name: value for name, value in os.environ.items() if name not in (*heap._CHOICES, "GLIBC_TUNABLES")}
    said = subprocess.run(
        [sys.executable, "-c", ask], env={**clean, "LD_PRELOAD": library}, capture_output=True, text=True, check=True
    ).stdout
    assert said == f"False LD_PRELOAD={library}\n"


def test_what_the_user_has_said_of_memory_is_told_whole(monkeypatch, malloc_is_not_chosen):
    """Kept timings apply only where it is the same."""
    raised = heap.format_variables(heap.RAISED) if heap.is_movable() else None
    assert (heap.settings("cpu"), heap.is_kept()) == (raised, False)
    for name, value in heap.KEPT.items():
        monkeypatch.setenv(name, value)
    for kind in ("cpu", "cuda"):
        assert sorted(heap.settings(kind).split()) == sorted(heap.format_variables(heap.KEPT).split())
    assert heap.is_kept()
    assert not heap.is_movable()


def faults(before, **variables):
    """Give the page faults of a third step, after some lines of Python, in a process without other bounds."""
    bare = {name: value for name, value in os.environ.items() if name not in (*heap._CHOICES, "GLIBC_TUNABLES")}
    done = subprocess.run(
        (sys.executable, "-c", FIRST_STEPS, before), capture_output=True, text=True, check=True,
        env={**bare, **variables},
    )  # fmt: skip
    return int(done.stdout)


NONE, SETTLED = "", "heap.own_process()\nHostMeter().settle()"
FREED = "libc.free(libc.malloc({} * 2**20))"
FEW = 10  # of huge pages, where the system has them; else 256 a MiB


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
@pytest.mark.parametrize("before", [NONE, FREED.format(1), FREED.format(31), "heap.keep_apart()"])
def test_a_step_meets_the_same_heap_whatever_ran_before(before):
    """Bounds are raised by a meter that was told that steps are to be timed, and stay whatever is freed then."""
    assert faults(f"{before}\n{SETTLED}\n{FREED.format(1)}") <= 1


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
def test_what_users_are_told_does_the_same():
    """The variables of a result, and the two calls of the guide; without them the same steps fetch memory anew."""
    assert faults(NONE) >= FEW
    assert faults(NONE, **heap.RAISED) <= 1
    guide = (Path(__file__).parents[3] / "docs/how-to/pytorch.md").read_text(encoding="utf-8")
    (calls,) = re.findall(r"^import ctypes\n[^`]+", guide, flags=re.MULTILINE)
    assert faults(calls) <= 1


@pytest.mark.skipif(not heap.is_movable(), reason="no glibc, or its bounds were chosen")
def test_a_meter_leaves_bounds_that_the_user_has_chosen():
    """Their steps are timed as they are everywhere."""
    assert faults(SETTLED, MALLOC_MMAP_THRESHOLD_="1048576") >= FEW


def test_whoever_has_the_bounds_that_are_advised_is_told_nothing(monkeypatch, malloc_is_not_chosen):
    """They are measured as without them, and no more is said; other choices are the user's."""
    if not heap.is_movable():
        pytest.skip("no glibc")
    assert heap.is_raised("cpu")
    assert (heap.is_raised("cuda"), heap.settings("cuda")) == (False, None)
    kept_as = heap.settings("cpu")
    for name, value in heap.RAISED.items():
        monkeypatch.setenv(name, value)
    assert (heap.is_raised("cpu"), heap.is_movable(), heap.settings("cpu")) == (False, True, kept_as)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert (heap.is_raised("cpu"), heap.is_movable()) == (False, False)


@pytest.mark.parametrize(("threshold", "is_apart"), [("1048576", True), ("33554432", False), ("1 MB", False)])
def test_blocks_lie_apart_only_above_a_low_threshold(monkeypatch, threshold, is_apart, malloc_is_not_chosen):
    """Of a high one those below it lie together, and take by chance what they take: README's is the highest."""
    is_glibcs = heap.is_movable()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    assert heap.is_apart() == (is_apart and is_glibcs)


def test_only_tunables_that_say_where_blocks_lie_count(monkeypatch, malloc_is_not_chosen):
    """Each is a variable of the same meaning; how many arenas there are is none of them."""
    is_movable = heap.is_movable()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0")
    assert (heap.is_movable(), heap.is_kept(), heap.is_apart()) == (is_movable, False, False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_max=0")
    assert (heap.is_movable(), heap.is_kept(), heap.is_apart()) == (False, True, False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")
    assert (heap.is_movable(), heap.is_kept(), heap.is_apart()) == (False, False, is_movable)
