"""How many channels a batch is stored with: what that changes of layers, plans and estimates, and what not."""

from __future__ import annotations

import pytest

from cubatch.hardware.catalogue import find
from cubatch.kernels.padding import filter_bytes, stored_input_shape, widened
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
    assert filter_bytes(shape, dtype) == 64 * 49 * 4 * itemsize
    assert filter_bytes(widened(shape), dtype) == 0
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
