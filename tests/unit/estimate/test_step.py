"""Times of steps by models made by hand: which pass asks which, and how errors add up."""

from __future__ import annotations

import itertools
import math

import attrs
import numpy as np
import pytest

from cubatch.errors import CubatchError
from cubatch.estimate import predictions
from cubatch.estimate.cubatch_kernels import LAUNCH_SECONDS, MOVED_SHARE
from cubatch.estimate.predictions import ModelNote, Scales
from cubatch.estimate.step import predict_step
from cubatch.estimate.vendor.vendor_model import FRAMEWORK_SD
from cubatch.hardware.catalogue import find
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Attention, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU
from cubatch.network.passes import Pass
from tests.unit.estimate.building import COSTS, stump
from tests.unit.estimate.steps import (
    CARD,
    CONV,
    LINEAR,
    SMALL,
    SUM,
    V100,
    codes,
    half_width,
    model_of,
)


def product_seconds(gemm):
    """Seconds of equal products in tiles of 128 x 128 on 48 SMs, by whole waves."""
    blocks = gemm.count * math.ceil(gemm.m / 128) * math.ceil(gemm.n / 128)
    return math.ceil(blocks / 48) * 128 * 128 * gemm.k / 1e11


@pytest.mark.parametrize(
    "layer",
    [
        LINEAR, Linear(h=7, w=5, c=100, k=300), Attention(h=197, w=1, c=192, heads=3), CONV, SMALL,
        Conv2d(h=9, w=7, c=64, k=64, r=3, s=3, pad=2, dilation=2), Conv2d(h=9, w=7, c=64, k=256, r=3, s=3, groups=2),
    ],
    ids=str,
)  # fmt: skip
def test_a_pass_is_the_sum_of_its_matrix_products(shipped, layer):
    """Convolution, linear layer, the products of attention: in whole tiles, each product has its own waves."""
    step = predict_step(layer, [1, 5, 64], CARD, mode="training")
    assert [found.pass_ for found in step.passes] == list(Pass)
    for found, (place, n) in itertools.product(step.passes, enumerate([1, 5, 64])):
        want = sum(product_seconds(gemm) for gemm in layer.gemms(found.pass_, n))
        assert found.seconds[place] == pytest.approx(want, rel=SUM)
        assert found.algorithms[place] == "128x128"
        first = layer.gemms(found.pass_, n)[0]
        assert found.blocks[place] == first.count * math.ceil(first.m / 128) * math.ceil(first.n / 128)


@pytest.mark.parametrize(("tensor", "elements"), [("x", 64 * 2048), ("y", 64 * 1000), ("w", 2048 * 1000)])
def test_every_pass_of_a_product_moves_the_tensors_of_its_layer(shipped, tensor, elements):
    """Input, output and filter, or their gradients: so many bytes each, longer by what scales the time of bytes."""
    model = shipped["deepbench gemm"]
    shipped[model.name] = attrs.evolve(model, constants={**model.constants, f"{tensor} tiles": 1.0})
    for memory in (1.0, 2.0):
        for found in predict_step(LINEAR, [64], CARD, mode="training", scales=Scales(memory=memory)).passes:
            (gemm,) = LINEAR.gemms(found.pass_, 64)
            assert found.seconds == pytest.approx([product_seconds(gemm) + memory * elements * 4 / 1.25e12], rel=SUM)


@pytest.mark.parametrize(
    ("layer", "pass_", "dtype", "name"),
    [
        (CONV, Pass.FPROP, "float32", "neusight"),
        (CONV, Pass.DGRAD, "float32", "deepbench conv"),
        (CONV, Pass.WGRAD, "float32", "deepbench conv"),
        (attrs.evolve(CONV, stride=2), Pass.FPROP, "float32", "deepbench conv"),
        (attrs.evolve(CONV, dilation=2), Pass.FPROP, "float32", "deepbench conv"),
        (attrs.evolve(CONV, groups=2), Pass.FPROP, "float32", "deepbench conv"),
        (attrs.evolve(CONV, r=1), Pass.FPROP, "float32", "deepbench conv"),
        (CONV, Pass.FPROP, "float16", "deepbench conv tensor"),
        (LINEAR, Pass.FPROP, "float32", "deepbench gemm"),
        (LINEAR, Pass.WGRAD, "float16", "deepbench gemm tensor"),
        (Attention(h=197, w=1, c=192, heads=3), Pass.FPROP, "float32", "deepbench gemm"),
    ],
)
def test_each_pass_is_answered_by_the_measurements_that_are_like_it(shipped, layer, pass_, dtype, name):
    """NeuSight for plain 3x3 forward passes in float32, DeepBench for all else, its V100 for Tensor Cores."""
    before = predict_step(layer, [8], CARD, mode="training", dtype=dtype)
    slower = {f"cost {COSTS[0]}": 3.0}
    shipped[name] = attrs.evolve(shipped[name], constants={**shipped[name].constants, **slower})
    after = predict_step(layer, [8], CARD, mode="training", dtype=dtype)
    index = list(Pass).index(pass_)
    assert after.passes[index].seconds == pytest.approx(3 * before.passes[index].seconds, rel=SUM)


