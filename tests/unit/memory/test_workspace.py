"""Scratch memory on hand-written kernels: what the plan reserves for each operation."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.kernels import problem as problems
from cubatch.kernels.ranking import other_slices, ranked, slices
from cubatch.memory import workspace
from cubatch.memory.plan import buffer_sizes, plan
from cubatch.memory.schedule import schedule
from cubatch.network import layers, models
from cubatch.network.graph import Network
from cubatch.network.layer import extents
from cubatch.network.passes import Pass
from cubatch.workload import Workload

V100, A100 = catalogue.find("v100-sxm2-16gb"), catalogue.find("a100-sxm4-40gb")
LAYERS = [
    layers.Conv2d(h=14, w=13, c=64, k=32, r=3, s=3, pad=1),
    layers.Conv2d(h=15, w=9, c=6, k=10, r=3, s=5, stride=2, groups=2),
    layers.Conv2d(h=14, w=14, c=48, k=48, r=5, s=5, pad=2, groups=48),
    layers.Linear(c=700, k=30),
    layers.BatchNorm2d(h=7, w=9, c=24),
]


def needs(layer, batch_size, dtype="float32", device=V100):
    """Bytes of each operation of a training step of one layer, by kind."""
    program = schedule(layer, "training")
    return {
        op.kind: workspace.kernel_workspace_bytes(op, program, batch_size, dtype, device)
        for op in program.ops
        if op.workspace is not None
    }


@given(
    layer=st.sampled_from(LAYERS),
    batch_size=st.integers(1, 3000),
    more=st.integers(1, 500),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_products_never_need_less_for_a_larger_batch(layer, batch_size, more, dtype):
    """Were it otherwise, a batch could fit where a smaller one does not, and no largest one could be found."""
    if isinstance(layer, layers.BatchNorm2d) or layer.parameter_shapes["w"][-1] == 1:
        return  # a few partial sums for each SM, which even sharing makes go up and down by some
    small, large = needs(layer, batch_size, dtype), needs(layer, batch_size + more, dtype)
    assert all(small[kind] <= large[kind] for kind in small)


@given(
    heads=st.integers(1, 4), width=st.integers(1, 80), tokens=st.integers(1, 300), batch_size=st.integers(1, 300),
    more=st.integers(1, 50), dtype=st.sampled_from(["float32", "float16"]),
)  # fmt: skip
def test_attention_never_needs_less_for_a_larger_batch_and_less_where_it_keeps(
    heads, width, tokens, batch_size, more, dtype
):
    """
    As products; in training forward what lies between the projections is kept, and no scratch memory.

    In inference there are weights among it only of heads of more than 64 channels, in rows of whole 8 elements.
    """
    layer = layers.Attention(h=tokens, w=1, c=heads * width, heads=heads)
    small, large = needs(layer, batch_size, dtype), needs(layer, batch_size + more, dtype)
    assert all(small[kind] <= large[kind] for kind in small)
    program = schedule(layer, "inference")
    (op,) = program.ops
    alone = workspace.kernel_workspace_bytes(op, program, batch_size, dtype, V100)
    row = (tokens + 7) // 8 * 8
    elements = batch_size * tokens * (4 * heads * width + heads * row * (width > 64))
    between = alone - small["forward"] - elements * (4 if dtype == "float32" else 2)
    assert 0 <= between < 3 * 64  # each of the three in whole units of alignment


@pytest.mark.parametrize(
    ("dtype", "device", "runs"), [("float16", A100, True), ("float16", V100, False), ("tf32", A100, False)]
)
def test_gradients_of_attention_without_stored_weights_need_a_number_per_query_instead(dtype, device, runs):
    """The plan has them where the kernels run: 6 heads of 197 tokens, rows of 200 elements."""
    layer, n = layers.Attention(h=197, w=1, c=384, heads=6), 5
    kept, again = (
        plan(attrs.evolve(Workload.of(layer, device, mode="training", dtype=dtype), experimental=names), n)
        for names in ([], ["flash_attention"])
    )
    sizes = [
        next(each.sizes[op.workspace] for op in each.schedule.ops if op.kind == "backward") for each in (kept, again)
    ]
    saving = n * 6 * 197 * (200 * 2 - 4)
    assert sizes[0] - sizes[1] == pytest.approx(runs * saving, abs=256)  # sizes are aligned
    assert (again.total < kept.total) == runs


@given(
    layer=st.sampled_from(LAYERS[:2] + LAYERS[3:4]),
    batch_size=st.integers(1, 4000),
    dtype=st.sampled_from(["float32", "tf32", "float16", "bfloat16"]),
    device=st.sampled_from([V100, A100]),
)
def test_the_slices_of_every_variant_fit(layer, batch_size, dtype, device):
    """Whichever variant is chosen, its partial sums in float32 lie within what is reserved."""
    for pass_, kind in ((Pass.FPROP, "forward"), (Pass.DGRAD, "backward"), (Pass.WGRAD, "backward")):
        problem = problems.problem_of(layer, pass_, batch_size, dtype)
        for found in ranked(problem, device):
            count = max(slices(problem, found, device), *other_slices(problem, found, device).values(), 1)
            partials = 4 * count * problem.m * problem.n * problem.groups * problem.phases if count > 1 else 0
            assert partials <= needs(layer, batch_size, dtype, device)[kind]


def test_most_operations_need_none():
    """Pooling, activations, sums and the optimiser work in place: their scratch memory is nothing."""
    program = schedule(models.build("resnet18"), "training")
    for op in program.ops:
        if op.workspace is not None and (op.node is None or not isinstance(op.node.layer, tuple(map(type, LAYERS)))):
            wanted = 0 if op.kind != "loss" else None
            for dtype in ("float32", "bfloat16"):
                got = workspace.kernel_workspace_bytes(op, program, 64, dtype, V100)
                assert got == wanted or (wanted is None and got > 0)


def test_an_update_in_float16_needs_a_flag_for_each_block_of_gradients():
    """Four bytes for every 8192 of them; nothing where the loss is not scaled, or a layer alone has no loss."""
    network = models.build("mlp")
    p = 1000 * 100 + 100 + 3 * (100 * 100 + 100) + 100 * 10 + 10
    for spec, dtype, wanted in (
        (network, "float16", 4 * -(-p // 8192)),
        (network, "bfloat16", 0),
        (layers.Linear(c=1000, k=100), "float16", 0),
    ):
        program = schedule(spec, "training")
        assert workspace.kernel_workspace_bytes(program.ops[-1], program, 64, dtype, V100) == wanted


def test_a_filter_over_patches_has_room_beside_its_product():
    """Unlike that of a convolution of the same extents, which reads no batch."""
    network = Network(
        input_shape=(14, 14, 3),
        layers=[
            layers.Conv2d(name="first", k=16, r=7, s=7, stride=2, pad=3),
            layers.Conv2d(name="between", k=16, r=1, s=1, pad=[1, 2, 1, 2]),
            layers.Conv2d(name="last", k=16, r=4, s=4),
        ],
    )  # fmt: skip
    program = schedule(network, "inference", library="cubatch", experimental={"space_to_depth"})
    first, _, last = program.ops
    assert extents(first.layer) == extents(last.layer)
    needed = [workspace.kernel_workspace_bytes(op, program, 5, "float16", V100) for op in (first, last)]
    assert needed[0] == needed[1] + 16 * 4 * 4 * 16 * 2
    sizes = buffer_sizes(program, 5, "float16", V100, "cubatch")
    assert sizes[first.workspace] - sizes[last.workspace] == needed[0] - needed[1]


def test_tf32_is_stored_as_float32():
    """
    What only rounds its factors needs what float32 needs, where it is no product or there are no tensor cores for it.

    A product may run on float32's variants or on its own, so that there is room for the slices of either.
    """
    for layer in [attrs.evolve(LAYERS[0], r=5), *LAYERS[1:]]:  # Winograd's algorithm is for float32 alone
        assert needs(layer, 64, "tf32") == needs(layer, 64)
        full, rounded = needs(layer, 64, device=A100), needs(layer, 64, "tf32", A100)
        assert all(full[kind] <= rounded[kind] for kind in full)
        if isinstance(layer, layers.BatchNorm2d):
            assert full == rounded


def test_layers_of_one_kind_share_what_was_worked_out_whatever_their_names():
    """Names do not enter: the same extents under another name cost nothing to plan."""
    first = workspace._layer_bytes.cache_info().misses
    needs(LAYERS[0], 77)
    once = workspace._layer_bytes.cache_info().misses - first
    needs(attrs.evolve(LAYERS[0], name="other"), 77)
    assert workspace._layer_bytes.cache_info().misses - first == once == 2


def test_a_gpu_of_unknown_size_is_refused():
    """Slices follow from the number of SMs, which nothing guesses."""
    with pytest.raises(InvalidArgument) as caught:
        needs(LAYERS[0], 8, device=Device(name="bare"))
    assert "num_sms" in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "pass_", "operation", "extents"),
    [
        (LAYERS[0], Pass.FPROP, "conv2d_fprop", (5 * 14 * 13, 32, 9 * 64)),
        (LAYERS[0], Pass.WGRAD, "conv2d_wgrad", (32, 9 * 64, 5 * 14 * 13)),
        (layers.Conv2d(h=7, w=7, c=8, k=16, r=1, s=1), Pass.DGRAD, "gemm_nn", (5 * 49, 8, 16)),
        (LAYERS[3], Pass.FPROP, "gemm_nt", (5, 30, 700)),
        (LAYERS[3], Pass.DGRAD, "gemm_nn", (5, 700, 30)),
        (LAYERS[3], Pass.WGRAD, "gemm_tn", (30, 700, 5)),
    ],
)
def test_passes_are_products_of_known_extents(layer, pass_, operation, extents):
    """Rows, columns and depth of each pass, as kernels/README.md tables them."""
    problem = problems.problem_of(layer, pass_, 5, "float32")
    assert (problem.operation, (problem.m, problem.n, problem.k)) == (operation, extents)


def test_what_no_tile_runs_is_no_product():
    """A depthwise convolution has kernels of its own, and a pooling multiplies nothing."""
    assert problems.problem_of(LAYERS[2], Pass.FPROP, 5, "float32") is None
    assert problems.problem_of(layers.ReLU(h=2, w=2, c=2), Pass.FPROP, 5, "float32") is None


@pytest.mark.parametrize(
    "layer",
    [
        layers.Linear(c=512, k=11),
        layers.Conv2d(h=7, w=7, c=512, k=11, r=1, s=1),
        layers.Conv2d(h=7, w=7, c=1024, k=22, r=3, s=3, groups=2),
    ],
    ids=["linear", "1x1", "3x3 in groups"],
)
@pytest.mark.parametrize(("pass_", "vector"), [(Pass.FPROP, 8), (Pass.DGRAD, 1), (Pass.WGRAD, 1)])
def test_gradients_load_rows_of_the_outputs_too(layer, pass_, vector):
    """Of 512 inputs and 11 outputs of a group only the forward pass can load 8 elements at a time."""
    problem = problems.problem_of(layer, pass_, 32, "float16")

    assert problem.vector == vector
