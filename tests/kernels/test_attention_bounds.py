"""Attention's cases of `cubatch bench` on kernels: within what its stages' errors come to, and only if it is right."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, target
from cubatch.engine.native.operations import operations
from cubatch.network.layers import Attention
from cubatch.network.passes import Pass
from tests.kernels.cases import DTYPES

LAYERS = [Attention(h=70, w=1, c=64, heads=4), Attention(h=9, w=5, c=65, heads=1)]
MAKE = {
    "inference": lambda layer, dtype: cases.of_layer(layer, Pass.FPROP, 2, dtype),
    "forward": lambda layer, dtype: cases.of_layer(layer, Pass.FPROP, 2, dtype, with_bias=True, mode="training"),
    "backward": lambda layer, dtype: cases.of_layer(layer, Pass.DGRAD, 2, dtype, with_bias=True),
}


@pytest.mark.parametrize("layer", LAYERS, ids=["heads of 16", "one head of 65"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_attention_is_within_the_bounds_of_its_case_and_not_with_other_heads(launcher, make, dtype, layer):
    """Every result against float64; the same call with each head's channels in another order is far outside."""
    case = make(layer, dtype)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    check.poison(case, arrays)
    on = {name: launcher.put(array) for name, array in arrays.items()}
    case.call(operations(launcher.context()), on)
    found = {name: launcher.get(array) for name, array in on.items()}
    assert expected.check(found).worst <= 1, expected.check(found).where
    assert expected.check(found).worst > 1e-3  # a bound that anything is within says nothing
    for name in case.results:
        turned = {**found, name: np.ascontiguousarray(np.roll(found[name], 1, axis=-1))}
        assert expected.check(turned).worst > 10, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_backward_pass_finds_saved_is_what_a_forward_pass_saved(dtype):
    """Weights add up to one but for their storage, and the mixed values are theirs: of random ones neither is so."""
    case = cases.of_layer(LAYERS[0], Pass.DGRAD, 2, dtype)
    arrays = {name: check._values(array) for name, array in target.fill(np, case, 1).items()}
    weights = arrays["weights"].reshape(2, 4, 70, -1)[..., :70]
    unit = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=2 * unit)
    values = arrays["qkv"].reshape(2, 70, 3, 4, 16)[:, :, 2].transpose(0, 2, 1, 3)
    mixed = (weights @ values).transpose(0, 2, 1, 3).reshape(2, -1)
    np.testing.assert_allclose(arrays["mixed"], mixed, atol=8 * unit)
