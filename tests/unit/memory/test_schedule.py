"""The schedule against a direct simulation: every value is there, unharmed, when it is read."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from cubatch.checks import EXPERIMENTAL
from cubatch.memory.schedule import schedule
from cubatch.memory.schedule_records import Schedule
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import (
    GELU,
    Add,
    Attention,
    BatchNorm2d,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    HardSwish,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    ReLU6,
    Scale,
    Sigmoid,
    SiLU,
    Slice,
)

BRANCHED = Network(
    input_shape=(8, 8, 4),
    layers=[
        Conv2d(name="stem", k=4, r=3, s=3, pad=1),
        BatchNorm2d(name="norm"),
        ReLU(name="a"),
        Conv2d(name="left", k=4, r=1, s=1),
        ReLU(name="left2"),
        Add(name="sum", inputs=["left2", "a"]),
        Conv2d(name="again", k=4, r=1, s=1),
        Add(name="sum2", inputs=["again", "sum", "a"]),
        Concat(name="both", inputs=["sum2", "sum"]),
        Dropout(),
        ReLU(),
        MaxPool2d(r=2, s=2),
        Flatten(),
        Linear(k=8),
        Sigmoid(),
        Linear(k=3),
    ],
)
TWICE = Network(
    input_shape=(4, 4, 2), layers=[Conv2d(name="x", k=2, r=1, s=1), Add(inputs=["x", "x"]), Conv2d(k=2, r=1, s=1)]
)
CUT = Network(
    input_shape=(4, 4, 2),
    layers=[
        Conv2d(name="x", k=8, r=1, s=1),
        Slice(name="a", inputs=["x"], end=2),
        Slice(name="b", inputs=["x"], start=2, end=5),
        Slice(name="c", inputs=["x"], start=5, end=8),
        Conv2d(name="all", inputs=["x"], k=2, r=1, s=1),
        Slice(name="meets c", inputs=["x"], start=4, end=8),
        Concat(inputs=["a", "b", "c", "all", "meets c"]),
        Flatten(),
        Linear(k=2),
    ],
)


ACTIVATED = Network(
    input_shape=(8, 8, 4),
    layers=[
        Conv2d(name="stem", k=4, r=3, s=3, pad=1),
        BatchNorm2d(name="norm"),
        SiLU(name="a"),
        Conv2d(name="deep", k=4, r=3, s=3, pad=1, groups=4),
        BatchNorm2d(name="norm2"),
        ReLU(name="b"),
        Conv2d(name="deep2", k=4, r=3, s=3, pad=1, groups=4),
        BatchNorm2d(name="norm3"),
        Add(name="sum", inputs=["norm3", "a"]),
        SiLU(name="c"),
        BatchNorm2d(name="norm4"),
        ReLU6(name="d"),
        ReLU(name="e"),
        BatchNorm2d(name="norm5"),
        Sigmoid(name="f"),
        HardSwish(name="k", inputs=["norm5"]),
        Add(name="sum2", inputs=["f", "norm5", "k"]),
        BatchNorm2d(name="norm8"),
        SiLU(name="l"),
        ReLU(name="m"),
        BatchNorm2d(name="norm7"),
        SiLU(name="i"),
        Add(name="sum3", inputs=["sum2", "i"]),
        Conv2d(name="g", k=2, r=8, s=8),
        BatchNorm2d(name="norm6"),
        ReLU(name="h"),
        Flatten(),
        Linear(k=2),
    ],
)
# Global pools next to other readers of: a norm's ReLU, read by a product first and last; a norm; a sum.
POOLED = Network(
    input_shape=(8, 8, 4),
    layers=[
        Conv2d(name="stem", k=4, r=3, s=3, pad=1),
        BatchNorm2d(name="norm"),
        ReLU(name="a"),
        Conv2d(name="first", k=4, r=1, s=1),
        GlobalAvgPool(name="second pool", inputs=["a"]),
        BatchNorm2d(name="norm2", inputs=["first"]),
        ReLU(name="b"),
        GlobalAvgPool(name="first pool"),
        Conv2d(name="second", inputs=["b"], k=4, r=1, s=1),
        BatchNorm2d(name="norm3"),
        GlobalAvgPool(name="plain pool"),
        GlobalAvgPool(name="again", inputs=["norm3"]),
        Scale(name="excited", inputs=["norm3", "plain pool"]),
        Add(name="sum", inputs=["excited", "norm3"]),
        GlobalAvgPool(name="sum pool"),
        Scale(name="excited2", inputs=["sum", "sum pool"]),
        Conv2d(name="third", k=4, r=1, s=1),
        BatchNorm2d(name="norm4"),
        GlobalAvgPool(name="next to a product"),
        Conv2d(name="fourth", inputs=["norm4"], k=4, r=1, s=1),
        GlobalAvgPool(name="last pool"),
        Add(name="means", inputs=["second pool", "first pool", "again", "next to a product", "last pool"]),
        Flatten(),
        Linear(k=2),
    ],
)
LIBRARIES = ["im2col", "cubatch"]
# GELUs: of a product, read by one; of one that another layer reads too; read by two; behind a sum, a norm and a product
# without a bias.
CURVED = Network(
    input_shape=(8, 8, 4),
    layers=[
        Conv2d(name="stem", k=8, r=3, s=3, pad=1),
        GELU(name="a"),
        Conv2d(name="first", k=8, r=1, s=1),
        GELU(name="b"),
        Add(name="sum", inputs=["first", "b"]),
        GELU(name="c"),
        Linear(name="second", k=8),
        GELU(name="d"),
        Linear(name="third", k=8),
        Add(name="sum2", inputs=["third", "d"]),
        Conv2d(name="no bias", k=8, r=1, s=1, bias=False),
        GELU(name="e"),
        Linear(name="fourth", k=8),
        BatchNorm2d(name="norm"),
        GELU(name="f"),
        Flatten(name="flat"),
        Linear(name="fifth", k=2),
    ],
)
NETWORKS = [BRANCHED, TWICE, CUT, ACTIVATED, POOLED, CURVED, *(models.build(name) for name in models.names())]


def run_symbolically(program: Schedule) -> dict[str, str]:
    """
    Execute with terms in place of numbers.

    Each buffer holds the term last written to it; gradients are sets of contributions.  Returns the
    term of every parameter-carrying layer's backward inputs.
    """
    held: dict[int, object] = {}
    for number in program.given:
        held[number] = program.buffers[number].name
    seen: dict[str, object] = {}
    for op in program.ops:
        for role, number in op.reads.items():
            assert number in held, f"{op.kind} of {op.node and op.node.name} reads {role} before it is written"
        reads = {role: held[number] for role, number in op.reads.items()}
        name = op.node.name if op.node else ""
        if op.kind == "fold":
            held |= dict.fromkeys(op.writes.values(), "folded")
            continue
        if op.kind == "accumulate":
            held[op.writes["y"]] = reads["x0"] + reads["x1"]
            continue
        if op.kind == "loss":
            held[op.writes["dy"]] = (("loss", "dy"),)
            continue
        for role, number in op.writes.items():
            is_gradient = op.kind == "backward"
            of = op.then[-1].name if op.then and role == "y" else name
            if op.summed is not None and role in {"statistics", "means"}:
                is_gradient, of = False, op.summed.name
            held[number] = (
                ((name, role), *reads.get("residual", ()), *reads.get("parts", ())) if is_gradient else (of, role)
            )
        if op.kind == "backward":
            seen[name] = reads
    return seen


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("library", "experimental"), [*((library, ()) for library in LIBRARIES), ("cubatch", EXPERIMENTAL)]
)
def test_every_saved_value_is_intact_when_the_backward_pass_reads_it(
    network: Network, recompute: bool, library: str, experimental: tuple[str, ...]
) -> None:
    """In-place writes and forgotten activations never destroy what a backward operation still reads."""
    program = schedule(network, "training", recompute=recompute, library=library, experimental=experimental)
    by_name = {node.name: node for node in network.nodes}
    norms = {
        op.node.name: op.summed for op in program.ops
        if op.kind == "backward" and op.node and op.summed and op.summed.layer.has_statistics
    }  # fmt: skip
    for name, reads in run_symbolically(program).items():
        node = by_name[name]
        for role, term in reads.items():
            if role in {"residual", "parts", "pooled"}:
                continue
            if role == "curved":
                curve = by_name[by_name[node.inputs[0]].inputs[0]]
                assert term == (curve.name, "y")
            elif role.startswith("x") or role in {"positive", "normed"}:
                of = norms[name] if role == "normed" else node
                source = of.inputs[int(role[1:]) if role.startswith("x") else 0]
                assert term == "input" if source == "input" else term in acceptable(network, source)
            elif role == "y":
                assert term == (name, "y") or (isinstance(node.layer, ReLU) and term in acceptable(network, name))
            elif role != "dy":
                assert term == (norms[name].name if name in norms else name, role)


def acceptable(network: Network, name: str) -> list[object]:
    """Terms that stand for a layer's output: its own, or its input's where it is done by its neighbours or a view."""
    node = next(node for node in network.nodes if node.name == name)
    terms: list[object] = [(name, "y")]
    if isinstance(node.layer, ReLU | Flatten):
        source = node.inputs[0]
        terms += ["input"] if source == "input" else acceptable(network, source)
    return terms


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_gradient_is_the_sum_over_all_readers(network: Network, recompute: bool, library: str) -> None:
    """The gradient that reaches a layer holds each of its readers' contributions exactly once."""
    program = schedule(network, "training", recompute=recompute, library=library)
    backward = {op.node.name for op in program.ops if op.kind == "backward" and op.node}
    expected: dict[str, list[tuple[str, str]]] = {network.nodes[-1].name: [("loss", "dy")]}
    for reader in reversed(network.nodes):  # readers come before what they read
        for i, source in enumerate(reader.inputs):
            arrived = [(reader.name, f"dx{i}")] if reader.name in backward else expected[reader.name]
            expected.setdefault(source, []).extend(arrived)
    for name, reads in run_symbolically(program).items():
        assert sorted((*reads["dy"], *reads.get("pooled", ()))) == sorted(expected[name])