@pytest.mark.parametrize(("taps", "dtype"), [(3, "float32"), (3, "float16"), (31, "float32"), (31, "float16")])
def test_a_depthwise_convolution_is_bound_by_its_bytes_or_the_float32_lanes(shipped, taps, dtype):
    """No tile of a product computes it, not even on Tensor Cores: 9 taps move bytes, 961 take arithmetic."""
    layer, n = Conv2d(h=28, w=28, c=256, k=256, r=taps, s=taps, pad=taps // 2, groups=256, bias=False), 64
    (found,) = predict_step(layer, [n], CARD, dtype=dtype).passes
    elements = 2 * n * 28 * 28 * 256 + 256 * taps**2
    moved = elements * {"float32": 4, "float16": 2}[dtype] / 1.25e12
    computed = 2 * n * 28 * 28 * 256 * taps**2 / (48 * 2e11)
    assert (moved > computed) == (taps == 3)
    assert found.seconds == pytest.approx([max(moved, computed) / MOVED_SHARE + LAUNCH_SECONDS], rel=SUM)
    assert found.algorithms == ("bytes",)


@pytest.mark.parametrize(("mode", "seconds"), [("inference", 3 * 40e-6), ("training", 3 * 40e-6 + 3 * 30e-6)])
def test_pytorch_launches_each_layer_once_forward_and_once_backward(shipped, mode, seconds):
    """
    Two convolutions and a ReLU; flattening is no operator, and both gradients of a layer are one.

    The step is the root of the sum of squares of host and kernels, whose errors add up by their shares of it.
    """
    conv = Conv2d(k=16, r=3, s=3, pad=1, bias=False)
    net = Network(input_shape=(8, 8, 16), layers=[conv, ReLU(), conv, Flatten()])
    kernels, step = (predict_step(net, [1, 4096], CARD, mode=mode, library=name) for name in ("vendor", "torch"))
    assert step.seconds == pytest.approx(np.hypot(kernels.seconds, seconds), rel=SUM)
    share = (seconds / step.seconds) ** 2
    assert share[0] > share[1]
    assert half_width(step) == pytest.approx(np.hypot((1 - share) * half_width(kernels), share * 0.35))
    assert [note.code for note in step.notes if note not in kernels.notes] == ["host_bound"]


@pytest.mark.parametrize("library", ["vendor", "torch", "cubatch"])
def test_a_step_of_nothing_has_an_interval_of_nothing(library):
    """Flattening alone takes no time, surely: no division of nothing by nothing."""
    with np.errstate(all="raise"):
        step = predict_step(Flatten(h=7, w=7, c=64), [1, 8], V100, library=library)
    assert step.seconds.tolist() == step.low.tolist() == step.high.tolist() == [0, 0]


TENSOR = attrs.evolve(
    CARD, compute_capability=(8, 0),
    peak_flops_per_second={"float32": 48 * 2e11, **dict.fromkeys(("float16", "bfloat16", "tf32"), 8 * 48 * 2e11)},
)  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "dtype", "size"),
    [
        (CONV, "float16", 2), (SMALL, "bfloat16", 2), (CONV, "tf32", 4), (LINEAR, "float16", 0),
        (Conv2d(h=28, w=28, c=256, k=256, r=3, s=3, groups=256), "float16", 0),
    ],
    ids=str,
)  # fmt: skip
def test_pytorch_converts_images_around_a_convolution_on_tensor_cores(shipped, layer, dtype, size):
    """In each pass two kernels read and write input and output, of `size` bytes an element; 0: no conversion."""
    layer = attrs.evolve(layer, bias=False)
    step, plain = (
        predict_step(layer, [64], TENSOR, mode="training", dtype=dtype, library=name) for name in ("torch", "vendor")
    )
    moved = 2 * 64 * (math.prod(layer.input_shape) + math.prod(layer.output_shape)) * size
    for got, own in zip(step.passes, plain.passes, strict=True):
        more = moved / (MOVED_SHARE * 1.25e12) + 2 * LAUNCH_SECONDS if size else 0
        assert got.seconds == pytest.approx(own.seconds + more, rel=SUM)


