"""Which passes of a network are operations, and what more they move, by hand."""

from __future__ import annotations

import math

from cubatch.estimate.scheduled import scheduled_passes
from cubatch.network import models
from cubatch.network.graph import Network, layer_passes
from cubatch.network.layers import (
    Add,
    BatchNorm2d,
    Conv2d,
    GlobalAvgPool,
    HardSwish,
    LayerNorm,
    Linear,
    ReLU,
    Scale,
)
from cubatch.network.passes import Pass

FORKED = Network(
    input_shape=(3, 5, 4),
    layers=[
        Conv2d(name="a", k=4, r=1, s=1),
        HardSwish(name="b"),
        Conv2d(name="c", k=4, r=1, s=1, groups=4),
        BatchNorm2d(name="d"),
        Conv2d(name="e", inputs=["b"], k=4, r=1, s=1),
        BatchNorm2d(name="f"),
        Add(name="g", inputs=["d", "f"]),
        ReLU(name="h"),
    ],
)
PIXELS = 3 * 5 * 4


def test_the_passes_are_those_of_the_network_in_its_order():
    """A pass that a neighbour does is listed too, as one that does not run."""
    for mode in ("inference", "training"):
        found = scheduled_passes(FORKED, mode, "cubatch")
        assert [(item.node, item.pass_) for item in found] == layer_passes(FORKED, mode)


def test_a_product_does_the_layers_after_it_and_a_depthwise_one_does_not():
    """In inference: e does f, g and h and reads a branch more; the norm d of the depthwise c runs by itself."""
    found = {item.node.name: (item.runs, item.more) for item in scheduled_passes(FORKED, "inference", "cubatch")}
    ran = dict.fromkeys("abcd", (True, 0)) | {"e": (True, PIXELS)} | dict.fromkeys("fgh", (False, 0))
    assert found == ran


def test_sums_of_gradients_are_counted_before_the_first_gradient_of_the_layer_whose_they_are():
    """In training: c's gradient cannot be added where it is made, so b's is a sum of two: three moves an element."""
    found = {(item.node.name, item.pass_): item for item in scheduled_passes(FORKED, "training", "cubatch")}
    assert found["b", Pass.DGRAD].more == 3 * PIXELS
    assert found["f", Pass.FPROP].more == PIXELS
    assert {name for (name, pass_), item in found.items() if not item.runs} == {"g", "h"}


def test_an_activation_that_a_norm_computes_runs_in_no_pass():
    """Behind a norm its forward and backward passes are the norm's; b, behind a product, is an operation."""
    behind = Network(
        input_shape=(3, 5, 4),
        layers=[Conv2d(name="a", k=4, r=1, s=1), BatchNorm2d(name="n"), HardSwish(name="b"), Conv2d(k=4, r=1, s=1)],
    )
    for network, runs in ((behind, False), (FORKED, True)):
        found = {item.pass_: item for item in scheduled_passes(network, "training", "cubatch") if item.node.name == "b"}
        assert {pass_: item.runs for pass_, item in found.items()} == {Pass.FPROP: runs, Pass.DGRAD: runs}


def test_the_gradient_of_a_global_pool_costs_what_reads_it():
    """Behind a norm, which adds it, one value a channel; behind a product the pool reads the others' gradient."""
    for layer, reads, runs in ((BatchNorm2d(name="n"), 4, False), (Conv2d(name="n", k=4, r=1, s=1), PIXELS, True)):
        excited = Network(
            input_shape=(3, 5, 4),
            layers=[
                Conv2d(name="a", k=4, r=1, s=1), layer, GlobalAvgPool(name="p"), Scale(name="s", inputs=["n", "p"]),
            ],
        )  # fmt: skip
        passes = scheduled_passes(excited, "training", "cubatch")
        found = {item.node.name: item for item in passes if item.pass_ is Pass.DGRAD}
        assert found["p" if runs else "n"].more == reads
        assert found["p"].runs is runs


