"""The choice of variant: what fits, what fills the device, and that the answer is the same every time."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.checks import EXPERIMENTAL
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.kernels import cost_model, ranking, variant as variants
from cubatch.kernels.problem import Problem, conv2d_problem, problem_of
from cubatch.kernels.ranking import can_finish, first_ranked, of_phases, ranked
from cubatch.kernels.workspace.product_scratch import conv2d_workspace, product_workspace
from cubatch.memory.schedule import schedule
from cubatch.network import models
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from cubatch.network.windows import conv_shape
from tests.thorough import examples

TITAN_X = Device(name="Titan X", compute_capability=(5, 2), num_sms=24)
V100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
H200 = Device(name="H200", compute_capability=(9, 0), num_sms=132)
T4 = Device(name="T4", compute_capability=(7, 5), num_sms=40)
A100 = Device(name="A100", compute_capability=(8, 0), num_sms=108)
DEVICES = st.sampled_from([TITAN_X, V100, T4, A100, H200])
OPERATIONS = ("gemm_nn", "gemm_nt", "gemm_tn", "conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad")
FEW = settings(max_examples=examples(60), deadline=None)


@st.composite
def problems(draw):
    return Problem(
        draw(st.sampled_from(OPERATIONS)),
        draw(st.sampled_from(["float32", "float16", "bfloat16", "tf32"])),
        *(draw(st.integers(0, most)) for most in (200_000, 4096, 5000)),
        groups=draw(st.sampled_from([1, 1, 4])),
        phases=draw(st.sampled_from([1, 1, 4])),
        vector=draw(st.sampled_from([1, 4, 8])),
    )


@given(problems(), DEVICES)
@FEW
def test_whatever_is_ranked_runs_on_the_device_and_loads_no_wider_than_allowed(problem, device):
    """A variant for another architecture would not launch, and a wider load would fault."""
    arch = 10 * device.compute_capability[0] + device.compute_capability[1]
    found = ranking.ranked(problem, device)
    assert found
    for variant in found:
        assert variant.operation == problem.operation
        assert variant.dtype in {problem.dtype, "float32" if problem.dtype == "tf32" else problem.dtype}
        assert variant.runs_on(arch)
        assert problem.vector % variant.vector == 0


@given(problems(), DEVICES)
@FEW
def test_slices_leave_work_in_each_and_their_partial_sums_in_bounds(problem, device):
    """No slice of gemm_k is empty or shorter than what a block costs, and scratch memory stays within its limit."""
    for variant in ranking.ranked(problem, device):
        modelled = ranking.slices(problem, variant, device)
        others = ranking.other_slices(problem, variant, device)
        assert others.get("/2", 0) < modelled < others.get("*2", modelled + 1)
        for count in (modelled, *others.values()):
            steps = -(-problem.k // variant.tile.k)
            each = -(-steps // count)
            assert count == 1 or ((count - 1) * each < steps and each >= ranking.least_steps(variant) // 2)
            partials = 4 * count * problem.m * problem.n * problem.groups * problem.phases if count > 1 else 0
            assert partials <= ranking.MOST_PARTIAL_BYTES
            assert partials <= product_workspace(problem, device)


def test_a_gradient_with_few_tiles_is_split_until_it_fills_the_device():
    """ResNet-50's third stage, 3x3, batch 256: 36 tiles on 132 SMs take several slices each."""
    problem = Problem("conv2d_wgrad", "float32", 256, 2304, 50176, vector=4)
    best = ranking.ranked(problem, H200)[0]
    assert cost_model.blocks(problem, best) * ranking.slices(problem, best, H200) >= 132


@pytest.mark.parametrize("device", [V100, H200])
def test_a_gradient_of_one_tile_is_split_over_all_sms(device):
    """64 to 64 channels, 1x1, batch 256 of 56x56: 64 slices would leave half of 132 SMs idle."""
    problem = Problem("conv2d_wgrad", "float16", 64, 64, 256 * 56 * 56, vector=8)
    best = ranking.ranked(problem, device)[0]
    blocks = cost_model.blocks(problem, best) * ranking.slices(problem, best, device)
    assert blocks >= 0.95 * device.num_sms
    assert blocks % device.num_sms == 0 or blocks % device.num_sms > 0.9 * device.num_sms


