"""Seconds of a step on a GPU that is not here: by models made by hand, then by those that cubatch comes with."""

from __future__ import annotations

import itertools
import math

import attrs
import numpy as np
import pytest

from cubatch.errors import InvalidArgument
from cubatch.estimate import step as step_model
from cubatch.estimate.ours import LAUNCH_SECONDS, MOVED_SHARE, pass_seconds
from cubatch.estimate.parts import Scales
from cubatch.estimate.step import predict_step
from cubatch.estimate.vendor import passes
from cubatch.estimate.vendor.algorithms import FAMILIES
from cubatch.estimate.vendor.fitted import Fitted
from cubatch.estimate.vendor.passes import FRAMEWORK_SD, FRAMEWORK_SD_16, l2_of
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Network, layer_passes
from cubatch.network.layers import Attention, Conv2d, Flatten, Linear, ReLU
from cubatch.network.passes import Pass
from tests.checks import assert_within, gamma
from tests.unit.estimate.test_algorithms import COSTS, constants_of
from tests.unit.estimate.test_fitted import stump

# An SM makes 10^11 multiply-adds a second.
CARD = Device(
    name="card", slug="card", compute_capability=(7, 5), num_sms=48, tensor_cores=True, l2_bytes=2**22,
    peak_flops_per_second={"float32": 48 * 2e11, "float16": 8 * 48 * 2e11}, peak_bytes_per_second=1.25e12,
)  # fmt: skip
P100, V100, A100, H200 = map(catalogue.find, ("p100-pcie-16gb", "v100-pcie-16gb", "a100-pcie-80gb", "h200-sxm"))
CONV = Conv2d(h=28, w=28, c=256, k=256, r=3, s=3, pad=1)
CHESS = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)
SMALL = Conv2d(h=28, w=28, c=256, k=64, r=1, s=1)
LINEAR = Linear(c=2048, k=1000)
SUM = gamma(100, 2.0**-53)


def tiles_alone():
    """Constants that leave one algorithm, whole tiles of 128 x 128 one wave after the other, and no bytes."""
    found = constants_of(partial=1e9) | {f"cost {name}": 1e9 for name in COSTS[1:]}
    return found | {f"cost {COSTS[0]}": 1.0, "scattered": 1e9} | {f"tail {family}": 1.0 for family in FAMILIES}


def model_of(name, sd, **changes):
    """A model by hand, which knows CARD and its kin."""
    scales = {"card": (1.0, 1.0), "v100-pcie-16gb": (1.0, 1.0)}
    facts = {"scales": scales, "trees": None, "unseen_sd": 0.2, "transforms": "tensor" not in name}
    return Fitted(name, tiles_alone(), sd=sd, **(facts | changes))


@pytest.fixture
def shipped(monkeypatch):
    """Models by hand in the place of those that come with cubatch; what was asked of which."""
    found = {
        name: model_of(name, sd)
        for name, sd in (
            ("neusight", 0.1), ("deepbench conv", 0.2), ("deepbench gemm", 0.4),
            ("deepbench conv tensor", 0.3), ("deepbench gemm tensor", 0.5),
        )
    }  # fmt: skip
    monkeypatch.setattr(passes, "shipped", found.__getitem__)
    return found


def product_seconds(gemm, peak=2e11):
    """Seconds of equal products in tiles of 128 x 128 on 48 SMs, by whole waves."""
    blocks = gemm.count * math.ceil(gemm.m / 128) * math.ceil(gemm.n / 128)
    return math.ceil(blocks / 48) * 128 * 128 * gemm.k / (peak / 2)


# --- by models made by hand ----------------------------------------------------------------------------------


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


def test_a_pass_of_several_products_goes_by_the_name_of_the_first(shipped):
    """
    Of attention's, 788 x 576 over 192 takes one wave of 35 tiles of 128 x 128, or two of 63 of 128 x 64: as long.

    The last, 192 wide, is faster in the latter.
    """
    model = shipped["deepbench gemm"]
    shipped[model.name] = attrs.evolve(model, constants={**model.constants, "cost 128x64": 1.0})
    (found,) = predict_step(Attention(h=197, w=1, c=192, heads=3), [4], CARD).passes
    assert (found.algorithms, found.blocks.tolist()) == (("128x128",), [35])


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


