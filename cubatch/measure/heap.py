"""
The C library's heap, kept in order: glibc's `malloc` on the host.

What a step frees is found again by the next only as far as it lies together.  A library takes a few kilobytes for good
in its first step with each shape, in between of the large blocks; later ones then do not fit into what is left, and the
heap grows: the same step of `densenet121`, 452 samples and 452 MiB of tensors, took 566 to 1306 MiB in nine
processes that did the same.  With large blocks apart from the heap in that first step it took 510 to 551 MiB.
A threshold alone does not have them apart: what is free in the heap, of steps before, is taken first.

glibc raises its bounds to the largest block below 32 MiB that a process has freed, so that the speed of a step depends
on what ran before it, less so where they are that high from the beginning ("Page faults" in
benchmarks/results/amd-epyc-2-threads/README.md).

A call of `mallopt` cannot be undone, so cubatch makes it only in a worker process, never in the user's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = 2**20
_LARGEST = 32 * 2**20
_IS_MAPPED = 2  # in the word before a block: malloc/malloc.c
_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

RAISED: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(_LARGEST), "MALLOC_TRIM_THRESHOLD_": str(2 * _LARGEST),
}  # fmt: skip
"""Variables with which glibc has from the beginning the bounds that `together` sets."""

KEPT: Mapping[str, str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}
"""Variables with which glibc keeps all that is freed, up to 16 GiB."""


_is_owned = False


def own_process() -> None:
    """Allow cubatch to call `mallopt` in this process; only a worker process calls this, once at its start."""
    global _is_owned  # noqa: PLW0603 - a property of the process, set before anything reads it
    _is_owned = True


def is_owned() -> bool:
    """Return whether cubatch started this process as a worker; False in the user's process."""
    return _is_owned


def is_movable() -> bool:
    """Say whether bounds are ours to set: glibc's, if the user has not said himself where blocks lie, or as we do."""
    return _is_glibcs() and _chosen() in ({}, RAISED)


def settings(device_kind: str) -> str | None:
    """
    Return the variables that set how a worker keeps freed memory, in shell syntax; None if none are set.

    They are those of the user, and on a CPU `RAISED` where `is_movable`.
    """
    names = (*_CHOICES, "GLIBC_TUNABLES", "LD_PRELOAD")
    said = {name: os.environ[name] for name in names if name in os.environ}
    return spelt({**RAISED, **said} if device_kind == "cpu" and is_movable() else said) or None


def is_raised(device_kind: str) -> bool:
    """Return whether a worker times steps with the thresholds of `RAISED`, which the user has not set."""
    return device_kind == "cpu" and is_movable() and not _chosen()


def spelt(variables: Mapping[str, str]) -> str:
    """
    Write variables as a shell has them.

    Example:
        >>> spelt(KEPT)
        'MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184'
        >>> spelt(RAISED)
        'MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=67108864'
    """
    return " ".join(f"{name}={value}" for name, value in variables.items())


def is_kept() -> bool:
    """Say whether the user has all that is freed kept, which a step does not always find again."""
    return _chosen().get("MALLOC_MMAP_MAX_") == "0"


def is_apart() -> bool:
    """Say whether the user has large blocks lie apart from the heap, by a low threshold that glibc does not move."""
    try:
        threshold = int(_chosen().get("MALLOC_MMAP_THRESHOLD_", ""), 0)
    except ValueError:
        return False
    return _is_glibcs() and threshold <= _LARGE and not is_kept()


def apart() -> list[int]:
    """
    Have each large block be a mapping of its own, which is gone once it is freed: exact, and half as fast.

    Returns:
        list: Blocks that hold what is free in the heap, untouched, until `together` is given them.
    """
    _set(_LARGE)
    libc, held, size = _libc(), [], _LARGEST  # a block that cannot be had would move the thread to another arena
    end = libc.sbrk(0)
    while size >= _LARGE:
        block = libc.malloc(size)
        if block is not None and not _is_mapped(block) and block < end:  # beyond it the heap has grown
            held.append(block)
            continue
        libc.free(block)  # nothing is free any more for so much
        size //= 2
    return held


def together(held: Iterable[int] = ()) -> None:
    """
    Have blocks lie in the heap, and be found again by the next step.

    Args:
        held: What `apart` has taken, to be free again.

    The bounds are those that glibc raises its own to, as far as they go, where blocks of up to 32 MiB were freed
    (mallopt(3), M_MMAP_THRESHOLD); a process cannot have it move them by itself again.
    """
    libc = _libc()
    for block in held:
        libc.free(block)
    _set(_LARGEST)


def trim() -> None:
    """Give back what nobody uses."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _is_glibcs() -> bool:
    """Say whether `malloc` is glibc's own: another allocator may be loaded before it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    addresses = {ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (libc, ctypes.CDLL("libc.so.6"))}
    return len(addresses) == 1


def _chosen() -> dict[str, str]:
    """Give what the user has said where blocks lie by, whichever way: each tunable of glibc's is a variable, too."""
    tunables = dict(item.partition("=")[::2] for item in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    names = {name: f"glibc.malloc.{name.removeprefix('MALLOC_').rstrip('_').lower()}" for name in _CHOICES}
    found = {name: os.environ.get(name, tunables.get(names[name])) for name in _CHOICES}
    return {name: value for name, value in found.items() if value is not None}


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    return libc


def _is_mapped(block: int) -> bool:
    return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MAPPED)


def _set(threshold: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, threshold)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * threshold)
