"""
Attention by PyTorch: its own linear layers, and scaled_dot_product_attention between them.

Which of its algorithms that is, PyTorch chooses by type and GPU: some never store the weights, in no pass.
A backward pass is that of its own graph, whose forward pass is done before anything is timed, with what it saves.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from cubatch.bench.cases import Case

Step = Callable[[], Any]


def step(torch: types.ModuleType, case: Case, tensors: Mapping[str, Any]) -> Step:
    """
    Give what does a case once.

    Args:
        torch: PyTorch.
        case: A pass of attention that keeps nothing, or all its gradients but for those of biases.
        tensors: Its arrays.
    """
    names = ("x", "w_in", "w_out", "b_in", "b_out")
    given = {name: tensors[name] for name in names if name in tensors}
    if "dy" not in tensors:
        kept: list[Any] = []

        def forward() -> Any:
            kept.clear()  # its memory is what the next result of this set is put into
            with torch.no_grad():
                kept.append(_attention(torch, case.options["heads"], **given))
            return kept[0]

        return forward
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    y = _attention(torch, case.options["heads"], **leaves)
    return lambda: torch.autograd.grad(y, list(leaves.values()), tensors["dy"], retain_graph=True)


def _attention(torch: Any, heads: int, x: Any, w_in: Any, w_out: Any, b_in: Any = None, b_out: Any = None) -> Any:
    functional, (n, t, c) = torch.nn.functional, x.shape
    qkv = functional.linear(x, w_in, b_in).view(n, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
    return functional.linear(mixed.transpose(1, 2).reshape(n, t, c), w_out, b_out)