def test_what_only_moves_takes_its_bytes_at_the_usual_share_of_the_bandwidth(shipped):
    """A ReLU reads and writes each element once, at our kernels' share of 1.25 TB/s, plus their launch."""
    relu, n = ReLU(h=50, w=50, c=100), 80
    for dtype, size in (("float32", 4), ("float16", 2)):
        step = predict_step(relu, [n], CARD, dtype=dtype)
        want = LAUNCH_SECONDS + 2 * n * 250_000 * size / (MOVED_SHARE * 1.25e12)
        assert step.seconds == pytest.approx([want], rel=SUM)
        assert (step.passes[0].algorithms, step.passes[0].blocks.tolist()) == (("bytes",), [0])


def test_what_moves_nothing_takes_nothing(shipped):
    """Flattening is another view: the network with it takes as long as without."""
    layers = [Conv2d(k=64, r=3, s=3), Flatten(), Linear(k=10)]
    step = predict_step(Network(input_shape=(9, 9, 8), layers=layers), [4], CARD)
    assert step.passes[1].seconds.tolist() == [0]
    assert step.seconds == pytest.approx(step.passes[0].seconds + step.passes[2].seconds, rel=SUM)


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
def test_a_step_of_nothing_has_an_interval_of_nothing(library):
    """Flattening alone takes no time, surely: no division of nothing by nothing."""
    with np.errstate(all="raise"):
        step = predict_step(Flatten(h=7, w=7, c=64), [1, 8], V100, library=library)
    assert step.seconds.tolist() == step.low.tolist() == step.high.tolist() == [0, 0]


TENSOR = attrs.evolve(
    CARD, compute_capability=(8, 0),
    peak_flops_per_second={"float32": 48 * 2e11, **dict.fromkeys(("float16", "bfloat16", "tf32"), 8 * 48 * 2e11)},
)  # fmt: skip


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
    words = f"no multiple of {multiple}"
    assert [words in note for note in step.notes].count(True) == 1
    assert not any("multiple" in note for note in want.notes)
    alone = predict_step(layer, [40], TENSOR, dtype=dtype)
    # Of another generation than the one that was measured a quarter more is unknown.
    assert half_width(alone) == pytest.approx([math.hypot(0.6, 0.25, FRAMEWORK_SD_16)])


@pytest.mark.parametrize(("dtype", "device"), [("float32", TENSOR), ("float16", None), ("bfloat16", None)])
def test_channels_are_not_padded_elsewhere(shipped, dtype, device):
    """Without Tensor Cores 3 channels are 3: no note, and the time of their own product."""
    layer = Conv2d(h=28, w=28, c=3, k=64, r=7, s=7, pad=3)
    step = predict_step(layer, [8], device or PLAIN, dtype=dtype)
    (gemm,) = layer.gemms(Pass.FPROP, 8)
    assert step.seconds == pytest.approx([product_seconds(gemm)], rel=SUM)
    assert not any("multiple" in note for note in step.notes)


PLAIN = attrs.evolve(CARD, tensor_cores=False, peak_flops_per_second={"float32": 48 * 2e11})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("layer", "name", "sd"), [(CONV, "neusight", 0.8), (SMALL, "deepbench conv", 0.8), (LINEAR, "deepbench gemm", 0.4)]
)
def test_16_bits_without_tensor_cores_are_computed_in_float32(shipped, layer, name, sd, dtype):
    """Both dtypes go by the models of float32 at its rate and half the bytes; storage of convolutions is less sure."""
    model = shipped[name]
    bytes_too = {**model.constants, "x tiles": 1.0}
    shipped[model.name] = attrs.evolve(model, constants=bytes_too)
    step = predict_step(layer, [64], PLAIN, dtype=dtype)
    (gemm,) = layer.gemms(Pass.FPROP, 64)
    moved = 64 * math.prod(layer.input_shape) * 2 / 1.25e12
    assert step.seconds == pytest.approx([product_seconds(gemm) + moved], rel=SUM)
    assert half_width(step) == pytest.approx([math.hypot(sd, 0.05, FRAMEWORK_SD_16)])
    assert step.notes == (f"{dtype} without Tensor Cores is computed in float32, with half the bytes.",)


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