@pytest.mark.parametrize(("layer", "tensors"), [(CONV, {Pass.FPROP: 2, Pass.WGRAD: 1}), (LINEAR, {})], ids=str)
def test_pytorch_adds_the_bias_of_a_convolution_by_a_kernel_of_its_own(shipped, layer, tensors):
    """It reads and writes the outputs, and another sums their gradients; the product of a linear layer has its bias."""
    step, plain = (predict_step(layer, [64], CARD, mode="training", library=name) for name in ("torch", "vendor"))
    for got, own in zip(step.passes, plain.passes, strict=True):
        moved = tensors.get(got.pass_, 0) * 64 * math.prod(layer.output_shape) * 4
        more = moved / (MOVED_SHARE * 1.25e12) + LAUNCH_SECONDS * bool(moved)
        assert got.seconds == pytest.approx(own.seconds + more, rel=SUM)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_batch_norm_of_pytorch_takes_as_long_in_16_bits(shipped, dtype):
    """
    In training it reads its input twice forward, and loads 4 bytes or an element of 2 in the same time.

    Backward, input and gradient are read for the parameters, and again for the gradient of the input.
    """
    net, n = Network(input_shape=(28, 28, 256), layers=[ReLU(), BatchNorm2d(), ReLU(), BatchNorm2d()]), 64
    step = predict_step(net, [n], CARD, mode="training", dtype=dtype, library="torch")
    taken = {each.pass_: float(each.seconds[0]) for each in step.passes if each.layer == net.nodes[-1].name}
    tensor = 4 * n * 28 * 28 * 256 / (MOVED_SHARE * 1.25e12)
    for pass_, (tensors, launches) in {Pass.FPROP: (3, 2), Pass.DGRAD: (3, 1), Pass.WGRAD: (2, 1)}.items():
        assert taken[pass_] == pytest.approx(tensors * tensor + launches * LAUNCH_SECONDS, rel=1e-3)  # of parameters


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_max_pooling_of_pytorch_moves_positions_of_8_bytes(shipped, dtype):
    """Forward it writes one for each output, backward it reads them; the kernels are the same."""
    net, n = Network(input_shape=(28, 28, 256), layers=[BatchNorm2d(), MaxPool2d(r=2, s=2)]), 64
    step, plain = (
        predict_step(net, [n], CARD, mode="training", dtype=dtype, library=name) for name in ("torch", "vendor")
    )
    more = 8 * n * 14 * 14 * 256 / (MOVED_SHARE * 1.25e12)
    pools = [(got, own) for got, own in zip(step.passes, plain.passes, strict=True) if got.layer == net.nodes[-1].name]
    assert [got.pass_ for got, _ in pools] == [Pass.FPROP, Pass.DGRAD]
    for got, own in pools:
        assert got.seconds == pytest.approx(own.seconds + more, rel=SUM)


@pytest.mark.parametrize(
    ("option", "value"), [("mode", "traning"), ("dtype", "float8"), ("dtype", "tf32"), ("library", "cudnn")]
)
def test_an_unknown_name_is_rejected(option, value):
    """With the name of the argument; so is a type that the device lacks."""
    with pytest.raises(CubatchError, match=value) as caught:
        predict_step(LINEAR, [8], V100, **{option: value})
    assert option in str(caught.value)


