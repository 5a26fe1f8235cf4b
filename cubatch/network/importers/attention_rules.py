"""
Rules for attention and class tokens, which foreign graphs compute in many steps and cubatch in one layer each.

Queries, keys and values are parts of the outputs of linear layers, cut and permuted into heads. Their axes show which
rows of the weights each comes from, so that `attention` gets the rows in its order. Attention is incomplete (`pending`)
until its output is projected, and tokens until a position is added.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from cubatch.network import layers
from cubatch.network.importers.axes import Dims, is_whole, joined, laid_out, places
from cubatch.network.importers.building import Builder, Value, permuted, with_channels
from cubatch.network.importers.source import Step


@attrs.frozen
class Mixed:
    """Attention without its output projection: input, number of heads, weights and biases of the input projection."""

    x: Value  # its input
    heads: int  # number of heads
    w: np.ndarray[Any, Any]  # projection to queries, keys and values, (3c, c), each with the heads in order
    b: np.ndarray[Any, Any] | None  # biases of that projection, (3c,), or None


@attrs.frozen
class Prepended:
    """Pixels with a class token in front, and no positions yet."""

    x: Value
    token: np.ndarray[Any, Any]


def select(build: Builder, step: Step) -> Value:
    """
    Return the value at one position of an axis; raise UnsupportedOperator for positions that no layer selects.

    An axis of extent 1 is dropped. One position of an axis of channels, such as the queries, is a range of the value's
    channels. The first token becomes the output of a ClassToken layer; other tokens and axes raise UnsupportedOperator.
    """
    value, axis = build.part(step), step.options["axis"] % (len(step.shape) + 1)
    atoms, index = value.dims[axis], step.options["index"]
    dims = value.dims[:axis] + value.dims[axis + 1 :]
    if not atoms:
        return attrs.evolve(value, dims=dims)
    if [atom.label for atom in atoms] == ["c"]:
        (atom,) = atoms
        return attrs.evolve(value, dims=dims, offset=value.offset + index % atom.size * atom.stride)
    value = build.value(step)
    if index == 0 and is_whole(atoms, "h", build.shapes[value.layer]) and build.shapes[value.layer][1] == 1:
        return build.add(step, layers.ClassToken(), value, dims=dims)
    raise build.refusal(step, "it selects another position than one of the heads, or the first of the tokens")


def cut(build: Builder, step: Step) -> Value:
    """Return a range of the channels of a step's input, without a new layer; other axes raise UnsupportedOperator."""
    value, axis = build.part(step), step.options["axis"] % len(step.shape)
    atoms = value.dims[axis]
    if [atom.label for atom in atoms] != ["c"]:
        raise build.refusal(step, "it takes a range of another axis than channels")
    (atom,) = atoms
    dims = (*value.dims[:axis], joined([atom._replace(size=step.shape[axis])]), *value.dims[axis + 1 :])
    return attrs.evolve(value, dims=dims, offset=value.offset + step.options["start"] * atom.stride)


def mix(build: Builder, step: Step) -> Value:
    """
    Return a placeholder for attention that a later step projects; no layer is made yet.

    Queries, keys and values are (n, heads, tokens, channels of a head), projected from one input.
    """
    return _mix(build, step, [build.part(step, i) for i in range(3)])


def mix_transposed(build: Builder, step: Step) -> Value:
    """Return the placeholder of `mix`, for keys of shape (n, heads, channels of a head, tokens)."""
    q, k, v = (build.part(step, i) for i in range(3))
    return _mix(build, step, [q, attrs.evolve(k, dims=(*k.dims[:-2], *k.dims[:-3:-1])), v])


def _mix(build: Builder, step: Step, parts: list[Value]) -> Value:
    if any(len(part.dims) != 4 for part in parts):  # noqa: PLR2004
        raise build.refusal(step, "its axes are not batch, heads, tokens and channels")
    made = [build.layers.get(part.layer) for part in parts]
    query = parts[0]
    rows, arrays = [], []
    for part, layer in zip(parts, made, strict=True):
        # Heads can only be cut from the outputs of a linear layer.
        if not isinstance(layer, layers.Linear) or part.dims[0] != query.dims[0] or part.dims[2] != query.dims[2]:
            raise build.refusal(
                step, "its queries, keys and values are not outputs of linear layers with the same axes"
            )
        extents = build.shapes[part.layer]
        is_cut = all(atom.label == "c" for axis in (1, 3) for atom in part.dims[axis])
        if not is_cut or not is_whole(part.dims[2], "hw", extents):
            raise build.refusal(step, "its axes are not batch, heads, tokens and channels")
        rows.append(part.offset + np.asarray(places([*part.dims[1], *part.dims[3]], (1, 1, extents[2]))))
        arrays.append(build.arrays[part.layer])
    sources = {(layer.inputs or ("",), layer.c) for layer in made if layer is not None}
    _, heads, _, channels_of_head = step.shape
    c = heads * channels_of_head
    if len(sources) != 1 or {len(each) for each in rows} != {c} or next(iter(sources))[1] != c:
        raise build.refusal(step, f"its queries, keys and values are not of one input with {c} channels")
    w = np.concatenate([array["w"][each] for array, each in zip(arrays, rows, strict=True)])
    biases = [array.get("b", np.zeros(len(array["w"])))[each] for array, each in zip(arrays, rows, strict=True)]
    b = np.concatenate(biases) if any("b" in array for array in arrays) else None
    ((x,), _) = next(iter(sources))
    dims = (query.dims[0], *laid_out("c", 1, (1, 1, c)), query.dims[2])
    mixed = Value(build.hold(step, Mixed(Value(x, ()), heads, w, b), build.shapes[x]), dims)
    return attrs.evolve(mixed, dims=_in_heads(mixed.dims, heads, c))


