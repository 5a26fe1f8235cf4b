"""The ladder of batch sizes: every rule of the contract, merging, cutting, limits."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings, strategies as st

from cubatch.estimate.on_sms import first_grid
from cubatch.estimate.step import predict_step
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.measure.records import Candidate
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Conv2d, Flatten, GlobalAvgPool, Linear, ReLU
from cubatch.network.passes import Pass
from cubatch.tuning import candidate_layers, ladder, step_memory
from cubatch.tuning.request import Request
from tests.building import workload
from tests.thorough import examples

V100 = "v100-sxm2-16gb"
GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)


def sizes(found: list[Candidate], text: str = "") -> list[int]:
    """Give the sizes that some reason containing the text speaks for."""
    return [c.batch_size for c in found if any(text in reason for reason in c.reasons)]


def reasons(found: list[Candidate], size: int) -> tuple[str, ...]:
    """Give the reasons of one size."""
    return next(c.reasons for c in found if c.batch_size == size)


def largest(spec: Any, limit: int | str, **options: Any) -> int:
    """Find the largest batch that fits by trying: doubling, then one by one from below."""
    return step_memory.max_batch_size(spec, memory=limit, device=V100, **{"mode": "inference"} | options)


# --- the rules on a GPU --------------------------------------------------------------------------------------


@pytest.mark.case("coulom-rule")
def test_coulom_sizes_of_go_boards_on_a_v100() -> None:
    """The rule's published example is in the ladder, each size marked with its n."""
    found = ladder.candidates(GO, device=V100)
    assert [size for size in sizes(found, "coulom") if size <= 113] == [28, 56, 85, 113]
    assert "coulom n=3" in reasons(found, 85)


def test_crests_are_marked_with_layer_and_level() -> None:
    """
    19 x 19 x 128 on 80 SMs: at n boards there are ceil(361 n / 128) blocks.

    28 boards are 79 blocks and 29 are 82; 56 are 158 and 57 are 161.
    """
    found = ladder.candidates(GO, device=V100, library="im2col")
    assert "crest 1 of conv2d" in reasons(found, 28)
    assert "past crest 1 of conv2d" in reasons(found, 29)
    assert "crest 2 of conv2d" in reasons(found, 56)
    assert "past crest 2 of conv2d" in reasons(found, 57)
    assert not any("past crest 3" in reason for c in found for reason in c.reasons)


