"""How many channels a batch is stored with: what that changes of layers, plans and estimates, and what not."""

from __future__ import annotations

import pytest

from cubatch.hardware.catalogue import find
from cubatch.kernels.cost_model import tiles
from cubatch.kernels.padding import filter_bytes, input_patches, over_patches, stored_input_shape, widened
from cubatch.kernels.problem import problem_of
from cubatch.kernels.ranking import ranking
from cubatch.kernels.workspace.product_scratch import conv2d_workspace
from cubatch.network.graph import Network, as_network
from cubatch.network.layers import Add, Conv2d, Linear, MaxPool2d
from cubatch.network.passes import Pass
from cubatch.tuning.step_memory import footprint

V100, H100 = find("v100-sxm2-16gb"), find("h100-sxm5-80gb")
CONV1 = Conv2d(h=224, w=224, c=3, k=64, r=7, s=7, stride=2, pad=3)


def of(*layers, shape=(32, 32, 3)):
    return Network(input_shape=shape, layers=list(layers))


@pytest.mark.parametrize(
    ("network", "stored"),
    [
        (of(Conv2d(name="a", k=8, r=3, s=3)), (32, 32, 4)),
        (of(Conv2d(name="a", k=8, r=3, s=3), shape=(32, 32, 1)), (32, 32, 1)),
        (of(Conv2d(name="a", k=8, r=3, s=3), shape=(32, 32, 5)), (32, 32, 5)),
        (of(Conv2d(name="a", k=6, r=3, s=3, groups=3)), (32, 32, 3)),
        (of(MaxPool2d(r=2, s=2), Conv2d(k=8, r=3, s=3)), (32, 32, 3)),
        (of(Linear(k=8), shape=(1, 1, 3)), (1, 1, 3)),
        (
            of(
                Conv2d(name="a", k=8, r=3, s=3, pad=1),
                Conv2d(name="b", k=8, r=1, s=1, inputs=["input"]),
                Add(inputs=["a", "b"]),
            ),
            (32, 32, 4),
        ),
        (
            of(Conv2d(name="a", k=3, r=3, s=3, pad=1), Add(inputs=["a", "input"])),
            (32, 32, 3),
        ),
    ],
)  # fmt: skip
def test_three_channels_are_stored_as_four_where_convolutions_alone_read_them(network, stored):
    """One channel would be three zeros of four; groups, a pool, a linear layer or a sum see the channels there are."""
    assert stored_input_shape(network) == stored


CUT = [
    (CONV1, (115, 115, 16), (4, 4)),
    (Conv2d(h=9, w=11, c=3, k=5, r=3, s=2, stride=2, pad=(1, 0, 0, 1)), (5, 6, 16), (2, 1)),
    (Conv2d(h=12, w=8, c=3, k=5, r=4, s=4, stride=4), (3, 2, 64), (1, 1)),
    (Conv2d(h=12, w=9, c=3, k=5, r=5, s=1, stride=(3, 1), pad=(2, 2, 0, 0)), (5, 9, 12), (2, 1)),
]


@pytest.mark.parametrize(("layer", "stored", "taps"), CUT, ids=["7x7", "3x2", "4x4", "5x1"])
def test_a_strided_convolution_of_an_image_has_stride_1_over_patches(layer, stored, taps):
    """The output keeps its shape, and the stored batch holds each pixel that the filter reads."""
    (node,) = (network := as_network(layer)).nodes
    patches = input_patches(network, space_to_depth=True)
    assert stored_input_shape(network, patches) == stored
    computed = over_patches(node.layer)
    assert computed.input_shape == stored
    assert computed.output_shape == layer.output_shape
    assert computed.parameter_shapes["w"] == (layer.k, *taps, stored[2])
    for axis, window in zip(patches, (layer.convolution.vertical, layer.convolution.horizontal), strict=True):
        read = {
            at for out in range(window.out) for tap in range(window.taps)
            if 0 <= (at := out * window.stride + tap + window.offset) < window.size
        }  # fmt: skip
        held = [axis.valid(pixel, 0, axis.out)[1] for pixel in range(axis.taps)]
        assert read <= {at for each in held for at in range(window.size)[each]}
        assert axis.offset == window.offset