def test_the_block_that_starts_a_wave_costs_its_tail(shipped):
    """49 tiles of 128 x 128 on 48 SMs, at 97 boards, take 0.55 of a wave and 0.45 of its 48th longer than 48."""
    shipped["neusight"] = attrs.evolve(shipped["neusight"], constants={**tiles_alone(), "tail tiles": 0.55})
    step = predict_step(CHESS, [96, 97], CARD)
    assert (step.passes[0].algorithms, step.passes[0].blocks.tolist()) == (("128x128", "128x128"), [48, 49])
    assert step.seconds[1] / step.seconds[0] == pytest.approx(1 + 0.55 + 0.45 / 48)


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


def half_width(step):
    """Standard deviations of the logarithm on either side, from the interval of 90 in 100."""
    assert_within(step.low * step.high, step.seconds**2, SUM * step.seconds**2)
    return np.log(step.high / step.seconds) / 1.6448536269514722


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
    assert half_width(step) == pytest.approx([math.hypot(0.3, of_the_gpu, FRAMEWORK_SD_16)])


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
            a * b * (1 if one == other else step_model._COMMON)
            for (one, a), (other, b) in itertools.product(zip(kinds, errors, strict=True), repeat=2)
        )
        # The GPU and the framework shift all passes alike.
        want = math.hypot(math.sqrt(variance) / step.seconds[place], 0.05, FRAMEWORK_SD)
        assert half_width(step)[place] == pytest.approx(want)


def test_a_layer_three_times_is_as_unsure_as_once(shipped):
    """Nothing averages out of errors that are the same."""
    same, once = Conv2d(k=256, r=3, s=3, pad=1), CONV
    step = predict_step(Network(input_shape=(28, 28, 256), layers=[same] * 3), [8], CARD)
    assert half_width(step) == pytest.approx(half_width(predict_step(once, [8], CARD)))


# --- by the models that cubatch comes with -------------------------------------------------------------------

SIZES = [4**power for power in range(7)]


@pytest.mark.parametrize("name", models.names())
def test_every_model_predicts_on_old_and_new_gpus_at_every_batch_size(name):
    """Times are finite, longest at the largest batch, and inside their interval, from one sample to 4096."""
    for device in (catalogue.find("titan-x-maxwell"), V100, H200):
        step = predict_step(models.resolve(name), SIZES, device)
        assert np.isfinite(step.high).all()
        assert (step.low > 0).all()
        assert ((step.low < step.seconds) & (step.seconds < step.high)).all()
        assert step.seconds[-1] > step.seconds[:5].max()  # up to 256 samples a small network is all launches


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_step_is_the_sum_of_its_passes_in_the_networks_order(mode):
    """Every pass of the network is there once, by name, and their seconds add up."""
    net = models.resolve("googlenet")
    step = predict_step(net, [3, 16], P100, mode=mode)
    assert step.batch_sizes == (3, 16)
    assert [(f.layer, f.pass_) for f in step.passes] == [(node.name, pass_) for node, pass_ in layer_passes(net, mode)]
    want = np.array([math.fsum(column) for column in zip(*(f.seconds for f in step.passes), strict=True)])
    assert_within(step.seconds, want, gamma(len(step.passes), 2.0**-53) * want, axes="n")


