"""
The proof that the simulator finds bugs of attention: each is planted in kernels/attention or misc/softmax.cu itself.

A mutant is a copy of the sources with a line changed.  Rows end with padding of NaN, as attention's weights do: a
kernel that reads it, writes it, or takes another stride must be seen.  Kernels without stored weights run on scores so
far below zero that padding, once it is exponentiated, is infinite.
"""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import heads, losses, self_attention
from cubatch.engine.native.context import Context
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.padding import stored_row
from cubatch.kernels.ranking import SplitKernel
from tests.cpusim import building, planting
from tests.cpusim.planting import WRONG
from tests.cpusim.simulator import SimulationError, Simulator

pytestmark = planting.IN_PLACE

KERNELS = variant.kernels_path()
A100 = Device(name="A100", compute_capability=(8, 0), num_sms=4)
TOKENS, WIDTH = 70, 8  # a tile of 64 and part of one; rows of 72 elements

SOURCES = {
    "heads": ("attention/heads_mma.cu", "attention/tiles.cuh", "attention/product.cuh"),
    "softmax": ("misc/softmax.cu",),
    "attend": ("attention/attend_backward_mma.cu", "attention/tiles.cuh"),
    "attend_sums": ("attention/attend_mma.cu", "attention/tiles.cuh"),
}


EACH_ROW = "for_rows(num_rows, classes, lanes, [&](const RowWalk& at) {\n    const CB_ELEMENT* "


@attrs.frozen
class Bug:
    """
    A changed line, which is there once.

    Attributes:
        operation: The kernel that must go wrong.
        file: The source.
        old, new: The line.
    """

    operation: str
    file: str
    old: str
    new: str


def in_queries(old, new):
    """Give a bug of the gradients of queries, by a kernel that computes weights again."""
    return Bug("attend_queries", "attend_backward_mma.cu", old, new)


BUGS = {
    "padding is multiplied": Bug("heads_nn", "tiles.cuh", "left < PIECE ? left * 2 : 16", "left < 0 ? 0 : 16"),
    "padding is overwritten by products": Bug(
        "heads_nt", "tiles.cuh", "if ((piece + 1) * PIECE <= columns) {", "if (piece * PIECE <= columns) {"
    ),
    "scores by another stride": Bug(
        "softmax", "softmax.cu", "scores = x + at.row * stride", "scores = x + at.row * classes"
    ),
    "padding is taken for scores": Bug(
        "softmax", "softmax.cu", f"{EACH_ROW}scores = x", f"{EACH_ROW}scores = x".replace("classes", "classes + 1")
    ),
    "the weights of a gradient by another stride": Bug(
        "softmax_backward", "softmax.cu", "results = y + at.row * stride;\n    float sum",
        "results = y + at.row * classes;\n    float sum",
    ),
    "padding is taken for gradients": Bug(
        "softmax_backward", "softmax.cu", f"{EACH_ROW}errors", f"{EACH_ROW}errors".replace("classes", "classes + 1")
    ),
    "sums stored by idle rows": Bug("attend_sums", "attend_mma.cu", "== 0 && query < tokens", "== 0"),
    "padding is exponentiated": in_queries("OF_KEYS || other < rest", "OF_KEYS || other <= rest"),
    "tiles are loaded before others are read": in_queries("cb_sync();  // what was read", "// what was read"),
    "sums of the step before": Bug(
        "attend_keys", "attend_backward_mma.cu", "numbers = of_step + step % 2 * 2 * TILE", "numbers = of_step"
    ),
}  # fmt: skip
OPERATIONS = (
    "heads_nt", "heads_nn", "heads_tn", "softmax", "softmax_backward", "attend_sums", "attend_queries", "attend_keys"
)  # fmt: skip


def mutant(operation, bug=None):
    """Give a kernel of 16 bits, from its source with a bug or as it is."""
    found = variant.find(operation, "float16", arch=80)
    kind = operation if operation in SOURCES else operation.partition("_")[0]
    paths, changes = [KERNELS / path for path in SOURCES[kind]], [(bug.file, bug.old, bug.new)] if bug else []
    return planting.mutant(f"attention {kind}", found, paths, changes)


class Changed(Simulator):
    """Launches a kernel instead of the one of its operation."""

    kernel, was_bound = None, False

    def bind(self, kernel, grid, arguments):
        """Bind the changed kernel, or another as it is."""
        is_changed = kernel.operation == self.kernel.operation
        self.was_bound = self.was_bound or is_changed
        return super().bind(self.kernel if is_changed else kernel, grid, arguments)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    sources = [mutant(bug.operation, bug) for bug in BUGS.values()] + [mutant(name) for name in OPERATIONS]
    building.precompile(sources, 80)


def padded(array):
    """The array with NaN behind its rows."""
    rows = np.full((*array.shape[:-1], stored_row(array.shape[-1])), np.nan, array.dtype)
    rows[..., : array.shape[-1]] = array
    return rows


