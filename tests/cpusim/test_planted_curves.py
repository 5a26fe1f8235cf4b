"""The proof that tests of products with -DCURVE find their bugs: each is planted in a copy of the sources."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import gemm, hopper
from cubatch.engine.native.context import Context
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from tests.cpusim import building, planting
from tests.cpusim.planting import MODES, WRONG, running, seen_always
from tests.cpusim.simulator import SimulationError
from tests.kernels.hopper_cases import H200
from tests.reference import CURVES

pytestmark = planting.IN_PLACE

SOURCES = variant.kernels_path() / "hopper"
DRAWS = 3
ONE = (("in_order", "early"),)
TILES = {"": "128x128x64", "swapped": "256x64x64"}


@attrs.frozen
class Bug:
    """
    A change of a line of a source that is there once, and what must come of it.

    Attributes:
        file, old, new: The source and the line.
        modes: (schedule, copies) in which it must come; a wrong formula is wrong in each of them.
        pattern: Part of the outcome.
    """

    file: str
    old: str
    new: str
    modes: tuple[tuple[str, str], ...] = ONE
    pattern: str = ""


BUGS = {
    "no wait for the activation's input": Bug(
        "sums.cuh", "  if constexpr (!MOMENTS) cb_barrier_wait(shared.full(ring.stage), ring.parity);\n  CB_UNROLL\n",
        "  CB_UNROLL\n", (("in_order", "late"), ("warps", "late")),
    ),
    "a stage that is not left": Bug("sums.cuh", "  release(shared, ring.stage);\n", "", pattern="deadlock"),
    "no density": Bug("curve.cuh", "dy * fmaf(x * 0.39894228040143268f, power, cdf)", "dy * cdf"),
}  # fmt: skip
CASES = seen_always(BUGS, "no wait for the activation's input", "no density")


def mutant(tile, *change):
    """Give the kernel with a bug, or as it is."""
    found = variant.find("gemm_nn_gelu", "float16", tile=TILES[tile])
    return planting.mutant("curves", found, SOURCES.iterdir(), (change,) if change else ())


def of(bug):
    """Give the kernel with a bug."""
    return mutant("", bug.file, bug.old, bug.new)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    building.precompile([*map(mutant, TILES), *(of(BUGS[name]) for name in running(CASES))], 90)


def outcome(kernel, mode, patch):
    """Compare a product times the slope, and its sums, with float64: "right", else WRONG or the error."""
    m, n, k, random = 331, 136, 72, np.random.default_rng(3)
    a = random.integers(-1, 2, (m, k)).astype(np.float16)
    b = (random.integers(-2, 3, (k, n)) / 16).astype(np.float16)
    x = random.normal(0, 2, (m, n)).astype(np.float16)
    want = (a.astype(np.float64) @ b.astype(np.float64)) * CURVES["gelu"][1](x.astype(np.float64))
    patch.setattr(hopper, "summing_variant", lambda *_: kernel)
    usual = variant.find("gemm_nn", "float16", tile=kernel.tile_name, family="hopper")
    for simulator in planting.simulators(90, mode, DRAWS):
        where = Context(device=H200, launcher=simulator, chooser=lambda *_: SplitKernel(usual))
        db = np.full(n, np.nan, np.float16)
        try:
            got = gemm.gemm(where, a, b, layout="nn", norm={"kind": "gelu", "x": x, "db": db})
        except SimulationError as error:
            return str(error)
        if not all(np.allclose(*pair, rtol=2.0**-10, atol=2.0**-12) for pair in ((got, want), (db, want.sum(axis=0)))):
            return WRONG
    return "right"


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("tile", TILES)
def test_the_kernel_as_it_is_passes(tile, mode, monkeypatch):
    """No false alarm in any order of threads and copies."""
    assert outcome(mutant(tile), mode, monkeypatch) == "right"


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_caught(name, monkeypatch):
    """In every mode that the table names: a wrong result, or an error that says what is wrong."""
    bug = BUGS[name]
    assert planting.missed(bug, lambda mode: outcome(of(bug), mode, monkeypatch)) == {}
