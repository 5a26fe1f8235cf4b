"""Facts of a kind stand on its record: nobody asks which kind a layer is, but for a few who say why."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest

import cubatch
from cubatch.engine import layers as engine
from cubatch.errors import UnsupportedLayer
from cubatch.hardware.facts import Device
from cubatch.memory import workspace
from cubatch.memory.blocks import aligned
from cubatch.memory.schedule import schedule
from cubatch.network.layer import Layer
from cubatch.network.layers import LAYERS

PACKAGE = Path(cubatch.__file__).parent
KINDS = {kind.__name__ for kind in LAYERS.values()}
MOST_QUESTIONS = 8
FACTS = ("elementwise", "in_place", "aliases_input", "idle_in_inference", "passes_gradient", "can_clamp",
         "can_activate", "slope_of_input", "has_statistics", "adds_up_to_one", "products_in_turn",
         "adds_gradients", "gradients_at_once")  # fmt: skip


def questions(source):
    """Lines of a module that ask of a value which kind of layer it is."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call | ast.Compare):
            continue
        named = {n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in ast.walk(node)}
        asks = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"isinstance", "issubclass"}
        )
        compares = isinstance(node, ast.Compare) and "type" in named
        if (asks or compares) and named & KINDS:
            yield node.lineno


def commented(source, line):
    """Whether a comment stands on a line or on the one before."""
    return any("#" in text for text in source.splitlines()[line - 2 : line])


def test_a_kind_is_asked_for_rarely_and_never_without_a_reason():
    """What a layer is like is a fact of its record; a module that needs more says why in a comment.

    The bench is left out: its subject is one kind of layer after another, and the rival that computes it.
    """
    found = [
        (path.relative_to(PACKAGE).as_posix(), line, commented(source, line))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE / "bench"
        for source in [path.read_text(encoding="utf-8")]
        for line in questions(source)
    ]
    assert [f"{path}:{line}" for path, line, reason in found if not reason] == []
    assert len(found) <= MOST_QUESTIONS, found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("isinstance(layer, ReLU)", 1),
        ("isinstance(layer, layers.Conv2d | Linear)", 1),
        ("type(layer) is ReLU", 1),
        ("[type(each) for each in found] == [layers.MaxPool2d]", 1),
        ("isinstance(layer, Layer)", 0),
        ("TABLE[type(layer)]", 0),
    ],
)
def test_questions_are_found_in_every_form(source, count):
    """By `isinstance` and by comparing types, with the module's name or without; a table asks nothing."""
    assert len(set(questions(source))) == count


def test_facts_are_of_the_kind_and_hold_for_the_kinds_that_have_them():
    """Every yes/no fact is listed with its kinds, so that a new kind is placed on purpose."""
    kinds = {fact: {name for name, kind in LAYERS.items() if getattr(kind, fact)} for fact in FACTS}
    pointwise = {"relu", "relu6", "hard_swish", "hard_sigmoid", "sigmoid", "silu", "gelu", "dropout"}
    assert kinds == {
        "elementwise": pointwise,
        "in_place": pointwise | {"add", "batch_norm2d", "layer_scale"},
        "aliases_input": {"flatten"},
        "idle_in_inference": {"dropout"},
        "passes_gradient": {"add"},
        "can_clamp": {"conv2d", "linear", "batch_norm2d", "add"},
        "can_activate": {"batch_norm2d"},
        "slope_of_input": {"relu", "relu6", "hard_swish", "silu", "gelu"},
        "has_statistics": {"batch_norm2d"},
        "adds_up_to_one": {"softmax"},
        "products_in_turn": {"attention", "opaque"},
        "adds_gradients": {"global_avg_pool", "layer_norm"},
        "gradients_at_once": {"layer_norm"},
    }
    assert {name for name, value in vars(Layer).items() if isinstance(value, bool)} == set(FACTS)


def test_every_kind_has_a_row_in_the_tables_of_scratch_memory_and_of_the_engine():
    """How a kind is added: facts on its record, a row in each table, and both know alike whether it can run."""
    assert list(workspace.TABLE) == list(engine.TABLE) == list(LAYERS.values())
    for kind, ops in engine.TABLE.items():
        assert (ops is engine.NOT_WRITTEN) == (workspace.TABLE[kind] is workspace.NOT_WRITTEN), kind


def test_every_kind_is_public_and_those_that_run_are_in_the_reference():
    """By the name of its record, and by the type that a spec file gives."""
    assert set(cubatch.__all__) >= KINDS
    text = (PACKAGE.parent / "docs/reference/files.md").read_text(encoding="utf-8")
    listed = re.search(r"layers of these types:\n\n```text\n(.*?)```", text, re.DOTALL)[1]
    written = [kind.type for kind, ops in engine.TABLE.items() if ops is not engine.NOT_WRITTEN]
    assert listed.split() == written


def test_a_kind_that_is_written_has_the_operations_that_its_facts_leave_to_it():
    """No forward operation where the output is the input's memory, no backward one where gradients are passed on."""
    for kind, ops in engine.TABLE.items():
        if ops is not engine.NOT_WRITTEN:
            assert (not ops.forward) == kind.aliases_input, kind
            assert (not ops.backward) == (kind.aliases_input or kind.passes_gradient), kind


@pytest.mark.parametrize("kind", [kind for kind, ops in engine.TABLE.items() if ops is engine.NOT_WRITTEN])
def test_what_is_not_written_can_be_planned_but_not_run(kind):
    """Its plan has room for inputs and outputs in float32, twice; the engine says that there is no code."""
    layer = kind(h=3, w=5, c=4)
    with pytest.raises(UnsupportedLayer) as caught:
        engine.check(layer, "here")
    assert caught.value.args == (f"here ({kind.type})", "its computation is not written yet")
    program, elements = schedule(layer), 3 * 5 * 4 + math.prod(layer.output_shape)
    cpu = Device(name="a CPU", kind="cpu", threads=1)
    assert workspace.im2col_workspace_bytes(program.ops[0], program, 7, 4, cpu) == aligned(7 * elements * 8)
    v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
    assert workspace.kernel_workspace_bytes(program.ops[0], program, 7, "float32", v100) == 0
