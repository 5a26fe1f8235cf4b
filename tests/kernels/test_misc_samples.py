"""What has one value for each sample and channel: global pooling and the scaling of squeeze-and-excite."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import scaling, window_pooling
from tests.checks import assert_within
from tests.kernels.cases import DTYPES, bound, decoded, drawn
from tests.kernels.placing import place, room


@st.composite
def samples(draw):
    """Samples with few and many pixels and channels, whole vectors or not."""
    return {
        "shape": (
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 5, 14])),
            draw(st.sampled_from([1, 7, 20])),
            draw(st.sampled_from([1, 3, 8, 16, 40, 150])),
        ),
        "dtype": draw(st.sampled_from(DTYPES)),
        "shift": draw(st.sampled_from([0, 0, 1])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def _arrays(case, *shapes):
    random = np.random.default_rng(case["seed"])
    return [drawn(random, shape, case["dtype"]) for shape in shapes]


@given(case=samples())
@settings(max_examples=20, deadline=None)
def test_global_pooling_is_the_mean_over_pixels(launcher, case):
    """A sum of h * w values, in any order, and a division."""
    (x,) = _arrays(case, case["shape"])
    n, h, w, c = case["shape"]
    y = room(launcher, (n, c), x.dtype)
    window_pooling.global_avg_pool(launcher.context(), place(launcher, x, case["shift"]), out=y)
    want = decoded(x).mean(axis=(1, 2))
    within = bound(h * w + 1, abs(decoded(x)).mean(axis=(1, 2)), want, case["dtype"])
    assert_within(decoded(launcher.get(y)), want, within, axes="nc", label=f"global_avg_pool {case}")


@given(case=samples(), added=st.sampled_from(["", "in place", "apart"]))
@settings(max_examples=30, deadline=None)
def test_its_gradient_is_spread_evenly(launcher, case, added):
    """One division for every pixel, and a sum with the gradient of other readers."""
    n, h, w, c = case["shape"]
    dy, others = _arrays(case, (n, c), case["shape"])
    residual = place(launcher, others, case["shift"]) if added else None
    dx = residual if added == "in place" else room(launcher, case["shape"], dy.dtype, case["shift"])
    window_pooling.global_avg_pool_backward(
        launcher.context(), place(launcher, dy), x_shape=case["shape"], residual=residual, out=dx
    )
    share = np.broadcast_to(decoded(dy)[:, None, None] / (h * w), case["shape"])
    want = share + (decoded(others) if added else 0)
    within = bound(2, abs(share) + abs(want), want, case["dtype"])
    assert_within(decoded(launcher.get(dx)), want, within, axes="nhwc", label=f"global_avg_pool_backward {case}")


@given(case=samples(), in_place=st.booleans())
@settings(max_examples=20, deadline=None)
def test_scale_multiplies_each_channel_of_each_sample(launcher, case, in_place):
    """One product, stored once; also over its input."""
    n, _, _, c = case["shape"]
    x, s = _arrays(case, case["shape"], (n, 1, 1, c))
    given_x = place(launcher, x, case["shift"])
    y = given_x if in_place else room(launcher, x.shape, x.dtype, case["shift"])
    scaling.scale(launcher.context(), given_x, place(launcher, s), out=y)
    want = decoded(x) * decoded(s)
    assert_within(
        decoded(launcher.get(y)), want, bound(1, abs(want), want, case["dtype"]), axes="nhwc", label=f"{case}"
    )


@given(case=samples(), wanted=st.sampled_from([(True, True), (True, False), (False, True)]), in_place=st.booleans())
@settings(max_examples=30, deadline=None)
def test_scale_backward_gives_what_is_wanted(launcher, case, wanted, in_place):
    """dx is a product, ds a sum of h * w products; each may be left out, and dx may be dy."""
    n, h, w, c = case["shape"]
    dy, x, s = _arrays(case, case["shape"], case["shape"], (n, 1, 1, c))
    given_dy = place(launcher, dy, case["shift"])
    dx = (given_dy if in_place else room(launcher, x.shape, x.dtype, case["shift"])) if wanted[0] else None
    ds = room(launcher, s.shape, s.dtype) if wanted[1] else None
    arrays = place(launcher, x, case["shift"]), place(launcher, s)
    scaling.scale_backward(launcher.context(), given_dy, *arrays, dx=dx, ds=ds)

    if dx is not None:
        want = decoded(dy) * decoded(s)
        within = bound(1, abs(want), want, case["dtype"])
        assert_within(decoded(launcher.get(dx)), want, within, axes="nhwc", label=f"dx {case}")
    if ds is not None:
        product = decoded(dy) * decoded(x)
        want, size = (part.sum(axis=(1, 2), keepdims=True) for part in (product, abs(product)))
        within = bound(h * w, size, want, case["dtype"])
        assert_within(decoded(launcher.get(ds)), want, within, axes="nhwc", label=f"ds {case}")
