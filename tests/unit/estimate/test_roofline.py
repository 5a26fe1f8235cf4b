"""The roofline against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cubatch.estimate import roofline
from cubatch.hardware import arithmetic as device_arithmetic
from cubatch.hardware.facts import Device
from cubatch.network import graph, models
from cubatch.network.graph import Network
from cubatch.network.layers import (
    Add,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Sigmoid,
)
from cubatch.network.passes import Pass

# Round figures, so that every time below can be worked out by hand.
CARD = Device(
    name="card",
    compute_capability=(7, 0),
    num_sms=80,
    tensor_cores=True,
    peak_flops_per_second={"float32": 1e12, "float16": 8e12},
    peak_bytes_per_second=1e9,
)
CONV = Conv2d(h=10, w=10, c=8, k=16, r=3, s=3, pad=1, bias=False)


def test_a_pass_takes_the_longer_of_its_arithmetic_and_its_bytes() -> None:
    """2 x 100 x 16 x 72 FLOP are 0.2304 us at 1 TFLOP/s, (800 + 1600 + 1152) x 4 B are 14.2 us at 1 GB/s."""
    assert roofline.layer_seconds(CONV, Pass.FPROP, 1, CARD, "float32") == pytest.approx(14.208e-6, rel=1e-12)
    fast_memory = Device(name="x", peak_flops_per_second={"float32": 1e12}, peak_bytes_per_second=1e12)
    assert roofline.layer_seconds(CONV, Pass.FPROP, 1, fast_memory, "float32") == pytest.approx(0.2304e-6, rel=1e-12)


def test_the_roof_that_binds_is_named() -> None:
    """The same pass is bound by bytes on slow memory and by arithmetic on fast."""
    fast_memory = Device(name="x", peak_flops_per_second={"float32": 1e12}, peak_bytes_per_second=1e12)
    assert roofline.bound(CONV, Pass.FPROP, 1, CARD, "float32") == "memory"
    assert roofline.bound(CONV, Pass.FPROP, 1, fast_memory, "float32") == "compute"


def test_half_precision_moves_half_the_bytes() -> None:
    """Storage of 16 bits halves the time of a pass that only moves bytes."""
    relu = ReLU(h=10, w=10, c=10)
    full, half = (roofline.layer_seconds(relu, Pass.FPROP, 3, CARD, dtype) for dtype in ("float32", "float16"))
    assert (full, half) == (24e-6, 12e-6)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        (CARD, "float16", 8e12),
        (CARD, "bfloat16", 1e12),  # Volta's Tensor Cores do not take bfloat16: float32 arithmetic
        (Device(name="cpu", kind="cpu", peak_flops_per_second={"float32": 1e11}), "float16", 1e11),
        (CARD, "tf32", None),  # which is an arithmetic, no storage
        (Device(name="unheard of", peak_flops_per_second={"float32": 1e12}), "float16", None),
        (
            Device(
                name="pascal", compute_capability=(6, 1), tensor_cores=False, peak_flops_per_second={"float32": 1e12}
            ),
            "float16",
            1e12,
        ),
        (
            Device(name="ada", compute_capability=(8, 9), tensor_cores=True, peak_flops_per_second={"float32": 1e12}),
            "float16",
            None,
        ),
        (
            Device(name="ada", compute_capability=(8, 9), tensor_cores=True, peak_flops_per_second={"float32": 1e12}),
            "tf32",
            None,
        ),
        (Device(name="cpu", kind="cpu"), "float32", None),
    ],
)
def test_peaks_that_are_not_known_stay_unknown(device: Device, dtype: str, peak: float | None) -> None:
    """A rate is the table's, or float32's where 16 bits are computed so, and never a guess."""
    assert device_arithmetic.peak_flops_per_second(device, dtype) == peak


def test_inference_passes_are_forward_and_leave_dropout_out() -> None:
    """Dropout does nothing in inference."""
    net = Network(input_shape=(1, 1, 4), layers=[Linear(k=3, name="a"), Dropout(name="d"), Linear(k=2, name="b")])
    assert [(node.name, pass_) for node, pass_ in graph.layer_passes(net, "inference")] == [
        ("a", Pass.FPROP),
        ("b", Pass.FPROP),
    ]


def test_training_passes_leave_out_what_nobody_needs() -> None:
    """No gradient of the network's input, no filter gradient of layers without parameters."""
    net = Network(
        input_shape=(8, 8, 2),
        layers=[
            MaxPool2d(r=2, s=2, name="pool"),
            Conv2d(k=4, r=3, s=3, name="conv"),
            BatchNorm2d(name="norm"),
            ReLU(name="relu"),
        ],
    )
    assert [(node.name, pass_.value) for node, pass_ in graph.layer_passes(net, "training")] == [
        ("pool", "fprop"),
        ("conv", "fprop"),
        ("conv", "wgrad"),
        ("norm", "fprop"),
        ("norm", "dgrad"),
        ("norm", "wgrad"),
        ("relu", "fprop"),
        ("relu", "dgrad"),
    ]


