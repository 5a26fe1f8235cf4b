"""
Settings of glibc's heap, which decide how much memory a step takes and how fast it is.

In its first step of each shape a library allocates a few kilobytes permanently, between large blocks.  Later large
blocks do not fit into the gaps, and the heap grows.  The same step of `densenet121` with 452 MiB of tensors took 566 to
1306 MiB in nine processes.  It took 510 to 551 MiB if large blocks were apart from the heap in the first step.  A
threshold alone does not ensure that: free blocks of the heap are used first.

glibc raises its thresholds to the largest block below 32 MiB that a process has freed.  So the speed of a step depends
on earlier steps.  It depends less if they are that high from the start ("Page faults" in
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
"""Variables that set the thresholds of `put_together` from the start of a process."""

KEPT: Mapping[str, str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}
"""Variables with which glibc keeps up to 16 GiB of freed memory."""


_is_owned = False


def own_process() -> None:
    """Allow cubatch to call `mallopt` in this process; only a worker process calls this, once at its start."""
    global _is_owned  # noqa: PLW0603 - a property of the process, set before anything reads it
    _is_owned = True


def is_owned() -> bool:
    """Return whether cubatch started this process as a worker; False in the user's process."""
    return _is_owned


def is_movable() -> bool:
    """Return whether cubatch may set malloc's thresholds: malloc is glibc's, and only `RAISED` sets them so far."""
    return _is_glibc() and _user_variables() in ({}, RAISED)


def settings(device_kind: str) -> str | None:
    """
    Return environment variables that set how a worker keeps freed memory, in shell syntax; None if none are set.

    They are the user's variables; for `device_kind` "cpu" cubatch adds `RAISED` if the user has set none and malloc is
    glibc's.
    """
    names = (*_CHOICES, "GLIBC_TUNABLES", "LD_PRELOAD")
    own = {name: os.environ[name] for name in names if name in os.environ}
    return format_variables({**RAISED, **own} if device_kind == "cpu" and is_movable() else own) or None


def is_raised(device_kind: str) -> bool:
    """Return whether cubatch, not the user, sets malloc's thresholds in the worker that times steps; False on a GPU."""
    return device_kind == "cpu" and is_movable() and not _user_variables()


def format_variables(variables: Mapping[str, str]) -> str:
    """Return environment variables in shell syntax, "NAME=value", separated by spaces."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def is_kept() -> bool:
    """Return whether the user's settings make glibc keep all freed memory, which later steps cannot always use."""
    return _user_variables().get("MALLOC_MMAP_MAX_") == "0"


def is_apart() -> bool:
    """Return whether the user's settings map large blocks apart from the heap: by a fixed threshold up to 1 MiB."""
    try:
        threshold = int(_user_variables().get("MALLOC_MMAP_THRESHOLD_", ""), 0)
    except ValueError:
        return False
    return _is_glibc() and threshold <= _LARGE and not is_kept()


def keep_apart() -> list[int]:
    """
    Make malloc map each block from 1 MiB on separately: freeing returns it to the system, and steps are half as fast.

    Returns:
        list: Addresses of blocks that occupy the free parts of the heap until `put_together` frees them.
    """
    _set(_LARGE)
    libc, held, size = _libc(), [], _LARGEST  # after a failed malloc the thread would use another arena
    end = libc.sbrk(0)
    while size >= _LARGE:
        block = libc.malloc(size)
        if block is not None and not _is_mapped(block) and block < end:  # beyond it the heap has grown
            held.append(block)
            continue
        libc.free(block)  # the heap has no free block of this size
        size //= 2
    return held


def put_together(held: Iterable[int] = ()) -> None:
    """
    Free the `held` blocks, and make malloc take blocks up to 32 MiB from the heap again, as the next step reuses them.

    The thresholds are the highest to which glibc raises its own (mallopt(3), M_MMAP_THRESHOLD).
    """
    libc = _libc()
    for block in held:
        libc.free(block)
    _set(_LARGEST)


def _is_glibc() -> bool:
    """Return whether `malloc` is glibc's: another allocator may be loaded before it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    addresses = {ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (libc, ctypes.CDLL("libc.so.6"))}
    return len(addresses) == 1


def _user_variables() -> dict[str, str]:
    """Return the user's settings of malloc as variables by name; those in GLIBC_TUNABLES included."""
    tunables = dict(item.partition("=")[::2] for item in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    names = {name: f"glibc.malloc.{name.removeprefix('MALLOC_').rstrip('_').lower()}" for name in _CHOICES}
    values = {name: os.environ.get(name, tunables.get(names[name])) for name in _CHOICES}
    return {name: value for name, value in values.items() if value is not None}


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
