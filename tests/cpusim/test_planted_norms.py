"""The proof that tests of layer norm's gradient find its bugs: each is planted in a copy of the source."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from cubatch.engine.native import layer_norm
from cubatch.engine.native.context import Context
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from tests.cpusim import building, planting
from tests.cpusim.planting import ANY_FIRST, MODES, WRONG, running, seen_always
from tests.cpusim.simulator import SimulationError

pytestmark = planting.IN_PLACE

SOURCE = variant.kernels_path() / "misc" / "layer_norm.cu"
DEVICE = attrs.evolve(catalogue.find("a100-sxm4-40gb"), num_sms=1)
DRAWS = 3
# (old, new, modes): a line that is there once, and the (schedule, copies) in which the bug must be seen.
ONE = (("in_order", "early"),)
BUGS = {
    "no wait for the zeros": ("shared[i] = 0.0f;\n    cb_sync();\n", "shared[i] = 0.0f;\n", ANY_FIRST),
    "no wait for the sums": (
        "  if (partials == nullptr) return;\n  cb_sync();\n", "  if (partials == nullptr) return;\n", ANY_FIRST,
    ),
    "rows combined over sums": ("*combined = shared + ROW_SUMS - WARPS", "*combined = shared", ONE),
}  # fmt: skip
CASES = seen_always(BUGS, "no wait for the zeros", "rows combined over sums")


def mutant(*change):
    """Give the kernel with a bug, or as it is."""
    found = variant.find("layer_norm_backward_add", "float16")
    return planting.mutant("norms", found, [SOURCE], ((SOURCE.name, *change),) if change else ())


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    building.precompile([mutant(), *(mutant(*BUGS[name][:2]) for name in running(CASES))], 80)


def outcome(kernel, mode, patch):
    """Compare gradients with float64, of rows that a warp or a block shares: "right", else WRONG or the error."""
    random = np.random.default_rng(3)
    patch.setattr(layer_norm, "variant", SimpleNamespace(find=lambda *_: kernel))
    for channels in (768, 1032):
        x, dy, other = (random.normal(size=(40, channels)).astype(np.float16) for _ in range(3))
        scale, wide = random.normal(size=channels).astype(np.float16), x.astype(np.float64)
        statistics = np.stack([wide.mean(1), wide.std(1) ** -1]).astype(np.float32)
        inv_std = statistics[1][:, None]
        normed, g, e = (wide - statistics[0][:, None]) * inv_std, dy.astype(np.float64) * scale, dy.astype(np.float64)
        dx = inv_std * (g - g.mean(1, keepdims=True) - normed * (g * normed).mean(1, keepdims=True)) + other
        for simulator in planting.simulators(80, mode, DRAWS):
            where = Context(device=DEVICE, launcher=simulator)
            dgamma, dbeta, out = (np.full(shape, np.nan, np.float16) for shape in (channels, channels, x.shape))
            try:
                layer_norm.layer_norm_backward(
                    where, dy, x, scale, statistics=statistics, dgamma=dgamma, dbeta=dbeta, residual=other, out=out
                )
            except SimulationError as error:
                return str(error)
            pairs = (out, dx), (dgamma, (e * normed).sum(0)), (dbeta, e.sum(0))
            if not all(np.allclose(*pair, rtol=2.0**-9, atol=2.0**-6) for pair in pairs):
                return WRONG
    return "right"


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_the_kernel_as_it_is_passes(mode, monkeypatch):
    """No false alarm in any order of threads and copies."""
    assert outcome(mutant(), mode, monkeypatch) == "right"


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_caught(name, monkeypatch):
    """In at least one of the modes that the table names: a wrong result, or an error that says what is wrong."""
    *change, modes = BUGS[name]
    assert {outcome(mutant(*change), mode, monkeypatch) for mode in modes} != {"right"}
