"""Sweeps of occupancy and of the batch size against asking for every single value."""

from __future__ import annotations

import functools
import itertools
from functools import partial

import attrs
import pytest
from hypothesis import Phase, given, settings, strategies as st

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.estimate import occupancy_sweep
from cubatch.estimate.batch_sweep import Grid, batch_sweep, grid_of, heaviest_layer, spread
from cubatch.estimate.block_counts import num_blocks
from cubatch.estimate.occupancy_sweep import sweep
from cubatch.hardware import architectures, catalogue
from cubatch.hardware.waves import occupancy
from cubatch.kernels import ranking, resources, survey, variant
from cubatch.kernels.problem import problem_of
from cubatch.kernels.resources import Figures, Needs, Recorded
from cubatch.network import models
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from tests.thorough import THOROUGH, examples
from tests.unit import kernel_tree

CAPABILITIES = st.sampled_from(list(architectures.known()))
GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)
V100 = catalogue.find("v100-sxm2-16gb")
FPROP = variant.find("conv2d_fprop", "float32", tile="128x128x8", vector=4)


def held(capability, **numbers):
    """Ask for one launch."""
    threads, registers, shared = numbers["threads"], numbers["registers"], numbers["shared"]
    return occupancy(
        compute_capability=capability,
        threads_per_block=threads,
        registers_per_thread=registers,
        shared_bytes_per_block=shared,
    )


# --- threads, registers, shared memory -----------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(
    capability=CAPABILITIES, quantity=st.sampled_from(occupancy_sweep.QUANTITIES), threads=st.integers(1, 1024),
    registers=st.integers(0, 255), shared=st.integers(0, 70_000), data=st.data(),
)  # fmt: skip
def test_a_sweep_is_what_every_value_says(capability, quantity, threads, registers, shared, data):
    """Steps follow each other without gaps, and any value asked for by itself is as its step says."""
    numbers = {"threads": threads, "registers": registers, "shared": shared}
    found = sweep(Needs(threads, registers, shared), capability, quantity)
    assert (found.quantity, found.value) == (quantity, numbers[quantity])
    most = {
        "threads": 1024,
        "registers": 255,
        "shared": max(architectures.of(capability).shared_bytes_per_sm, shared),
    }
    assert (found.steps[0].first, found.steps[-1].last) == (1 if quantity == "threads" else 0, most[quantity])
    for before, after in itertools.pairwise(found.steps):
        assert after.first == before.last + 1
        assert before.cliff == (after.occupancy < before.occupancy)
    assert not found.steps[-1].cliff
    edges = {value for step in found.steps for value in (step.first, step.last)}
    for value in sorted({*edges, data.draw(st.integers(found.steps[0].first, most[quantity]))}):
        answer = held(capability, **numbers | {quantity: value})
        step = found.at(value)
        assert (step.blocks_per_sm, step.occupancy, step.limiters) == (
            answer.blocks_per_sm, answer.occupancy, answer.limiters,
        )  # fmt: skip


@settings(max_examples=examples(40))
@given(
    capability=CAPABILITIES, quantity=st.sampled_from(["threads", "registers"]), threads=st.integers(1, 1024),
    registers=st.integers(0, 255), shared=st.integers(0, 49_152),
)  # fmt: skip
def test_the_nearest_better_value_is_that_of_trying_all(capability, quantity, threads, registers, shared):
    """Of all values with higher occupancy the nearest; of threads, whole warps only."""
    numbers = {"threads": threads, "registers": registers, "shared": shared}
    found = sweep(Needs(threads, registers, shared), capability, quantity)
    values = range(32, 1025, 32) if quantity == "threads" else range(256)
    now = held(capability, **numbers).occupancy
    better = [value for value in values if held(capability, **numbers | {quantity: value}).occupancy > now]
    here = numbers[quantity]
    assert found.better == min(better, key=lambda value: (abs(value - here), value), default=None)


