"""The context in which operations launch kernels: the device, the choice of variants, and the launcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from cubatch.engine import backend
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.kernels import ranking, variant
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import Prepare, SplitKernel
from cubatch.kernels.variant import Kernel

Grid = tuple[int, int, int]

_STORAGE = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}
_BY_VALUE: dict[type, Callable[[Any], np.generic]] = {bool: np.int32, int: np.int32, float: np.float32}


class Launcher(Protocol):
    """Runs kernels: on a GPU, or on the CPU in tests."""

    @property
    def module(self) -> Any:
        """The array module whose arrays the launcher accepts: CuPy, or NumPy in tests."""

    def bind(self, kernel: Kernel, grid: Grid, arguments: Sequence[object]) -> Callable[[], None]:
        """
        Return a function that runs the kernel, or enqueues it, each time it is called.

        Args:
            grid: Blocks in x, y and z.
            arguments: In the order of the kernel's parameters: arrays and None are passed as pointers, NumPy scalars
                and tensor maps by value.
        """


@attrs.frozen
class Context:
    """The device and launcher on which operations run, and the choice of kernel variants."""

    device: Device  # the device, whose SMs and architecture decide grids and variants
    launcher: Launcher  # runs the kernels
    # returns the variant for a problem and its slices; may time some variants
    chooser: Callable[[Problem, Device, Prepare | None], SplitKernel] = ranking.first_ranked
    tf32: bool = False  # whether products of float32 arrays may round their operands to tf32, for tensor cores
    # whether sums over rows start at the last row, by kernels of their own: SummedRows of kernels/common/columns.cuh
    reverses_sums: bool = False
    # families of kernels that the driver has refused to launch here, or one family for one problem: others take their
    # place
    refused: set[str | tuple[str, Problem]] = attrs.field(factory=set, init=False, eq=False)

    def choose(self, problem: Problem, run: Callable[[SplitKernel], object] | None = None) -> SplitKernel:
        """
        Return the variant that runs a problem, and its slices; of a refused family only if there is no other.

        Args:
            problem: The product or convolution.
            run: Launches a variant on the arrays, overwriting the result; None: choose without a trial launch.
        """
        prepare = None if run is None else functools.partial(backend.prepare, run)

        def is_refused(kernel: Kernel) -> bool:
            return not self.refused.isdisjoint({kernel.family, (kernel.family, problem)})

        chosen = self.chooser(problem, self.device, prepare)
        if not is_refused(chosen.kernel):
            return chosen
        others = (kernel for kernel in ranking.ranked(problem, self.device) if not is_refused(kernel))
        return next((SplitKernel.modelled(problem, other, self.device) for other in others), chosen)

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[object]) -> None:
        """
        Launch a kernel, or inside `backend.prepare` record the launch; an empty grid is not launched.

        Python's int and bool are passed as int32, float as float32.
        """
        if all(grid):
            values = (_BY_VALUE[type(value)](value) if type(value) in _BY_VALUE else value for value in arguments)
            backend.call(self.launcher.bind(kernel, grid, tuple(values)))

    def run(self, operation: str, like: Any, grid: Grid, *arguments: object) -> None:
        """Launch the only kernel of an operation for the type of the array `like`; see `launch`."""
        self.launch(variant.find(operation, dtype_of(like)), grid, arguments)

    @staticmethod
    def address(array: Any) -> int:
        """Return the address of an array; 0 for None."""
        if array is None:
            return 0
        return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

    @classmethod
    def aligned(cls, array: Any, num_bytes: int) -> bool:
        """Return whether an array starts at a multiple of `num_bytes`; True for None."""
        return cls.address(array) % num_bytes == 0


def dtype_of(array: Any) -> str:
    """Return the dtype of an array's elements, "bfloat16" for uint16; raise InvalidArgument if kernels lack it."""
    name = str(array.dtype)
    if name not in _STORAGE:
        raise InvalidArgument("dtype", name, "float32, float16 or uint16 (the bits of bfloat16)")
    return _STORAGE[name]
