"""
Operators of a traced step of PyTorch, as records for the model of time: extents, FLOP, bytes and launches.

Each call of PyTorch's dispatcher that makes or changes a tensor is one kernel, except the calls below.  A view is no
kernel. FLOP are those of `torch.utils.flop_counter`, except of a convolution's gradients, where it ignores groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from cubatch.estimate.operators import Operator
from cubatch.estimate.vendor.vendor_calls import direct_flops, of_product
from cubatch.frameworks.lazy_torch import torch
from cubatch.network.passes import Gemm, Pass, product_extents

Shape = Sequence[int]

_TENSORS_PER_LAUNCH = 64  # of PyTorch's multi_tensor_apply with two lists, ATen/native/cuda/MultiTensorApply.cuh
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense"}
)
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "_embedding_bag", "_embedding_bag_forward_only"})
"""They read as much of their first tensor as they write."""
_SCATTERS = frozenset({"index_put_", "index_put", "index_add_", "scatter_", "scatter_add_", "index_copy_"})
"""They write as much of their first tensor as they read of the others."""
_TWO_PASSES = frozenset(
    {"native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward"}
)
"""They read their tensors once for sums over them, and again to apply these."""
_WEIGHTS = {"native_batch_norm": 1, "native_batch_norm_backward": 2}
"""Position of the weights of batch norms."""


def records(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any, *, phase: str, repeats: int
) -> Iterator[Operator]:  # fmt: skip
    """
    Yield the records of one call of PyTorch's dispatcher; none for a call without a kernel, such as a view.

    Args:
        function: The called operator or function of PyTorch.
        arguments, options: Arguments of `function`, with tensors without data.
        phase: Phase of the step: "forward", "backward" or "optimizer".
        repeats: Number of times that the call occurs in the step.
    """
    from torch.utils._pytree import tree_leaves

    if not isinstance(function, torch._ops.OpOverload):  # noqa: SLF001 - its only home
        return
    name = function._schema.name.partition("::")[2]  # noqa: SLF001
    inputs = [leaf for leaf in tree_leaves([arguments, dict(options)]) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    written = _written(function, arguments, options, inputs, outputs)
    if not written or name in _NO_KERNEL:
        return
    # In inference its statistics are given.
    counted = "" if name == "native_batch_norm" and not arguments[5] else name
    whole = Operator(
        name=name,
        kind="bytes",
        phase=phase,
        repeats=repeats,
        pass_=Pass.FPROP,
        dtype=_dtype(written[0]),
        flops=_flops(function, arguments, options, result),
        read_bytes=_read_bytes(counted, inputs, outputs, written) * (wider := _wider(counted, arguments)),
        written_bytes=sum(map(_num_bytes, written)) * wider,
    )
    special = _SPECIAL.get(name) or (_attention if "scaled_dot_product" in name else None)
    yield from (whole,) if special is None else special(whole, list(arguments), outputs)


def merged(operators: Sequence[Operator]) -> list[Operator]:
    """
    Return the operators of a step, with those of the optimizer merged over all parameters.

    PyTorch merges them on a GPU; a trace on a CPU has one call for each parameter.  Calls with the same name become
    one, in the order of the first.
    """
    chosen: list[Operator] = []
    places: dict[tuple[str, str], int] = {}
    counts: dict[int, int] = {}
    for each in operators:
        if each.phase != "optimizer" or each.kind != "bytes":
            chosen.append(each)
            continue
        place = places.setdefault((each.name, each.dtype), len(chosen))
        counts[place] = counts.get(place, 0) + 1
        if place == len(chosen):
            chosen.append(each)
            continue
        first = chosen[place]
        launches = math.ceil(counts[place] / _TENSORS_PER_LAUNCH)
        chosen[place] = attrs.evolve(
            first,
            read_bytes=first.read_bytes + each.read_bytes,
            written_bytes=first.written_bytes + each.written_bytes,
            launches=launches,
            host_calls=launches,
        )
    return chosen


def _written(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> list[Any]:
    given = {_storage(tensor) for tensor in inputs}
    made = [tensor for tensor in outputs if _storage(tensor) not in given]
    return [*made, *changed(function, arguments, options)]


def changed(function: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that a call writes to by the operator's schema; none if it is no operator of PyTorch."""
    from torch.utils._pytree import tree_leaves

    for place, name in _written_arguments(function):
        given = arguments[place] if place < len(arguments) else options.get(name)
        yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))


