"""The ways to do a case on our kernels: every variant that can run it, and what each launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import attrs
import numpy as np

from cubatch.bench.cases import Case
from cubatch.bench.target import reserve
from cubatch.engine.native import naive
from cubatch.engine.native.context import Context, Grid, Launcher
from cubatch.engine.native.operations import operations
from cubatch.errors import UnsupportedLayer
from cubatch.hardware.facts import Device
from cubatch.kernels.cost_model import blocks
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import SplitKernel, ranked, slices
from cubatch.kernels.variant import Kernel, kernels

Which = Literal["chosen", "ranked", "all"]
TENSOR_FAMILIES = ("mma", "hopper")
"""Families on tensor cores, an order of magnitude faster than the others."""


@attrs.frozen
class Launch:
    """A launch of a call: which kernel, how many blocks, and the last problem for which a variant was chosen."""

    kernel: Kernel
    grid: Grid
    problem: Problem | None = None

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)


@attrs.define
class Tracer:
    """
    A launcher that notes what passes through it.

    Attributes:
        launcher: Launches the kernels; None: nothing is launched.
        launches: What was bound.
        problems: What a variant was chosen for.
    """

    launcher: Launcher | None = None
    launches: list[Launch] = attrs.field(factory=list)
    problems: list[Problem] = attrs.field(factory=list)

    @property
    def module(self) -> ModuleType:
        """The array module whose arrays it takes: the launcher's, else NumPy."""
        return self.launcher.module if self.launcher else np

    def bind(self, kernel: Kernel, grid: Grid, arguments: Sequence[object]) -> Callable[[], None]:
        """Note a launch and hand it on."""
        self.launches.append(Launch(kernel, grid, self.problems[-1] if self.problems else None))
        return self.launcher.bind(kernel, grid, arguments) if self.launcher else _nothing


def _nothing() -> None:
    """Do what a launch does without a launcher."""


@attrs.frozen(eq=False)
class Way:
    """
    A way to do a case.

    Attributes:
        case: The call.
        device: Decides grids and variants.
        wanted: The variant that runs the problems of its operation; None: what is ranked first.
        is_naive: By kernels/naive, which have no variants.
        launches: What it launches.
        problems: What a variant is chosen for; none where there is no choice.
    """

    case: Case
    device: Device
    wanted: Kernel | None = None
    is_naive: bool = False
    launches: tuple[Launch, ...] = attrs.field(init=False)
    problems: tuple[Problem, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        tracer = Tracer()
        self.case.call(self.operations(tracer), reserve(self.case))
        object.__setattr__(self, "launches", tuple(tracer.launches))
        object.__setattr__(self, "problems", tuple(tracer.problems))

    def operations(self, tracer: Tracer) -> Any:
        """
        Return the engine's operations, done this way and noted.

        Args:
            tracer: Hands the launches on.

        Raises:
            UnsupportedLayer: If no kernel does what the case calls.
        """

        def choose(problem: Problem, device: Device, *_: object) -> SplitKernel:
            tracer.problems.append(problem)
            fits = self.wanted is not None and self.wanted.operation == problem.operation
            kernel = self.wanted if self.wanted is not None and fits else ranked(problem, device)[0]
            return SplitKernel.modelled(problem, kernel, device)

        context = Context(self.device, tracer, choose, tf32=self.case.dtype == "tf32")
        # Whom the driver refuses is refused: timed under its name, another family's kernel would be taken for it.
        context.refused.update({kernel.family for kernel in kernels()}, {self.wanted.family} if self.wanted else ())
        found = _naive(context) if self.is_naive else operations(context)
        if not hasattr(found, self.case.operation):
            raise UnsupportedLayer(self.case.name, f"there is no kernel for {self.case.operation}")
        return found

    @property
    def main(self) -> Kernel:
        """The kernel that does the main part: the one that was chosen, else the first."""
        if self.wanted is not None:
            return self.wanted
        chosen = self.problems[0].operation if self.problems else None
        return next((run.kernel for run in self.launches if run.kernel.operation == chosen), self.launches[0].kernel)

    def shared_tiles(self, launch: Launch) -> int | None:
        """Count the tiles that the blocks of a launch share; None where each block has one: in all but one family."""
        problem = launch.problem
        if launch.kernel.family != "hopper" or problem is None:
            return None
        tiles = blocks(problem, launch.kernel) * slices(problem, launch.kernel, self.device)
        # The phases of a strided gradient are launches of up to four, of nearly the same size.
        same = [other for other in self.launches if other.kernel is launch.kernel and other.problem is problem]
        return -(-tiles // len(same))

    @property
    def label(self) -> str:
        """Its main kernel's name among those of the operation: family, tile, vector."""
        main = self.main
        vector = f"v{main.vector}" if main.vector > 1 and main.winograd is None else ""
        return " ".join(part for part in (main.family, main.tile_name, vector) if part)


def ways(case: Case, device: Device, variants: Which = "chosen", without: Collection[str] = ()) -> list[Way]:
    """
    List the ways to do a case.

    Args:
        case: The call.
        device: What it runs on.
        variants: "chosen": the variant ranked first; "ranked": every one that can run it, where there are some on
            tensor cores only those; "all": every one and kernels/naive.
        without: Families that take no part; where no other can run it, there is no way.

    Raises:
        UnsupportedLayer: If no kernel does it.
    """
    first = Way(case, device)
    if not first.problems:
        return [first]
    kernels = [kernel for kernel in ranked(first.problems[0], device) if kernel.family not in without]
    if variants == "ranked":
        kernels = [kernel for kernel in kernels if kernel.family in TENSOR_FAMILIES] or kernels
    found = [Way(case, device, kernel) for kernel in (kernels[:1] if variants == "chosen" else kernels)]
    if variants == "all" and hasattr(_naive(Context(device, Tracer())), case.operation) and _is_plain(case):
        found.append(Way(case, device, is_naive=True))
    return found


def _is_plain(case: Case) -> bool:
    """Return whether kernels/naive do the whole case: a product with a bias and a ReLU at most, nothing padded."""
    return {"bias", "relu"}.issuperset(case.epilogue) and not any(each.padded for each in case.operands.values())


def _naive(context: Context) -> Any:
    """Return what kernels/naive do under the engine's names."""
    found: Mapping[str, Callable[..., Any]] = {
        "linear": functools.partial(naive.gemm, context, layout="nt"),
        "linear_dgrad": functools.partial(naive.gemm, context, layout="nn"),
        "linear_wgrad": lambda x, dy, *, dw: naive.gemm(context, dy, x, layout="tn", out=dw),
        "conv2d": functools.partial(naive.conv2d, context),
        "conv2d_dgrad": functools.partial(naive.conv2d_dgrad, context),
        "conv2d_wgrad": functools.partial(naive.conv2d_wgrad, context),
    }
    return SimpleNamespace(**found)
