"""
Attention by PyTorch: its own linear layers, and scaled_dot_product_attention between them.

Which of its algorithms that is, PyTorch chooses by type and GPU: some never store the weights, in no pass.
A backward pass is that of its own graph, whose forward pass is done before anything is timed, with what it saves.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from cubatch.bench.calls import keeping
from cubatch.bench.cases import Case

Step = Callable[[], Any]
_GIVEN = ("x", "w_in", "w_out", "b_in", "b_out")


def step(torch: types.ModuleType, case: Case, tensors: Mapping[str, Any]) -> Step:
    """
    Return a step that does a case once.

    Args:
        torch: PyTorch.
        case: A pass of attention; one that keeps what its backward pass reads is done under autograd.
        tensors: Its arrays.
    """
    heads = case.options["heads"]
    given = {name: tensors[name] for name in _GIVEN if name in tensors}
    if "dy" not in tensors:
        keeps = "keep" in case.lists
        leaves = {name: tensor.detach().requires_grad_(keeps) for name, tensor in given.items()}

        def forward() -> Any:
            with torch.set_grad_enabled(keeps):
                return _attention(torch, heads, **leaves)

        return keeping(forward)
    # Values of biases change no gradient; they are there to have one.
    given |= {name: torch.zeros_like(tensors[f"d{name}"]) for name in ("b_in", "b_out") if f"d{name}" in tensors}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    y = _attention(torch, heads, **leaves)
    return lambda: torch.autograd.grad(y, list(leaves.values()), tensors["dy"], retain_graph=True)


def _attention(torch: Any, heads: int, x: Any, w_in: Any, w_out: Any, b_in: Any = None, b_out: Any = None) -> Any:
    functional, (n, t, c) = torch.nn.functional, x.shape
    qkv = functional.linear(x, w_in, b_in).view(n, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
    return functional.linear(mixed.transpose(1, 2).reshape(n, t, c), w_out, b_out)