def test_more_shared_memory_than_an_sm_has_is_one_more_value(monkeypatch):
    """48 GiB, a slip for KiB, are one step with 0 blocks: not a value for each 128 bytes of them."""
    asked, on = [], Needs.on
    monkeypatch.setattr(Needs, "on", lambda needs, *where: (asked.append(needs), on(needs, *where))[1])
    for shared in (2**24, 48 * 2**30):
        asked.clear()
        last = sweep(Needs(threads=256, registers=64, shared_bytes=shared), (9, 0), "shared").steps[-1]
        assert (last.first, last.last, last.blocks_per_sm) == (227 * 1024 + 1, shared, 0)
        assert len(asked) < 228 * 1024 / 128 + 5


def test_less_shared_memory_is_the_nearest_better():
    """17 KiB in 96 KiB are five blocks, six need 16 KiB: the edge of that step, not a smaller one."""
    found = sweep(Needs(threads=32, registers=32, shared_bytes=17 * 1024), (7, 0), "shared")
    assert (found.at(found.value).blocks_per_sm, found.better) == (5, 16 * 1024)


def test_a_launch_beyond_all_limits_has_a_way_back():
    """300 KB fit no SM: 0 blocks for want of shared memory, and the most that launches is the nearest better."""
    found = sweep(Needs(threads=128, registers=32, shared_bytes=300_000), (9, 0), "shared")
    assert (found.at(300_000).blocks_per_sm, found.at(300_000).limiters) == (0, ("shared_memory",))
    assert found.better == 227 * 1024


def test_a_sweep_of_something_else_is_refused():
    """The error names what can change."""
    with pytest.raises(InvalidArgument) as caught:
        sweep(Needs(128, 32), (7, 0), "warps")
    assert "threads, registers, shared" in str(caught.value)
    with pytest.raises(InvalidArgument) as caught:
        sweep(Needs(1025, 32), (7, 0), "registers")
    assert caught.value.field == "threads_per_block"
    with pytest.raises(UnknownName):
        sweep(Needs(128, 32), (3, 5), "threads")


# --- batch size ----------------------------------------------------------------------------------------------


def plain_grid(layer, pass_, num_sms, batch_size):
    """Give the grid of 128 x 128 tiles without split-K, one block resident."""
    blocks = num_blocks(layer, pass_, batch_size)
    return Grid(batch_size=batch_size, **attrs.asdict(spread(blocks, num_sms, blocks_per_sm=1)))


def test_the_steps_of_a_sweep_end_at_coulombs_sizes():
    """Boards of 19 x 19 with 128 channels on the 80 SMs of a V100: the teeth of the saw are the published sizes."""
    found = batch_sweep(partial(plain_grid, GO, Pass.FPROP, 80), 80, 60)
    ends = [step.last.batch_size for step in found.steps if step.cliff]
    assert ends[:4] == [28, 56, 85, 113]
    assert [step.last.busiest_sm_blocks for step in found.steps][:4] == [1, 2, 3, 4]
    assert (found.grid.batch_size, found.better.batch_size) == (60, 56)


