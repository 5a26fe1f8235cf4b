"""The timed choice of variants on real kernels: trials happen while calls are recorded, and must leave no trace."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine import backend
from cubatch.engine.native import conv, gemm
from cubatch.engine.native.operands import Fused
from cubatch.errors import DeviceFailed
from cubatch.kernels.choice import TimedChoice, Winners
from cubatch.measure.clocks import HostClock
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma

pytestmark = pytest.mark.heavy
U = UNIT_ROUNDOFF["float32"]


def timed(launcher):
    """A context whose chooser times, and the variants that it tried."""
    choice, tried = TimedChoice(HostClock, Winners(None, gpu="", sources=""), 60.0), []

    def watch(problem, device, prepare):
        def note(split):
            tried.append(split.kernel.name)
            return prepare(split)

        return choice(problem, device, None if prepare is None else note)

    return launcher.context(chooser=watch), tried


def test_trials_inside_a_recording_change_no_input_and_are_not_replayed(launcher):
    """Two variants or more run while a filter's gradient is bound; replaying computes it once, from intact inputs."""
    random = np.random.default_rng(0)
    x, dy = (random.standard_normal(shape, dtype=np.float32) for shape in ((2, 6, 5, 8), (2, 6, 5, 12)))
    there_x, there_dy, dw = launcher.put(x), launcher.put(dy), launcher.unwritten((12, 3, 3, 8), np.float32)
    context, tried = timed(launcher)
    step = backend.prepare(conv.conv2d_wgrad, context, there_x, there_dy, dw=dw, pad=(1, 1, 1, 1))
    assert len(set(tried)) > 1
    before = len(tried)
    dw[...] = np.nan
    step()
    assert len(tried) == before
    np.testing.assert_array_equal(launcher.get(there_x), x)
    np.testing.assert_array_equal(launcher.get(there_dy), dy)
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))  # n, p, q, c, r, s
    want = np.einsum("npqcrs,npqk->krsc", windows, dy.astype(np.float64))
    size = np.einsum("npqcrs,npqk->krsc", abs(windows), abs(dy.astype(np.float64)))
    assert_within(launcher.get(dw), want, gamma(2 * 6 * 5, U) * size, axes="krsc")


def test_a_product_added_to_its_own_output_is_not_tried(launcher):
    """Each trial would add anew: the output is the sum of what it held and one product, also through another view."""
    random = np.random.default_rng(1)
    a, b, held = (random.standard_normal(shape, dtype=np.float32) for shape in ((40, 16), (24, 16), (40, 24)))
    out = launcher.put(held)
    context, tried = timed(launcher)
    gemm.gemm(context, launcher.put(a), launcher.put(b), layout="nt", out=out, fused=Fused(residual=out[:]))
    assert not tried
    want = held + a.astype(np.float64) @ b.T.astype(np.float64)
    size = abs(held) + abs(a).astype(np.float64) @ abs(b).T.astype(np.float64)
    assert_within(launcher.get(out), want, gamma(17, U) * size, axes="mn")


def test_a_prepared_product_is_tried_though_it_is_added_to_its_own_output(launcher):
    """What lies there while a call is prepared is not what a step finds; the step itself adds once."""
    random = np.random.default_rng(2)
    a, b, held = (random.standard_normal(shape, dtype=np.float32) for shape in ((40, 16), (24, 16), (40, 24)))
    out = launcher.put(held)
    context, tried = timed(launcher)
    fused = Fused(residual=out)
    step = backend.prepare(gemm.gemm, context, launcher.put(a), launcher.put(b), layout="nt", out=out, fused=fused)
    assert tried
    out[...] = launcher.put(held)
    step()
    want = held + a.astype(np.float64) @ b.T.astype(np.float64)
    size = abs(held) + abs(a).astype(np.float64) @ abs(b).T.astype(np.float64)
    assert_within(launcher.get(out), want, gamma(17, U) * size, axes="mn")


@pytest.mark.parametrize("status", [1, 700])
def test_a_family_that_the_driver_refuses_is_replaced_once_and_for_all(launcher, status, monkeypatch):
    """The product is right by another family; the refused one is not asked again.  A broken device is no refusal."""
    if launcher.context().device.compute_capability < (7, 0):
        pytest.skip("a GPU without tensor cores has one family of products")
    random = np.random.default_rng(2)
    a, b = (random.integers(-2, 3, shape).astype(np.float16) for shape in ((40, 16), (24, 16)))  # sums are exact
    out, context, asked = launcher.unwritten((40, 24), np.float16), launcher.context(), []
    bind = context.launcher.bind

    def refuse(kernel, grid, arguments):
        asked.append(kernel.family)
        if kernel.family == asked[0]:
            raise DeviceFailed.by_driver(f"launching {kernel.name}", status)
        return bind(kernel, grid, arguments)

    monkeypatch.setattr(context.launcher, "bind", refuse)
    for _ in range(2):
        if status == 700:
            with pytest.raises(DeviceFailed):
                gemm.gemm(context, launcher.put(a), launcher.put(b), layout="nt", out=out)
        else:
            gemm.gemm(context, launcher.put(a), launcher.put(b), layout="nt", out=out)
            np.testing.assert_array_equal(launcher.get(out), a @ b.T)
    assert asked.count(asked[0]) == (1 if status == 1 else 2)