def _in_heads(dims: Dims, heads: int, c: int) -> Dims:
    batch, (channels,), tokens = dims
    inner = c // heads
    outer = channels._replace(size=heads, stride=inner)
    return batch, joined([outer]), tokens, joined([channels._replace(size=inner)])


def project(build: Builder, step: Step, value: Value, order: list[int] | None, mixed: Mixed) -> Value:
    """
    Add the Attention layer of `mixed` and the linear layer of this step, which projects its result; return the output.

    `order` is the order of the features that the step reads, as for `permuted`; None is the layer's own. Weights that
    are not (c, c) raise UnsupportedOperator.
    """
    w, b = step.constants["w"], step.constants.get("b")
    c = len(mixed.w) // 3
    if w.shape != (c, c):
        raise build.refusal(step, f"it projects {w.shape[1]} channels to {w.shape[0]}, not the {c} of attention to {c}")
    arrays = {"w_in": mixed.w, "w_out": permuted(w, order)}
    has_bias = b is not None or mixed.b is not None
    if has_bias:
        arrays |= {"b_in": np.zeros(3 * c) if mixed.b is None else mixed.b, "b_out": np.zeros(c) if b is None else b}
    layer = layers.Attention(heads=mixed.heads, bias=has_bias)
    return build.add(step, layer, mixed.x, dims=with_channels(value, -1, c), arrays=arrays)


def is_projected(build: Builder, value: Value) -> bool:
    """Return whether a value is the output of an attention layer."""
    return "w_out" in build.arrays.get(value.layer, {})


def project_with_bias(build: Builder, value: Value, bias: np.ndarray[Any, Any]) -> Value:
    """Add a constant to the bias of an attention layer's output projection; return the layer's output."""
    c = len(bias)
    known = {"b_in": np.zeros(3 * c), "b_out": np.zeros(c), **build.arrays[value.layer]}
    with_bias: dict[str, Any] = {"bias": True}
    layer = attrs.evolve(build.layers[value.layer], **with_bias)
    build.replace(value.layer, layer, {"b_in": known["b_in"], "b_out": known["b_out"] + bias})
    return value


def prepend(build: Builder, step: Step) -> Value:
    """
    Return a placeholder for pixels with a class token in front, (n, h w + 1, c).

    The layer is made once a position embedding is added. Other constants in front raise UnsupportedOperator.
    """
    value, token, axis = build.value(step), step.constants["token"], step.options["axis"]
    h, w, c = build.shapes[value.layer]
    rows = joined(atom for dim in build.axes("hw", (h, w, c)) for atom in dim)
    is_tokens = value.dims == (*build.axes("n", (h, w, c)), rows, *build.axes("c", (h, w, c)))
    joins = f"it joins a constant of shape {token.shape} along axis {axis}"
    if not is_tokens:
        raise build.refusal(step, f"{joins} in front of a value that is no sequence of pixels, (n, h w, c)")
    if axis % 3 != 1 or token.shape[-2:] != (1, c):
        raise build.refusal(step, f"{joins}; a class token has shape {(1, 1, c)} and joins along axis 1")
    if np.ptp(token, axis=0).any():
        raise build.refusal(step, f"{joins} that differs between samples; a class token is the same for all")
    shape = (h * w + 1, 1, c)
    return Value(build.hold(step, Prepended(value, token.reshape(-1, c)[0]), shape), build.axes("nhc", shape))


def position(build: Builder, step: Step, value: Value, prepended: Prepended) -> Value:
    """
    Add a Tokens layer, which puts the class token in front and adds the position embedding; return its output.

    A constant of another shape than (tokens, c) raises UnsupportedOperator.
    """
    tokens, _, c = build.shapes[value.layer]
    constant = step.constants["constant"]
    if constant.shape not in {(1, tokens, c), (tokens, c)}:
        raise build.refusal(
            step,
            f"it adds a constant of shape {constant.shape}; a position embedding has tokens, channels = {(tokens, c)}",
        )
    arrays = {"token": prepended.token, "position": constant.reshape(tokens, c)}
    return build.add(step, layers.Tokens(), prepended.x, dims=value.dims, arrays=arrays)