def test_a_product_that_fills_the_device_is_not_split():
    """Partial sums would be written and read for nothing."""
    problem = Problem("gemm_nt", "float32", 8192, 8192, 8192, vector=4)
    assert all(ranking.slices(problem, variant, H200) == 1 for variant in ranking.ranked(problem, H200))


@pytest.mark.parametrize(
    ("device", "m", "n", "want"),
    [
        (V100, 8192, 8192, "256x128x8"),  # registers for the largest tile
        (TITAN_X, 8192, 8192, "128x128x8"),  # not before sm_70
        (H200, 802816, 64, "128x64x8"),  # a wider tile would be half empty
        (H200, 802816, 32, "128x32x8"),
    ],
)
def test_a_tile_fits_the_output_and_the_architecture(device, m, n, want):
    """The widest tile that the output fills goes first."""
    assert ranking.ranked(Problem("gemm_nt", "float32", m, n, 1024, vector=4), device)[0].tile.name == want


@pytest.mark.parametrize(
    ("device", "dtype", "vector", "family"),
    [
        (V100, "float16", 8, "mma"),
        (T4, "float16", 4, "mma"),
        (A100, "bfloat16", 8, "mma"),
        (A100, "tf32", 4, "mma"),
        (V100, "bfloat16", 8, "simt"),  # not before sm_80
        (V100, "tf32", 4, "simt"),
        (A100, "float16", 1, "simt"),  # odd channels
        (A100, "tf32", 1, "simt"),
        (A100, "float32", 4, "simt"),  # nobody asked for tf32
    ],
)
def test_tensor_cores_go_first_where_they_take_the_type_and_its_loads(device, dtype, vector, family):
    """What they cannot multiply is left to CUDA cores."""
    ranked = ranking.ranked(Problem("gemm_nt", dtype, 8192, 8192, 8192, vector=vector), device)
    assert ranked[0].family == family
    assert {variant.family for variant in ranked} <= {family, "simt"}


