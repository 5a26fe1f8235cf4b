"""The proof that tests of kernels/hopper/sums.cuh find its bugs: each is planted in a copy of the sources."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import gemm, hopper
from cubatch.engine.native.context import Context
from cubatch.engine.native.operands import Fused
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from tests.cpusim import building, planting
from tests.cpusim.planting import ANY_FIRST, LATE, MODES, WRONG, running, seen_always
from tests.cpusim.simulator import SimulationError
from tests.kernels.hopper_cases import H200

pytestmark = planting.IN_PLACE

SOURCES = variant.kernels_path() / "hopper"
DRAWS = 4
TILES = {"": "256x128x64", "wide": "128x256x64", "swapped": "256x64x64"}
SLOWLY = "  cb_barrier_arrive(shared.joined(consumer));\n  cb_barrier_wait(shared.joined(consumer), joins++ & 1);\n"
FULL = "  if constexpr (!MOMENTS) cb_barrier_wait(shared.full(ring.stage), ring.parity);\n"


@attrs.frozen
class Bug:
    """
    A change of a line of sums.cuh that is there once, and what must come of it.

    Attributes:
        old, new: The line.
        pattern: Part of the outcome.
        modes: (schedule, copies) in which it must come.
        layout: Of the product: "nt" has a norm behind it, "nn" one before.
        tile: Key of TILES.
    """

    old: str
    new: str
    pattern: str = ""
    modes: tuple[tuple[str, str], ...] = MODES
    layout: str = "nt"
    tile: str = ""


BUGS = {
    "no wait for the norm's input": Bug(
        f"{FULL}  CB_UNROLL\n", "  CB_UNROLL\n", modes=(("in_order", "late"), ("warps", "late")), layout="nn"
    ),
    "a stage that is not left": Bug("  release(shared, ring.stage);\n", "", "deadlock", layout="nn"),
    "left before all have read": Bug(
        "as behind a mask\n" + SLOWLY, "as behind a mask\n  (void)joins, (void)consumer;\n",
        modes=ANY_FIRST, layout="nn",
    ),
    "no wait for the other warps": Bug(
        f"u32& joins) {{\n{SLOWLY}  const int first", "u32& joins) {\n  const int first", modes=ANY_FIRST
    ),
    "sums staged over strips": Bug("    if (lane == 0) cb_tma_store_wait_read<0>();\n", "", modes=LATE, tile="wide"),
    "swapped, three lanes": Bug("bit < 4; bit *= 2", "bit < 2; bit *= 2", tile="swapped"),
}  # fmt: skip
CASES = seen_always(BUGS, "no wait for the norm's input", "no wait for the other warps", "swapped, three lanes")


def mutant(layout, tile, *change):
    """Give the kernel with a bug, or as it is."""
    found = variant.find(f"gemm_{layout}_sums", "float16", tile=TILES[tile])
    return planting.mutant("sums", found, SOURCES.iterdir(), (("sums.cuh", *change),) if change else ())


def of(bug):
    """Give the kernel with a bug."""
    return mutant(bug.layout, bug.tile, bug.old, bug.new)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    plain = [mutant(layout, tile) for layout in ("nt", "nn") for tile in TILES]
    building.precompile([*plain, *(of(BUGS[name]) for name in running(CASES))], 90)


def outcome(kernel, layout, mode, patch):
    """Multiply integers, whose sums are exact, and compare the sums of columns: "right", else WRONG or the error."""
    m, n, k, random = 603, 136, 72, np.random.default_rng(3)
    a = random.integers(-2, 3, (m, k)).astype(np.float16)
    b = random.integers(-2, 3, (n, k) if layout == "nt" else (k, n)).astype(np.float16)
    y = a.astype(np.float64) @ (b.T if layout == "nt" else b).astype(np.float64)
    bias = random.integers(1, 6000, n).astype(np.float16) if layout == "nt" else None
    ones = np.ones(n, np.float32)
    x = random.integers(-3, 4, (m, n)).astype(np.float16)
    patch.setattr(hopper, "summing_variant", lambda *_: kernel)
    usual = variant.find(f"gemm_{layout}", "float16", tile=kernel.tile_name, family="hopper")
    for simulator in planting.simulators(90, mode, DRAWS):
        where = Context(device=H200, launcher=simulator, chooser=lambda *_: SplitKernel(usual))
        mean, inv_std, means = (np.full(size, np.nan, np.float32) for size in (n, n, (2, n)))
        if layout == "nt":
            norm = {"mean": mean, "inv_std": inv_std, "momentum": 0.1, "eps": 0.0}
        else:
            half = np.ones(n, np.float16)
            norm = {"x": x, "mean": ones, "inv_std": ones, "gamma": half, "beta": 2 * half}
            norm |= {"means": means, "dgamma": half.copy(), "dbeta": half.copy()}
        fused = Fused(mask=np.maximum(x + np.float16(1), 0)) if layout == "nn" else Fused()
        try:
            got = gemm.gemm(where, a, b, bias, layout=layout, fused=fused, norm=norm)
        except SimulationError as error:
            return str(error)
        if layout == "nt":
            stored = (y + bias).astype(np.float16).astype(np.float64)
            # Means near 6000 are rounded to 2^-12; of the sums before rounding the variance is 0.5 % less.
            pairs = [(got, stored, 0), (mean, stored.mean(axis=0), 1e-6), (inv_std, stored.var(axis=0) ** -0.5, 1e-4)]
        else:
            passed = np.where(x > -1, y, 0)
            want = np.array([(passed * (x - 1.0)).mean(axis=0), passed.mean(axis=0)])
            pairs = [(got, passed, 0), (means, want, 1e-6)]
        if not all(np.allclose(one, want, rtol=near, atol=near) for one, want, near in pairs):
            return WRONG
    return "right"


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_the_kernel_as_it_is_passes(layout, tile, mode, monkeypatch):
    """No false alarm in any order of threads and copies."""
    assert outcome(mutant(layout, tile), layout, mode, monkeypatch) == "right"


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_caught(name, monkeypatch):
    """In every mode that the table names: a wrong result, or an error that says what is wrong."""
    bug = BUGS[name]
    assert planting.missed(bug, lambda mode: outcome(of(bug), bug.layout, mode, monkeypatch)) == {}