def test_ranges_that_do_not_meet_share_one_gradient() -> None:
    """Backward from the last: `meets c` has one of its own; `c`, `b` and `a` share another; `all` is added to both."""
    ops = [op for op in schedule(CUT, "training").ops if op.kind in {"backward", "accumulate"}]
    cut = {op.node.name: op for op in ops if op.kind == "backward" and op.node and isinstance(op.node.layer, Slice)}
    assert {name: "parts" in op.reads for name, op in cut.items()} == {
        "meets c": False, "c": False, "b": True, "a": True,
    }  # fmt: skip
    shared = cut["c"].writes["dx0"]
    for name in "ab":
        assert cut[name].reads["parts"] == cut[name].writes["dx0"] == shared
    assert cut["meets c"].writes["dx0"] != shared
    assert sum(op.kind == "accumulate" for op in ops) == 2


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_slope_is_applied_once(network: Network, recompute: bool, library: str) -> None:
    """By its own operation or the norm before it; a ReLU's also by the max pool after it, or with its gradient."""
    program = schedule(network, "training", recompute=recompute, library=library)
    by_name = {node.name: node for node in network.nodes}
    applied: list[str] = []
    for op in program.ops:
        if op.kind != "backward" or op.node is None:
            continue
        if op.node.layer.slope_of_input:
            applied.append(op.node.name)
        if op.activation is not None:
            assert [node.layer.type for node in op.then] == [op.activation]
            applied.append(op.then[0].name)
        if "positive" in op.reads or op.relu or isinstance(op.node.layer, MaxPool2d):
            name = op.node.inputs[0]
            while isinstance(by_name[name].layer, Flatten):
                name = by_name[name].inputs[0]
            if isinstance(by_name[name].layer, ReLU):
                applied.append(name)
    assert sorted(applied) == sorted(node.name for node in network.nodes if node.layer.slope_of_input)