def test_a_single_layer_does_all_three_passes() -> None:
    """The contract: a layer by itself also computes the gradient of its input."""
    assert [pass_ for _, pass_ in graph.layer_passes(CONV, "training")] == [Pass.FPROP, Pass.DGRAD, Pass.WGRAD]


def test_a_step_is_the_sum_of_its_passes() -> None:
    """Two layers' worth of bytes at 1 GB/s: (4 + 6 + 4x6) + (6 + 6) elements of 4 bytes."""
    net = Network(input_shape=(1, 1, 4), layers=[Linear(k=6, bias=False), Sigmoid(), Flatten()])
    assert roofline.roofline_seconds(net, 1, CARD) == pytest.approx((34 + 12) * 4e-9, rel=1e-12)


def test_what_a_neighbour_does_costs_what_it_makes_it_read() -> None:
    """
    At 1 GB/s: x and y of 4 elements and a filter of 16 for each pass; a slope reads 4 more, a second branch too.

    Of the ReLU and the sum nothing else is left; backward the sum passes its gradient on to be added.
    """
    layers = [
        Linear(name="a", k=4, bias=False),
        ReLU(name="b"),
        Linear(name="c", k=4, bias=False),
        Add(inputs=["b", "c"]),
    ]
    net = Network(input_shape=(1, 1, 4), layers=layers)
    product = 4 + 4 + 16
    assert roofline.roofline_seconds(net, 1, CARD) == pytest.approx((2 * product + 4) * 4e-9, rel=1e-12)
    moved = (2 * product + 4) + product + (product + 4 + 4) + product  # forward; wgrad of a; dgrad, wgrad of c
    assert roofline.roofline_seconds(net, 1, CARD, "training") == pytest.approx(moved * 4e-9, rel=1e-12)


def test_the_sum_of_two_gradients_of_a_sum_is_counted() -> None:
    """
    Of "s" the next sum passes a gradient on, which the norm reads and adds to its own: 4 elements, at 1 GB/s.

    Forward b reads a for the sum s, and c reads s for the last one; backward the slope of a is added to by b.
    """
    layers = [
        Linear(name="a", k=4, bias=False),
        Linear(name="b", k=4, bias=False),
        Add(name="s", inputs=["a", "b"]),
        LayerNorm(name="n"),
        Linear(name="c", k=4, bias=False),
        Add(name="t", inputs=["s", "c"]),
    ]
    net = Network(input_shape=(1, 1, 4), layers=layers)
    product, norm = 4 + 4 + 16, net.nodes[3].layer
    norms = sum(norm.traffic(pass_, 1) for pass_ in (Pass.FPROP, Pass.DGRAD))  # which computes all gradients
    products = (product + (product + 4) * 2) + product + 2 * 2 * product + 4  # forward; wgrad of a; both of b and c
    seconds = roofline.roofline_seconds(net, 1, CARD, "training")
    assert seconds == pytest.approx((products + norms + 4) * 4e-9, rel=1e-12)


def test_zeros_that_a_kernel_multiplies_are_no_part_of_the_bound() -> None:
    """The input gradient of an unpadded filter may skip what lies beyond the output: 25 x 10^4 x 2 x 36 FLOP."""
    fast_memory = Device(name="x", peak_flops_per_second={"float32": 1e12}, peak_bytes_per_second=1e15)
    conv = Conv2d(h=10, w=10, c=100, k=100, r=5, s=5)
    for pass_ in Pass:
        seconds = roofline.layer_seconds(conv, pass_, 1, fast_memory, "float32")
        assert seconds == pytest.approx(2 * 36 * 25 * 10**4 / 1e12)


def test_an_unknown_bandwidth_gives_no_time() -> None:
    """Half a roofline would be a guess; a CPU has none at all."""
    no_bandwidth = Device(name="x", peak_flops_per_second={"float32": 1e12})
    assert roofline.roofline_seconds(models.build("mlp"), 1, no_bandwidth) is None
    assert roofline.bound(CONV, Pass.FPROP, 1, no_bandwidth, "float32") is None
    assert roofline.roofline_seconds(models.build("mlp"), 1, Device(name="cpu", kind="cpu"), "training") is None


@given(n=st.integers(1, 10**6), more=st.integers(1, 10**6))
def test_larger_batches_never_take_less_and_never_more_per_sample(n: int, more: int) -> None:
    """Work grows with the batch while parameters are moved once, so time grows, but not faster."""
    low, high = (roofline.layer_seconds(CONV, Pass.FPROP, size, CARD, "float32") for size in (n, n + more))
    assert low is not None
    assert high is not None
    assert low < high
    assert high / (n + more) <= low / n * (1 + 1e-12)


def test_a_known_network_on_a_known_card() -> None:
    """vgg16 forward, batch 256, is 256 x 30.94 GFLOP: half a second at 15.67 TFLOP/s, and little more in all."""
    v100 = Device(name="V100", peak_flops_per_second={"float32": 15.67e12}, peak_bytes_per_second=900e9)
    seconds = roofline.roofline_seconds(models.build("vgg16"), 256, v100)
    arithmetic = 256 * 2 * 15.47e9 / 15.67e12
    assert seconds is not None
    assert arithmetic < seconds < 1.1 * arithmetic