@pytest.mark.parametrize(("dtype", "multiple"), [("float16", 8), ("bfloat16", 8), ("tf32", 4)])
@pytest.mark.parametrize(
    "layer",
    [
        Conv2d(h=28, w=28, c=3, k=64, r=7, s=7, pad=3), Conv2d(h=28, w=28, c=132, k=130, r=3, s=3, pad=1),
        Conv2d(h=28, w=28, c=129, k=64, r=1, s=1), Linear(c=2048, k=1001), Linear(c=130, k=10),
    ],
    ids=str,
)  # fmt: skip
def test_channels_are_padded_on_tensor_cores(shipped, layer, dtype, multiple):
    """They take as long as those of the next multiple of 8, of 4 in tf32, with a note and an sd of 0.6."""
    c, k = (math.ceil(extent / multiple) * multiple for extent in (layer.input_shape[2], layer.output_shape[2]))
    padded = attrs.evolve(layer, c=c, k=k)
    step, want = (predict_step(one, [1, 40], TENSOR, mode="training", dtype=dtype) for one in (layer, padded))
    for got, same in zip(step.passes, want.passes, strict=True):
        assert got.seconds == pytest.approx(same.seconds, rel=SUM)
        assert got.blocks.tolist() == same.blocks.tolist()
    assert step.notes.count(ModelNote("channels_padded", multiple)) == 1
    assert "channels_padded" not in codes(want)
    alone = predict_step(layer, [40], TENSOR, dtype=dtype)
    # Of another generation than the one that was measured a quarter more is unknown.
    assert half_width(alone) == pytest.approx([math.hypot(0.6, 0.25, FRAMEWORK_SD)])


@pytest.mark.parametrize(("dtype", "device"), [("float32", TENSOR), ("float16", None), ("bfloat16", None)])
def test_channels_are_not_padded_elsewhere(shipped, dtype, device):
    """Without Tensor Cores 3 channels are 3: no note, and the time of their own product."""
    layer = Conv2d(h=28, w=28, c=3, k=64, r=7, s=7, pad=3)
    step = predict_step(layer, [8], device or PLAIN, dtype=dtype)
    (gemm,) = layer.gemms(Pass.FPROP, 8)
    assert step.seconds == pytest.approx([product_seconds(gemm)], rel=SUM)
    assert "channels_padded" not in codes(step)


PLAIN = attrs.evolve(CARD, tensor_cores=False, peak_flops_per_second={"float32": 48 * 2e11})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("layer", "name", "sd", "size"),
    [(CONV, "neusight", 0.8, 4), (SMALL, "deepbench conv", 0.8, 4), (LINEAR, "deepbench gemm", 0.4, 2)],
)
def test_16_bits_without_tensor_cores_are_computed_in_float32(shipped, layer, name, sd, size, dtype):
    """Both dtypes go by the models of float32 at its rate; convolutions are converted and move as many bytes."""
    model = shipped[name]
    bytes_too = {**model.constants, "x tiles": 1.0}
    shipped[model.name] = attrs.evolve(model, constants=bytes_too)
    step = predict_step(layer, [64], PLAIN, dtype=dtype)
    (gemm,) = layer.gemms(Pass.FPROP, 64)
    moved = 64 * math.prod(layer.input_shape) * size / 1.25e12
    assert step.seconds == pytest.approx([product_seconds(gemm) + moved], rel=SUM)
    assert half_width(step) == pytest.approx([math.hypot(sd, 0.05, FRAMEWORK_SD)])
    assert step.notes == (ModelNote("float32_arithmetic", dtype),)


@pytest.mark.parametrize(("dilation", "runs"), [(1, "winograd"), (2, "128x128"), ((1, 2), "128x128")])
def test_a_dilated_convolution_runs_in_tiles(shipped, dilation, runs):
    """Where Winograd is nearly free it computes what is plain, and no filter whose taps lie apart on any axis."""
    model = shipped["deepbench conv"]
    cheap = {name: 1e-3 for name in model.constants if name.startswith("cost winograd")}
    shipped["deepbench conv"] = attrs.evolve(model, constants={**model.constants, **cheap})
    layer = attrs.evolve(CONV, dilation=dilation, pad=2)
    for found in predict_step(layer, [32], CARD, mode="training").passes[1:]:
        assert found.algorithms[0].startswith(runs)


