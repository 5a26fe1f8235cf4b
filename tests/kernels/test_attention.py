"""Products of heads and attention on kernels, each stage within the rounding of its own sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from cubatch.engine.native import self_attention
from cubatch.engine.native.context import Context
from cubatch.engine.native.heads import Heads, multiply_heads
from cubatch.kernels import attention_launches as planned
from cubatch.kernels.padding import stored_row
from cubatch.kernels.workspace.attention_scratch import attention_backward_workspace, attention_workspace
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.checks import assert_within, gamma
from tests.kernels.attention_stages import Stages
from tests.kernels.cases import DTYPES, bound, decoded, drawn, encoded
from tests.kernels.placing import place, room

EXTENTS = st.sampled_from([1, 3, 16, 17, 64, 70, 130])


def padded(launcher, array, stride):
    """An array on the device, in whose rows NaN follow up to a stride."""
    rows = np.empty((*array.shape[:-1], stride), array.dtype)
    rows.view(np.uint8)[...] = 0xFF
    rows[..., : array.shape[-1]] = array
    return place(launcher, rows)


def unwritten(launcher, shape, stride, dtype):
    """Room for rows that begin every `stride` elements: all NaN."""
    return padded(launcher, np.empty((*shape[:-1], 0), dtype), stride)


@given(
    layout=st.sampled_from(["nt", "nn", "tn"]), m=EXTENTS, n=EXTENTS, k=EXTENTS, multiple=st.sampled_from([1, 5, 8]),
    samples=st.integers(1, 2), heads=st.integers(1, 3), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_products_of_heads_are_sums_of_their_factors(launcher, layout, m, n, k, multiple, samples, heads, dtype):
    """In every layout, of whole tiles and not; stored once. Padding behind rows is neither read nor written."""
    random = np.random.default_rng(m * n * k)
    shapes = ((m, k) if layout[0] == "n" else (k, m), (k, n) if layout[1] == "n" else (n, k))
    a, b = (drawn(random, (samples, heads, *shape), dtype) for shape in shapes)
    strides = [-(-columns // multiple) * multiple for columns in (a.shape[-1], b.shape[-1], n)]
    out = unwritten(launcher, (samples, heads, m, n), strides[2], a.dtype)
    factors = (
        Heads.one_by_one(padded(launcher, array, stride), array.shape[-1])
        for array, stride in zip((a, b), strides, strict=False)
    )
    multiply_heads(launcher.context(), layout, *factors, Heads.one_by_one(out, n), factor=0.375)
    left, right = (
        decoded(array).swapaxes(-1, -2) if turned else decoded(array)
        for array, turned in ((a, layout[0] == "t"), (b, layout[1] == "t"))
    )
    want = 0.375 * (left @ right)
    within = bound(k + 1, 0.375 * (abs(left) @ abs(right)), want, dtype)
    found = decoded(launcher.get(out))
    assert_within(found[..., :n], want, within, axes="nhij", label=f"{layout} {m} {n} {k} {multiple} {dtype}")
    assert np.isnan(found[..., n:]).all()


@given(part=st.integers(0, 2), t=EXTENTS, width=st.sampled_from([1, 5, 16]), heads=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_heads_lie_side_by_side_and_others_are_left_alone(launcher, part, t, width, heads):
    """One part of rows of three is written from another array's; what lies between stays as it was."""
    random = np.random.default_rng(t)
    weights, values = drawn(random, (2, heads, t, t)), drawn(random, (2, t, 3 * heads * width))
    out = launcher.put(np.full(values.shape, 7, np.float32))
    multiply_heads(
        launcher.context(), "nn", Heads.one_by_one(launcher.put(weights)),
        Heads.side_by_side(launcher.put(values), heads, width, 2), Heads.side_by_side(out, heads, width, part),
    )  # fmt: skip
    parts = decoded(launcher.get(out)).reshape(2, t, 3, heads, width)
    of = decoded(values).reshape(2, t, 3, heads, width)[:, :, 2].transpose(0, 2, 1, 3)
    want, terms = decoded(weights) @ of, abs(decoded(weights)) @ abs(of)
    assert_within(parts[:, :, part].transpose(0, 2, 1, 3), want, bound(t, terms, want), label=f"part {part}")
    assert (np.delete(parts, part, axis=2) == 7).all()


