"""
Products "gemm_tn" in tf32 on Hopper, whose operands are both transposed and then multiplied as a "gemm_nt".

Instructions of wgmma read tf32 along gemm_k only; without them such a product runs on mma.sync at half their rate.
Scratch memory is bounded: one part of gemm_k after another is transposed and multiplied, and adds to the parts before
it.  These variants are not in `ranking`.  The choice times the best of them against the fastest one that reads the
operands as they are.
"""

from __future__ import annotations

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import MOST_TRANSPOSED_BYTES, MOST_TRANSPOSED_ROWS, fitting, ranking
from cubatch.kernels.variant import Kernel

_STEP = 32  # elements of a step of the main loop, so that parts of gemm_k end with a step
# Least m n / (m + n).  Products cost m n, transposing costs m + n: at 335 both ways take the same time on an H200, by
# the factors of estimate/cubatch_kernels.py.  Timings decide above this.
_LEAST_INTENSITY = 256


def is_transposing(problem: Problem, kernel: Kernel) -> bool:
    """Return whether a variant runs a problem after both operands are transposed: a "gemm_nt" for a "gemm_tn"."""
    return (problem.operation, kernel.operation) == ("gemm_tn", "gemm_nt")


def part_of(problem: Problem) -> Problem:
    """
    Return the "gemm_nt" that computes a part of gemm_k of a "gemm_tn"; the last part may be smaller.

    Example:
        >>> part_of(Problem("gemm_tn", "tf32", 768, 3072, 50432, vector=4)).k  # operands of 775 MB
        25216
    """
    parts = -(-problem.k // max(1, _most_rows(problem)))
    k = problem.k if parts <= 1 else _STEP * -(-problem.k // (_STEP * parts))
    return attrs.evolve(problem, operation="gemm_nt", k=k)


def operand_bytes(problem: Problem) -> int:
    """Return the most bytes of both transposed operands of a part of gemm_k; never less for a larger batch."""
    return _row_bytes(problem) * _most_rows(problem)


def may_transpose(problem: Problem, device: Device) -> bool:
    """
    Return whether variants may compute a problem whose operands are both transposed, at some batch size.

    The answer is the same for all batch sizes: the memory plan of a larger batch has to suffice for smaller ones.
    """
    m, n = problem.m, problem.n
    if (problem.operation, problem.dtype) != ("gemm_tn", "tf32") or m * n <= _LEAST_INTENSITY * (m + n):
        return False
    return _most_rows(problem) > 0 and any(each.family == "hopper" for each in fitting(part_of(problem), device))


def ranking_transposed(problem: Problem, device: Device) -> tuple[tuple[float, int, Kernel], ...]:
    """
    Return the variants for a problem whose operands are both transposed, by predicted cost; empty if there are none.

    Each is (clock cycles of an SM for all parts without transposing, slices of each part, variant of "gemm_nt").
    """
    if problem.k % problem.vector or not may_transpose(problem, device):
        return ()
    part = part_of(problem)
    parts = -(-problem.k // part.k)
    ranked = (each for each in ranking(part, device) if each[2].family == "hopper")
    return tuple((parts * clocks, slices, kernel) for clocks, slices, kernel in ranked)


def _most_rows(problem: Problem) -> int:
    rows = min(MOST_TRANSPOSED_BYTES // _row_bytes(problem), MOST_TRANSPOSED_ROWS)
    return min(problem.k, rows // _STEP * _STEP)


def _row_bytes(problem: Problem) -> int:
    return BYTES_PER_ELEMENT["tf32"] * (problem.m + problem.n)