def test_crests_of_our_kernels_are_those_of_the_tile_ranked_first() -> None:
    """Each marked size is the last before the blocks of that tile, counted here, put one more on the busiest SM."""
    device = probe.resolve(V100, live=False)
    found = ladder.candidates(GO, device=V100)
    largest_size = max(c.batch_size for c in found)
    (rows, columns), outputs, _ = first_grid(
        GO, Pass.FPROP, largest_size, device=device, dtype="float32", library="cubatch"
    )
    assert outputs == 4  # F(4x4): 36 products over 5 x 5 tiles of a board
    crests = [size for size in sizes(found, "crest") if any(r.startswith("crest") for r in reasons(found, size))]
    assert len(crests) > 3

    def busiest(n: int) -> int:
        return -(-(36 * -(-25 * n // rows) * -(-128 // columns)) // 80)

    assert all(busiest(n) < busiest(n + 1) for n in crests)


def test_crests_are_of_what_is_slowest_in_the_mode_and_dtype_asked_for(monkeypatch) -> None:
    """Tensor Cores rank passes otherwise than float32 does, and so do gradients."""
    asked: list[Any] = []
    monkeypatch.setattr(ladder, "slowest", lambda *given: asked.append(given) or [])
    ladder.candidates(GO, device=V100, mode="training", dtype="float16", max_batch_size=64, library="cubatch")
    ((work, limit),) = asked
    assert (work.mode, work.dtype, work.library, limit) == ("training", "float16", "cubatch", 64)


def test_backward_crests_name_their_pass() -> None:
    """In training a gradient with a grid of its own has crests of its own."""
    wide = Conv2d(h=14, w=14, c=512, k=128, r=3, s=3, pad=1)
    assert sizes(ladder.candidates(wide, device=V100, mode="training"), "conv2d dgrad")
    assert not sizes(ladder.candidates(wide, device=V100), "dgrad")
    assert not sizes(ladder.candidates(wide, device=V100, mode="training"), "wgrad")


def test_the_memory_limit_and_shares_of_it_are_candidates() -> None:
    """The largest batch whose plan fits, 0.9 and 0.75 of it; nothing is above."""
    found = ladder.candidates("resnet18", device=V100, memory_limit="1GiB")
    top = largest("resnet18", "1GiB")
    assert found[-1].batch_size == top
    assert sizes(found, "0.9 of the memory limit") == [int(0.9 * top)]
    assert sizes(found, "0.75 of the memory limit") == [int(0.75 * top)]
    assert "memory limit" in reasons(found, top)


def test_max_batch_size_above_memory_is_no_candidate() -> None:
    """What does not fit is not proposed, whatever the user's limit."""
    found = ladder.candidates("resnet18", device=V100, memory_limit="1GiB", max_batch_size=10**6)
    assert found[-1].batch_size == largest("resnet18", "1GiB")
    assert not sizes(found, "max_batch_size")


@pytest.mark.case("tensor-core-multiples")
@pytest.mark.parametrize(
    ("device", "dtype", "multiple"),
    [
        (V100, "float16", 8),
        (V100, "float32", None),
        (V100, "bfloat16", None),
        ("a100-sxm4-80gb", "bfloat16", 8),
        ("a100-sxm4-80gb", "tf32", 4),
        ("titan-x-pascal", "float16", None),
    ],
)
def test_tensor_core_multiples_follow_gpu_and_dtype(device: str, dtype: str, multiple: int | None) -> None:
    """Every tooth rounded down to 8 (float16, bfloat16) or 4 (tf32), only where Tensor Cores take the dtype."""
    found = ladder.candidates(GO, device=device, dtype=dtype, max_batch_size=150)
    marked = sizes(found, "tensor-core multiple")
    if multiple is None:
        assert marked == []
        return
    teeth = [size for size in sizes(found, "coulom") + sizes(found, "crest") if size <= 150]
    assert set(marked) == {size // multiple * multiple for size in teeth if size >= multiple}
    assert all(f"tensor-core multiple of {multiple}" in reasons(found, size) for size in marked)


def test_a_size_with_several_reasons_is_one_candidate_with_all() -> None:
    """56 boards are Coulom's n = 2, a multiple of 8, and asked for, at once."""
    found = ladder.candidates(GO, device=V100, dtype="float16", max_batch_size=56)
    assert {"coulom n=2", "tensor-core multiple of 8", "max_batch_size"} <= set(reasons(found, 56))


@pytest.mark.parametrize(("library", "model"), [("auto", "cubatch"), ("im2col", "vendor")])
def test_predicted_seconds_are_those_of_the_model_for_the_library(library: str, model: str) -> None:
    """On a GPU of known facts: our kernels where they would run, else the vendor's."""
    found = ladder.candidates(GO, device=V100, batch_sizes=[28, 56], mode="training", library=library)
    step = predict_step(GO, [28, 56], probe.device(V100), mode="training", library=model)
    assert [c.predicted_seconds for c in found] == pytest.approx(list(step.seconds), rel=1e-12)


def test_a_gpu_of_unknown_sms_has_no_teeth() -> None:
    """Without the number of SMs there are powers of two and limits, and no guess."""
    bare = Device(name="bare", memory_bytes=8 * 2**30)
    found = ladder.candidates(GO, device=bare, max_batch_size=20)
    assert [c.batch_size for c in found] == [1, 2, 4, 8, 16, 20]
    assert {c.predicted_seconds for c in found} == {None}


# --- the CPU, callables, sizes asked for ---------------------------------------------------------------------


def test_the_cpu_has_powers_of_two_and_between_and_the_limits() -> None:
    """Powers of two, 1.5 times them, and the limits; no SMs, so no teeth."""
    found = ladder.candidates("mlp", device="cpu", max_batch_size=100)
    assert [c.batch_size for c in found] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert reasons(found, 24) == ("1.5 times a power of two",)
    assert reasons(found, 100) == ("max_batch_size",)


@given(limit=st.integers(1, 2**31 - 1))
def test_plain_candidates_hold_the_bounds_at_any_limit(limit: int) -> None:
    """At most 40, ascending, no gap wider than a factor of two, both ends in, every kind represented."""
    check(ladder.plain(Request(max_batch_size=limit)), limit)


def test_batch_sizes_are_exactly_those_asked_for() -> None:
    """Each once, ascending, with the one reason; the rules have no say, nor has the number 40."""
    asked = [500, 3, 3, 64, *range(100, 160)]
    found = ladder.candidates(GO, device=V100, batch_sizes=asked)
    assert [c.batch_size for c in found] == sorted(set(asked))
    assert {c.reasons for c in found} == {("asked for",)}


def test_batch_sizes_above_the_memory_limit_are_marked() -> None:
    """They are listed with their plan, to be reported and never tried."""
    top = largest("resnet18", "1GiB")
    found = ladder.candidates("resnet18", device=V100, memory_limit="1GiB", batch_sizes=[1, top, top + 1])
    assert [c.over_limit for c in found] == [False, False, True]
    assert found[2].predicted_peak_bytes is not None
    assert found[2].predicted_peak_bytes > 2**30


# --- bounds of every ladder ----------------------------------------------------------------------------------


def kinds(found: list[Candidate]) -> set[str]:
    """Reduce reasons to their kinds: the words without numbers and layers."""
    heads = ("coulom", "crest", "past crest", "tensor-core multiple", "power of two", "1.5 times")
    limits = ("memory limit", "0.9 of", "0.75 of", "max_batch_size")
    return {head for c in found for reason in c.reasons for head in (*heads, *limits) if reason.startswith(head)}


def check(found: list[Candidate], limit: int) -> None:
    """Assert what holds for every ladder: its size, order, gaps and ends."""
    ladder_sizes = [c.batch_size for c in found]
    assert len(ladder_sizes) <= 40
    assert ladder_sizes == sorted(set(ladder_sizes))
    assert ladder_sizes[0] == 1
    assert ladder_sizes[-1] == limit
    assert all(high <= 2 * low for low, high in itertools.pairwise(ladder_sizes))
    assert all(c.reasons for c in found)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    extent, channels = draw(st.integers(3, 40)), st.integers(1, 300)
    layers: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        layers += [Conv2d(k=draw(channels), r=3, s=3, pad=1, stride=draw(st.integers(1, 2))), ReLU()]
    if draw(st.booleans()):
        layers += [GlobalAvgPool() if draw(st.booleans()) else Flatten(), Linear(k=draw(channels))]
    return Network(input_shape=(extent, extent, draw(channels)), layers=layers)


@pytest.mark.case("hyperparameter")
@settings(max_examples=examples(100) // 2, deadline=None)
@given(
    net=networks(),
    device=st.sampled_from([V100, "a100-sxm4-80gb", "titan-x-pascal", "h200-sxm", "cpu"]),
    training=st.booleans(), half=st.booleans(), top=st.none() | st.integers(1, 2**31 - 1),
    memory_limit=st.integers(2**28, 2**36),
)  # fmt: skip
def test_every_ladder_keeps_its_bounds(
    net: Network,
    device: str,
    training: bool,
    half: bool,
    top: int | None,
    memory_limit: int,
) -> None:
    """Whatever network, device and limits: at most 40, ascending, no gap above two, and no kind lost in the cut."""
    options: dict[str, Any] = {
        "device": device,
        "mode": "training" if training else "inference",
        "dtype": "float16" if half and device != "cpu" else "float32",
    }
    if device == "cpu":  # whose free memory changes from one look to the next
        memory_limit = min(memory_limit, 2**29)
    room = hardware_memory.memory_limit(probe.resolve(device, live=False), memory_limit).bytes
    assume(step_memory.footprint(net, batch_size=1, **options).total <= room)
    fits = step_memory.max_batch_size(net, memory=room, **options)
    try:
        before, ladder.MOST = ladder.MOST, 10**6
        everything = ladder.candidates(net, max_batch_size=top, memory_limit=room, **options)
    finally:
        ladder.MOST = before
    found = ladder.candidates(net, max_batch_size=top, memory_limit=room, **options)
    check(found, min(fits, top or fits))
    assert kinds(found) == kinds(everything)
    assert set(found) <= set(everything)


def test_the_bounds_hold_at_the_largest_limit_there_is() -> None:
    """31 powers of two leave little room for the rest: the cut keeps one of every kind all the same."""
    work = workload(GO, probe.resolve(V100, live=False), mode="training", dtype="float16")
    proposals = ladder._proposals(work, 2**31 - 1, 2**31 - 2)
    found = ladder._ladder(proposals)
    check(found, 2**31 - 2)
    assert kinds(found) == {
        "coulom", "crest", "past crest", "tensor-core multiple", "power of two", "0.9 of", "0.75 of", "max_batch_size",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("memory_bytes", "free", "refused", "largest"),
    [
        (1000, 800, [], 7),  # all of it still fits: its own limit holds
        (1000, 500, [8], 3),  # less is free: what no longer fits is refused, by today's limit
        (None, 800, [], 3),  # the run ended before its limit was kept
    ],
)
def test_a_kept_ladder_is_judged_by_the_memory_that_is_there_now(memory_bytes, free, refused, largest) -> None:
    """The limit that a ladder was made under stays its limit unless a size is refused or that limit is unknown."""
    steps = tuple(Candidate(n, predicted_peak_bytes=100 * n) for n in (2, 8))
    kept = ladder.Ladder(steps, None if memory_bytes is None else 7, memory_bytes)
    found = kept.within(MemoryLimit(bytes=free, free_bytes=free, note=""), 3)
    assert [step.batch_size for step in found.candidates if step.over_limit] == refused
    assert (found.largest, found.memory_bytes) == (largest, memory_bytes if largest == 7 else free)


def test_a_ladder_within_forty_is_not_cut() -> None:
    """Nothing is left out without need."""
    found = ladder.candidates(GO, device=V100, max_batch_size=200, library="im2col")
    expected = {1, 2, 4, 8, 16, 32, 64, 128, 200} | {28, 56, 85, 113, 141, 170, 198} | {29, 57}
    assert {c.batch_size for c in found} == expected


# --- explaining ----------------------------------------------------------------------------------------------


@pytest.mark.case("coulom-rule")
def test_explain_shows_the_arithmetic_of_the_crest() -> None:
    """28 boards are 79 blocks of 80 SMs; one more is 82, two on the busiest, and half the device idle."""
    rows = candidate_layers.explain(GO, [Candidate(28), Candidate(29)], device=V100, library="im2col")
    assert [(r["batch_size"], r["blocks"], r["busiest_sm_blocks"], round(r["fill"], 3)) for r in rows] == [
        (28, 79, 1, 0.988),
        (29, 82, 2, 0.512),
    ]


def test_explain_counts_the_slices_of_our_kernels() -> None:
    """A deep product with few tiles is split: its blocks are the tiles, counted here, times the slices it names."""
    deep = Conv2d(h=7, w=7, c=512, k=512, r=3, s=3, pad=1)
    (row,) = candidate_layers.explain(deep, [Candidate(1)], device=V100, library="cubatch")
    rows, columns = map(int, row["tile"].split("x"))
    assert row["slices"] > 1
    assert row["blocks"] == row["slices"] * -(-49 // rows) * -(-512 // columns)
    (plain,) = candidate_layers.explain(deep, [Candidate(1)], device=V100, library="im2col")
    assert (plain["tile"], plain["slices"], plain["blocks"]) == ("128x128", 1, 4)


def test_explain_lists_equal_layers_once() -> None:
    """go-net is 80 equal convolutions: one line for each pass, with their number and the time of all."""
    rows = candidate_layers.explain("go-net", [Candidate(64)], device=V100, mode="training")
    assert [(row["pass"], row["layers"]) for row in rows] == [("fprop", 80), ("wgrad", 80), ("dgrad", 79)]
    assert rows[0]["predicted_seconds"] == pytest.approx(80 * 64 * 2 * 361 * 9 * 128**2 / 15.67e12, rel=1e-6)
    assert rows[0]["layer"] == models.resolve("go-net").nodes[0].name
    half = candidate_layers.explain("go-net", [Candidate(64)], device=V100, dtype="float16")[0]
    assert half["predicted_seconds"] == pytest.approx(80 * 64 * 2 * 361 * 9 * 128**2 / 125e12, rel=1e-6)


@pytest.mark.case("tensor-core-multiples")
def test_explain_shows_channels_that_miss_the_tensor_cores() -> None:
    """Three input channels, or one, are padded to 8 in float16 and to 4 in tf32, and not at all in float32."""
    stem = Conv2d(h=32, w=32, c=3, k=20, r=3, s=3)
    one = [Candidate(1)]
    assert candidate_layers.explain(stem, one, device=V100, dtype="float16")[0]["padding"] == {"c": 8, "k": 24}
    assert candidate_layers.explain(stem, one, device="a100-sxm4-80gb", dtype="tf32")[0]["padding"] == {"c": 4}
    assert candidate_layers.explain(stem, one, device=V100)[0]["padding"] == {}
    grey = attrs.evolve(stem, c=1, k=16)
    assert candidate_layers.explain(grey, one, device=V100, dtype="float16")[0]["padding"] == {"c": 8}
    halves = attrs.evolve(stem, c=16, k=24, groups=2)  # each of 8 and 12
    assert candidate_layers.explain(halves, one, device=V100, dtype="float16")[0]["padding"] == {"k": 16}
    depthwise = Conv2d(h=8, w=8, c=12, k=12, r=3, s=3, groups=12)
    assert candidate_layers.explain(depthwise, one, device=V100, dtype="float16")[0]["padding"] == {}


def test_explain_has_nothing_to_say_of_a_cpu() -> None:
    """A CPU has no SMs for blocks to fall on."""
    assert candidate_layers.explain(GO, device="cpu", max_batch_size=4) == []