def test_the_end_of_a_sweep_is_no_crest():
    """A block for each 1000 samples on 10 SMs: from 16 000 the nearest crest is 10 000, not where the sweep ends."""

    def at(n):
        blocks = -(-n // 1000)
        return Grid(batch_size=n, **attrs.asdict(spread(blocks, 10, blocks_per_sm=1)))

    found = batch_sweep(at, 10, 16_000)
    assert [(step.first.batch_size, step.last.batch_size) for step in found.steps] == [(1, 10_000), (10_001, 16_384)]
    assert at(16_384).fill > at(16_000).fill + 0.01
    assert found.better == at(10_000)


EXAMPLES = 12 if THOROUGH else 4  # each asks hundreds of times


@settings(max_examples=EXAMPLES, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    h=st.integers(1, 24), c=st.integers(1, 40), k=st.integers(1, 40), batch_size=st.none() | st.integers(1, 200),
    device=st.sampled_from(["titan-x-pascal", "v100-sxm2-16gb", "t4", "rtx-3090"]),
    pass_=st.sampled_from(list(Pass)),
)  # fmt: skip
def test_a_sweep_of_batch_sizes_is_what_every_batch_says(h, c, k, batch_size, device, pass_):
    """
    Each batch size is on one step, and has the slices and the busiest SM that its step says.

    A cliff is where the busiest SM has more to do, in tiles of full depth, and the nearest better size is the end of
    a step at which at least a hundredth more of the SMs is at work.
    """
    layer, gpu = Conv2d(h=h, w=h, c=4 * c, k=4 * k, r=3, s=3, pad=1), catalogue.find(device)
    tile = "128x128x8" if pass_ is Pass.WGRAD else "64x64x16"
    tiled = variant.find(f"conv2d_{pass_.value}", "float32", tile=tile, vector=4)
    at = functools.cache(partial(grid_of, layer, pass_, tiled, device=gpu, blocks_per_sm=2))
    found = batch_sweep(at, gpu.num_sms, batch_size)
    assert found.steps[0].first.batch_size == 1
    assert found.steps[-1].last.batch_size >= (batch_size or 1)
    crests = []
    for step, after in itertools.zip_longest(found.steps, found.steps[1:]):
        inside = range(step.first.batch_size, step.last.batch_size + 1)
        assert {(at(n).slices, at(n).busiest_sm_blocks) for n in inside} == {
            (step.first.slices, step.first.busiest_sm_blocks)
        }
        if after is not None:
            assert after.first.batch_size == step.last.batch_size + 1
            more = after.first.busiest_sm_blocks * step.last.slices > step.last.busiest_sm_blocks * after.first.slices
            assert step.cliff == more
            rates = [end.batch_size * end.slices / end.busiest_sm_blocks for end in (step.last, after.first)]
            assert step.drop == pytest.approx(1 - rates[1] / rates[0] if more else 0, abs=1e-12)
            crests.append(step.last)
    if batch_size is not None:
        now = at(batch_size)
        better = [crest for crest in crests if crest.fill > now.fill + 0.01]
        assert found.grid == now
        expected = min(better, key=lambda c: (abs(c.batch_size - batch_size), c.batch_size), default=None)
        assert found.better == expected


@given(
    h=st.integers(1, 30), c=st.integers(1, 40), k=st.integers(1, 40), n=st.integers(1, 300),
    blocks_per_sm=st.integers(0, 4),
)  # fmt: skip
def test_a_grid_is_that_of_the_law_times_the_slices(h, c, k, n, blocks_per_sm):
    """Tiles as counted from the layer's products, times the slices that the kernel is launched with."""
    layer = Conv2d(h=h, w=h, c=4 * c, k=4 * k, r=3, s=3, pad=1)
    found = grid_of(layer, Pass.FPROP, FPROP, n, device=V100, blocks_per_sm=blocks_per_sm)
    slices = ranking.slices(problem_of(layer, Pass.FPROP, n, "float32"), FPROP, V100)
    assert (found.slices, found.blocks) == (slices, slices * num_blocks(layer, Pass.FPROP, n))
    assert found.busiest_sm_blocks == -(-found.blocks // 80)
    if blocks_per_sm:
        assert found.waves == -(-found.blocks // (80 * blocks_per_sm))
    else:
        assert (found.waves, found.last_wave) == (None, None)


def test_a_kernel_is_told_which_layers_it_computes():
    """Another operation, other channels and a kernel without a tile are errors that name kernel or layer."""
    vgg = models.build("vgg16")
    assert heaviest_layer(vgg, FPROP)[0].name == "conv1_2"
    assert heaviest_layer(vgg, FPROP, "conv3_1") == (
        next(node.layer for node in vgg.nodes if node.name == "conv3_1"), Pass.FPROP,
    )  # fmt: skip
    linear = variant.find("gemm_tn", "float32", tile="128x128x8", vector=4)
    layer, pass_ = heaviest_layer(vgg, linear)
    assert (layer.type, layer.name, pass_) == ("linear", "fc1", Pass.WGRAD)
    with pytest.raises(UnknownName, match="conv3_1"):
        heaviest_layer(vgg, FPROP, "conv31")
    assert heaviest_layer(vgg, FPROP, "conv1_1")[0].c == 3  # which are stored as 4
    with pytest.raises(InvalidArgument, match="conv1"):
        heaviest_layer(models.build("lenet5"), FPROP, "conv1")  # 1 channel, loads of 4
    with pytest.raises(InvalidArgument, match="mlp"):
        heaviest_layer(models.build("mlp"), FPROP)
    with pytest.raises(InvalidArgument, match="a tiled kernel"):
        heaviest_layer(vgg, variant.find("activation", "float32"))
    with pytest.raises(InvalidArgument, match=FPROP.name):
        grid_of(Linear(c=64, k=64), Pass.FPROP, FPROP, 4, device=V100, blocks_per_sm=1)


@pytest.mark.parametrize("value", [0, -1, 1.5, 10**9, "8", True])
def test_batch_sizes_that_a_sweep_cannot_show_are_refused(value):
    """Named with its value, before anything is computed for it."""
    with pytest.raises(InvalidArgument) as caught:
        batch_sweep(partial(plain_grid, GO, Pass.FPROP, 80), 80, value)
    assert (caught.value.field, caught.value.value) == ("batch_size", value)


# --- what is recorded ----------------------------------------------------------------------------------------


def test_every_recorded_kernel_has_an_answer_on_every_gpu_it_runs_on():
    """No GPU, no compiler: more than 12 GPUs of the catalogue, and a block of every kernel fits on each."""
    budget, known = resources.recorded_figures(), variant.kernels()
    gpus = [gpu for gpu in catalogue.all_devices() if gpu.arch in survey.ARCHS]
    assert len(gpus) >= 12
    assert len({gpu.arch for gpu in gpus}) >= 10
    answered = dict.fromkeys(budget.figures, 0)
    for gpu, one in itertools.product(gpus, known):
        if one.name in answered and one.runs_on(variant.arch_number(gpu.arch)):
            needs = resources.recorded_needs(one, gpu.arch, budget)
            figures = budget.figures[one.name][variant.arch_number(gpu.arch)]
            assert (needs.threads, needs.registers) == (one.threads, figures.registers)
            assert needs.shared_bytes == figures.shared_bytes + one.dynamic_shared_bytes
            assert needs.on(gpu.compute_capability).blocks_per_sm >= 1
            answered[one.name] += 1
    everywhere = {one.name for one in known if one.where == "any"} & set(answered)
    assert everywhere
    assert all(answered[name] == len(gpus) for name in everywhere)
    assert all(answered.values())


def test_shared_memory_asked_for_at_the_launch_counts():
    """A pipeline's ring is no static memory: the figures hold the one, the kernel says the other."""
    ring = kernel_tree.kernel(dynamic_shared_bytes=32_768)
    budget = Recorded("12.9.86", {}, {ring.name: {70: Figures(registers=64, shared_bytes=512)}})
    found = resources.recorded_needs(ring, "sm_70", budget)
    assert (found.threads, found.registers, found.shared_bytes) == (256, 64, 33_280)
    assert survey.needs(ring, "sm_70", budget) == found


def test_names_find_one_variant_or_all_that_begin_so():
    """A name by itself, what several share, and what is near a misspelt one."""
    assert resources.named(FPROP.name) == [FPROP]
    shared = resources.named("conv2d_fprop_implicit_gemm_f32_simt")
    assert FPROP in shared
    assert len(shared) > 1
    with pytest.raises(UnknownName, match="did you mean"):
        resources.named(FPROP.name.replace("fprop", "frop"))
    assert {one.operation for one in resources.named("conv2d_fp")} == {"conv2d_fprop", "conv2d_fprop_sums"}


def test_what_does_not_run_somewhere_says_where_it_does():
    """A kernel of tensor cores on a Titan X: the error names both."""
    tensor = next(one for one in variant.kernels() if one.family == "mma" and (one.min_arch or 0) >= 80)
    with pytest.raises(InvalidArgument) as caught:
        survey.needs(tensor, "sm_61", resources.recorded_figures())
    assert tensor.name in str(caught.value)
    assert tensor.where in str(caught.value)


def test_what_is_not_recorded_is_compiled():
    """sm_60 is not among the recorded architectures; its compiler says as many registers as the survey."""
    budget = resources.recorded_figures()
    one = variant.find("gemm_nt", "float32", family="naive")
    assert resources.recorded_needs(one, "sm_60", budget) is None
    (row,) = survey.survey([one], ["sm_60"])
    found = survey.needs(one, "sm_60", budget)
    assert (found.registers, found.nvrtc) == (row.figures.registers, row.nvrtc)
