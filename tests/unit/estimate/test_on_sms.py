"""What a network puts on the SMs, against blocks counted by hand and NVIDIA's own occupancy figures."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import attrs
import pytest

from cubatch.estimate.on_sms import layer_rows
from cubatch.hardware import catalogue
from cubatch.kernels import ranking, resources
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Conv2d, Flatten, Linear, ReLU
from tests.building import workload

V100 = catalogue.find("v100-sxm2-16gb")
SMS = 80
# Rows of the result are pixels of 64 images, columns are filters; resnet18's figure 5 (He et al., 2015).
RESNET18 = {
    "conv1": (64 * 112 * 112, 64),
    "layer1.0.conv1": (64 * 56 * 56, 64),
    "layer2.0.downsample.conv": (64 * 28 * 28, 128),
    "layer3.1.conv2": (64 * 14 * 14, 256),
    "layer4.1.conv2": (64 * 7 * 7, 512),
    "fc": (64, 1000),
}
SMALL = Network(
    input_shape=(8, 8, 64),
    layers=[
        Conv2d(name="a", k=64, r=3, s=3, pad=1),
        ReLU(name="relu"),
        Conv2d(name="b", k=64, r=3, s=3, pad=1),
        Conv2d(name="depthwise", k=64, r=3, s=3, pad=1, groups=64),
        Flatten(),
        Linear(name="fc", k=10),
    ],
)


def rows_of(spec, sizes, device=V100, choose=ranking.first_ranked, **options):
    """The rows of a spec on a V100 in inference, unless said otherwise."""
    return layer_rows(workload(spec, device, library="cubatch", **options), sizes, choose)


def walked(extent, step):
    """Count tiles by stepping over an extent."""
    return len(range(0, extent, step))


def test_blocks_of_resnet18_are_those_counted_by_hand():
    """Tiles of the kernel that is named cover the pixels and filters of each layer, once for each slice."""
    rows = {row["layer"]: row for row in rows_of(models.build("resnet18"), [64])[64]}
    assert len(rows) == 21
    for layer, (pixels, filters) in RESNET18.items():
        row = rows[layer]
        tile = [int(number) for number in re.search(r"_(\d+)x(\d+)x\d+(_|$)", row["kernel"]).groups()[:2]]
        rows_of_product, products = pixels, 1
        if outputs := re.search(r"_f(\d)x", row["kernel"]):  # by Winograd's algorithm, over tiles of square images
            side, of_tile = math.isqrt(pixels // 64), int(outputs[1])
            rows_of_product, products = 64 * walked(side, of_tile) ** 2, (of_tile + 2) ** 2
        blocks = products * walked(rows_of_product, tile[0]) * walked(filters, tile[1]) * row["slices"]
        assert (row["pass"], row["blocks"]) == ("fprop", blocks)
        assert row["busiest_sm_blocks"] == walked(blocks, SMS)
        assert row["fill"] == pytest.approx(blocks / (SMS * walked(blocks, SMS)))


def test_occupancy_is_what_nvidias_table_gives_for_the_recorded_registers():
    """
    Each quarter of an SM of sm_70 has 16384 registers, given to warps in units of 256, and room for 16 warps.

    128 registers of 256 threads fit twice (0.25), 254 once (0.125), 154 of 128 threads three times (0.1875).
    """
    budget, seen = resources.recorded_figures(), set()
    for row in rows_of(models.build("resnet18"), [64], mode="training")[64]:
        (kernel,) = resources.named(row["kernel"])
        warps, registers = kernel.threads // 32, budget.figures[kernel.name][70].registers
        blocks = 4 * (16384 // (256 * walked(32 * registers, 256))) // warps
        assert (row["blocks_per_sm"], row["occupancy"]) == (blocks, blocks * warps / 64)
        seen.add((kernel.threads, blocks))
    assert {(256, 1), (256, 2), (128, 3)} <= seen


def test_rows_are_the_products_of_a_step_in_the_order_of_the_network():
    """No row is of what has no tiled kernel; nobody wants the gradient of the input, and inference has one pass."""
    three = ("fprop", "dgrad", "wgrad")
    expected = [("a", "fprop"), ("a", "wgrad"), *((name, pass_) for name in ("b", "fc") for pass_ in three)]
    assert [(row["layer"], row["pass"]) for row in rows_of(SMALL, [4], mode="training")[4]] == expected
    expected = [(name, "fprop") for name in ("a", "b", "fc")]
    assert [(row["layer"], row["pass"]) for row in rows_of(SMALL, [4])[4]] == expected


def test_the_predicted_time_is_no_less_than_the_flops_at_the_peak_rate():
    """A large convolution takes more than its multiply-adds at 15.67 TFLOP/s, and less than twice that."""
    (row,) = rows_of(Conv2d(h=28, w=28, c=512, k=512, r=5, s=5, pad=2), [64])[64]
    floor = 2 * 64 * 28 * 28 * 512 * 512 * 25 / 15.67e12
    assert floor <= row["predicted_seconds"] < 2 * floor


def test_what_is_computed_again_counts_twice():
    """Of nine equal layers the fifth is kept: the four before it run forward twice, and nothing else does."""
    net = Network(input_shape=(1, 1, 256), layers=[Linear(k=256) for _ in range(9)])
    kept, again = (rows_of(net, [64], mode="training", recompute=recompute)[64] for recompute in (False, True))
    factors = Counter(
        (one["pass"], round(two["predicted_seconds"] / one["predicted_seconds"], 9))
        for one, two in zip(kept, again, strict=True)
    )
    assert factors == {("fprop", 2): 4, ("fprop", 1): 5, ("dgrad", 1): 8, ("wgrad", 1): 9}


def test_each_size_has_its_own_rows():
    """In the order asked for; a thousand images are more blocks than one, and take longer."""
    rows = rows_of(SMALL, [1, 30, 1000])
    assert list(rows) == [1, 30, 1000]
    (small,), (large,) = ([row for row in rows[n] if row["layer"] == "b"] for n in (1, 1000))
    assert large["blocks"] > small["blocks"]
    assert large["predicted_seconds"] > small["predicted_seconds"]


def test_without_a_clock_rate_there_are_blocks_and_no_time():
    """A board that is not in the catalogue, or a slice of one, has SMs and no rates."""
    bare = attrs.evolve(V100, clock_hz=None, peak_bytes_per_second=None, peak_flops_per_second={})
    known, unknown = (rows_of(SMALL, [64], device)[64] for device in (V100, bare))
    assert [row | {"predicted_seconds": None} for row in known] == unknown
    assert json.loads(json.dumps(known)) == known


def test_equal_layers_are_asked_for_once_and_the_choice_is_followed():
    """Of the 80 equal convolutions of go-net one is chosen at each size, in turn; 28 boards are 79 tiles."""
    asked, (chosen,) = [], resources.named("conv2d_fprop_implicit_gemm_f32_simt_128x128x8_v4")

    def choose(problem, _):
        asked.append(problem.m)
        return ranking.SplitKernel(chosen)

    rows = rows_of(models.build("go-net"), [2, 28, 29], choose=choose)
    assert asked == [2 * 361, 28 * 361, 29 * 361]
    for size, tiles in ((2, 6), (28, 79), (29, 82)):
        assert Counter((row["kernel"], row["blocks"] / row["slices"]) for row in rows[size]) == {
            (chosen.name, tiles): 80
        }
