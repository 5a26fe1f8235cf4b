"""
Launches of attention between its projections, on cubatch kernels, and their predicted cost.

Products between tokens run on tensor cores if elements have 16 bits, from sm_80 on, else on CUDA cores in float32.  The
sources are kernels/attention/; `engine.native.self_attention` makes these launches.
"""

from __future__ import annotations

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels import variant
from cubatch.kernels.cost_model import ATTEND_EFFICIENCY, HEADS_EFFICIENCY, NEWEST, lanes_clocks, tensor_clocks
from cubatch.kernels.padding import WIDEST_HEAD, stored_row
from cubatch.kernels.variant import Kernel
from cubatch.kernels.workspace.attention_scratch import HEADS_TILE, KEYS, QUERIES, stores_weights
from cubatch.kernels.workspace.misc import row_blocks
from cubatch.network.layers import Attention
from cubatch.network.passes import Pass

_BY_SUMS = {
    Pass.FPROP: [("attend_sums", 2, 4, 1)],
    Pass.DGRAD: [("attend_queries", 3, 6, 2), ("attend_keys", 4, 6, 2)],
}
"""
Launches of a pass that computes attention weights again: (kernel, products of a block, arrays moved, numbers moved).

The arrays have all heads' channels, as queries have; the numbers are float32, counted per query.
"""

_STEP = 64
"""Step along gemm_k, and along heads' channels, of the kernels on tensor cores: TILE there."""


@attrs.frozen
class Launch:
    """A kernel launch of attention: its blocks, clock cycles, FLOP, and the elements that it reads and writes."""

    name: str  # name of the kernel
    blocks: int  # blocks of its grid
    clocks: float  # clocks of the busiest SM's arithmetic; 0 for a launch that only moves data
    flops: int  # FLOP of its products
    moved: int  # elements that it reads and writes
    rated: str = "float32"  # type whose peak rate applies: that of the elements on tensor cores, else float32
    family: str = ""  # "mma" for products on tensor cores, else empty


def find(operation: str, dtype: str, device: Device) -> Kernel:
    """
    Return the kernel of kernels/attention that computes an operation in a dtype on a device.

    Raises InvalidArgument unless there is exactly one.
    """
    major, minor = device.compute_capability or NEWEST
    return variant.find(operation, dtype, arch=10 * major + minor)


def on_tensor_cores(kernel: Kernel) -> bool:
    """Return whether a kernel of kernels/attention multiplies on tensor cores."""
    return kernel.source.endswith("_mma.cu")


def launches(
    layer: Attention, pass_: Pass, batch_size: int, dtype: str, device: Device, *, saves: bool, by_sums: bool = False
) -> list[Launch]:
    """
    Return the kernel launches of a pass of attention between its projections, in their order.

    Args:
        pass_: The pass; WGRAD has no such launches.
        dtype: Storage of the elements, or "tf32".
        saves: Whether the forward pass saves the attention weights, as in training.
        by_sums: Whether the forward pass saves logarithms of sums instead, on a GPU that has kernels for that.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> layer = Attention(h=197, w=1, c=192, heads=3)
        >>> for saves in (False, True):
        ...     print([each.name for each in launches(layer, Pass.FPROP, 8, "float16", v100, saves=saves)])
        ['attend_f16_attention']
        ['heads_nt_f16_attention', 'softmax_f16_misc', 'heads_nn_f16_attention']
    """
    h, w, c = layer.input_shape
    tokens, width, count = h * w, c // layer.heads, batch_size * layer.heads
    stored, matrix, rows = "float32" if dtype == "tf32" else dtype, count * tokens * stored_row(tokens), count * tokens

    moved = 2 * rows * width + matrix  # by a product: weights, and two operands of the heads' channels

    def product(layout: str, n: int, k: int) -> Launch:
        blocks, kernel = count * -(-tokens // HEADS_TILE) * -(-n // HEADS_TILE), find(f"heads_{layout}", stored, device)
        if on_tensor_cores(kernel):
            clocks = tensor_clocks(blocks, HEADS_TILE * HEADS_TILE * -(-k // _STEP) * _STEP, device)
        else:
            clocks = lanes_clocks(blocks, HEADS_TILE * HEADS_TILE * k, HEADS_EFFICIENCY, device)
        family = "mma" if on_tensor_cores(kernel) else ""
        return Launch(kernel.name, blocks, clocks, 2 * count * tokens * n * k, moved, _rated(kernel), family)

    def softmax(operation: str, matrices: int) -> Launch:
        name, blocks = variant.find(operation, stored).name, row_blocks(rows, tokens, device)
        return Launch(name, blocks, 0.0, 0, matrices * matrix)

    def at_once(operation: str, products: int, arrays: int, numbers: int = 0) -> Launch:
        """Return a launch whose blocks multiply 64 queries by all keys, or 64 keys by all queries; see `_BY_SUMS`."""
        blocks, kernel = count * -(-tokens // QUERIES), find(operation, stored, device)
        # Values are padded to the widest head; on tensor cores queries and keys are too.
        if on_tensor_cores(kernel):
            clocks = tensor_clocks(blocks, QUERIES * -(-tokens // _STEP) * _STEP * products * WIDEST_HEAD, device)
        else:
            keys = -(-tokens // KEYS) * KEYS
            clocks = lanes_clocks(blocks, QUERIES * keys * (width + WIDEST_HEAD), ATTEND_EFFICIENCY, device)
        flops = products * 2 * count * tokens * tokens * width
        moved = arrays * rows * width + numbers * rows * BYTES_PER_ELEMENT["float32"] // BYTES_PER_ELEMENT[stored]
        return Launch(kernel.name, blocks, clocks, flops, moved, _rated(kernel))

    if by_sums or pass_ is Pass.WGRAD:
        return [at_once(*each) for each in _BY_SUMS.get(pass_, ())]
    scores, mixed = product("nt", tokens, width), product("nn", width, tokens)
    if pass_ is Pass.DGRAD:
        turned = product("tn", width, tokens)
        return [turned, scores, softmax("softmax_backward", 3), mixed, turned]
    if stores_weights(c, layer.heads, saves=saves):
        return [scores, softmax("softmax", 2), mixed]
    return [at_once("attend", 2, 4)]


def _rated(kernel: Kernel) -> str:
    return kernel.dtype if on_tensor_cores(kernel) else "float32"
