"""Dropout: its random numbers are Philox's, and a mask depends on seed and element alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from cubatch.engine import backend, functional
from cubatch.engine.native import pointwise
from tests.kernels.cases import DTYPES, decoded, drawn, encoded
from tests.kernels.placing import place, room


def _philox(counter, key):
    """Philox4x32-10 in whole numbers (Salmon et al., 2011): ten rounds, the key raised between them."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * a, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c, 1 << 32)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return [a, b, c, d]


def _mask(size, p, seed, step):
    key = [int(word) for word in np.random.SeedSequence(seed).generate_state(2, np.uint32)]
    words = [word for i in range(-(-size // 4)) for word in _philox((i, 0, step, 0), key)]
    return (np.array(words[:size]) >> 8) * np.float32(2.0**-24) >= np.float32(p)


def test_the_reference_draws_the_published_numbers():
    """Known answers of Random123, the authors' library: kat_vectors, philox 4x32 of 10 rounds."""
    ones = (1 << 32) - 1
    assert _philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert _philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@given(size=st.sampled_from([1, 7, 32, 1000]), p=st.sampled_from([0.0, 0.1, 0.5, 0.9]), shift=st.sampled_from([0, 1]),
       dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**40))  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_dropout_keeps_what_philox_says_and_scales_it(launcher, size, p, shift, dtype, seed):
    """Mask, result and gradient are exact: one product in float32, rounded once more where 16 bits are stored."""
    x = drawn(np.random.default_rng(size), size, dtype)
    y, mask = room(launcher, (size,), x.dtype, shift), room(launcher, (size,), np.bool_, shift)
    pointwise.dropout(
        launcher.context(), place(launcher, x, shift), p=p, seed=(seed, 3), step=seed % 5, out=y, mask=mask
    )

    kept = _mask(size, p, (seed, 3), seed % 5)
    np.testing.assert_array_equal(launcher.get(mask), kept)
    want = encoded(decoded(x).astype(np.float32) * np.where(kept, np.float32(1 / (1 - p)), np.float32(0)), dtype)
    np.testing.assert_array_equal(launcher.get(y), want)

    dx = place(launcher, x, shift)
    pointwise.dropout_backward(launcher.context(), dx, mask, p=p, out=dx)
    np.testing.assert_array_equal(launcher.get(dx), want)


def test_what_is_not_finite_is_dropped_to_a_nan(launcher):
    """Zero times infinity, in both passes, as PyTorch has it and the NumPy engine: a run that diverges says so."""
    x = np.array([np.nan, np.inf, -np.inf, 1.0] * 64, np.float32)
    context, kept = launcher.context(), _mask(x.size, 0.5, 7, 0)
    assert {*zip(x[1::4], kept[1::4], strict=True)} == {(np.inf, True), (np.inf, False)}
    y, _ = pointwise.dropout(context, launcher.put(x), p=0.5, seed=7)
    dx = pointwise.dropout_backward(context, launcher.put(x), launcher.put(kept), p=0.5)
    with np.errstate(invalid="ignore"):
        want = functional.dropout_backward(x, kept, p=0.5)
    assert np.isnan(want[1::4]).tolist() == (~kept[1::4]).tolist()
    np.testing.assert_array_equal(launcher.get(y), want)
    np.testing.assert_array_equal(launcher.get(dx), want)


def test_equal_seeds_draw_equal_masks_and_others_do_not(launcher):
    """A replay of the forward pass must drop what the first pass dropped; the next step must not."""
    x = place(launcher, np.ones(512, np.float32))
    draws = ((1, 2), 4), ((1, 2), 4), ((1, 3), 4), ((1, 2), 5)
    masks = [pointwise.dropout(launcher.context(), x, p=0.5, seed=seed, step=step)[1] for seed, step in draws]
    first, again, other, later = map(launcher.get, masks)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != later).any()


def test_a_launch_that_was_prepared_draws_by_the_step_that_stands_in_memory(launcher):
    """So it can be repeated as it is: what it draws then is what a launch with that number draws."""
    x, step = place(launcher, np.ones(512, np.float32)), launcher.put(np.array([1], np.int32))
    y, mask = room(launcher, (512,), np.float32), room(launcher, (512,), np.bool_)
    work = backend.prepare(pointwise.dropout, launcher.context(), x, p=0.5, seed=7, step=step, out=y, mask=mask)
    for number in (1, 2):
        step.fill(number)
        work()
        want = pointwise.dropout(launcher.context(), x, p=0.5, seed=7, step=number)[1]
        np.testing.assert_array_equal(launcher.get(mask), launcher.get(want))
