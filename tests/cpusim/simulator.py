"""Running CUDA kernels on the CPU: the launcher of tests where there is no GPU."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cubatch.kernels.tensor_map import TensorMap, Window, check_address
from cubatch.kernels.variant import Kernel
from tests.cpusim import building, reports

Grid = tuple[int, int, int]

SCHEDULES = ("in_order", "reversed", "shuffled", "warps")
MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
_MESSAGE_BYTES = 1 << 14
_running = threading.Lock()  # the runtime has one set of fibers, and a unit one set of shared arrays


class SimulationError(Exception):
    """A launch that a GPU could not carry out, or whose result it would leave to chance; says where."""


class _Parameter(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint32), ("size", ctypes.c_uint32), ("pointee", ctypes.c_uint32))


class _Entry(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("num_parameters", ctypes.c_uint64),
        ("cluster", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):  # CpusimLaunch of runtime.h
    _fields_ = (
        ("entry", ctypes.POINTER(_Entry)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("blocks", ctypes.c_void_p),
        ("num_blocks", ctypes.c_uint64),
        ("shared_begin", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
        ("dynamic_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("early", ctypes.c_uint32),
    )


# TensorMap of cpusim_hopper.h.
_TENSOR_MAP = np.dtype(
    [("address", np.uint64)]
    + [(name, np.uint32) for name in ("is_im2col", "rank", "element_bytes", "rounds_to_tf32")]
    + [("dims", np.uint32, 4), ("strides", np.uint64, 3), ("box", np.uint32, 4), ("steps", np.uint32, 4)]
    + [("lower", np.int32, 2), ("upper", np.int32, 2), ("unused", np.uint64, 2)],
    align=True,
)


class Simulator:
    """
    Runs kernels on the CPU, each thread a fiber, each block or cluster for itself; has the method of a launcher.

    Args:
        arch: Compute capability times ten that kernels are compiled for: which branch of CB_ARCH.
        build: "plain", or "address" or "thread" for the sanitizer (whose library must be preloaded).
        schedule: Who goes first: "in_order", "reversed", "shuffled" threads or "warps" in shuffled order. The last
            two shuffle the blocks as well.
        copies: When an asynchronous copy happens: "late", at the wait for it, or "early", at its issue.
        seed: Of the shuffling: equal launches run in equal order.
        blocks: Which blocks run: None for all, or a list of (x, y, z), or what gives one for a grid; of clusters, those
            that they are in.

    Attributes:
        module: The array module whose arrays it takes: NumPy.
    """

    module = np

    def __init__(
        self,
        arch: int = 80,
        build: str = "plain",
        *,
        schedule: str = "shuffled",
        copies: str = "late",
        seed: int = 0,
        blocks: Iterable[Grid] | Callable[[Grid], Iterable[Grid]] | None = None,
    ) -> None:
        if schedule not in SCHEDULES or copies not in {"late", "early"}:
            raise ValueError(f"no schedule {schedule!r} with copies {copies!r}")
        self.arch, self.build, self.early, self.blocks = arch, build, copies == "early", blocks
        self.schedule = SCHEDULES.index(schedule)
        self.seed = seed

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[object]) -> None:
        """Run a kernel to its end: what `bind` gives, called once."""
        self.bind(kernel, grid, arguments)()

    def bind(self, kernel: Kernel, grid: Grid, arguments: Sequence[object]) -> Callable[[], None]:
        """
        Prepare a launch; what comes back runs the kernel to its end each time it is called.

        Args:
            kernel: Which; compiled when it is first met.
            grid: Blocks in x, y and z.
            arguments: In the order of its parameters: arrays and None as pointers, NumPy scalars and tensor maps by
                value.

        Raises:
            BuildError: If g++ refuses the kernel.
            SimulationError: If grid or arguments do not fit the kernel; from the launch, what went wrong and where.
        """
        if not kernel.runs_on(self.arch):
            raise SimulationError(f"{kernel.name} is not for sm_{self.arch}")
        if not all(0 < extent <= most for extent, most in zip(grid, MAX_GRID, strict=True)):
            raise SimulationError(f"{kernel.name}: a GPU takes no grid of {grid}")
        if kernel.threads % 32 or not 0 < kernel.threads <= 1024:
            raise SimulationError(f"{kernel.name}: {kernel.threads} threads are no whole warps of one block")
        if self.build != "plain" and os.environ.get("CUBATCH_CPUSIM") != self.build:
            raise SimulationError(f"the {self.build} build runs under `python -m tests.cpusim {self.build}`")
        unit = _load(building.shared_object(kernel, self.arch, self.build))
        entry = unit.entries[kernel.entry]
        values = _arguments(kernel, entry, arguments)
        blocks = self.blocks(grid) if callable(self.blocks) else self.blocks
        wanted = None if blocks is None else np.array(list(blocks), dtype=np.uint32).reshape(-1, 3)
        if wanted is not None:
            if (wanted >= np.array(grid)).any():
                raise SimulationError(f"{kernel.name}: blocks outside of a grid of {grid}")
            wanted[:, 0] -= wanted[:, 0] % entry.cluster
            wanted = np.array(list(dict.fromkeys(map(tuple, wanted))), dtype=np.uint32).reshape(-1, 3)
        launch = _Launch(
            entry=ctypes.pointer(entry),
            arguments=(ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values)),
            blocks=None if wanted is None else wanted.ctypes.data,
            num_blocks=grid[0] * grid[1] * grid[2] if wanted is None else len(wanted),
            shared_begin=unit.shared[0],
            shared_end=unit.shared[1],
            dynamic_bytes=kernel.dynamic_shared_bytes,
            seed=self.seed,
            grid=grid,
            threads=kernel.threads,
            schedule=self.schedule,
            early=self.early,
        )
        launch.kept = arguments, values, wanted  # what it points to

        def run() -> None:
            message = ctypes.create_string_buffer(_MESSAGE_BYTES)
            with _running:
                failed = unit.run(ctypes.byref(launch), message, _MESSAGE_BYTES)
                races = reports.new_races() if self.build == "thread" else ""
            if failed:
                raise SimulationError(reports.with_places(message.value.decode(errors="replace")))
            if races:
                raise SimulationError(f"{kernel.name}: {races}")

        return run


class _Unit:
    """A shared object: its kernels, and the bounds of its shared memory."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.run = library.cpusim_launch  # found in the runtime that the unit is linked to
        self.shared = (ctypes.c_void_p * 2).in_dll(library, "cpusim_shared")
        table = ctypes.cast(ctypes.addressof(ctypes.c_char.in_dll(library, "cpusim_entries")), ctypes.POINTER(_Entry))
        named = itertools.takewhile(lambda entry: entry.name, map(table.__getitem__, itertools.count()))
        self.entries = {entry.name.decode(): entry for entry in named}


