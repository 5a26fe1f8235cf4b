"""Times of steps by the models that cubatch comes with: sums, notes, and what is refused."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from cubatch.errors import InvalidArgument
from cubatch.estimate import step as step_model
from cubatch.estimate.cubatch_kernels import pass_seconds
from cubatch.estimate.predictions import ModelNote, Scales
from cubatch.estimate.step import predict_step
from cubatch.estimate.vendor import vendor_model
from cubatch.estimate.vendor.vendor_model import FRAMEWORK_SD, l2_of
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Network, layer_passes
from cubatch.network.layers import Conv2d, Flatten, Linear, ReLU, Sigmoid
from cubatch.network.passes import Pass
from tests.checks import assert_within, gamma
from tests.unit.estimate.steps import (
    A100,
    CARD,
    CHESS,
    CONV,
    H200,
    LINEAR,
    P100,
    SMALL,
    SUM,
    V100,
    codes,
    half_width,
)

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


def test_pytorch_computes_float32_convolutions_in_tf32_where_a_gpu_can():
    """
    By its defaults, on an A100 but not on a V100, and no matrix product.

    The convolution takes what it takes in TF32, and two conversions of 2 x 2 tensors at 0.75 of the bandwidth.
    """
    conv = attrs.evolve(CONV, bias=False)
    for device, layer, dtype in ((A100, conv, "tf32"), (A100, LINEAR, "float32"), (V100, conv, "float32")):
        torch = predict_step(layer, [64], device, library="torch").passes[0]
        vendor = predict_step(layer, [64], device, dtype=dtype).passes[0]
        images = 64 * (math.prod(layer.input_shape) + math.prod(layer.output_shape))
        moved = 2 * images * 4 / device.peak_bytes_per_second / 0.75 + 2 * 3e-6
        wanted = vendor.seconds[0] + (moved if dtype == "tf32" else 0.0)
        assert torch.seconds[0] == pytest.approx(wanted, rel=1e-9)


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


def test_a_dtype_that_nobody_published_is_less_sure():
    """bfloat16 has the rate of float16 on an A100, the same time, and a wider interval with a note."""
    half, brain = (predict_step(LINEAR, [512], A100, dtype=dtype) for dtype in ("float16", "bfloat16"))
    assert brain.seconds == pytest.approx(half.seconds)
    assert brain.high / brain.low > 1.05 * (half.high / half.low)
    assert [note for note in brain.notes if note not in half.notes] == [ModelNote("dtype_not_measured", "bfloat16")]


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
    assert codes(predict_step(models.resolve("vgg16"), [8], P100, mode="training")) == ["bytes_only"]


@pytest.mark.parametrize(
    ("spec", "device", "dtype", "note"),
    [
        (CONV, H200, "float32", ModelNote("device_not_measured", "3x3 convolutions")),
        (SMALL, H200, "float32", ModelNote("device_not_measured", "other convolutions")),
        (LINEAR, H200, "float32", ModelNote("device_not_measured", "matrix products")),
        (models.build("vgg16"), H200, "float32", ModelNote("device_not_measured", "3x3 convolutions, matrix products")),
        (LINEAR, A100, "float16", ModelNote("tensor_cores_of_v100")),
        (LINEAR, A100, "tf32", ModelNote("dtype_not_measured", "tf32")),
        (models.resolve("mobilenet-v3-large"), P100, "float32", ModelNote("grouped_or_dilated")),
        (attrs.evolve(CONV, dilation=2), P100, "float32", ModelNote("grouped_or_dilated")),
        (models.resolve("deit-tiny"), P100, "float32", ModelNote("attention")),
        (CONV, P100, "float16", ModelNote("float32_arithmetic", "float16")),
        (LINEAR, V100, "bfloat16", ModelNote("float32_arithmetic", "bfloat16")),
        (models.resolve("resnet18"), V100, "float16", ModelNote("channels_padded", 8)),
    ],
)
def test_what_was_never_measured_is_noted_once(spec, device, dtype, note):
    """Layers, devices and dtypes without published times."""
    step = predict_step(spec, [8], device, dtype=dtype)
    assert step.notes.count(note) == 1
    assert len(set(step.notes)) == len(step.notes)


def test_tensor_cores_are_spoken_of_only_where_they_multiply():
    """A ReLU in float16 needs none, and its interval is that of bytes on a GPU that is known."""
    step = predict_step(ReLU(h=8, w=8, c=64), [8], A100, dtype="float16")
    assert codes(step) == ["bytes_only"]
    assert half_width(step) == pytest.approx([math.hypot(0.3, 0.05, FRAMEWORK_SD)])


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
    """
    Every pass, of products or of bytes alone, is what `estimate.ours` says; no published model is asked.

    The convolution does the ReLU, the linear layer's gradient its slope, and the reshaping is no work.
    """
    monkeypatch.setattr(vendor_model, "shipped", {}.__getitem__)
    layers = [Conv2d(k=64, r=3, s=3, pad=1), ReLU(), Flatten(), Linear(k=99), Sigmoid(), Linear(k=9)]
    net = Network(input_shape=(28, 28, 256), layers=layers)
    options = {"mode": "training", "dtype": dtype, "library": "cubatch", "scales": Scales(compute=1.5, memory=2.0)}
    step = predict_step(net, [8, 64], V100, **options)
    for (node, pass_), found in zip(layer_passes(net, "training"), step.passes, strict=True):
        slope = 28 * 28 * 64 if node.layer.c == 28 * 28 * 64 and pass_ is Pass.DGRAD else 0
        times, names, blocks = pass_seconds(
            node.layer, pass_, [8, 64], V100, dtype, scales=options["scales"], more=slope
        )
        if isinstance(node.layer, ReLU | Flatten):
            times, names = 0 * times, ("fused", "fused")
        assert (found.layer, found.pass_) == (node.name, pass_)
        assert (found.seconds.tolist(), found.algorithms) == (times.tolist(), names)
        assert found.blocks.tolist() == blocks.tolist()
    assert all(name.startswith("conv2d_fprop") for name in step.passes[0].algorithms)
    assert step.passes[-1].algorithms != ("bytes", "bytes")
    assert codes(step) == ["counted_clocks", "bytes_only"]
    assert step.scale_sd == step_model.CUBATCH_SCALE_SD


def test_our_own_kernels_are_less_sure_than_published_ones():
    """One product errs by its clocks and by what nothing was fitted to, a dilated one by what was never seen."""
    for layer, sd in ((CONV, 0.3), (attrs.evolve(CONV, dilation=2), 0.6), (ReLU(h=8, w=8, c=8), 0.3)):
        step = predict_step(layer, [64], V100, library="cubatch")
        assert half_width(step) == pytest.approx([math.hypot(sd, step_model.CUBATCH_SCALE_SD)])


def test_moving_bytes_takes_as_long_by_either_library():
    """A ReLU is a ReLU."""
    vendor, ours = (predict_step(ReLU(h=56, w=56, c=64), [1, 64], V100, library=one) for one in ("vendor", "cubatch"))
    assert ours.seconds == pytest.approx(vendor.seconds, rel=SUM)


@pytest.mark.parametrize("layer", [CONV, LINEAR, ReLU(h=8, w=8, c=8)], ids=str)
def test_whether_there_are_tensor_cores_has_to_be_known(layer):
    """Nobody can tell what runs a product in float16 without, though the rate is known; float32 does not ask."""
    device = attrs.evolve(V100, tensor_cores=None)
    assert predict_step(layer, [8], device).seconds > 0
    with pytest.raises(InvalidArgument, match="whether its Tensor Cores take float16") as caught:
        predict_step(layer, [8], device, dtype="float16")
    assert caught.value.field == "device"


def test_a_cache_that_is_not_known_is_taken_from_gpus_alike():
    """The median of those of the compute capability, or of all; only the trees see it."""
    assert (l2_of(V100), l2_of(CARD)) == (V100.l2_bytes, 2**22)
    turing = sorted(d.l2_bytes for d in catalogue.all_devices() if d.compute_capability == (7, 5) and d.l2_bytes)
    every = sorted(d.l2_bytes for d in catalogue.all_devices() if d.l2_bytes)
    for capability, known in (((7, 5), turing), ((99, 0), every)):
        middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
        assert l2_of(Device(name="card", compute_capability=capability)) == middle


def test_where_nothing_was_timed_a_prediction_of_ours_says_so_and_is_less_sure():
    """Only Hopper's products were; a V100's are the clocks that are counted."""
    for name, timed, scale in (
        ("h100-sxm", True, step_model.CUBATCH_FITTED_SCALE_SD),
        ("v100-sxm2-16gb", False, step_model.CUBATCH_SCALE_SD),
    ):
        step = predict_step(models.build("lenet5"), [64], catalogue.find(name), library="cubatch")
        assert codes(step)[0] == ("fitted_on_h200" if timed else "counted_clocks")
        assert step.scale_sd == scale


@pytest.mark.parametrize("library", ["cubatch", "vendor"])
def test_16_bits_without_tensor_cores_are_said_to_be_computed_in_float32(library):
    """A V100 has tensor cores for float16, and none for bfloat16."""
    for dtype, is_noted in (("bfloat16", True), ("float16", False)):
        step = predict_step(models.build("vgg11"), [8], V100, dtype=dtype, library=library)
        assert ("float32_arithmetic" in codes(step)) == is_noted