def test_the_first_convolution_over_patches_runs_on_hopper():
    """Forward, and for the filter in one tile of 256 columns: 4 rows of taps of 64 channels."""
    computed = over_patches(CONV1)
    for pass_ in (Pass.FPROP, Pass.WGRAD):
        kernel = ranking(problem_of(computed, pass_, 256, "float16"), H100)[0][2]
        assert kernel.family == "hopper"
    assert tiles(problem_of(computed, Pass.WGRAD, 256, "float16"), kernel) == (1, 1)
    assert (kernel.tile.m, kernel.tile.n) == (128, 256)


@pytest.mark.parametrize(
    "network",
    [
        of(Conv2d(name="a", k=8, r=3, s=3, pad=1)),
        of(Conv2d(name="a", k=8, r=1, s=1, stride=2)),
        of(Conv2d(name="a", k=8, r=3, s=3, stride=2, dilation=2)),
        of(Conv2d(name="a", k=8, r=3, s=3, stride=2), shape=(32, 32, 4)),
        of(Conv2d(name="a", k=6, r=3, s=3, stride=2, groups=3)),
        of(MaxPool2d(r=2, s=2), Conv2d(k=8, r=3, s=3, stride=2)),
        of(
            Conv2d(name="a", k=8, r=3, s=3, stride=2, pad=1),
            Conv2d(name="b", k=8, r=2, s=2, stride=2, inputs=["input"]),
            Add(inputs=["a", "b"]),
        ),
    ],
)  # fmt: skip
def test_a_batch_is_cut_only_where_one_window_reads_all_of_its_three_channels(network):
    """Not without a stride, with pixels or taps left out, other channels, groups, other layers or two windows."""
    assert all(axis.taps == 1 for axis in input_patches(network, space_to_depth=True))
    shape = stored_input_shape(network)
    assert stored_input_shape(network, input_patches(network, space_to_depth=True)) == shape


def test_convolutions_of_one_window_share_a_batch_in_patches():
    """Two first layers with different numbers of filters."""
    network = of(
        Conv2d(name="a", k=8, r=3, s=3, stride=2, pad=1),
        Conv2d(name="b", k=8, r=3, s=3, stride=2, pad=1, inputs=["input"]),
        Add(inputs=["a", "b"]),
    )
    assert stored_input_shape(network, input_patches(network, space_to_depth=True)) == (17, 17, 16)


def test_the_plan_holds_the_fourth_channel_for_our_kernels_alone():
    """A batch of 64 images of 224 x 224; by a BLAS, on a GPU or the CPU, it has three."""
    for library, channels in (("cubatch", 4), ("im2col", 3)):
        found = footprint("resnet18", batch_size=64, device=V100, library=library)
        assert found.layers[0]["activations"] == 64 * 224 * 224 * channels * 4
    assert footprint("resnet18", batch_size=64, device="cpu").layers[0]["activations"] == 64 * 224 * 224 * 3 * 4


@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
def test_the_filter_has_room_beside_what_its_product_takes(dtype):
    """49 taps of 4 channels for 64 filters, before the workspace of the same convolution over 4 channels."""
    shape, itemsize = CONV1.convolution, 2 if dtype.endswith("16") else 4
    assert widened(shape).c == 4
    assert filter_bytes(widened(shape), dtype) == 64 * 49 * 4 * itemsize
    for pass_ in (Pass.FPROP, Pass.WGRAD):
        padded, plain = (conv2d_workspace(pass_, each, 32, dtype, V100) for each in (shape, widened(shape)))
        assert padded >= 64 * 49 * 4 * itemsize + plain


def test_an_images_products_reach_the_tensor_cores():
    """Forward and for the filter 4 elements are loaded at a time; the gradient of an image is of three channels."""
    for pass_, families in ((Pass.FPROP, {"mma", "hopper"}), (Pass.WGRAD, {"mma", "hopper"})):
        problem = problem_of(CONV1, pass_, 256, "float16")
        assert problem.vector == 4
        assert ranking(problem, H100)[0][2].family in families
    assert problem_of(CONV1, Pass.FPROP, 1, "float16").k == 49 * 4
    assert problem_of(CONV1, Pass.DGRAD, 1, "float16").vector == 1
    assert as_network(CONV1).input_shape == (224, 224, 3)