_load = cache(_Unit)


def _arguments(kernel: Kernel, entry: Any, arguments: Sequence[object]) -> list[np.ndarray[Any, Any]]:
    """Give the bytes of every argument, each checked against its parameter in the source."""
    if len(arguments) != entry.num_parameters:
        raise SimulationError(f"{kernel.name}: {entry.num_parameters} parameters, but {len(arguments)} arguments")
    return [
        _argument(f"{kernel.name}: parameter {index}", entry.parameters[index], argument)
        for index, argument in enumerate(arguments)
    ]


def _argument(place: str, parameter: Any, argument: object) -> np.ndarray[Any, Any]:
    kind, size = chr(parameter.kind), parameter.size
    if kind in "pc":
        return np.array([_address(place, kind, parameter.pointee, argument)], dtype=np.uint64)
    if isinstance(argument, TensorMap):
        argument = _tensor_map(argument)
    if not isinstance(argument, np.generic):
        raise SimulationError(f"{place} is by value: wants a NumPy scalar, got {type(argument).__name__}")
    names = {"i": "i", "u": "ub", "f": "f", "s": "V"}
    if argument.dtype.kind not in names[kind] or argument.itemsize != size:
        raise SimulationError(f"{place} has {size} bytes of kind {kind!r}, got {argument.dtype} of {argument.itemsize}")
    return np.array(argument)


def _tensor_map(described: TensorMap) -> np.void:
    """Give the record that the twins of the copy engine read, in the place of the GPU's 128 bytes."""

    def four(*numbers: int) -> tuple[int, ...]:
        return numbers + (1,) * (4 - len(numbers))

    window = described.window or Window((1, 1), (0, 0), (0, 0))
    address = check_address(described.array.ctypes.data)
    kind = (described.window is not None, len(described.dims), described.item_bytes, described.dtype == "tf32")
    strides = (*described.strides, 0, 0)[:3]
    facts = (address, *kind, four(*described.dims), strides, four(*described.box), four(1, *window.steps))
    return np.array((*facts, window.lower, window.upper, (0, 0)), dtype=_TENSOR_MAP)[()]


def _address(place: str, kind: str, pointee: int, argument: object) -> int:
    if argument is None:
        return 0
    if not isinstance(argument, np.ndarray):
        raise SimulationError(f"{place} is a pointer: wants an array or None, got {type(argument).__name__}")
    if pointee > 1 and argument.itemsize not in {1, pointee}:
        raise SimulationError(f"{place} points to {pointee} bytes each, got an array of {argument.dtype}")
    if kind == "p" and not argument.flags.writeable:
        raise SimulationError(f"{place} may be written to, got a read-only array")
    return argument.ctypes.data
