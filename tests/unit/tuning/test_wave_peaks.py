"""Coulom's sizes and crests against brute force over every batch size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from cubatch.estimate.on_sms import first_grid, on_sms
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import occupancy
from cubatch.kernels import resources
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.layers import Attention, Conv2d, Linear
from cubatch.network.passes import Pass
from cubatch.tuning.wave_peaks import coulom, slowest, wave_peaks
from tests.building import workload
from tests.thorough import examples

GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)
V100_SMS = 80
LEVELS = [1, 2, 3, 4, 5, 6, 7, 8, *(2**i for i in range(4, 24))]


def sizes(proposals: list[Any], kind: str) -> list[int]:
    return [proposal.batch_size for proposal in proposals if proposal.kind == kind]


def tiles_by_hand(layer: Layer, pass_: Pass, n: int) -> int:
    """Count tiles by walking over the rows and columns of each product in steps of 128."""
    return sum(gemm.count * len(range(0, gemm.m, 128)) * len(range(0, gemm.n, 128)) for gemm in layer.gemms(pass_, n))


# --- Coulom --------------------------------------------------------------------------------------------------


def test_coulom_sizes_go_1_to_8_then_double_up_to_the_limit() -> None:
    """int(n * (1 << 14) * SM / (h * w * c)) for n = 1 to 8, 16, 32, ... as long as it is within the limit."""
    for limit in (27, 28, 112, 113, 453, 454, 5000):
        expected = [int(n * (1 << 14) * 80 / (19 * 19 * 128)) for n in LEVELS]
        found = coulom(GO, V100_SMS, limit)
        assert sizes(found, "coulom") == [size for size in expected if size <= limit]
        assert [p.reason for p in found] == [f"coulom n={n}" for n in LEVELS[: len(found)]]


def test_coulom_counts_the_input_of_a_layer() -> None:
    """The published rule has the input's h, w, c, also where the output is another size."""
    strided = Conv2d(h=56, w=56, c=64, k=128, r=3, s=3, stride=2, pad=1)
    assert sizes(coulom(strided, V100_SMS, 20), "coulom") == [
        int(n * (1 << 14) * 80 / (56 * 56 * 64)) for n in (1, 2, 3)
    ]


def test_coulom_sizes_below_one_are_left_out() -> None:
    """One sample of a large image is more than a tile per SM: n = 1 gives nothing, not zero."""
    large = Conv2d(h=224, w=224, c=64, k=64, r=3, s=3, pad=1)
    first = coulom(large, V100_SMS, 100)[0]
    assert first.batch_size == 1
    assert first.reason == "coulom n=3"


def test_coulom_takes_the_three_distinct_convolutions_with_most_flop() -> None:
    """vgg16's heaviest are conv1_2 with 64 channels, then layers of 112 x 112 x 128 and 56 x 56 x 256."""
    expected = {int(n * (1 << 14) * 80 / (h * h * c)) for n in LEVELS for h, c in ((224, 64), (112, 128), (56, 256))}
    assert set(sizes(coulom(models.build("vgg16"), V100_SMS, 1000), "coulom")) == {
        s for s in expected if 1 <= s <= 1000
    }


def test_a_network_of_equal_convolutions_has_one_set_of_sizes() -> None:
    """80 equal layers count once."""
    assert sizes(coulom(models.build("go-net"), V100_SMS, 120), "coulom") == [28, 56, 85, 113]


def test_without_convolutions_there_are_no_coulom_sizes() -> None:
    """The rule is about convolutions; a multilayer perceptron has none."""
    assert coulom(models.build("mlp"), V100_SMS, 10**6) == []


# --- on the SMs ----------------------------------------------------------------------------------------------