def test_norms_compute_the_activation_that_alone_reads_them_and_its_slope() -> None:
    """
    Only on cubatch kernels, and never behind a sum, twice, or where the slope needs the activation's result.

    A product applies the slope of the ReLU h, but none that of b: kernels of depthwise convolutions have no mask.
    """
    done = {
        kind: {
            op.node.name: ([node.name for node in op.then], op.activation)
            for op in schedule(ACTIVATED, "training", library="cubatch").ops
            if op.kind == kind and op.node is not None and isinstance(op.node.layer, BatchNorm2d) and op.then
        }
        for kind in ("forward", "backward")
    }
    own = {"norm": (["a"], "silu"), "norm4": (["d"], "relu6"), "norm7": (["i"], "silu"), "norm8": (["l"], "silu")}
    assert done["forward"] == own | {"norm2": (["b"], None), "norm3": (["sum"], None), "norm6": (["h"], None)}
    assert done["backward"] == own | {"norm2": (["b"], "relu")}
    for mode in ("training", "inference"):
        assert not any(op.activation for op in schedule(ACTIVATED, mode).ops)
    inside = schedule(ACTIVATED, "inference", library="cubatch").ops
    assert {op.node.name for op in inside if op.activation and op.node} == {"norm4", "norm7", "norm8"}