def test_strides_of_rows_and_of_columns_are_told_apart(shipped):
    """A correction of what has strides down the rows leaves strides along the columns alone, and the reverse."""
    plain = shipped["deepbench conv"]
    for name, stride in itertools.product(("stride_h", "stride_w"), ((2, 1), (1, 2))):
        layer = attrs.evolve(SMALL, stride=stride)
        shipped[plain.name] = plain
        before = predict_step(layer, [64], CARD).seconds
        shipped[plain.name] = attrs.evolve(plain, trees=stump(name, 1.5, 0.0, 0.5))
        correction = 0.5 * (stride[("stride_h", "stride_w").index(name)] == 2)
        assert np.log(predict_step(layer, [64], CARD).seconds / before) == pytest.approx([correction])


def test_scales_are_factors_on_arithmetic_and_on_bytes(shipped):
    """Twice the arithmetic doubles a product and no ReLU, twice the bytes the ReLU's share beyond its launch."""
    net = Network(input_shape=(28, 28, 256), layers=[Conv2d(k=256, r=3, s=3), ReLU()])
    conv, relu = (found.seconds for found in predict_step(net, [8], CARD).passes)
    slow_conv, same_relu = (f.seconds for f in predict_step(net, [8], CARD, scales=Scales(compute=2.0)).passes)
    assert slow_conv == pytest.approx(2 * conv, rel=SUM)
    assert same_relu.tolist() == relu.tolist()
    same_conv, slow_relu = (f.seconds for f in predict_step(net, [8], CARD, scales=Scales(memory=2.0)).passes)
    assert same_conv.tolist() == conv.tolist()
    assert slow_relu - LAUNCH_SECONDS == pytest.approx(2 * (relu - LAUNCH_SECONDS), rel=1e-9)


def test_a_gpus_own_factors_count_as_well(shipped):
    """What was fitted of a GPU and what is asked for multiply."""
    plain = predict_step(LINEAR, [64], CARD).seconds
    shipped["deepbench gemm"] = model_of("deepbench gemm", 0.4, scales={"card": (1.5, 1.0)})
    assert predict_step(LINEAR, [64], CARD, scales=Scales(compute=2.0)).seconds == pytest.approx(3 * plain, rel=SUM)


@pytest.mark.parametrize(("slug", "of_the_gpu"), [("card", 0.05), ("other", 0.2), ("", 0.2)])
def test_the_interval_of_one_pass_has_its_models_error_the_gpus_and_the_frameworks(shipped, slug, of_the_gpu):
    """They are independent, so their squares add: 0.1 of the model; 0.05 of a GPU that was measured, else 0.2."""
    step = predict_step(CONV, [8], attrs.evolve(CARD, slug=slug))
    shared = math.hypot(of_the_gpu, FRAMEWORK_SD)
    assert step.scale_sd == pytest.approx(shared)
    assert half_width(step) == pytest.approx([math.hypot(0.1, shared)])


