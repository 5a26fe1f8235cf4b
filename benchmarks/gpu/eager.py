"""
PyTorch's own calls for operations that are no products: norms, activations, pooling, sums and optimizers.

`cubatch.bench.rivals` has the products; both are checked and timed in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cubatch.bench.calls import Case
from cubatch.bench.rivals import EPS, Step, Tensors, Way, Ways, ended
from cubatch.engine.loss_scale import SKIPPED, UNSCALE

COMPILED_OPERATIONS = {"batch_norm_train", "batch_norm_inference", "layer_norm", "activation", "activation_backward"}
"""Those that `torch.compile` takes: they have no graph of their own."""


def _functions(torch: Any) -> dict[str, Any]:
    """Return PyTorch's activation functions by the type of cubatch's layers."""
    aten, hardtanh = torch.ops.aten, torch.nn.functional.relu6
    return {
        "relu": aten.relu, "relu6": hardtanh, "sigmoid": aten.sigmoid, "silu": aten.silu,
        "hard_swish": aten.hardswish, "hard_sigmoid": aten.hardsigmoid, "gelu": aten.gelu,
    }  # fmt: skip


def _activation(torch: Any, case: Case) -> dict[str, Way]:
    """Activation functions, forward and backward, by the kernels that autograd calls."""
    aten, kind = torch.ops.aten, case.options.get("kind", "relu")
    if case.operation.endswith("backward"):
        slope = {
            "relu": lambda dy, y: aten.threshold_backward(dy, y, 0),
            "relu6": lambda dy, y: aten.hardtanh_backward(dy, y, 0, 6),
            "sigmoid": aten.sigmoid_backward,
            "silu": aten.silu_backward,
            "hard_swish": aten.hardswish_backward,
            "hard_sigmoid": aten.hardsigmoid_backward,
            "gelu": aten.gelu_backward,
        }[kind]

        def backward(t: Tensors) -> Step:
            saved = t["y" if kind == "relu" else "saved"]
            if kind == "hard_sigmoid":  # cubatch saves the output, PyTorch the input: 0 lies between the bends, 4 not
                saved = 4 * ((saved <= 0) | (saved >= 1)).to(saved.dtype)
            return lambda: slope(t["dy"], saved)

        return {"torch": Way(backward, case.results, stored=1)}
    function = _functions(torch)[kind]
    return {"torch": Way(lambda t: lambda: function(t["x"]), case.results)}


def _batch_norm(torch: Any, case: Case) -> dict[str, Way]:
    """Batch norm with parameters in float32, as mixed precision has them; its backward pass by autograd."""
    norm, eps, is_training = torch.nn.functional.batch_norm, getattr(case.layer, "eps", EPS), "mean" in case.operands
    function = _functions(torch).get(case.options.get("activation"), lambda y: y)

    def forward(t: Tensors) -> Step:
        gamma, beta, statistics = t["gamma"].float(), t["beta"].float(), (t.get("running_mean"), t.get("running_var"))
        return lambda: function(ended(torch, case, norm(t["x"], *statistics, gamma, beta, is_training, eps=eps), t))

    def backward(t: Tensors) -> Step:
        leaves = [t[name].float() if name != "x" else t[name] for name in ("x", "gamma", "beta")]
        leaves = [each.detach().requires_grad_() for each in leaves]
        y = function(norm(leaves[0], None, None, *leaves[1:], training=True, eps=eps))
        if "pooled" not in t:
            return lambda: torch.autograd.grad(y, leaves, t["dy"], retain_graph=True)
        n, c, h, w = y.shape
        pooled = t["pooled"].reshape(n, c, 1, 1)
        return lambda: torch.autograd.grad(y, leaves, t["dy"] + pooled / (h * w), retain_graph=True)

    if case.operation.endswith("backward"):
        return {"torch": Way(backward, ("out", "dgamma", "dbeta"))}
    return {"torch": Way(forward, ("out",))}


def _layer_norm(torch: Any, case: Case) -> dict[str, Way]:
    norm, eps = torch.nn.functional.layer_norm, getattr(case.layer, "eps", EPS)

    def forward(t: Tensors) -> Step:
        return lambda: norm(t["x"], t["gamma"].shape, t["gamma"], t["beta"], eps)

    def backward(t: Tensors) -> Step:
        leaves = [each.detach().requires_grad_() for each in (t["x"], t["gamma"], 0 * t["gamma"])]
        y = norm(leaves[0], t["gamma"].shape, *leaves[1:], eps)
        return lambda: torch.autograd.grad(y, leaves, t["dy"], retain_graph=True)

    if case.operation.endswith("backward"):
        return {"torch": Way(backward, ("out", "dgamma", "dbeta"), is_image=False, stored=4)}
    return {"torch": Way(forward, ("out",), is_image=False)}


def _pool(torch: Any, case: Case) -> dict[str, Way]:
    """Max and average pooling; a backward pass gets the shape of its input from `out`."""
    given, aten = case.options["window"], torch.ops.aten
    top, _, left, _ = given.pad
    (down, across), (r, s) = given.stride, (given.r, given.s)
    window, ceil, count_pad = [[r, s], [down, across], [top, left]], given.ceil_mode, given.count_include_pad

    def max_forward(t: Tensors) -> Step:
        pool = torch.nn.functional.max_pool2d
        return lambda: ended(torch, case, pool(t["x"], *window, ceil_mode=ceil), t)

    def max_backward(t: Tensors) -> Step:
        tap = t["argmax"].long() - 1  # counted row by row in its window
        rows, columns = (torch.arange(size, device=tap.device) for size in tap.shape[2:])
        y = rows[:, None] * down - top + tap // s
        places = y * t["out"].shape[3] + columns * across - left + tap % s
        return lambda: aten.max_pool2d_with_indices_backward(t["dy"], t["out"], *window, [1, 1], ceil, places)

    def mean_forward(t: Tensors) -> Step:
        return lambda: aten.avg_pool2d(t["x"], *window, ceil, count_pad)

    def mean_backward(t: Tensors) -> Step:
        return lambda: aten.avg_pool2d_backward(t["dy"], t["out"], *window, ceil, count_pad, None)

    ways = {"max_pool2d": max_forward, "max_pool2d_backward": max_backward, "avg_pool2d": mean_forward,
            "avg_pool2d_backward": mean_backward}  # fmt: skip
    # On a CPU PyTorch adds gradients of overlapping windows in the type of the case.
    return {"torch": Way(ways[case.operation], ("out",), stored=r * s if case.operation.endswith("backward") else 0)}


def _global_pool(torch: Any, case: Case) -> dict[str, Way]:
    def forward(t: Tensors) -> Step:
        return lambda: t["x"].mean((2, 3))

    def backward(t: Tensors) -> Step:
        n, c, h, w = t["out"].shape
        return lambda: ended(torch, case, t["dy"].reshape(n, c, 1, 1).expand(n, c, h, w) / (h * w), t)

    return {"torch": Way(backward if case.operation.endswith("backward") else forward, ("out",))}


def _add(torch: Any, case: Case) -> dict[str, Way]:
    def make(t: Tensors) -> Step:
        first, second, *others = (t[name] for name in case.arrays["branches"] if name)

        def step() -> Any:
            y = first + second
            for other in others:
                y += other
            return ended(torch, case, y, t)

        return step

    return {"torch": Way(make, ("out",), stored=len(case.arrays["branches"]) - 2)}


def _optimizer(torch: Any, case: Case) -> dict[str, Way]:
    """An optimizer on float32 weights; gradients and parameters of 16 bits are converted as mixed precision does."""
    options = {"lr": case.options["lr"], "weight_decay": case.options["weight_decay"]}

    def make(how: str, t: Tensors) -> Step:
        weights, gradient, state = t.get("master", t["parameters"]), t["gradient0"], {}
        parameter = torch.nn.Parameter(weights)
        scaling = t.get("scaling")
        if case.operation == "adam":
            skipped = 0 if scaling is None else int(scaling[SKIPPED])
            step = torch.tensor(float(case.options["step"] - skipped - 1), device=weights.device)
            state = {"step": step, "exp_avg": t["mean"], "exp_avg_sq": t["square"]}
            optimizer = torch.optim.Adam([parameter], **options, **{how: True})
        else:
            state = {"momentum_buffer": t["velocity"]} if "velocity" in t else {}
            optimizer = torch.optim.SGD([parameter], momentum=0.9 if state else 0.0, **options, **{how: True})
        optimizer.state[parameter] = state

        def step_once() -> None:
            parameter.grad = gradient if gradient.dtype == weights.dtype else gradient.float()
            if scaling is not None:
                parameter.grad.mul_(scaling[UNSCALE])
            optimizer.step()
            if weights is not t["parameters"]:
                t["parameters"].copy_(weights)

        return step_once

    return {
        f"torch.optim ({how})": Way(functools.partial(make, how), (), is_image=False) for how in ("fused", "foreach")
    }


WAYS: Ways = {
    **dict.fromkeys(("relu", "relu_backward", "activation", "activation_backward"), _activation),
    **dict.fromkeys(("batch_norm_train", "batch_norm_inference", "batch_norm_backward"), _batch_norm),
    **dict.fromkeys(("layer_norm", "layer_norm_backward"), _layer_norm),
    **dict.fromkeys(("max_pool2d", "max_pool2d_backward", "avg_pool2d", "avg_pool2d_backward"), _pool),
    **dict.fromkeys(("global_avg_pool", "global_avg_pool_backward"), _global_pool),
    **dict.fromkeys(("sgd", "momentum", "adam"), _optimizer),
    "add": _add,
}
"""PyTorch's ways by operation; the first is as PyTorch's users have it."""


def _with_compiled(find: Callable[[Any, Case], Mapping[str, Way]], torch: Any, case: Case) -> dict[str, Way]:
    ways = dict(find(torch, case))
    plain = next(iter(ways.values()))
    return ways | {
        "torch.compile": attrs.evolve(plain, make=lambda given: torch.compile(plain.make(given), dynamic=False))
    }


COMPILED: Ways = {
    name: functools.partial(_with_compiled, find) if name in COMPILED_OPERATIONS else find
    for name, find in WAYS.items()
}
"""The same and `torch.compile`, which compiles for seconds."""