@st.composite
def attentions(draw):
    """Few tokens and many, heads of whole vectors and not, with biases and without."""
    heads = draw(st.integers(1, 3))
    shape = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 5, 17, 66, 130])), heads * draw(WIDTHS)
    return {
        "shape": shape, "heads": heads, "dtype": draw(st.sampled_from(DTYPES)), "has_bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }  # fmt: skip


WIDTHS = st.sampled_from([1, 4, 8, 20, 64, 65])
LONG = {"shape": (2, 260, 64), "heads": 2, "dtype": "float16", "has_bias": False, "seed": 1}


def parameters(case, random):
    """Projections and biases of a size that keeps values of order one."""
    c, dtype = case["shape"][2], case["dtype"]
    shapes = {"w_in": (3 * c, c), "w_out": (c, c)} | ({"b_in": (3 * c,), "b_out": (c,)} if case["has_bias"] else {})
    return {name: encoded(random.uniform(-2, 2, shape) / math.sqrt(c), dtype) for name, shape in shapes.items()}


@given(case=attentions(), keeps=st.booleans())
@example(case=LONG, keeps=False)  # larger scores come late
@settings(max_examples=20, deadline=None)
def test_attention_is_right_stage_by_stage(launcher, case, keeps):
    """Projections, scores and softmax, mix: in training what is kept, in inference what lies in the scratch memory."""
    random, (n, t, c), heads, dtype = np.random.default_rng(case["seed"]), case["shape"], case["heads"], case["dtype"]
    x, p = drawn(random, case["shape"], dtype), parameters(case, random)
    stages, context = Stages(case["shape"], heads, dtype, str(case), device=launcher.device), launcher.context()
    need = attention_workspace((n, t, c), heads, dtype, launcher.device, saves=keeps)
    workspace, y = launcher.unwritten((need,), np.uint8), room(launcher, x.shape, x.dtype)
    keep = [launcher.unwritten((n, math.prod(shape[1:])), x.dtype) for shape in stages.shapes] if keeps else None
    given_ = {name: place(launcher, array) for name, array in p.items()}
    self_attention.attention(
        context, place(launcher, x), **given_, heads=heads, keep=keep, out=y, workspace=workspace
    )  # fmt: skip
    between = list(map(launcher.get, keep)) if keeps else stages.between(launcher.get(workspace), x.dtype, forward=True)
    stages.forward(x, p, between, launcher.get(y))
    if keeps:
        assert np.isnan(decoded(between[1]).reshape(n, heads, t, -1)[..., t:]).all()


@given(case=attentions(), in_place=st.booleans())
@settings(max_examples=20, deadline=None)
def test_its_gradients_are_right_stage_by_stage(launcher, case, in_place):
    """From what a forward pass kept; dx may be written over dy."""
    random, (n, t, c), heads, dtype = np.random.default_rng(case["seed"]), case["shape"], case["heads"], case["dtype"]
    x, dy, p = drawn(random, case["shape"], dtype), drawn(random, case["shape"], dtype), parameters(case, random)
    stages, context = Stages(case["shape"], heads, dtype, str(case), device=launcher.device), launcher.context()
    given_ = {name: place(launcher, array) for name, array in p.items()}
    saved = [launcher.unwritten((n, math.prod(shape[1:])), x.dtype) for shape in stages.shapes]
    self_attention.attention(
        context, place(launcher, x), **given_, heads=heads, keep=saved, out=room(launcher, x.shape, x.dtype)
    )
    need = attention_backward_workspace((n, t, c), heads, dtype, launcher.device)
    workspace, errors = launcher.unwritten((need,), np.uint8), place(launcher, dy)
    gradients = {name: launcher.unwritten(array.shape, x.dtype) for name, array in p.items()}
    dx = errors if in_place else room(launcher, x.shape, x.dtype)
    self_attention.attention_backward(
        context, errors, place(launcher, x), given_["w_in"], given_["w_out"], heads=heads, saved=saved, out=dx,
        workspace=workspace, **{f"d{name}": array for name, array in gradients.items()},
    )  # fmt: skip
    found = {name: launcher.get(array) for name, array in gradients.items()}
    between = stages.between(launcher.get(workspace), x.dtype)
    stages.backward(dy, x, p, list(map(launcher.get, saved)), found, between, launcher.get(dx))


@pytest.mark.parametrize("width", [8, 65])
@pytest.mark.parametrize("dtype", DTYPES)
def test_predictions_are_of_the_launches_that_are_made(launcher, monkeypatch, dtype, width):
    """Their names, order and blocks, in inference, forward and backward, with heads that are held and that are not."""
    seen, launch = [], Context.launch

    def noted(context, kernel, grid, arguments):
        seen.append((kernel.name, math.prod(grid)))
        launch(context, kernel, grid, arguments)

    monkeypatch.setattr(Context, "launch", noted)
    n, t, heads = 2, 70, 2
    random, c = np.random.default_rng(0), heads * width
    case = {"shape": (n, t, c), "dtype": dtype, "has_bias": True}
    x, p = drawn(random, (n, t, c), dtype), parameters(case, random)
    given_ = {name: place(launcher, array) for name, array in p.items()}
    layer, context = layers.Attention(h=t, w=1, c=c, heads=heads), launcher.context()
    saved = [launcher.unwritten((n, size), x.dtype) for size in (3 * t * c, heads * t * stored_row(t), t * c)]

    def found(run, pass_, *, saves):
        seen.clear()
        run()
        expected = planned.launches(layer, pass_, n, dtype, launcher.device, saves=saves)
        between = [one for one in seen if one[0].startswith(("attend", "heads", "softmax"))]
        assert between == [(one.name, one.blocks) for one in expected]

    on = place(launcher, x)
    found(lambda: self_attention.attention(context, on, **given_, heads=heads), Pass.FPROP, saves=False)
    found(lambda: self_attention.attention(context, on, **given_, heads=heads, keep=saved), Pass.FPROP, saves=True)
    gradients = {f"d{name}": launcher.unwritten(array.shape, x.dtype) for name, array in p.items()}
    given_ = {name: array for name, array in given_.items() if name.startswith("w")}
    found(
        lambda: self_attention.attention_backward(context, on, on, **given_, heads=heads, saved=saved, **gradients),
        Pass.DGRAD,
        saves=True,
    )


@pytest.mark.parametrize("rising", [1, -1])
def test_scores_may_rise_or_fall_from_step_to_step(launcher, rising):
    """
    Without stored weights, over five steps of keys, the largest score is in the last step or in the first.

    By the head's one channel a score is 3 * its key's number / 32 and exact, so that a weight is off by the roundings
    of an exponential, of its sum and of the scaling down in each step.
    """
    t = 150
    keys = rising * np.arange(t) * 0.09375
    qkv = np.stack([np.ones(t), keys, np.random.default_rng(0).uniform(-1, 1, t)], axis=-1).astype(np.float32)[None]
    out = room(launcher, (1, t, 1), np.float32)
    self_attention.attend(launcher.context(), place(launcher, qkv), heads=1, out=out)
    powers = np.exp(keys - keys.max())
    weights, values = powers / powers.sum(), decoded(qkv)[0, :, 2]
    within = gamma(2 * t + 8 * 5 + 20, 2.0**-24) * (weights @ abs(values))
    assert_within(decoded(launcher.get(out))[0, :, 0], np.full(t, weights @ values), within, label=f"rising {rising}")