def test_a_layer_takes_as_long_in_a_network_as_alone():
    """Neither its place, nor its name, nor another like it changes a layer's time; nor do other batch sizes."""
    layers = [
        Linear(k=256), Conv2d(k=256, r=3, s=3, pad=1), ReLU(), Conv2d(k=256, r=3, s=3, pad=1, name="again"),
        Conv2d(k=256, r=1, s=1, stride=2),
    ]  # fmt: skip
    net = Network(input_shape=(28, 28, 256), layers=layers)
    step = predict_step(net, [48, 5], V100, mode="training")
    assert len(step.passes) == 5 * 3 - 2  # nobody wants the gradient of the input; a ReLU has no parameters
    for (node, pass_), found in zip(layer_passes(net, "training"), step.passes, strict=True):
        for n, got, algorithm in zip((48, 5), found.seconds, found.algorithms, strict=True):
            alone = predict_step(node.layer, [n], V100, mode="training")
            (same,) = (one for one in alone.passes if one.pass_ is pass_)
            # The residual of the log is a sum over the 1007 measurements that are fitted, in float32, and BLAS adds
            # in an order that depends on how many cases there are.
            assert (got, algorithm) == (pytest.approx(same.seconds[0], rel=gamma(1007, 2.0**-24)), same.algorithms[0])


@pytest.mark.parametrize("layer", [CONV, Linear(c=4096, k=4096)], ids=str)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_twice_the_samples_of_a_big_layer_take_about_twice_as_long(layer, mode):
    """Where waves are many, the time is proportional."""
    one, two = predict_step(layer, [1024, 2048], P100, mode=mode).seconds
    assert two / one == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_training_takes_longer_than_inference(dtype):
    """Two more products of every layer take one to four times as long as its first."""
    trained, run = (predict_step(CONV, [32, 256], V100, mode=m, dtype=dtype).seconds for m in ("training", "inference"))
    assert (trained > 2 * run).all()
    assert (trained < 5 * run).all()


@pytest.mark.parametrize("layer", [CONV, Linear(c=4096, k=4096)], ids=str)
def test_tensor_cores_make_large_products_faster(layer):
    """A V100's have eight times the rate of its other cores: they gain more than half of it and no more than all."""
    single, half = (predict_step(layer, [4096], V100, dtype=dtype).seconds for dtype in ("float32", "float16"))
    # Winograd's transforms, which only float32 has here, save it up to a factor of 4.
    assert 2 < single / half < 16


def test_a_dtype_that_nobody_published_is_less_sure():
    """bfloat16 has the rate of float16 on an A100, the same time, and a wider interval with a note."""
    half, brain = (predict_step(LINEAR, [512], A100, dtype=dtype) for dtype in ("float16", "bfloat16"))
    assert brain.seconds == pytest.approx(half.seconds)
    assert brain.high / brain.low > 1.05 * (half.high / half.low)
    assert [note for note in brain.notes if note not in half.notes] == [
        "No measurement in bfloat16 was published to us: the times are those of float16 at bfloat16's rate."
    ]


def test_one_sample_more_costs_a_wave_where_the_law_says_so():
    """
    On 48 SMs the 97th board of 8 x 8 x 128 starts a wave, and the 193rd another: a tenth of the time or more.

    As measured on a GeForce RTX 2080 Super, where it was more: https://github.com/LeelaChessZero/lc0/pull/1101
    """
    step = predict_step(CHESS, [95, 96, 97, 191, 192, 193], CARD, dtype="float16")
    for before, last, after in step.seconds.reshape(2, 3):
        assert last / before < 1.02
        assert after / last > 1.1


# --- what it is told and what it tells -----------------------------------------------------------------------


def test_a_gpu_that_was_measured_needs_no_note():
    """A P100 is in all of the sources, whose figures are of products alone."""
    assert predict_step(CONV, [8], P100, mode="training").notes == ()
    (moved,) = predict_step(models.resolve("vgg16"), [8], P100, mode="training").notes
    assert "75 % of the data sheet's bandwidth" in moved