def test_products_compute_the_sums_of_the_norms_next_to_them() -> None:
    """
    In `resnet50` of all 53 norms forward; back of all but the stem's, behind a max pool, the last one's, behind the
    global pool, and one of the two behind each of the 4 sums with a shortcut.  32 ReLUs lie between norm and product.
    """
    network = models.build("resnet50")
    by_name = {node.name: node for node in network.nodes}
    program = schedule(network, "training", library="cubatch", experimental={"norm_sums"})
    summed = [op for op in program.ops if op.summed is not None]
    assert Counter(op.kind for op in summed) == {"forward": 53, "backward": 53 - 1 - 1 - 4}
    assert sum(op.undoes_relu for op in summed) == 32
    for op in summed:
        assert op.node is not None
        assert op.summed is not None
        if op.kind == "forward":
            assert op.summed.inputs == (op.node.name,)
            assert program.buffers[op.writes["statistics"]].node == op.summed.name
        else:
            read = program.buffers[op.reads["normed"]]
            assert read.node == op.summed.inputs[0]
            assert isinstance(by_name[read.node].layer, Conv2d)
    norms = [op for op in program.ops if op.node is not None and isinstance(op.node.layer, BatchNorm2d)]
    assert Counter((op.kind, "statistics" in op.writes, "means" in op.reads) for op in norms) == {
        ("forward", False, False): 53, ("backward", False, True): 47, ("backward", False, False): 6,
    }  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_only_training_on_cubatch_kernels_changes_what_products_do(library: str, mode: str) -> None:
    """Elsewhere the switches change nothing; a depthwise convolution and a norm behind a norm share no sums."""
    program = schedule(ACTIVATED, mode, library=library, experimental={"norm_sums"})
    summed = {(op.kind, op.summed.name) for op in program.ops if op.summed is not None}
    shares = library == "cubatch" and mode == "training"
    assert summed == ({("forward", "norm"), ("forward", "norm6"), ("backward", "norm6")} if shares else set())
    if not shares:
        assert program == schedule(ACTIVATED, mode, library=library)
    curved = schedule(CURVED, mode, library=library, experimental={"gelu_products"})
    assert (curved == schedule(CURVED, mode, library=library)) != shares


@pytest.mark.parametrize("recompute", [False, True])
def test_products_apply_the_slope_of_a_gelu_of_another_product(recompute: bool) -> None:
    """
    Where a product reads the GELU first: "a", "d" and "e"; "c" is a sum's and "f" a norm's.

    With it comes the gradient of the bias before, if there is one.
    """
    program = schedule(CURVED, "training", library="cubatch", experimental={"gelu_products"}, recompute=recompute)
    back = {op.node.name: op for op in program.ops if op.kind == "backward" and op.node}
    slopes = {name: op for name, op in back.items() if "curved" in op.reads}
    assert {name: op.then[-1].name for name, op in slopes.items()} == {"first": "a", "third": "d", "fourth": "e"}
    assert {op.activation for op in slopes.values()} == {"gelu"}
    assert {name: op.summed and op.summed.name for name, op in slopes.items()} == {
        "first": "stem", "third": "second", "fourth": None,
    }  # fmt: skip
    assert {name for name, op in back.items() if op.has_bias_gradient} == {"stem", "second"}
    assert back.keys() & {"a", "b", "c", "d", "e", "f"} == {"b", "c"}
    for op in slopes.values():
        assert op.node
        assert program.buffers[op.reads["curved"]].shape == op.node.layer.input_shape


