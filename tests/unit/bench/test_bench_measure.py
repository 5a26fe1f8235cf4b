"""Measuring in `cubatch bench`, on NumPy kernels in the place of ours, and its rivals."""

from __future__ import annotations

import contextlib
import os

import attrs
import numpy as np
import pytest

from cubatch.bench import bench_results, cases, measure, rivals, target
from cubatch.bench.contest import Contest
from cubatch.bench.implementations import Launch, Tracer, ways
from cubatch.errors import DeviceFailed
from cubatch.hardware import catalogue
from cubatch.kernels.resources import Figures
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.cpusim import building
from tests.cpusim.simulator import Simulator
from tests.unit.bench.building import GEMM, Paced
from tests.unit.bench_fakes import DEVICE, World, kernel

# --- measuring -----------------------------------------------------------------------------------------------------


def test_ours_and_the_vendors_are_compared_in_the_same_rounds(world):
    """Ours takes 1 ms, the vendor 0.9 ms: the ratio is 0.9, its interval too, where nothing varies."""
    world.seconds = {"gemm_nt_a": 1e-3, "gemm_nt_b": 2e-3, "vendor": 0.9e-3}
    result = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", seconds=10.0)
    a, b, vendor = result.entries
    assert [entry.status for entry in result.entries] == ["ok", "dropped", "ok"]
    assert result.best is a
    assert result.times == {"ours": a, "vendor": vendor}
    assert vendor.name == "numpy.matmul"
    assert a.ratio == pytest.approx(0.9)
    assert a.ratio_interval == pytest.approx((0.9, 0.9))
    assert b.ratio == pytest.approx(0.45)
    assert a.flops_per_second == pytest.approx(2 * 70 * 50 * 30 / 1e-3)
    assert a.roofline_fraction == pytest.approx(GEMM.roofline_seconds(DEVICE) / 1e-3)
    assert a.worst_error <= 1
    assert len(a.timings) == len(vendor.timings) == 5


def test_a_wrong_kernel_is_reported_and_never_timed(world):
    """Even where it would be the fastest."""
    world.seconds, world.wrong = {"gemm_nt_a": 1e-6}, {"gemm_nt_a"}
    result = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", with_rivals=False)
    a, b = result.entries
    assert (a.status, a.seconds, a.timings) == ("wrong", None, ())
    assert "the rounding bound at out[" in a.reason
    assert result.best is b
    assert result.wrong == (a,)
    assert world.launched.count("gemm_nt_a") == 1


def test_a_variant_that_the_driver_refuses_does_not_end_the_others(world, monkeypatch):
    """Its error is its result, as that of a variant that does not compile; what breaks the context ends them all."""
    bind = World.bind

    def refused(self, found, grid, arguments):
        if found.name == "gemm_nt_a":
            raise DeviceFailed.by_driver("launching gemm_nt_a", status)
        return bind(self, found, grid, arguments)

    monkeypatch.setattr(World, "bind", refused)
    status = 701
    timed = measure.time_case(GEMM, world.target(), Contest(world), variants="ranked", with_rivals=False)
    checked = measure.verify(GEMM, world.target())
    for result in (timed, checked):
        assert [entry.status for entry in result.entries] == ["error", "ok"]
        assert "status 701" in result.entries[0].reason
    status = 700
    with pytest.raises(DeviceFailed, match="status 700"):
        measure.verify(GEMM, world.target())


def test_the_place_is_told_of_each_variant_before_its_first_launch_and_after(world):
    """So that whoever watches a process knows which kernel ended it; what it refuses is the result of that variant."""
    seen = []

    @contextlib.contextmanager
    def trying(found):
        seen.append((found.name, len(world.launched)))
        if found.name == "gemm_nt_b":
            raise DeviceFailed(f"kernel {found.name}", "the end of an earlier process")
        yield
        seen.append((found.name, len(world.launched)))

    result = measure.verify(GEMM, attrs.evolve(world.target(), trying=trying))
    assert seen == [("gemm_nt_a", 0), ("gemm_nt_a", 1), ("gemm_nt_b", 1)]
    assert [entry.status for entry in result.entries] == ["ok", "error"]
    assert "an earlier process" in result.entries[1].reason


def test_buffers_are_taken_in_turn(world):
    """Sets that together pass twice the L2, each with data of its own; fewer, as the most allowed, are called warm."""
    device = attrs.evolve(DEVICE, l2_bytes=GEMM.num_bytes * 2)
    result = measure.time_case(GEMM, world.target(device), Contest(world), with_rivals=False)
    assert (result.sets, result.l2) == (4, "cold")
    counts = [world.data.count(which) for which in set(world.data)]
    assert len(counts) == 4
    assert max(counts) - min(counts) <= 1
    large = attrs.evolve(DEVICE, l2_bytes=1 << 20)  # more than 128 sets of a tiny product
    result = measure.time_case(cases.gemm(2, 2, 2), world.target(large), Contest(world), with_rivals=False)
    assert (result.sets, result.l2) == (target.MAX_SETS, "warm")