@functools.cache
def _written_arguments(function: Any) -> list[tuple[int, str]]:
    """Return position and name of the arguments that an operator writes to."""
    taken = enumerate(function._schema.arguments) if isinstance(function, torch._ops.OpOverload) else ()  # noqa: SLF001
    return [(place, each.name) for place, each in taken if each.alias_info is not None and each.alias_info.is_write]


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - its only identity


def _num_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements; of an expanded tensor at most the bytes of its storage."""
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _read_bytes(name: str, inputs: Sequence[Any], outputs: Sequence[Any], written: Sequence[Any]) -> int:
    sizes = [_num_bytes(tensor) for tensor in inputs]
    if name in _GATHERS and sizes:
        return min(sizes[0], sum(map(_num_bytes, outputs))) + sum(sizes[1:])
    if name in _SCATTERS:
        return sum(sizes[1:])
    if name in {"fill_", "zero_", "copy_"} and inputs and inputs[0] is written[0]:
        return sum(sizes[1:])
    return sum(sizes) * (2 if name in _TWO_PASSES else 1)


def _wider(name: str, arguments: Sequence[Any]) -> int:
    """
    Return the factor on the bytes of a call that moves them no faster than those of float32.

    cuDNN takes no batch norm whose weights have 16 bits.  PyTorch's kernels for it load single elements
    (`ATen/native/cuda/Normalization.cuh`).
    """
    weights = arguments[_WEIGHTS[name]] if name in _WEIGHTS else None
    return 1 if weights is None else max(1, 4 // weights.itemsize)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _flops(function: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any) -> int:
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(function._overloadpacket)  # noqa: SLF001
    return 0 if formula is None else int(formula(*arguments, **options, out_val=result))


# --- matrix products ------------------------------------------------------------------------------------------


def _product(first: int) -> Callable[[Operator, list[Any], list[Any]], Iterator[Operator]]:
    """Return a function that yields the record of a matrix product of the arguments `first` and `first + 1`."""

    def made(whole: Operator, arguments: list[Any], _: list[Any]) -> Iterator[Operator]:
        a, b = arguments[first : first + 2]
        pass_ = Pass.WGRAD if _is_turned(a) else Pass.FPROP if _is_turned(b) else Pass.DGRAD
        count = a.shape[0] if a.ndim > 2 else 1  # noqa: PLR2004 - a batch of matrices
        gemm = Gemm(m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], count=count)
        yield attrs.evolve(
            whole, kind="product", pass_=pass_, dtype=_product_dtype(whole.dtype), extents=(of_product(gemm, pass_),)
        )

    return made


def _grouped_product(whole: Operator, arguments: list[Any], outputs: list[Any]) -> Iterator[Operator]:
    """Yield the record of the products of groups of rows, as of experts, which are assumed to be of equal size."""
    a, b = arguments[:2]
    extents = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
    stacks = {"m": b, "n": a, "k": outputs[0]}  # which has a matrix for each group if an extent is that of all groups
    cut = [name for name, each in stacks.items() if each.ndim > 2]  # noqa: PLR2004
    count = stacks[cut[0]].shape[0]
    if len(cut) == 1:  # else it is a batch of products
        extents[cut[0]] = math.ceil(extents[cut[0]] / count)
    gemm, pass_ = Gemm(**extents, count=count), Pass.WGRAD if cut == ["k"] else Pass.FPROP
    yield attrs.evolve(
        whole, kind="product", pass_=pass_, dtype=_product_dtype(whole.dtype), extents=(of_product(gemm, pass_),),
        flops=gemm.flops,
    )  # fmt: skip


def _is_turned(matrix: Any) -> bool:
    """Return whether a matrix is stored transposed, by columns."""
    return bool(matrix.stride(-2) == 1 and matrix.stride(-1) != 1)


def _product_dtype(dtype: str) -> str:
    is_tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_tf32 else dtype


def _attention(whole: Operator, arguments: list[Any], _: list[Any]) -> Iterator[Operator]:
    """
    Yield one record of fused attention: `whole` with two products forward, or five backward.

    The backward pass computes the scores again. `arguments` are those of PyTorch's operator.
    """
    is_backward = "backward" in whole.name
    query, key, value = arguments[1:4] if is_backward else arguments[:3]
    count, rows, width = math.prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
    columns, out = key.shape[-2], value.shape[-1]
    scores, sums = Gemm(m=rows, n=columns, k=width, count=count), Gemm(m=rows, n=out, k=columns, count=count)
    gemms = [scores, sums]
    if is_backward:
        gemms += [scores, sums, Gemm(m=columns, n=width, k=rows, count=count)]
    extents = tuple(of_product(gemm, Pass.FPROP) for gemm in gemms)
    flops = whole.flops or sum(gemm.flops for gemm in gemms)
    yield attrs.evolve(whole, kind="attention", dtype=_product_dtype(whole.dtype), extents=extents, flops=flops)


def _recurrent(whole: Operator, arguments: list[Any], _outputs: list[Any]) -> Iterator[Operator]:
    """
    Yield the records of a recurrent layer as cuDNN computes it.

    Products with the inputs are computed for all time steps at once, products with the states step by step. The layer's
    weights are (gates * hidden, inputs) and (gates * hidden, hidden).
    """
    x, _, of_state = arguments[:3]
    steps, n, inputs = x.shape
    gates, hidden = of_state.shape
    is_backward = "backward" in whole.name
    passes = (Pass.DGRAD, Pass.WGRAD) if is_backward else (Pass.FPROP,)
    made = [_of_gemm(_gemm(steps * n, gates, inputs, pass_), whole, pass_) for pass_ in passes]
    if is_backward:
        made.append(_of_gemm(_gemm(steps * n, gates, hidden, Pass.WGRAD), whole, Pass.WGRAD))
    each = attrs.evolve(whole, repeats=whole.repeats * steps)
    made.append(_of_gemm(_gemm(n, gates, hidden, passes[0]), each, passes[0]))
    size = n * (gates + 2 * hidden) * x.element_size()
    moving = attrs.evolve(each, name="recurrent gates", read_bytes=size, written_bytes=size)
    for place, operator in enumerate([*made, moving]):
        yield attrs.evolve(operator, host_calls=int(place == 0))


def _gemm(rows: int, features: int, inputs: int, pass_: Pass) -> Gemm:
    m, n, k = product_extents(pass_, outputs=rows, inputs=rows, c=inputs, k=features)
    return Gemm(m=m, n=n, k=k)


def _of_gemm(gemm: Gemm, whole: Operator, pass_: Pass) -> Operator:
    size = {"float32": 4, "float64": 8}.get(whole.dtype, 2)
    return attrs.evolve(
        whole, kind="product", pass_=pass_, dtype=_product_dtype(whole.dtype), extents=(of_product(gemm, pass_),),
        flops=gemm.flops, read_bytes=size * gemm.k * (gemm.m + gemm.n), written_bytes=size * gemm.m * gemm.n,
    )  # fmt: skip


# --- convolutions ---------------------------------------------------------------------------------------------


def _convolution(whole: Operator, arguments: list[Any], outputs: list[Any]) -> Iterator[Operator]:
    x, w, bias, stride, _, dilation, transposed, _, groups = arguments[:9]
    out = outputs[0]
    pass_ = Pass.DGRAD if transposed else Pass.FPROP
    extents = (
        _geometry(out, w, x, stride=stride, dilation=dilation, groups=groups)
        if transposed
        else _geometry(x, w, out, stride=stride, dilation=dilation, groups=groups)
    )
    conv = attrs.evolve(
        whole, kind="convolution", pass_=pass_, dtype=_conv_dtype(whole.dtype, x), extents=(extents,)
    )  # fmt: skip
    yield conv
    yield from _layout(conv, x, [x, out])
    if bias is not None:
        yield _moving(whole, "convolution bias", [out], [out])


def _convolution_backward(whole: Operator, arguments: list[Any], _outputs: list[Any]) -> Iterator[Operator]:
    grad, x, w, _, stride, _, dilation, transposed, _, groups, mask = arguments[:11]
    extents = (
        _geometry(grad, w, x, stride=stride, dilation=dilation, groups=groups)
        if transposed
        else _geometry(x, w, grad, stride=stride, dilation=dilation, groups=groups)
    )
    passes = [Pass.FPROP if transposed else Pass.DGRAD, Pass.WGRAD]
    chosen = [pass_ for pass_, is_asked in zip(passes, mask, strict=False) if is_asked]
    for place, pass_ in enumerate(chosen):
        moved = [grad, w, x] if pass_ is not Pass.WGRAD else [grad, x, w]
        conv = attrs.evolve(
            whole,
            kind="convolution",
            pass_=pass_,
            dtype=_conv_dtype(whole.dtype, x),
            extents=(extents,),
            flops=int(direct_flops(extents)),
            read_bytes=_num_bytes(moved[0]) + _num_bytes(moved[1]),
            written_bytes=_num_bytes(moved[2]),
            host_calls=int(place == 0),
        )
        yield conv
        yield from _layout(conv, x, [grad, x])
    if mask[2]:
        yield _moving(whole, "convolution bias gradient", [grad], [])


def _geometry(x: Any, w: Any, out: Any, *, stride: Shape, dilation: Shape, groups: int) -> tuple[float, ...]:
    """
    Return the extents of a convolution from x to out, in the order of `vendor_calls.EXTENTS`.

    For a transposed convolution, the caller exchanges x and out. A single spatial axis becomes one row of pixels. Of
    three axes, outputs along the first multiply the images, and taps along it the input channels.
    """
    axes = x.ndim - 2
    inside, outside, taps = (list(each.shape[2:]) for each in (x, out, w))
    strides, steps = ([each[0]] * axes if len(each) == 1 else list(each) for each in (stride, dilation))
    lead = max(0, axes - 2)
    images, depth = math.prod(outside[:lead]), math.prod(taps[:lead])

    def last_two(values: list[int]) -> list[int]:
        return ([1] * 2 + values)[-2:] if axes < 2 else values[-2:]  # noqa: PLR2004 - rows and columns

    (h, width), (p, q), (r, s) = map(last_two, (inside, outside, taps))
    stride_h, stride_w = last_two(strides)
    c = x.shape[1] * depth
    return (x.shape[0] * images, h, width, c, out.shape[1], r, s, p, q, stride_h, stride_w, max(steps), groups)


def _conv_dtype(dtype: str, tensor: Any) -> str:  # noqa: ARG001
    return "tf32" if dtype == "float32" and torch.backends.cudnn.allow_tf32 else dtype


def _layout(conv: Operator, x: Any, tensors: list[Any]) -> Iterator[Operator]:
    """
    Yield the conversion from NCHW around a convolution on Tensor Cores; nothing if the channels are last already.

    `x` is the convolution's input, and `tensors` are those that are converted.
    """
    is_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004
    channels, groups = conv.extents[0][3], conv.extents[0][-1]
    is_depthwise = channels == groups > 1  # PyTorch's own kernels take NCHW
    if not is_last and not is_depthwise and conv.dtype in {"float16", "bfloat16", "tf32"}:
        yield attrs.evolve(
            _moving(conv, "convolution layout", tensors, tensors),
            kind="layout",
            launches=len(tensors),
            dtype=conv.dtype,
        )


def _moving(whole: Operator, name: str, read: list[Any], written: list[Any]) -> Operator:
    """
    Return the record of a kernel `name` that only moves bytes: a part of the operator `whole`.

    `read` and `written` are the tensors that it reads and writes.
    """
    return attrs.evolve(
        whole,
        name=name,
        kind="bytes",
        pass_=Pass.FPROP,
        extents=(),
        flops=0,
        read_bytes=sum(map(_num_bytes, read)),
        written_bytes=sum(map(_num_bytes, written)),
        host_calls=0,
    )


_SPECIAL: Mapping[str, Callable[[Operator, list[Any], list[Any]], Iterator[Operator]]] = {
    "mm": _product(0),
    "bmm": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "_grouped_mm": _grouped_product,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