def test_sums_of_gradients_are_counted_also_where_the_layer_is_no_operation():
    """In ConvNeXt a sum's gradient is that of the next sum and of a depthwise convolution: it runs in no other way."""
    found = scheduled_passes(models.build("convnext-tiny"), "training", "cubatch")
    sums = {item.node.name: item for item in found if isinstance(item.node.layer, Add) and item.pass_ is Pass.DGRAD}
    last = {name: sums.pop(name) for name in ("stage1.2.add", "stage2.2.add", "stage3.8.add", "stage4.2.add")}
    assert {(item.runs, item.more) for item in last.values()} == {(False, 0)}  # only a norm or a pool reads it
    assert all((item.runs, item.more) == (False, 3 * math.prod(item.layer.output_shape)) for item in sums.values())
    assert len(sums) == 18 - 4


def test_the_operations_of_a_residual_network_are_those_that_run():
    """`resnet50` in training: 53 convolutions and norms, two poolings and a product; back a slope more."""
    found = scheduled_passes(models.build("resnet50"), "training", "cubatch")
    assert sum(item.runs for item in found if item.pass_ is Pass.FPROP) == 53 + 53 + 1 + 1 + 1
    backward = {item.node.name for item in found if item.runs and item.pass_ is not Pass.FPROP}
    assert len(backward) == 53 + 53 + 1 + 1 + 1 + 1  # the last is the slope before the pooling


def test_products_that_sum_norms_read_a_norms_input_in_place_of_a_mask_that_it_implies():
    """In `resnet50` 32 masks are slopes of norms' inputs; 15 of sums with a shortcut are read with such an input."""
    network = models.build("resnet50")
    plain, summed = (
        scheduled_passes(network, "training", "cubatch", names) for names in (frozenset(), frozenset({"norm_sums"}))
    )
    pairs = [(one, other) for one, other in zip(plain, summed, strict=True) if other.summed]
    products = [(one, other) for one, other in pairs if not other.node.layer.has_statistics]
    more = {other.node.name: other.more - one.more for one, other in products if other.pass_ is Pass.DGRAD}
    inputs = {one.node.name: math.prod(one.node.layer.input_shape) for one, _ in products}
    assert len([name for name, extra in more.items() if extra == 0]) == 32
    assert len([name for name, extra in more.items() if extra == inputs[name]]) == 15
    assert sum(one.pass_ is Pass.FPROP for one, _ in products) == 53
    ends = [(other.pass_, one.runs, other.runs) for one, other in pairs if other.node.layer.has_statistics]
    assert (ends.count((Pass.FPROP, True, True)), ends.count((Pass.WGRAD, True, False))) == (53, 47)


def test_a_batch_in_patches_is_read_by_a_convolution_over_them():
    """In `resnet50` 4 x 4 of 115 x 115 patches, forward and for the filter; nothing else changes."""
    network, names = models.build("resnet50"), frozenset({"space_to_depth"})
    passes = zip(
        scheduled_passes(network, "training", "cubatch", names), scheduled_passes(network, "training", "cubatch"),
        strict=True,
    )  # fmt: skip
    changed = [item for item, plain in passes if item != plain]
    assert [item.pass_ for item in changed if item.runs] == [Pass.FPROP, Pass.WGRAD]
    assert {(item.node.name, item.layer.input_shape) for item in changed} == {("conv1", (115, 115, 16))}


def test_one_kernel_computes_all_gradients_of_a_layer_norm():
    """With that of its input, if that is wanted; of long rows, or by an array library, a second pass sums."""
    tail = [LayerNorm(name="n"), Linear(name="l", k=4)]
    drawn = [([Linear(k=channels)], "cubatch", passes) for channels, passes in ((4, 1), (6140, 1), (6141, 2))]
    for first, library, runs in (*drawn, ([Linear(k=4)], "im2col", 2), ([], "cubatch", 1)):
        network = Network(input_shape=(1, 1, 4), layers=[*first, *tail])
        found = [item for item in scheduled_passes(network, "training", library) if item.node.name == "n"]
        assert sum(item.runs for item in found if item.pass_ is not Pass.FPROP) == runs


def test_an_array_library_runs_activations_that_cubatch_kernels_fuse():
    """In efficientnet-b0 33 norms end in SiLU: stem, 15 expansions, 16 depthwise convolutions and head of its paper."""
    network = models.build("efficientnet-b0")
    fused, separate = (
        sum(item.runs for item in scheduled_passes(network, "training", library) if item.node.layer.type == "silu")
        for library in ("cubatch", "im2col")
    )
    assert separate - fused == 2 * 33