def attended(context, random):
    """Logarithms of sums and gradients of queries, keys and values in one row, what they should be, and a bound."""
    values = random.uniform(-1, 1, (3, 2, TOKENS, WIDTH))  # of two heads
    values[:2] = values[:2] * 0.5 + np.array([-6, 6.5]).reshape(2, 1, 1, 1)
    (q, k, v), dmixed = values.astype(np.float16), random.uniform(-1, 1, (2, TOKENS, WIDTH)).astype(np.float16)
    heads_joined = [array.transpose(1, 0, 2).reshape(1, TOKENS, -1) for array in (q, k, v, dmixed)]
    qkv, mixed = np.concatenate(heads_joined[:3], axis=-1), np.full_like(heads_joined[3], np.nan)
    out, (log_sums, means) = np.full_like(qkv, np.nan), np.full((2, 1, 2, TOKENS), np.nan, np.float32)
    self_attention.attend(context, qkv, heads=2, out=mixed, log_sums=log_sums)
    self_attention.attend_backward(context, qkv, mixed, heads_joined[3], log_sums, heads=2, means=means, out=out)
    q, k, v, owed = (array.astype(float) for array in (q, k, v, dmixed))
    powers = np.exp(WIDTH**-0.5 * q @ k.swapaxes(1, 2))
    weights, sums = powers / powers.sum(axis=-1, keepdims=True), np.log2(powers.sum(axis=-1))
    slopes = owed @ v.swapaxes(1, 2)
    slopes = WIDTH**-0.5 * weights * (slopes - (slopes * weights).sum(axis=-1, keepdims=True))
    want = slopes @ k, slopes.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ owed
    got = out.reshape(TOKENS, 3, 2, WIDTH).transpose(1, 2, 0, 3).astype(float)
    pairs = [*zip(got, want, strict=True), (log_sums[0], sums)]
    got, want = (np.concatenate([pair[i].ravel() / abs(pair[1]).max() for pair in pairs]) for i in range(2))
    return got, want, 2.0**-5


def outcome(operation, kernel, copies="late"):
    """Run a kernel on padded rows: "right", WRONG, or the error.  Products are of integers, whose sums are exact."""
    random = np.random.default_rng(3)
    simulator = Changed(80, seed=3, copies=copies)
    simulator.kernel = kernel
    context = Context(device=A100, launcher=simulator, chooser=lambda *_: SplitKernel(kernel))
    weights = random.integers(-2, 3, (1, 2, TOKENS, TOKENS)).astype(np.float16)
    channels, more = (random.integers(-2, 3, (1, 2, TOKENS, WIDTH)).astype(np.float16) for _ in range(2))
    of_weights = heads.Heads.one_by_one(padded(weights), TOKENS)
    bound = 0.0
    try:
        if operation == "heads_nt":
            got, want = padded(np.zeros_like(weights)), channels.astype(float) @ more.astype(float).swapaxes(2, 3)
            factors = (heads.Heads.one_by_one(array) for array in (channels, more))
            heads.multiply_heads(context, "nt", *factors, heads.Heads.one_by_one(got, TOKENS))
        elif operation.startswith("heads"):
            turned = weights.swapaxes(2, 3) if operation == "heads_tn" else weights
            got, want = np.full_like(channels, np.nan), turned.astype(float) @ channels.astype(float)
            right, out = (heads.Heads.one_by_one(array) for array in (channels, got))
            heads.multiply_heads(context, operation[-2:], of_weights, right, out)
        elif operation == "softmax":
            got, powers, bound = padded(weights), np.exp(weights.astype(float)), 2.0**-10
            want = powers / powers.sum(axis=-1, keepdims=True)
            losses.softmax_rows(context, got, TOKENS, out=got)
        elif operation.startswith("attend"):
            got, want, bound = attended(context, random)
        else:
            got, y, bound = padded(weights), (weights + np.float16(2)) / np.float16(256), 2.0**-6
            dy = weights.astype(float)
            want = y * (dy - (dy * y).sum(axis=-1, keepdims=True))
            losses.softmax_rows_backward(context, got, padded(y), TOKENS, out=got)
    except SimulationError as error:
        return str(error)
    assert simulator.was_bound
    columns = want.shape[-1]
    right = (abs(got[..., :columns] - want) <= bound * abs(want).max()).all() and np.isnan(got[..., columns:]).all()
    return "right" if right else WRONG


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_kernel_as_it_is_passes(operation):
    """Results are right, and what lies behind the rows is still NaN."""
    assert all(outcome(operation, mutant(operation), copies) == "right" for copies in ("late", "early"))


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_caught(name):
    """A wrong result, padding that was written, or an error that says where it happened."""
    bug = BUGS[name]
    kernel = mutant(bug.operation, bug)
    assert any(outcome(bug.operation, kernel, copies) != "right" for copies in ("late", "early"))
