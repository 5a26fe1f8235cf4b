"""Matrix products on kernels/simt, kernels/mma and kernels/hopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cubatch.engine.backend import of
from cubatch.engine.native import norm_sums
from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context
from cubatch.engine.native.operands import PLAIN, Fused, Operands
from cubatch.engine.native.product import product_dtype, vector_of
from cubatch.errors import InvalidArgument
from cubatch.kernels.problem import Problem

LAYOUTS = ("nn", "nt", "tn")
"""Which operands are stored the other way round: b of "nt" is (n, k), a of "tn" is (k, m)."""


_LONGEST_ROW = 1 << 26  # a step of the main loop along the rows is counted in 32 bits


def gemm(
    context: Context, a: Any, b: Any, bias: Any = None, *, layout: str = "nt", out: Any = None,
    workspace: Any = None, fused: Fused = PLAIN, norm: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """
    Return a product of matrices: out[m, n] = bias[n] + sum over k of a[m, k] * b[k, n].

    A letter t of the layout "nn", "nt" or "tn" means that a is (k, m), or b is (n, k). Only "nt" has a bias, and only
    "nt" and "nn" a batch norm: see `norm_sums.launch`. `fused` are further terms of the result. The workspace has
    `product_workspace` bytes; None allocates it.
    """
    problem = gemm_problem(context, a, b, layout=layout)
    result = of(a).empty((problem.m, problem.n), dtype=a.dtype) if out is None else out
    check(a.dtype, a=a, b=b)
    check(a.dtype, (problem.m, problem.n), out=result)
    operands = Operands(problem=problem, a=a, b=b, out=result, bias=bias, fused=fused, workspace=workspace)
    norm_sums.launch(context, operands, norm)
    return result


def gemm_problem(context: Context, a: Any, b: Any, *, layout: str = "nt") -> Problem:
    """
    Return a product of matrices as a problem of the tiled kernels; a, b and layout are those of `gemm`.

    InvalidArgument is raised for an unknown layout, shapes that do not fit in it, and rows of 2^26 elements or more.
    """
    m, n, gemm_k = extents(a, b, layout)
    if max(a.shape[1], b.shape[1]) >= _LONGEST_ROW:
        raise InvalidArgument("a, b", (a.shape, b.shape), f"matrices with rows of fewer than {_LONGEST_ROW} elements")
    vector = vector_of(context, (a.shape[1], b.shape[1]), a, b)
    return Problem(f"gemm_{layout}", product_dtype(context, a), m, n, gemm_k, vector=vector)


def extents(a: Any, b: Any, layout: str) -> tuple[int, int, int]:
    """
    Return the extents m, n and k of the product of a and b, whose shapes depend on the layout as in `gemm`.

    Raises InvalidArgument if the layout is unknown or the shapes do not fit together.
    """
    if layout not in LAYOUTS:
        raise InvalidArgument("layout", layout, "one of " + ", ".join(LAYOUTS))
    (m, gemm_k), (b_k, n) = (x.shape[::-1] if turn == "t" else x.shape for x, turn in zip((a, b), layout, strict=True))
    if b_k != gemm_k:
        raise InvalidArgument(
            "b", b.shape, f"with {gemm_k} elements to sum over, as a of {a.shape} has in layout {layout}"
        )
    return m, n, gemm_k
