"""The ways to do a case on cubatch kernels: every variant that can run it, and its launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import attrs
import numpy as np

from cubatch.bench.calls import Case
from cubatch.bench.target import reserve
from cubatch.engine.native import naive
from cubatch.engine.native.context import Context, Grid, Launcher
from cubatch.engine.native.operations import operations
from cubatch.errors import UnsupportedLayer
from cubatch.hardware.facts import Device
from cubatch.kernels.cost_model import blocks
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import SplitKernel, of_phases, ranked, slices
from cubatch.kernels.transposing import is_transposing, part_of, ranking_transposed
from cubatch.kernels.variant import Kernel, kernels

Which = Literal["chosen", "ranked", "all"]
TENSOR_FAMILIES = ("mma", "hopper")
"""Families on tensor cores, an order of magnitude faster than the others."""
PHASES, TRANSPOSED = OTHER_WAYS = ("phases", "transposed")
"""Ends of the labels of variants that run in other launches than the ranked ones: see `Way.label`."""


@attrs.frozen
class Launch:
    """A recorded launch of a kernel."""

    kernel: Kernel  # the variant
    grid: Grid  # blocks in x, y and z
    # the last problem before the launch for which a variant was chosen; None if there was none
    problem: Problem | None = None

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)


@attrs.define
class Tracer:
    """A launcher that records its launches."""

    launcher: Launcher | None = None  # launches the kernels; `None` if nothing is launched
    launches: list[Launch] = attrs.field(factory=list)  # launches that were bound
    problems: list[Problem] = attrs.field(factory=list)  # problems for which a variant was chosen

    @property
    def module(self) -> ModuleType:
        """Array module of the launcher, else NumPy."""
        return self.launcher.module if self.launcher else np

    def bind(self, kernel: Kernel, grid: Grid, arguments: Sequence[object]) -> Callable[[], None]:
        """Record a launch of `grid` blocks; return the function that runs it, which does nothing without a launcher."""
        self.launches.append(Launch(kernel, grid, self.problems[-1] if self.problems else None))
        return self.launcher.bind(kernel, grid, arguments) if self.launcher else _nothing


def _nothing() -> None:
    pass


@attrs.frozen(eq=False)
class Way:
    """An implementation of a case on cubatch kernels."""

    case: Case  # the call
    device: Device  # decides grids and variants
    # kernel variant for the problems of its operation; `None` for the variant ranked first
    wanted: Kernel | None = None
    is_naive: bool = False  # whether the kernels of kernels/naive are used, which have no variants
    launches: tuple[Launch, ...] = attrs.field(init=False)  # launches of the case
    # problems for which a variant is chosen; none if there is no choice
    problems: tuple[Problem, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        tracer = Tracer()
        self.case.call(self.operations(tracer), reserve(self.case))
        object.__setattr__(self, "launches", tuple(tracer.launches))
        object.__setattr__(self, "problems", tuple(tracer.problems))

    def operations(self, tracer: Tracer) -> Any:
        """Return the engine's operations, launched through `tracer`; raise UnsupportedLayer if no kernel suits."""

        def choose(problem: Problem, device: Device, *_: object) -> SplitKernel:
            tracer.problems.append(problem)
            kernel = ranked(problem, device)[0]
            if self.wanted is not None and self.wanted.operation in {problem.operation, f"{problem.operation}_phases"}:
                kernel = self.wanted
            elif self.wanted is not None and is_transposing(problem, self.wanted):
                kernel, problem = self.wanted, part_of(problem)
            return SplitKernel.modelled(problem, kernel, device)

        context = Context(self.device, tracer, choose, tf32=self.case.dtype == "tf32")
        # A family that the driver refuses fails: another family must not be timed under its name.
        context.refused.update({kernel.family for kernel in kernels()}, {self.wanted.family} if self.wanted else ())
        bound = _naive(context) if self.is_naive else operations(context)
        if not hasattr(bound, self.case.operation):
            raise UnsupportedLayer(self.case.name, f"there is no kernel for {self.case.operation}")
        return bound

    @property
    def main(self) -> Kernel:
        """The main kernel: the wanted variant, else that of the first problem with a choice or of the first launch."""
        if self.wanted is not None:
            return self.wanted
        chosen = self.problems[0].operation if self.problems else None
        return next((run.kernel for run in self.launches if run.kernel.operation == chosen), self.launches[0].kernel)

    def shared_tiles(self, launch: Launch) -> int | None:
        """Return the number of tiles that the blocks of a launch share; `None` if each block has one."""
        problem = launch.problem
        if launch.kernel.family != "hopper" or problem is None:
            return None
        if is_transposing(problem, launch.kernel):  # each launch computes all tiles of a part of gemm_k
            part = part_of(problem)
            return blocks(part, launch.kernel) * slices(part, launch.kernel, self.device)
        tiles = blocks(problem, launch.kernel) * slices(problem, launch.kernel, self.device)
        # The phases of a strided gradient are launches of up to four, of nearly the same size.
        same = [other for other in self.launches if other.kernel is launch.kernel and other.problem is problem]
        return -(-tiles // len(same))

    @property
    def label(self) -> str:
        """
        Family, tile and vector of the main kernel.

        "phases" follows for a variant of `ranking.of_phases`, "transposed" if both operands are transposed first.
        """
        main = self.main
        is_transposed = any(is_transposing(problem, main) for problem in self.problems)
        vector = f"v{main.vector}" if main.vector > 1 and main.winograd is None else ""
        other = PHASES if main.finishes_phases else TRANSPOSED if is_transposed else ""
        return " ".join(part for part in (main.family, main.tile_name, vector, other) if part)


def ways(case: Case, device: Device, variants: Which = "chosen", without: Collection[str] = ()) -> list[Way]:
    """
    Return the implementations of a case on cubatch kernels.

    Args:
        variants: "chosen": the variant ranked first; "ranked": all variants on tensor cores, or all variants if none
            is; "all": every variant and kernels/naive.
        without: Families of kernels that are left out.
    """
    first = Way(case, device)
    if not first.problems:
        return [first]
    kernels = [kernel for kernel in ranked(first.problems[0], device) if kernel.family not in without]
    if variants == "ranked":
        kernels = [kernel for kernel in kernels if kernel.family in TENSOR_FAMILIES] or kernels
    kernels += [other for kernel in kernels if (other := of_phases(first.problems[0], kernel))]
    kernels += [kernel for *_, kernel in ranking_transposed(first.problems[0], device) if kernel.family not in without]
    chosen = [Way(case, device, kernel) for kernel in (kernels[:1] if variants == "chosen" else kernels)]
    if variants == "all" and hasattr(_naive(Context(device, Tracer())), case.operation) and _is_plain(case):
        chosen.append(Way(case, device, is_naive=True))
    return chosen


def _is_plain(case: Case) -> bool:
    """Return whether kernels/naive support a case: a bias and a ReLU at most, and no operand padded with channels."""
    return {"bias", "relu"}.issuperset(case.epilogue) and not any(each.padded for each in case.operands.values())


def _naive(context: Context) -> Any:
    """Return an object that has the operations of kernels/naive as methods, named as those of the engine."""
    operations: Mapping[str, Callable[..., Any]] = {
        "linear": lambda x, w, b=None, **options: naive.gemm(context, x, w, b, layout="nt", **options),
        "linear_dgrad": lambda dy, w, out: naive.gemm(context, dy, w, layout="nn", out=out),
        "linear_wgrad": lambda x, dy, dw: naive.gemm(context, dy, x, layout="tn", out=dw),
        "conv2d": functools.partial(naive.conv2d, context),
        "conv2d_dgrad": functools.partial(naive.conv2d_dgrad, context),
        "conv2d_wgrad": functools.partial(naive.conv2d_wgrad, context),
    }
    return SimpleNamespace(**operations)