@pytest.mark.parametrize(
    ("slug", "dtype", "rate"),
    [
        ("rtx-2080", "float16", 256),
        ("rtx-2080-ti", "float16", 271),  # its peak is for a clock 6 % above the catalogue's
        *((slug, "float16", 256) for slug in ("rtx-3090", "rtx-3090-ti", "rtx-4090", "rtx-5090")),
        *((slug, "tf32", 128) for slug in ("rtx-3090", "rtx-3090-ti", "rtx-4090", "rtx-5090")),
    ],
)
def test_tensor_cores_of_half_the_rate_go_first_and_no_sm_multiplies_faster(slug, dtype, rate):
    """GeForce boards add up in float32 at half the rate of their chips: so does the busiest SM, however few work."""
    board = catalogue.find(slug)
    overclocked = attrs.evolve(board, clock_hz=1.2 * board.clock_hz)
    for m, n in [(8192, 8192), (256 * board.num_sms // 2, 128)]:
        problem = Problem("gemm_nt", dtype, m, n, 8192, vector=4 if dtype == "tf32" else 8)
        assert ranked(problem, overclocked) == ranked(problem, board)
        clocks, parts, found = ranking.ranking(problem, board)[0]
        busiest = math.ceil(cost_model.blocks(problem, found) * parts / board.num_sms)
        assert found.family == "mma"
        assert clocks >= busiest * found.tile.m * found.tile.n * problem.k / parts / rate


@pytest.mark.parametrize(
    "slug", ["v100-sxm2-16gb", "v100-pcie-32gb", "t4", "a100-sxm4-80gb", "a30", "h100-sxm", "h200-sxm", "l40s"]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32"])
def test_a_board_with_its_chips_rate_ranks_by_the_chip_alone(slug, dtype):
    """What data sheets round, and the lower clock that Hopper's are for, makes no variants change places."""
    board = catalogue.find(slug)
    unknown = attrs.evolve(board, peak_flops_per_second={})
    for m, n, k in [(196, 64, 256), (3136, 64, 64), (50176, 512, 4608), (8192, 8192, 8192), (802816, 64, 576)]:
        problem = Problem("gemm_nt", dtype, m, n, k, vector=4 if dtype == "tf32" else 8)
        assert ranked(problem, board) == ranked(problem, unknown), problem


@pytest.mark.parametrize("operation", ["gemm_nt", "gemm_tn", "conv2d_wgrad"])
@pytest.mark.parametrize("vector", [8, 4])
def test_narrow_loads_are_for_rows_that_no_wide_ones_take(operation, vector):
    """On tensor cores, whatever the tile: a narrower load moves the same bytes in more instructions."""
    found = ranking.fitting(Problem(operation, "float16", 99, 64, 64, vector=vector), A100)
    assert {one.vector for one in found if one.family == "mma"} == {vector}
    assert not [one for one in ranking.fitting(Problem("gemm_nt", "float16", 99, 64, 64), A100) if one.vector > 1]


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        (8192, 8192, 8192, "256x128x32"),  # fewest bytes of shared memory for a product
        (2048, 2048, 2048, "128x128x32_w4"),  # two blocks an SM, whose warps read less than those of 128x128x32
        (12544, 128, 1152, "128x128x32"),  # one, which has too few warps then
        (802816, 64, 256, "128x64x32"),  # a wider tile would be half empty
    ],
)
def test_on_tensor_cores_a_tile_fits_the_output_too(m, n, k, want):
    """The widest tile that the output fills goes first, and of two equally wide the one that costs memory less."""
    assert ranking.ranked(Problem("gemm_nt", "float16", m, n, k, vector=8), A100)[0].tile.name == want


def test_a_short_product_on_tensor_cores_is_split_or_gets_small_tiles():
    """ResNet-50's last stage at batch 32, 3x3: 52 tiles of 128 x 128 would leave half of the SMs idle."""
    problem = Problem("conv2d_fprop", "float16", 1568, 512, 4608, vector=8)
    best = ranking.ranked(problem, A100)[0]
    assert cost_model.blocks(problem, best) * ranking.slices(problem, best, A100) >= 0.9 * 108


def test_tiles_and_blocks_count_residues_groups_and_phases():
    """A tile that is cut by the edge is a tile; each group and phase has its own."""
    variant = variants.find("conv2d_dgrad", "float32", tile="128x64x8", vector=4)
    problem = Problem("conv2d_dgrad", "float32", 129, 65, 10, groups=3, phases=4, vector=4)
    assert cost_model.tiles(problem, variant) == (2, 2)
    assert cost_model.blocks(problem, variant) == 2 * 2 * 3 * 4


@pytest.mark.parametrize("changes", [{"num_sms": None}, {"compute_capability": None}])
def test_a_device_that_is_not_known_is_named(changes):
    """Without SMs there is no busiest one, without an architecture no variant."""
    facts = {"name": "mystery", "compute_capability": (7, 0), "num_sms": 80} | changes
    with pytest.raises(InvalidArgument, match="mystery"):
        ranking.ranked(Problem("gemm_nt", "float32", 64, 64, 64), Device(**facts))


def test_an_operation_or_type_without_kernels_is_refused():
    """The error names what was asked for."""
    with pytest.raises(UnknownName, match="gemm_tt"):
        ranking.ranked(Problem("gemm_tt", "float32", 64, 64, 64), V100)
    with pytest.raises(InvalidArgument, match="float64"):
        ranking.ranked(Problem("gemm_nt", "float64", 64, 64, 64), V100)
    with pytest.raises(InvalidArgument, match="tile"):
        cost_model.tiles(Problem("gemm_nt", "float32", 64, 64, 64), variants.find("gemm_nt", "float32", family="naive"))


def test_a_convolution_that_moves_nothing_is_a_plain_product():
    """1x1 at stride 1 without pad or groups; any of those makes it a convolution again."""
    plain = conv_shape((7, 7, 64), (32, 1, 1, 64), (1, 1), (0, 0, 0, 0), (1, 1))
    strided = conv_shape((7, 7, 64), (32, 1, 1, 64), (2, 2), (0, 0, 0, 0), (1, 1))
    grouped = conv_shape((7, 7, 64), (32, 1, 1, 32), (1, 1), (0, 0, 0, 0), (1, 1), groups=2)
    assert conv2d_problem(Pass.FPROP, plain, 2, "float32", 4) == Problem("gemm_nt", "float32", 98, 32, 64, vector=4)
    assert conv2d_problem(Pass.DGRAD, strided, 2, "float32", 4) == Problem(
        "conv2d_dgrad", "float32", 32, 64, 8, phases=4, vector=4
    )
    assert conv2d_problem(Pass.WGRAD, grouped, 2, "float32", 4) == Problem(
        "conv2d_wgrad", "float32", 16, 32, 98, groups=2, vector=4, tensor_copies=False, tap_channels=32
    )


def test_the_workspace_of_a_gradient_covers_addresses_that_turn_out_not_to_be_aligned():
    """The plan knows extents and no addresses, so it takes the larger of both."""
    shape = conv_shape((7, 7, 512), (512, 3, 3, 512), (1, 1), (1, 1, 1, 1), (1, 1))
    needs = [
        product_workspace(conv2d_problem(Pass.DGRAD, shape, 1, "float32", vector), H200) for vector in (1, 4)
    ]  # fmt: skip
    assert conv2d_workspace(Pass.DGRAD, shape, 1, "float32", H200) == max(needs) > 0


@pytest.mark.parametrize(
    ("channels", "groups", "family"), [(256, 1, "hopper"), (256, 2, "mma"), (24, 1, "mma")], ids=str
)
def test_the_tensor_cores_of_hopper_are_fed_by_tensor_copies_where_those_fill_their_boxes(channels, groups, family):
    """A plain convolution goes to kernels/hopper; groups and few channels leave it to kernels/mma."""
    shape = conv_shape((28, 28, channels), (256, 3, 3, channels // groups), (1, 1), (1,) * 4, (1, 1), groups=groups)
    problem = conv2d_problem(Pass.FPROP, shape, 64, "float16", 8)
    found = ranked(problem, H200)
    assert found[0].family == family
    assert ("hopper" in {variants.family for variants in found}) == (family == "hopper")


def first_stage(operation, c, k, taps, samples, dtype):
    """Give the problem of a layer of ResNet-50's first stage, 56x56."""
    shape = conv_shape((56, 56, c), (k, taps, taps, c), (1, 1), (taps // 2,) * 4, (1, 1))
    return conv2d_problem(Pass(operation.removeprefix("conv2d_")), shape, samples, dtype, 4 if dtype == "tf32" else 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize(
    ("operation", "c", "k", "taps"),
    [
        ("conv2d_fprop", 64, 64, 3),
        ("conv2d_dgrad", 64, 64, 3),
        ("conv2d_fprop", 256, 64, 1),
        ("conv2d_dgrad", 64, 256, 1),
    ],
)
def test_64_columns_are_the_rows_of_wgmma_where_tiles_fill_the_device(operation, c, k, taps, dtype):
    """Shared memory is read less for it: from batch 16 on, but neither for one sample nor for 256 columns."""
    for samples in (16, 32, 256):
        assert ranked(first_stage(operation, c, k, taps, samples, dtype), H200)[0].tile.swapped, samples
    assert not ranked(first_stage(operation, c, k, taps, 1, dtype), H200)[0].tile.swapped
    assert not ranked(attrs.evolve(first_stage(operation, c, k, taps, 32, dtype), n=256), H200)[0].tile.swapped


@pytest.mark.parametrize(
    ("tile", "share"),
    [
        ("128x64x64", 57),
        ("128x128x64", 80),
        ("128x192x64", 92),
        ("256x128x64", 89),
        ("256x64x64", 80),
        ("128x256x64", 100),
    ],
)
def test_shared_memory_bounds_narrow_tiles_less_where_they_are_swapped(tile, share, monkeypatch):
    """Percent of wgmma's rate where the L2 keeps up, as kernels/configs.toml says them."""
    monkeypatch.setattr(cost_model, "_HOPPER_L2_BYTES_PER_CLOCK", float("inf"))
    found = variants.find("conv2d_fprop", "float16", family="hopper", tile=tile)
    clocks = cost_model.step_clocks(first_stage("conv2d_fprop", 64, 64, 3, 32, "float16"), found, H200)
    assert round(100 * found.tile.m * found.tile.n * found.tile.k / 2048 / clocks) == share


def test_rows_that_are_no_whole_16_bytes_have_no_swapped_tile():
    """100 channels of float16 are copied by no tensor map; of tf32 they are."""
    problem = first_stage("conv2d_fprop", 64, 64, 3, 32, "float16")
    assert [found for found in ranked(problem, H200) if found.tile.swapped]
    assert not [found for found in ranked(attrs.evolve(problem, n=100, vector=4), H200) if found.tile.swapped]
    tf32 = attrs.evolve(problem, dtype="tf32", n=100, vector=4)
    assert [found for found in ranked(tf32, H200) if found.tile.swapped]


@pytest.mark.parametrize("extents", [(0, 64, 64), (64, 64, 0), (2**31, 64, 64), (64, 64, 2**31)])
def test_extents_that_kernels_of_hopper_do_not_count_go_elsewhere(extents):
    """An empty product has no tensor map, and they count in 32 bits."""
    found = ranked(Problem("gemm_nt", "float16", *extents, vector=8), H200)
    assert "hopper" not in {variants.family for variants in found}


def test_an_idle_block_of_a_cluster_counts():
    """3 rows of tiles are 4 blocks in clusters of two, and 3 without: the same problem is dearer in clusters."""
    problem = Problem("gemm_nt", "float16", 300, 256, 4096, vector=8)
    alone, shared = (
        variants.find("gemm_nt", "float16", family="hopper", tile=name) for name in ("128x256x64", "128x256x64_c2")
    )

    assert (cost_model.blocks(problem, alone), cost_model.blocks(problem, shared)) == (3, 4)


def test_a_box_of_a_tensor_map_holds_channels_of_one_tap():
    """72 channels take two boxes of 64 for each of 9 taps, 1152 columns on Hopper; 648 where taps share a tile."""
    problem = conv2d_problem(
        Pass.WGRAD, conv_shape((14, 14, 72), (64, 3, 3, 72), (1, 1), (1,) * 4, (1, 1)), 2, "float16", 8
    )
    hopper = variants.find("conv2d_wgrad", "float16", family="hopper", tile="128x128x64")
    mma = variants.find("conv2d_wgrad", "float16", family="mma", tile="128x128x32", vector=8)

    assert cost_model.tiles(problem, hopper) == (1, 1152 // 128)
    assert cost_model.tiles(problem, mma) == (1, -(-648 // 128))


def test_what_a_variant_cannot_load_it_cannot_run():
    """Groups are nothing for tensor maps, and rows of 4 elements nothing for loads of 8."""
    hopper = variants.find("conv2d_fprop", "float16", family="hopper", tile="128x128x64")
    mma = variants.find("conv2d_fprop", "float16", family="mma", tile="128x128x32", vector=8)
    problem = Problem("conv2d_fprop", "float16", 392, 64, 576, vector=8)

    assert ranking.can_run(problem, hopper)
    assert not ranking.can_run(attrs.evolve(problem, groups=2), hopper)
    assert ranking.can_run(attrs.evolve(problem, groups=2), mma)
    assert not ranking.can_run(attrs.evolve(problem, vector=4), mma)


@pytest.mark.parametrize(
    ("mode", "experimental", "finished", "phased", "others"),
    [
        ("training", (), 46, 6, 0),
        ("training", EXPERIMENTAL, 46, 6, 0),
        ("inference", (), 52, 0, 1),
        ("inference", EXPERIMENTAL, 53, 0, 0),
    ],
)
def test_convolutions_of_resnet50_are_finished_in_registers(mode, experimental, finished, phased, others):
    """
    With all that their epilogues do: masks and residuals of gradients, folded norms and residuals of inference.

    Input gradients with a stride (6) are where the choice times that variant and it wins.  The other one is the first
    layer in inference, unless its batch is in patches.
    """
    result, pass_ = ("dx0", Pass.DGRAD) if mode == "training" else ("y", Pass.FPROP)
    program = schedule(models.build("resnet50"), mode, library="cubatch", experimental=experimental)
    found = []
    for op in program.ops:
        if not isinstance(op.layer, Conv2d) or result not in op.writes:
            continue
        problem = problem_of(op.layer, pass_, 256, "float16")
        chosen = first_ranked(problem, catalogue.find("h200-sxm"))
        has_terms = bool(op.ending - {"folded"})
        for kind, kernel in (("usual", chosen.kernel), ("phased", of_phases(problem, chosen.kernel))):
            if kernel and kernel.family == "hopper" and can_finish(problem, kernel, chosen.slices, has_terms=has_terms):
                found.append(kind)
                break
        else:
            found.append("others")
    assert [found.count(kind) for kind in ("usual", "phased", "others")] == [finished, phased, others]


@pytest.mark.parametrize(
    ("change", "slices", "has_terms", "expected"),
    [
        ({}, 1, True, True),
        ({"phases": 4}, 1, False, False),
        ({}, 2, False, False),
        ({"n": 252}, 1, False, False),
        ({"operation": "conv2d_wgrad"}, 1, False, False),
        ({"dtype": "tf32"}, 1, True, False),
        ({"dtype": "tf32"}, 1, False, True),
    ],
)
def test_each_limit_of_finishing_in_registers_refuses_alone(change, slices, has_terms, expected):
    """Phases, slices, rows of odd bytes, filter gradients, and terms of 32 bits are stored another way."""
    usual = variants.find("gemm_nn", "float16", family="hopper", tile="128x256x64")
    problem = attrs.evolve(Problem("gemm_nn", "float16", 512, 256, 64, vector=8), **change)
    assert can_finish(problem, usual, slices, has_terms=has_terms) == expected
    swapped = variants.find("gemm_nn", "float16", family="hopper", tile="256x64x64")
    is_short = problem.dtype != "tf32"  # the transposing store has elements of 16 bits
    assert can_finish(problem, swapped, slices, has_terms=has_terms) == (expected and is_short)


@pytest.mark.parametrize(
    ("change", "kernel", "expected"),
    [
        ({}, {"family": "hopper", "tile": "256x128x64"}, "256x128x64"),
        ({"phases": 1}, {"family": "hopper", "tile": "256x128x64"}, None),
        ({"dtype": "tf32"}, {"family": "hopper", "tile": "128x256x32"}, None),
        ({}, {"family": "mma", "tile": "128x128x32", "vector": 8}, None),
    ],
)
def test_only_phases_of_short_elements_on_hopper_have_another_variant(change, kernel, expected):
    """It has the same tile, and the phases do not keep it from finishing sums in registers."""
    problem = attrs.evolve(Problem("conv2d_dgrad", "float16", 50176, 256, 576, phases=4, vector=8), **change)
    usual = variants.find("conv2d_dgrad", problem.dtype, **kernel)
    other = of_phases(problem, usual)
    assert (other and other.tile_name) == expected
    assert not can_finish(attrs.evolve(problem, phases=4), usual, 1, has_terms=True)
    assert other is None or can_finish(problem, other, 1, has_terms=True)


def test_every_tile_of_short_elements_on_hopper_has_a_variant_for_phases():
    """A tile that is added to the usual variants is missed there only by a step with such a gradient."""
    problem = Problem("conv2d_dgrad", "float16", 50176, 256, 576, phases=4, vector=8)
    usual = [kernel for kernel in variants.kernels() if (kernel.operation, kernel.family) == ("conv2d_dgrad", "hopper")]
    found = [of_phases(problem, kernel) for kernel in usual if kernel.dtype != "tf32"]
    assert {kernel.name for kernel in found} == {
        kernel.name for kernel in variants.kernels() if kernel.operation == "conv2d_dgrad_phases"
    }