@pytest.mark.parametrize(
    "layer",
    [
        attrs.evolve(CONV, groups=2), attrs.evolve(CONV, dilation=2), attrs.evolve(CONV, groups=256),
        Attention(h=197, w=1, c=192, heads=3),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_never_measured_errs_by_more_than_its_model(shipped, layer):
    """0.6 of two groups as of many, of dilation and of attention, on a GPU that was measured otherwise."""
    assert half_width(predict_step(layer, [8], CARD)) == pytest.approx([math.hypot(0.6, 0.05, FRAMEWORK_SD)])


@pytest.mark.parametrize(("capability", "of_the_gpu"), [((7, 0), 0.05), ((7, 5), 0.25)])
def test_tensor_cores_are_as_sure_as_the_one_gpu_that_was_measured(shipped, capability, of_the_gpu):
    """Those of a V100 have its model's error; of any other generation a quarter more is unknown."""
    step = predict_step(CONV, [8], attrs.evolve(CARD, compute_capability=capability), dtype="float16")
    assert half_width(step) == pytest.approx([math.hypot(0.3, of_the_gpu, FRAMEWORK_SD)])


def test_the_interval_of_a_step_follows_from_the_covariance_of_its_passes(shipped):
    """Errors of equal layers are the same, those of different ones correlated: the variance of the sum by terms."""
    conv = Conv2d(k=256, r=3, s=3, pad=1)
    net = Network(
        input_shape=(28, 28, 256),
        layers=[conv, ReLU(), conv, Conv2d(k=64, r=1, s=1), conv, Conv2d(k=256, r=3, s=3), Flatten(), Linear(k=99)],
    )
    step = predict_step(net, [1, 64], CARD)
    kinds = "abadefgh"  # the second convolution is the first again; the third has other channels
    sds = (0.1, 0.3, 0.1, 0.2, 0.1, 0.1, 0.3, 0.4)  # of the models, and 0.3 of what moves bytes
    for place in (0, 1):
        errors = [sd * found.seconds[place] for sd, found in zip(sds, step.passes, strict=True)]
        variance = sum(
            a * b * (1 if one == other else predictions.COMMON)
            for (one, a), (other, b) in itertools.product(zip(kinds, errors, strict=True), repeat=2)
        )
        # The GPU and the framework shift all passes alike.
        want = math.hypot(math.sqrt(variance) / step.seconds[place], 0.05, FRAMEWORK_SD)
        assert half_width(step)[place] == pytest.approx(want)


def test_a_batch_in_patches_is_predicted_by_the_kernels_over_patches():
    """Of `resnet18` in float16 on an H200 the first convolution takes less time, and all else the same."""
    network, facts = models.build("resnet18"), {"mode": "training", "dtype": "float16", "library": "cubatch"}
    plain, cut = (
        predict_step(network, [256], find("h200-sxm"), experimental=names, **facts)
        for names in ([], ["space_to_depth"])
    )
    pairs = [
        (one, other) for one, other in zip(plain.passes, cut.passes, strict=True) if one.algorithms != other.algorithms
    ]
    assert {one.layer for one, _ in pairs} == {"conv1"}
    for one, other in pairs:
        assert "hopper" in other.algorithms[0]
        assert other.seconds[0] < 0.5 * one.seconds[0]


@pytest.mark.parametrize(("slug", "dtype", "changes"), [
    ("h200-sxm", "float16", True), ("h200-sxm", "tf32", False), ("a100-sxm4-80gb", "float16", False),
])  # fmt: skip
def test_slopes_in_products_are_predicted_where_they_run(slug, dtype, changes):
    """
    Of `deit-tiny` slopes of GELU take no time, the gradients before them more, but less, and gradients of filters less.

    What 31 instructions of each element take lies between nothing and what was saved.
    """
    network, facts = models.build("deit-tiny"), {"mode": "training", "dtype": dtype, "library": "cubatch"}
    plain, fused = (
        predict_step(network, [256], find(slug), experimental=names, **facts) for names in ([], ["gelu_products"])
    )
    saved: dict[str, float] = {}
    for one, other in zip(plain.passes, fused.passes, strict=True):
        name = f"{one.layer.rsplit('.', 1)[-1]} {one.pass_.value}"
        if one.seconds[0] != other.seconds[0]:
            saved[name] = saved.get(name, 0.0) + float(one.seconds[0] - other.seconds[0])
    assert bool(saved) == changes
    if changes:
        assert saved.keys() == {"act dgrad", "fc2 dgrad", "fc1 wgrad"}
        assert -saved["act dgrad"] < saved["fc2 dgrad"] < 0
        assert saved["fc1 wgrad"] > 0


@pytest.mark.parametrize(("slug", "dtype", "changes"), [
    ("h200-sxm", "float16", True), ("h200-sxm", "tf32", False), ("v100-sxm2-16gb", "float16", False),
])  # fmt: skip
def test_attention_without_stored_weights_is_predicted_where_it_runs(slug, dtype, changes):
    """Of `deit-tiny` attention alone changes, forward and in the input's gradient, and takes less time."""
    network, facts = models.build("deit-tiny"), {"mode": "training", "dtype": dtype, "library": "cubatch"}
    plain, again = (
        predict_step(network, [64], find(slug), experimental=names, **facts) for names in ([], ["flash_attention"])
    )
    pairs = [
        (one, other)
        for one, other in zip(plain.passes, again.passes, strict=True)
        if one.seconds[0] != other.seconds[0]
    ]
    assert len(pairs) == 2 * 12 * changes
    for one, other in pairs:
        assert one.layer.endswith("attn")
        assert other.algorithms[0].startswith("attend_")
        assert other.seconds[0] < 0.7 * one.seconds[0]