@pytest.mark.parametrize(
    ("spec", "device", "dtype", "words"),
    [
        (CONV, H200, "float32", ("No measurement of", "H200", "3x3 convolutions")),
        (SMALL, H200, "float32", ("No measurement of", "H200", "model of convolutions")),
        (LINEAR, H200, "float32", ("No measurement of", "H200", "matrix products")),
        (models.build("vgg16"), H200, "float32", ("model of 3x3 convolutions and of matrix products was",)),
        (LINEAR, A100, "float16", ("Tensor Cores were measured on a V100 only", "A100")),
        (LINEAR, A100, "tf32", ("No measurement in tf32",)),
        (models.resolve("mobilenet-v3-large"), P100, "float32", ("depthwise", "never seen")),
        (attrs.evolve(CONV, dilation=2), P100, "float32", ("dilated", "never seen")),
        (models.resolve("deit-tiny"), P100, "float32", ("Attention", "never seen")),
        (CONV, P100, "float16", ("float16 without Tensor Cores",)),
        (LINEAR, V100, "bfloat16", ("bfloat16 without Tensor Cores",)),
        (models.resolve("resnet18"), V100, "float16", ("no multiple of 8", "ten times")),
    ],
)
def test_what_was_never_measured_is_said(spec, device, dtype, words):
    """Each note is one sentence, said once, and widens the interval of what it is about."""
    step = predict_step(spec, [8], device, dtype=dtype)
    assert len([note for note in step.notes if all(word in note for word in words)]) == 1
    assert len(set(step.notes)) == len(step.notes)


def test_tensor_cores_are_spoken_of_only_where_they_multiply():
    """A ReLU in float16 needs none, and its interval is that of bytes on a GPU that is known."""
    step = predict_step(ReLU(h=8, w=8, c=64), [8], A100, dtype="float16")
    assert ["only move bytes" in note for note in step.notes] == [True]
    assert half_width(step) == pytest.approx([math.hypot(0.3, 0.05, FRAMEWORK_SD_16)])


