"""
Padding of the batch's channels and of rows of attention weights, so that kernels load whole vectors.

An image of three channels has no whole vectors: products over it would be gathered element by element, in 16 bits not
on tensor cores.  The batch is stored with a fourth channel of zeros, and the filter is copied with one.  More channels
would only multiply zeros.

The first convolution of a network often has a stride.  With space to depth the batch is stored in patches of stride x
stride pixels.  A patch is a position with the channels of all its pixels: 16 for 2 x 2 pixels of four channels.  The
padding is stored as zeros.  The convolution then has stride 1, and a filter of fewer taps with more channels:

    7 x 7 of stride 2, padding 3, over 224 x 224 x 4        4 x 4 of stride 1 over 115 x 115 x 16

A row of attention weights has an element per token, 197 in a vision transformer.  Rows are padded to multiples of 8
elements.  In 16 bits each row then begins at a vector of 16 bytes, in 32 bits at a sector of 32 bytes.  No kernel reads
or writes the padding.
"""

from __future__ import annotations

from typing import Any

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.graph import INPUT, Network
from cubatch.network.layer import Layer
from cubatch.network.windows import Axis, ConvShape

_COLOURS, _STORED = 3, 4
_ROW_MULTIPLE = 8

WIDEST_HEAD = 64
"""Most channels of a head in the attend kernels: WIDTH there."""


def stored_channels(channels: int) -> int:
    """
    Return the number of channels that images of `channels` channels are stored with.

    Example:
        >>> [stored_channels(c) for c in (1, 3, 4, 17)]
        [1, 4, 4, 17]
    """
    return _STORED if channels == _COLOURS else channels


def stored_input_shape(network: Network, patches: tuple[Axis, Axis] | None = None) -> tuple[int, int, int]:
    """
    Return the stored shape (h, w, c) of a sample of the batch; c is padded if only convolutions read it.

    `patches` are the result of `input_patches`; None for patches of one pixel.
    """
    down, right = patches or input_patches(network)
    channels = network.input_shape[2]
    is_padded = all(shape is not None and shape.groups == 1 for shape in _readers(network))
    return down.out, right.out, down.taps * right.taps * (stored_channels(channels) if is_padded else channels)


def input_patches(network: Network, *, space_to_depth: bool = False) -> tuple[Axis, Axis]:
    """
    Return the vertical and horizontal axis along which a sample of the batch is cut into patches.

    An axis has an output position for each patch, and a tap for each pixel of a patch.  With `space_to_depth` patches
    have the stride of the convolutions that read the batch.  These must have three channels, equal windows, and a
    stride above 1 that leaves no pixel out.  Otherwise patches have one pixel.

    Example:
        >>> from cubatch.network import models
        >>> [(axis.out, axis.taps) for axis in input_patches(models.build("resnet50"), space_to_depth=True)]
        [(115, 2), (115, 2)]
    """
    windows = {(s.vertical, s.horizontal) if s and _is_strided(s) else None for s in _readers(network)}
    if space_to_depth and len(windows) == 1 and (axes := windows.pop()) is not None:
        return _patches(axes[0]), _patches(axes[1])
    h, w, _ = network.input_shape
    return Axis(h, h, 1, 1, 1, 0), Axis(w, w, 1, 1, 1, 0)


def over_patches(layer: Layer) -> Layer:
    """
    Return the convolution of stride 1 over patches of `input_patches` that computes the output of a strided one.

    ValueError is raised for any other layer.

    Example:
        >>> from cubatch.network.layers import Conv2d
        >>> print(over_patches(Conv2d(h=224, w=224, c=3, k=64, r=7, s=7, stride=2, pad=3)))
        Conv2d(h=115, w=115, c=16, k=64, r=4, s=4)
    """
    shape = layer.convolution
    if shape is None or not _is_strided(shape):
        raise ValueError(f"{layer} is no strided convolution of an image")
    down, right = _patches(shape.vertical), _patches(shape.horizontal)
    facts: dict[str, Any] = {
        "h": down.out, "w": right.out, "c": down.taps * right.taps * stored_channels(shape.c),
        "r": 1 + down.out - shape.vertical.out, "s": 1 + right.out - shape.horizontal.out,
        "stride": (1, 1), "pad": (0, 0, 0, 0), "dilation": (1, 1),
    }  # fmt: skip
    return attrs.evolve(layer, **facts)


def _readers(network: Network) -> list[ConvShape | None]:
    """Return the convolutions that read the batch, with None for each reader that is another layer."""
    return [node.layer.convolution for node in network.nodes if INPUT in node.inputs]


def _is_strided(shape: ConvShape) -> bool:
    if shape.groups != 1 or stored_channels(shape.c) == shape.c:
        return False
    axes = shape.vertical, shape.horizontal
    return max(axis.stride for axis in axes) > 1 and all(axis.step == 1 and axis.taps >= axis.stride for axis in axes)


def _patches(window: Axis) -> Axis:
    """Return the axis that cuts pixels into patches of a window's stride, as many as its taps read."""
    size, out, taps, stride, _, offset = window
    return Axis(size, out + -(-taps // stride) - 1, stride, stride, 1, offset)


def stored_row(tokens: int) -> int:
    """
    Return the number of elements that a row of attention weights is stored with.

    Example:
        >>> [stored_row(tokens) for tokens in (1, 64, 197)]
        [8, 64, 200]
    """
    return -(-tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def stored_saved_elements(layer: Layer, *, by_sums: bool = False) -> dict[str, tuple[int, int]]:
    """
    Return {name: (elements per sample, bytes per element)} as `Layer.saved_elements`, with padded attention weights.

    0 bytes per element stand for the size of the dtype. Attention saves "qkv", "mixed" and "weights". With `by_sums`
    and heads of at most 64 channels it saves a float32 per query and head, "log_sums", instead of the weights.

    Example:
        >>> from cubatch.network.layers import Attention
        >>> stored_saved_elements(Attention(h=197, w=1, c=192, heads=3))["weights"]
        (118200, 0)
    """
    saved = layer.saved_elements()
    if "weights" in saved:  # of attention
        (elements, itemsize), (h, w, c) = saved["weights"], layer.input_shape
        rows = elements // (h * w)
        if by_sums and c * h * w <= WIDEST_HEAD * rows:
            return {"qkv": saved["qkv"], "log_sums": (rows, BYTES_PER_ELEMENT["float32"]), "mixed": saved["mixed"]}
        saved["weights"] = (rows * stored_row(h * w), itemsize)
    return saved


def widened(shape: ConvShape) -> ConvShape:
    """Return a convolution with the number of input channels as stored, with padding; unchanged if it has groups."""
    return shape._replace(c=stored_channels(shape.c)) if shape.groups == 1 else shape


def filter_bytes(shape: ConvShape, dtype: str) -> int:
    """Return the bytes of a copy of a filter or of its gradient, rounded up to a multiple of 16."""
    return -(-shape.filter_elements * BYTES_PER_ELEMENT[dtype] // VECTOR_BYTES) * VECTOR_BYTES
