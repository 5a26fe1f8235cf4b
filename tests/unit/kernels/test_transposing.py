"""Products whose operands are both transposed first: which ones, in which parts, with how much scratch memory."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import example, given, strategies as st

from cubatch.hardware import catalogue
from cubatch.kernels import ranking
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import MOST_PARTIAL_BYTES, MOST_TRANSPOSED_BYTES, MOST_TRANSPOSED_ROWS, ranked
from cubatch.kernels.transposing import is_transposing, may_transpose, operand_bytes, part_of, ranking_transposed
from cubatch.kernels.workspace.product_scratch import product_workspace

H200, A100 = catalogue.find("h200-sxm"), catalogue.find("a100-sxm4-40gb")
FILTER = Problem("gemm_tn", "tf32", 768, 3072, 256 * 197, vector=4)

EXTENTS = st.integers(1, 1 << 13).map(lambda count: 4 * count)


@pytest.mark.parametrize(
    ("change", "device", "expected"),
    [
        ({}, H200, True),
        ({}, A100, False),
        ({"operation": "gemm_nn"}, H200, False),
        ({"dtype": "float16", "vector": 8}, H200, False),
        ({"vector": 1}, H200, False),
        ({"k": 256 * 197 - 2}, H200, False),
        ({"m": 272}, H200, False),
        ({"m": 288}, H200, True),
    ],
    ids=str,
)
def test_each_limit_of_transposed_operands_refuses_alone(change, device, expected):
    """Another GPU, operation or type, rows of odd bytes before or after, and few products for the elements moved."""
    problem = attrs.evolve(FILTER, **change)
    entries = ranking_transposed(problem, device)
    assert bool(entries) == expected
    assert may_transpose(problem, device) == (expected or "k" in change)  # the plan is for each batch
    assert {(kernel.family, kernel.operation) for *_, kernel in entries} <= {("hopper", "gemm_nt")}
    assert all(is_transposing(problem, kernel) for *_, kernel in entries)
    assert not any(is_transposing(problem, kernel) for kernel in ranked(problem, device))


def test_parts_of_gemm_k_take_as_long_as_each_of_them():
    """Two parts of 387 MB; a batch of half the size is one part."""
    half = attrs.evolve(FILTER, k=FILTER.k // 2)
    whole, part = ranking_transposed(FILTER, H200), ranking_transposed(half, H200)
    assert [kernel for *_, kernel in whole] == [kernel for *_, kernel in part]
    assert [clocks for clocks, *_ in whole] == [2 * clocks for clocks, *_ in part]
    assert part == tuple(each for each in ranking.ranking(part_of(half), H200) if each[2].family == "hopper")


@given(m=EXTENTS, n=EXTENTS, k=st.integers(1, 1 << 22))
@example(m=4, n=4, k=1 << 22)
def test_parts_of_gemm_k_are_bounded(m, n, k):
    """Their operands fit, their rows do not exceed the grid, all but the last end with a step."""
    problem = Problem("gemm_tn", "tf32", m, n, k, vector=4)
    part = part_of(problem)
    assert (part.operation, part.m, part.n) == ("gemm_nt", m, n)
    assert 0 < part.k <= min(k, MOST_TRANSPOSED_ROWS)
    assert part.k == k or part.k % 32 == 0
    assert 4 * (m + n) * part.k <= operand_bytes(problem) <= MOST_TRANSPOSED_BYTES


@given(m=EXTENTS, n=EXTENTS, k=st.integers(1, 1 << 18), more=st.integers(0, 1 << 18))
def test_a_larger_batch_never_needs_less_scratch_memory(m, n, k, more):
    """Also where only the smaller one has transposed rows of whole 16 bytes, or needs a part less."""
    problem = Problem("gemm_tn", "tf32", m, n, k, vector=4)
    larger = attrs.evolve(problem, k=k + more)
    assert may_transpose(problem, H200) == may_transpose(larger, H200)
    needed = product_workspace(problem, H200)
    assert needed <= product_workspace(larger, H200) <= MOST_TRANSPOSED_BYTES + MOST_PARTIAL_BYTES
    for _, slices, _ in ranking_transposed(problem, H200):
        assert operand_bytes(problem) + 4 * m * n * (slices if slices > 1 else 0) <= needed