def test_what_was_never_measured_is_less_sure():
    """A dilated filter has the interval of what was never seen, an unseen GPU a wider one than a measured one."""
    width = {
        name: float(half_width(predict_step(layer, [64], device))[0])
        for name, layer, device in (
            ("plain", SMALL, P100), ("dilated", attrs.evolve(CONV, dilation=2), P100), ("unseen", SMALL, H200),
        )
    }  # fmt: skip
    assert width["dilated"] > 0.6 > width["unseen"] > width["plain"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_our_own_kernels_are_asked_of_themselves(monkeypatch, dtype):
    """Every pass, of products or of bytes alone, is what `kernel_seconds` says; no published model is asked."""
    monkeypatch.setattr(passes, "shipped", {}.__getitem__)
    layers = [Conv2d(k=64, r=3, s=3, pad=1), ReLU(), Flatten(), Linear(k=99)]
    net = Network(input_shape=(28, 28, 256), layers=layers)
    options = {"mode": "training", "dtype": dtype, "library": "cubatch", "scales": Scales(compute=1.5, memory=2.0)}
    step = predict_step(net, [8, 64], V100, **options)
    for (node, pass_), found in zip(layer_passes(net, "training"), step.passes, strict=True):
        times, names, blocks = pass_seconds(node.layer, pass_, [8, 64], V100, dtype, compute=1.5, memory=2.0)
        assert (found.layer, found.pass_) == (node.name, pass_)
        assert (found.seconds.tolist(), found.algorithms) == (times.tolist(), names)
        assert found.blocks.tolist() == blocks.tolist()
    assert all(name.startswith("conv2d_fprop") for name in step.passes[0].algorithms)
    assert step.passes[-1].algorithms != ("bytes", "bytes")
    ours, moved = step.notes
    assert "our kernels" in ours
    assert "only move bytes" in moved
    assert step.scale_sd == step_model.OURS_SCALE_SD


def test_our_own_kernels_are_less_sure_than_published_ones():
    """One product errs by its clocks and by what no GPU has timed, a dilated one by what was never seen."""
    for layer, sd in ((CONV, 0.3), (attrs.evolve(CONV, dilation=2), 0.6), (ReLU(h=8, w=8, c=8), 0.3)):
        step = predict_step(layer, [64], V100, library="cubatch")
        assert half_width(step) == pytest.approx([math.hypot(sd, step_model.OURS_SCALE_SD)])


def test_moving_bytes_takes_as_long_by_either_library():
    """A ReLU is a ReLU."""
    vendor, ours = (predict_step(ReLU(h=56, w=56, c=64), [1, 64], V100, library=one) for one in ("vendor", "cubatch"))
    assert ours.seconds == pytest.approx(vendor.seconds, rel=SUM)


def test_a_library_that_is_neither_is_refused():
    """There are the vendor's and ours."""
    with pytest.raises(InvalidArgument, match="library"):
        predict_step(CONV, [8], V100, library="other")


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
@pytest.mark.parametrize("sizes", [[], [0], [8, -1], [2.5], [True]], ids=str)
def test_batch_sizes_are_whole_numbers_of_at_least_one(sizes, library):
    """No size, half a sample and less than one are refused by the argument's name."""
    with pytest.raises(InvalidArgument) as caught:
        predict_step(CONV, sizes, V100, library=library)
    assert caught.value.field == "batch_sizes"


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
@pytest.mark.parametrize("layer", [CONV, Flatten(h=2, w=2, c=8)], ids=str)
def test_the_bandwidth_has_to_be_known(layer, library):
    """Whatever is asked: no time without it."""
    with pytest.raises(InvalidArgument, match="peak_bytes_per_second is known") as caught:
        predict_step(layer, [8], attrs.evolve(V100, peak_bytes_per_second=None), library=library)
    assert caught.value.field == "device"


@pytest.mark.parametrize("layer", [CONV, LINEAR, ReLU(h=8, w=8, c=8)], ids=str)
def test_whether_there_are_tensor_cores_has_to_be_known(layer):
    """Nobody can tell what runs a product in float16 without, though the rate is known; float32 does not ask."""
    device = attrs.evolve(V100, tensor_cores=None)
    assert predict_step(layer, [8], device).seconds > 0
    with pytest.raises(InvalidArgument, match="whether its Tensor Cores take float16") as caught:
        predict_step(layer, [8], device, dtype="float16")
    assert caught.value.field == "device"


@pytest.mark.parametrize("layer", [CONV, LINEAR, ReLU(h=8, w=8, c=8)], ids=str)
@pytest.mark.parametrize(
    ("lacking", "name"),
    [
        ({"num_sms": None}, "num_sms"),
        ({"peak_flops_per_second": {}}, "peak_flops_per_second"),
        ({"peak_bytes_per_second": None}, "peak_bytes_per_second"),
    ],
)
def test_a_fact_that_is_not_known_is_named(layer, lacking, name):
    """A GPU without it is refused, unless nothing asks for it: a ReLU needs the bandwidth only."""
    device = attrs.evolve(CARD, **lacking)
    if isinstance(layer, ReLU) and name != "peak_bytes_per_second":
        assert predict_step(layer, [8], device).seconds > 0
        return
    with pytest.raises(InvalidArgument, match=f"{name} is known, got 'card'") as caught:
        predict_step(layer, [8], device)
    assert caught.value.field == "device"


def test_a_rate_that_the_gpu_lacks_is_refused():
    """A V100 has no tf32."""
    with pytest.raises(InvalidArgument, match="peak_flops_per_second"):
        predict_step(LINEAR, [8], V100, dtype="tf32")


def test_a_cache_that_is_not_known_is_taken_from_gpus_alike():
    """The median of those of the compute capability, or of all; only the trees see it."""
    assert (l2_of(V100), l2_of(CARD)) == (V100.l2_bytes, 2**22)
    turing = sorted(d.l2_bytes for d in catalogue.all_devices() if d.compute_capability == (7, 5) and d.l2_bytes)
    every = sorted(d.l2_bytes for d in catalogue.all_devices() if d.l2_bytes)
    for capability, known in (((7, 5), turing), ((99, 0), every)):
        middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
        assert l2_of(Device(name="card", compute_capability=capability)) == middle
