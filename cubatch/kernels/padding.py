"""
Padding of the batch's channels and of rows of attention weights, so that kernels load whole vectors.

An image of three channels has no whole vectors: products over it would be gathered element by element, in 16 bits not
on tensor cores.  The batch is stored with a fourth channel of zeros, and the filter is copied with one.  More channels
would only multiply zeros.

A row of attention weights has an element per token, 197 in a vision transformer.  Rows are padded to multiples of 8
elements.  In 16 bits each row then begins at a vector of 16 bytes, in 32 bits at a sector of 32 bytes.  No kernel reads
or writes the padding.
"""

from __future__ import annotations

from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.graph import INPUT, Network
from cubatch.network.layer import Layer
from cubatch.network.windows import ConvShape

_COLOURS, _STORED = 3, 4
_ROW_MULTIPLE = 8


def stored_channels(channels: int) -> int:
    """
    Return the number of channels that images of `channels` channels are stored with.

    Example:
        >>> [stored_channels(c) for c in (1, 3, 4, 17)]
        [1, 4, 4, 17]
    """
    return _STORED if channels == _COLOURS else channels


def stored_input_shape(network: Network) -> tuple[int, int, int]:
    """Return the stored shape (h, w, c) of a sample of the batch; c is padded if only convolutions read it."""
    h, w, c = network.input_shape
    readers = [node.layer.convolution for node in network.nodes if INPUT in node.inputs]
    is_padded = all(shape is not None and shape.groups == 1 for shape in readers)
    return h, w, stored_channels(c) if is_padded else c


def stored_row(tokens: int) -> int:
    """
    Return the number of elements that a row of attention weights is stored with.

    Example:
        >>> [stored_row(tokens) for tokens in (1, 64, 197)]
        [8, 64, 200]
    """
    return -(-tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def stored_saved_elements(layer: Layer) -> dict[str, tuple[int, int]]:
    """
    Return the elements and bytes per element of each value that a layer saves, with padded attention weights.

    Example:
        >>> from cubatch.network.layers import Attention
        >>> stored_saved_elements(Attention(h=197, w=1, c=192, heads=3))["weights"]
        (118200, 0)
    """
    saved = layer.saved_elements()
    if "weights" in saved:  # of attention
        elements, itemsize = saved["weights"]
        h, w, _ = layer.input_shape
        saved["weights"] = (elements // (h * w) * stored_row(h * w), itemsize)
    return saved


def widened(shape: ConvShape) -> ConvShape:
    """Return a convolution with the number of input channels as stored, padding included; as it is if it has groups."""
    return shape._replace(c=stored_channels(shape.c)) if shape.groups == 1 else shape


def filter_bytes(shape: ConvShape, dtype: str) -> int:
    """Return the bytes of a filter's padded copy or of its gradient; 0 if the filter needs no padding."""
    wide = widened(shape)
    if wide == shape:
        return 0
    return -(-wide.filter_elements * BYTES_PER_ELEMENT[dtype] // VECTOR_BYTES) * VECTOR_BYTES