@pytest.mark.case("coulom-rule")
def test_blocks_of_the_published_cliff() -> None:
    """On the 48 SMs of a 2080 Super, 96 boards of 8 x 8 are a wave of the vendor's tiles, and 97 begin a second."""
    conv, gpu = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1), catalogue.find("rtx-2080-super")
    how = {"device": gpu, "dtype": "float32", "library": "im2col"}
    found = [on_sms(conv, Pass.FPROP, n, **how) for n in (96, 97)]
    assert [(f["blocks"], f["waves"], f["busiest_sm_blocks"]) for f in found] == [(48, 1, 1), (49, 2, 2)]


def test_waves_of_our_kernels_are_those_of_their_recorded_occupancy() -> None:
    """What a V100 holds of the kernel ranked first, counted anew, makes a wave; time still follows the busiest SM."""
    budget, gpu, seen = resources.recorded_figures(), catalogue.find("v100-sxm2-16gb"), set()
    for n in (1, 16, 60, 100, 1000):
        found = on_sms(GO, Pass.FPROP, n, device=gpu, dtype="float32", library="cubatch")
        (chosen,) = resources.named(found["kernel"])
        figures = budget.figures[chosen.name][70]
        held = occupancy(
            compute_capability=(7, 0), threads_per_block=chosen.threads, registers_per_thread=figures.registers,
            shared_bytes_per_block=figures.shared_bytes + chosen.dynamic_shared_bytes,
        )  # fmt: skip
        rows, columns = map(int, found["tile"].split("x"))
        assert (chosen.tile.m, chosen.tile.n) == (rows, columns)
        tiles = n * 361 if chosen.winograd is None else n * len(range(0, 19, chosen.winograd)) ** 2
        products = 1 if chosen.winograd is None else (chosen.winograd + 2) ** 2
        assert found["blocks"] == found["slices"] * products * len(range(0, tiles, rows)) * len(range(0, 128, columns))
        assert found["blocks_per_sm"] == held.blocks_per_sm
        assert found["occupancy"] == held.blocks_per_sm * chosen.threads / 2048  # threads that an SM of sm_70 holds
        slots = 80 * held.blocks_per_sm
        assert found["waves"] == len(range(0, found["blocks"], slots))
        assert found["last_wave"] == (found["blocks"] - (found["waves"] - 1) * slots) / slots
        assert found["busiest_sm_blocks"] == len(range(0, found["blocks"], 80))
        seen.add(held.blocks_per_sm > 1 and found["waves"] != found["busiest_sm_blocks"])
    assert True in seen  # where they are not the same number


def test_waves_of_the_vendors_kernels_are_blocks_of_the_busiest_sm() -> None:
    """Nothing is known of what resides; with one block per SM 29 boards begin a second wave of 2 blocks."""
    gpu = catalogue.find("v100-sxm2-16gb")
    how = {"device": gpu, "dtype": "float32", "library": "im2col"}
    found = [on_sms(GO, Pass.FPROP, n, **how) for n in (28, 29)]
    assert [(f["waves"], f["last_wave"], f["blocks_per_sm"], f["kernel"]) for f in found] == [
        (1, 79 / 80, 1, None),
        (2, 2 / 80, 1, None),
    ]


def test_waves_are_not_known_where_nothing_is_recorded() -> None:
    """sm_53 is none of the recorded architectures: blocks, no waves."""
    how = {"dtype": "float32", "library": "cubatch"}
    found = on_sms(GO, Pass.FPROP, 28, device=Device(name="x", compute_capability=(5, 3), num_sms=1), **how)
    assert (found["waves"], found["last_wave"], found["blocks_per_sm"], found["occupancy"]) == (None,) * 4
    assert found["kernel"] is not None


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_falls_on_the_sms_as_its_projection_to_queries_keys_and_values(dtype, pass_) -> None:
    """The largest of its products that tiled kernels run: kernel, tile, blocks and so crests are of that."""
    attention, linear = Attention(h=197, w=1, c=192, heads=3), Linear(h=197, w=1, c=192, k=576)
    how = {"device": catalogue.find("h100-sxm"), "dtype": dtype, "library": "cubatch"}
    assert on_sms(attention, pass_, 64, **how) == on_sms(linear, pass_, 64, **how)
    (tile, _, blocks), (want, _, expected) = (first_grid(layer, pass_, 64, **how) for layer in (attention, linear))
    assert (tile, [blocks(n) for n in (1, 7, 64, 500)]) == (want, [expected(n) for n in (1, 7, 64, 500)])