def test_what_a_kernel_writes_over_is_put_back_for_the_next(world, monkeypatch):
    """An optimiser changes its parameters: a second variant's check begins with those of the first."""
    case = cases.optimizer_step("adam", 500)
    way = measure.ways(case, DEVICE)[0]
    monkeypatch.setattr(measure, "ways", lambda *_: [way, way])
    result = measure.time_case(case, world.target(), Contest(world), seconds=0.0, with_rivals=False)
    assert [entry.status for entry in result.entries] == ["ok", "ok"]


def test_bandwidth_stands_against_the_copy_of_the_same_run(world):
    """Batch norm that moves its bytes in 1 ms, where a copy moves twice as many."""
    case = cases.of_layer(layers.BatchNorm2d(h=8, w=8, c=16), Pass.FPROP, 4)
    copy = 2 * case.moved_bytes / 1e-3
    result = measure.time_case(case, world.target(), Contest(world), copy_bytes_per_second=copy)
    assert result.best.bytes_per_second == pytest.approx(case.moved_bytes / 1e-3)
    assert result.best.copy_fraction == pytest.approx(0.5)
    assert result.best.flops_per_second is None


def test_arrays_that_do_not_fit_are_a_status_and_no_crash(world, monkeypatch):
    """CuPy's out of memory is a MemoryError."""

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(measure, "filled", refuse)
    result = measure.time_case(GEMM, world.target(), Contest(world))
    assert result.status == "out_of_memory"
    assert result.best is not None
    assert result.best.seconds is None


def test_a_variant_that_the_driver_refuses_is_not_replaced_by_another():
    """The engine would take another family's; here its time and its results would be taken for the refused one's."""
    case, device = cases.gemm(512, 512, 512, dtype="float16"), catalogue.find("h200-sxm")
    way = next(way for way in ways(case, device, "all") if way.main.family == "hopper")

    class Launcher:
        module = np

        def bind(self, kernel, *_):
            def launch():
                if kernel.family == "hopper":
                    raise DeviceFailed.by_driver(f"launching {kernel.name}", 1)

            return launch

    with pytest.raises(DeviceFailed, match=way.main.name):
        case.call(way.operations(Tracer(Launcher())), target.reserve(case))


@pytest.mark.parametrize(
    "case",
    [
        cases.gemm(7, 5, 9),
        cases.of_layer(layers.BatchNorm2d(h=3, w=5, c=6), Pass.FPROP, 2),
        cases.of_layer(layers.Conv2d(h=7, w=6, c=5, k=5, r=3, s=3, pad=1, groups=5), Pass.DGRAD, 2, with_bias=True),
    ],
    ids=lambda case: case.name,
)
def test_the_kernels_themselves_are_planned_and_verified(case):
    """Executed on the CPU from their own source: every variant that the plan names is right."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    device = catalogue.find("a100-sxm4-40gb")
    here = target.Target(device, Simulator(80), np, Paced())
    planned = measure.plan(case, device, variants="all", compiled=False)
    result = measure.verify(case, here)
    assert [entry.name for entry in result.entries] == [entry.name for entry in planned.entries]
    assert {entry.status for entry in result.entries} == {"ok"}, result.wrong
    assert all(launch.fill for entry in planned.entries for launch in entry.launches)


def test_shared_memory_of_the_launch_limits_the_blocks_of_an_sm(monkeypatch):
    """
    An SM of sm_80 has 164 KiB, of which a block takes 2 + 80, and 1 for the system: it holds one block of 8 warps.

    Its 65 536 registers would hold four blocks of 256 threads with 64 each, and it has slots for 64 warps.
    """
    monkeypatch.setattr(bench_results, "_figures", lambda *_: Figures(registers=64, shared_bytes=2 << 10))
    launch = Launch(kernel=attrs.evolve(kernel("gemm_nt"), threads=256, dynamic_shared_bytes=80 << 10), grid=(1, 1, 1))
    facts = bench_results.launch_facts(launch, catalogue.find("a100-sxm4-40gb"))
    assert (facts.shared_bytes, facts.blocks_per_sm, facts.occupancy) == (82 << 10, 1, 8 / 64)


# --- rivals --------------------------------------------------------------------------------------------------------


def test_tf32_is_off_for_cupy(monkeypatch):
    """Whatever the environment says."""
    monkeypatch.setenv("CUPY_TF32", "1")
    rivals.rivals(GEMM, np)
    assert os.environ["CUPY_TF32"] == "0"