@pytest.mark.parametrize(("name", "blocks"), [("vit-base", 12), ("convnext-tiny", 18)])
def test_slopes_in_products_save_two_thirds_of_what_they_moved(name: str, blocks: int) -> None:
    """By hand: gradient and input were read and a gradient was written; the input is still read."""
    network = models.build(name)
    plain, fused = (
        schedule(network, "training", library="cubatch", experimental=of) for of in ((), ("gelu_products",))
    )
    elements = sum(math.prod(node.layer.output_shape) for node in network.nodes if isinstance(node.layer, GELU))
    assert len(plain.ops) - len(fused.ops) == blocks
    assert plain.moved - fused.moved == (3 - 1) * elements
    assert sum(op.has_bias_gradient for op in fused.ops) == blocks


def test_the_gradient_of_layer_norm_adds_that_of_other_branches() -> None:
    """Each block of `vit-base` has two sums, whose gradient a layer norm behind them reads with its own."""
    program = schedule(models.build("vit-base"), "training")
    norms = [op for op in program.ops if op.kind == "backward" and op.node and isinstance(op.node.layer, LayerNorm)]
    assert not [op for op in program.ops if op.kind == "accumulate"]
    added = [op for op in norms if "residual" in op.reads]
    assert (len(added), len(norms)) == (24, 25)
    assert all(op.reads["residual"] == op.writes["dx0"] for op in added)


def test_an_activation_inside_its_norm_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 33 SiLUs of `efficientnet-b0` were read and written, and backward read twice and written."""
    network = models.build("efficientnet-b0")
    inside = schedule(network, "training", library="cubatch")
    monkeypatch.setattr("cubatch.memory.schedule.norms_activate", lambda _: False)
    outside = schedule(network, "training", library="cubatch")
    norms = {node.name for node in network.nodes if isinstance(node.layer, BatchNorm2d)}
    curves = [node.layer for node in network.nodes if isinstance(node.layer, SiLU) and node.inputs[0] in norms]
    assert len(curves) == 2 * 16 - 1 + 2  # an expansion and a depthwise one in each block but the first; stem and head
    # Outside, the pools of 16 squeeze-and-excites read the gradient of their input and write the sum.
    excited = [node.layer for node in network.nodes if isinstance(node.layer, Scale)]
    assert len(outside.ops) - len(inside.ops) == 2 * len(curves) + len(excited)
    once, again = (sum(math.prod(layer.output_shape) for layer in each) for each in (curves, excited))
    assert outside.moved - inside.moved == 5 * once + 2 * again


@pytest.mark.parametrize("experimental", [(), ("norm_sums",)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_gradient_of_a_global_pool_is_added_where_another_is_read(
    library: str, experimental: tuple[str, ...]
) -> None:
    """
    On cubatch kernels by the norm, unless a product reads the norm's ReLU first and masks the sum; else by the pool.

    A norm that adds one has its own sums, since a product's would be of a part of the gradient.
    """
    program = schedule(POOLED, "training", library=library, experimental=experimental)
    back = {op.node.name: op for op in program.ops if op.kind == "backward" and op.node}
    by_norm = {"norm2": "first pool", "norm3": "plain pool", "norm4": "next to a product"}
    by_norm = by_norm if library == "cubatch" else {}
    assert {name for name, op in back.items() if "pooled" in op.reads} == {*by_norm}
    for norm in by_norm:
        assert program.buffers[back[norm].reads["pooled"]].shape == (1, 1, 4)
        assert "means" not in back[norm].reads
    pools = {node.name: back.get(node.name) for node in POOLED.nodes if isinstance(node.layer, GlobalAvgPool)}
    assert {name for name, op in pools.items() if op is None} == {*by_norm.values()}
    own = {name: op for name, op in pools.items() if op is not None}
    alone = {"second pool", "last pool"}  # no gradient of their input is there before
    assert {name for name, op in own.items() if "residual" not in op.reads} == alone
    assert all(own[name].reads["residual"] == own[name].writes["dx0"] for name in own.keys() - alone)
    assert [op.node.name for op in program.ops if op.kind == "accumulate" and op.node] == ["norm3"]


def test_a_residual_network_has_few_operations_beside_its_layers() -> None:
    """
    Of `resnet50` in training: its layers but for 33 and 16 ReLUs that others do, and once back.

    Only the slope before the global pooling is an operation; gradients of forks are added up where they are made.
    """
    kinds = Counter(op.kind for op in schedule(models.build("resnet50"), "training").ops)
    slopes = [
        op.node.name for op in schedule(models.build("resnet50"), "training").ops
        if op.kind == "backward" and op.node is not None and isinstance(op.node.layer, ReLU)
    ]  # fmt: skip
    assert kinds["accumulate"] == 0
    assert len(slopes) == 1


def test_recompute_keeps_less_alive() -> None:
    """Recomputing lowers the bytes alive at the peak of a deep network, at the price of more operations."""
    network = models.build("resnet50")
    kept, again = schedule(network, "training"), schedule(network, "training", recompute=True)
    assert peak_elements(again) < 0.6 * peak_elements(kept)
    assert len(again.ops) > len(kept.ops)


def peak_elements(program: Schedule) -> int:
    """Most elements per sample alive at once, counted operation by operation."""
    spans = program.lifetimes
    return max(
        sum(
            b.elements
            for b, (first, last) in zip(program.buffers, spans, strict=True)
            if b.batched and first <= t <= last
        )
        for t in range(len(program.ops))
    )


def test_a_layer_on_its_own_does_all_three_passes() -> None:
    """A single layer in training computes the gradient of its input, a network's first layer does not."""
    conv = Conv2d(h=8, w=8, c=4, k=4, r=3, s=3, pad=1)
    alone = next(op for op in schedule(conv, "training").ops if op.kind == "backward")
    network = Network(input_shape=(8, 8, 4), layers=[Conv2d(k=4, r=3, s=3, pad=1)])
    inside = next(op for op in schedule(network, "training").ops if op.kind == "backward")
    assert "dx0" in alone.writes
    assert "dx0" not in inside.writes