# --- crests --------------------------------------------------------------------------------------------------


def crests_by_hand(blocks: Callable[[int], int], num_sms: int, limit: int) -> dict[int, int]:
    """Try every batch: {blocks on the busiest SM: the largest batch that has it and whose next has more}."""
    busiest = [-(-blocks(n) // num_sms) for n in range(1, limit + 2)]
    found = {}
    for n in range(1, limit + 1):
        if busiest[n] > busiest[n - 1] and busiest[n - 1] in LEVELS:
            found[busiest[n - 1]] = n
    return found


@settings(max_examples=examples(150), deadline=None)
@given(
    h=st.integers(1, 40), c=st.integers(1, 300), k=st.integers(1, 600), stride=st.integers(1, 2),
    num_sms=st.integers(1, 132), limit=st.integers(1, 400), pass_=st.sampled_from([Pass.FPROP, Pass.DGRAD]),
)  # fmt: skip
def test_crests_are_those_of_brute_force(
    h: int, c: int, k: int, stride: int, num_sms: int, limit: int, pass_: Pass
) -> None:
    """
    At a crest the busiest SM has b blocks and at one sample more it has more.

    Proposed are exactly the crests that trying every batch finds, for b = 1 to 8 and then doubling.
    """
    layer = Conv2d(h=h, w=h, c=c, k=k, r=3, s=3, pad=1, stride=stride)

    def blocks(n: int) -> int:
        return tiles_by_hand(layer, pass_, n)

    expected = crests_by_hand(blocks, num_sms, limit)
    found = wave_peaks([("x", blocks)], num_sms, limit)
    assert {p.reason: p.batch_size for p in found if p.kind == "crest"} == {
        f"crest {level} of x": size for level, size in expected.items()
    }
    past = {
        f"past crest {level} of x": size + 1 for level, size in itertools.islice(expected.items(), 2) if size < limit
    }
    assert {p.reason: p.batch_size for p in found if p.kind == "past crest"} == past


# --- which passes --------------------------------------------------------------------------------------------

CARD = Device(name="card", num_sms=80, peak_flops_per_second={"float32": 1e13}, peak_bytes_per_second=1e12)


def test_the_slowest_of_each_grid_leads() -> None:
    """
    By hand at batch 64: a takes 5.9 ms, b 23.7 ms on the same grid, c 1.5 ms, d less on the grid of c.

    The larger of two passes with one grid stands for both.
    """
    net = Network(
        input_shape=(56, 56, 64),
        layers=[Conv2d(name=name, k=k, r=3, s=3, pad=1) for name, k in (("a", 256), ("b", 256), ("c", 16), ("d", 16))],
    )
    assert [name for name, _ in slowest(workload(net, CARD), 64)] == ["b", "c"]


def test_equal_grids_count_once() -> None:
    """The 80 convolutions of go-net, and their gradients, rise and fall together."""
    assert [name for name, _ in slowest(workload(models.build("go-net"), CARD, mode="training"), 64)] == ["conv1"]


def test_passes_that_do_not_grow_with_the_batch_are_left_out() -> None:
    """The result of wgrad is the filter, as large for one sample as for a thousand."""
    names = [name for name, _ in slowest(workload(Linear(c=4096, k=1000), CARD, mode="training"), 64)]
    assert sorted(names) == ["linear", "linear dgrad"]


def test_without_peaks_flop_stand_for_time() -> None:
    """A card whose rates nobody printed still has a heaviest layer."""
    bare = Device(name="bare", num_sms=80)
    names = [name for name, _ in slowest(workload(models.build("mlp"), bare), 64)]
    assert names == ["fc1"]