def test_rows_of_attention_weights_are_padded_for_our_kernels_only() -> None:
    """By hand: 197 tokens and 3 heads; rows of 200 elements with our kernels, of 197 with the array library."""
    layer = Attention(h=197, w=1, c=192, heads=3)
    shapes = {
        library: {buffer.shape for buffer in schedule(layer, "training", library=library).buffers}
        for library in ("cubatch", "im2col")
    }
    assert (3 * 197 * 200,) in shapes["cubatch"] - shapes["im2col"]
    assert (3 * 197 * 197,) in shapes["im2col"] - shapes["cubatch"]


@pytest.mark.parametrize(("heads", "library", "stored"), [
    (3, "cubatch", (3 * 197,)), (2, "cubatch", (2 * 197 * 200,)), (3, "im2col", (3 * 197 * 197,)),
])  # fmt: skip
def test_attention_stores_sums_instead_of_weights_of_narrow_heads(
    heads: int, library: str, stored: tuple[int, ...]
) -> None:
    """By hand: 197 tokens; heads of 64 channels store a float32 per query, and of 96 weights, as an array library."""
    layer = Attention(h=197, w=1, c=192, heads=heads)
    program = schedule(layer, "training", library=library, experimental={"flash_attention"})
    forward, backward = program.ops[0], program.ops[-2]
    (role,) = forward.writes.keys() - {"y", "qkv", "mixed"}
    buffer = program.buffers[forward.writes[role]]
    assert (role, buffer.shape, buffer.itemsize) in {("log_sums", stored, 4), ("weights", stored, 0)}
    assert (role == "log_sums") == (library == "cubatch" and heads == 3)
    assert backward.reads[role] == forward.writes[role]
    inference = schedule(layer, "inference", library=library, experimental={"flash_attention"})
    assert all(set(op.writes) == {"y"} for op in inference.ops)


@pytest.mark.parametrize(("mode", "stored"), [("inference", (115, 115, 16)), ("training", (224, 224, 4))])
def test_a_layer_on_its_own_computes_the_gradient_of_a_batch_as_it_is(mode: str, stored: tuple[int, int, int]) -> None:
    """Without a gradient the batch is cut into patches of 2 x 2 pixels."""
    layer = Conv2d(h=224, w=224, c=3, k=64, r=7, s=7, stride=2, pad=3)
    program = schedule(layer, mode, library="cubatch", experimental={"space_to_depth"})
    (batch,) = (buffer for buffer in program.buffers if buffer.name == "input")
    assert batch.shape == stored
    assert {op.computed is not None for op in program.ops if op.node} == {mode == "inference"}
