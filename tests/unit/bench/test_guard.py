"""Rivals that fail: ours are measured all the same, and nobody is blamed for what another did."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.bench import measure, rivals
from cubatch.bench.contest import Contest
from cubatch.bench.guard import twice
from cubatch.bench.rivals import Rival
from tests.unit.bench.building import GEMM
from tests.unit.bench_fakes import DEVICE


class Gpu:
    """A GPU whose context may be broken, and pools that may hold memory back."""

    def __init__(self):
        self.broken, self.freed = "", 0

    def synchronize(self):
        if self.broken:
            raise RuntimeError(self.broken)

    def free_pools(self):
        self.freed += 1

    def target(self, world, device=DEVICE):
        return attrs.evolve(world.target(device), synchronize=self.synchronize, free_pools=self.free_pools)


def with_rival(monkeypatch, bind):
    """Put a library that is right in the place of the vendor; `bind` gives what else each of its steps does."""

    def right(arrays):
        also = bind(arrays)

        def step():
            also()
            np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])

        return step

    monkeypatch.setitem(rivals.RIVALS, "vendor", lambda *_, **__: Rival("library", right))


def timed(world, gpu, device=DEVICE):
    """All that is told of the case."""
    return measure.time_case(GEMM, gpu.target(world, device), Contest(world), seconds=10.0)


@pytest.mark.parametrize("error", [MemoryError("pool"), RuntimeError("no kernel image")])
def test_a_rival_that_cannot_begin_costs_its_own_time_alone(world, monkeypatch, error):
    """For want of memory too, which CuPy says with a MemoryError: the case is not out of memory, ours ran."""

    def bind(_):
        raise error

    with_rival(monkeypatch, bind)
    result = timed(world, Gpu())
    (ours,) = result.entries
    assert (ours.status, len(ours.timings)) == ("ok", 5)
    assert result.missing == {"vendor": f"library failed with {type(error).__name__}: {error}"}


def test_a_rival_that_fails_later_does_not_end_ours(world, monkeypatch):
    """In the middle of a round; it is not tried again."""
    calls = []

    def step():
        calls.append(1)
        if len(calls) > 7:  # five sets are bound
            raise RuntimeError("no workspace")

    with_rival(monkeypatch, lambda _: step)
    ours, vendor = timed(world, Gpu()).entries
    assert (ours.status, ours.ratio, len(ours.timings)) == ("ok", None, 5)
    assert (vendor.status, vendor.reason, vendor.timings) == ("error", "RuntimeError: no workspace", ())
    assert len(calls) == 8


def test_an_error_of_our_kernels_is_not_the_rivals(world, monkeypatch):
    """It shows at the next call to the GPU, whoever makes it: so it is asked for first."""
    gpu = Gpu()
    with_rival(monkeypatch, lambda _: pytest.fail("asked of a broken GPU"))
    gpu.broken = "an illegal address"
    with pytest.raises(RuntimeError, match="an illegal address"):
        timed(world, gpu)


@pytest.mark.parametrize("when", ["bound", "timed"])
def test_a_rival_that_breaks_the_gpu_ends_the_process(world, monkeypatch, when):
    """Nothing of ours would run there either, and would be called wrong."""
    gpu, calls = Gpu(), []

    def step():
        calls.append(1)
        if when == "bound" or len(calls) > 7:  # five sets are bound
            gpu.broken = "an illegal address"
            raise RuntimeError("launch failed")

    with_rival(monkeypatch, lambda _: step)
    with pytest.raises(RuntimeError, match="an illegal address"):
        timed(world, gpu)


def test_memory_that_the_pools_hold_back_is_given_back_once(world, monkeypatch):
    """Neither library can make the other give back what it has freed; a second want of memory is one."""
    gpu, tries = Gpu(), []

    def make():
        tries.append(gpu.freed)
        if gpu.freed < 1:
            raise MemoryError
        return "made"

    assert twice(make, gpu.target(world)) == "made"
    assert tries == [0, 1]
    with pytest.raises(MemoryError):
        twice(lambda: (_ for _ in ()).throw(MemoryError()), gpu.target(world))
    with pytest.raises(RuntimeError):
        twice(lambda: (_ for _ in ()).throw(RuntimeError("refused")), gpu.target(world))
    assert gpu.freed == 2


def test_pools_are_emptied_between_cases(world, monkeypatch):
    """What one library keeps of a case is what the other lacks in the next."""
    gpu = Gpu()
    with_rival(monkeypatch, lambda _: lambda: None)
    for number in (1, 2):
        timed(world, gpu)
        assert gpu.freed == number


def test_a_rival_does_every_set_once_before_it_is_timed(world, monkeypatch):
    """Taking memory for the results of each is no part of a timing."""
    bound, done = [], []
    device = attrs.evolve(DEVICE, l2_bytes=GEMM.num_bytes * 2)

    def bind(arrays):
        bound.append(id(arrays["out"]))
        number = len(bound)
        return lambda: done.append((number, len(world.readings)))

    with_rival(monkeypatch, bind)
    timed(world, Gpu(), device)
    assert len(set(bound)) == 4
    assert [number for number, readings in done if not readings] == [1, 2, 3, 4]


def test_a_cudnn_that_does_not_know_the_gpu_costs_its_version_alone(monkeypatch):
    """From 9.11 on it raises on GPUs before Turing; what else is there is told."""

    class Torch:
        __version__ = "2.11.0"

        class backends:  # noqa: N801 - PyTorch's name
            class cudnn:  # noqa: N801 - PyTorch's name
                def version():
                    raise RuntimeError("not compatible with devices with SM < 7.5")

    monkeypatch.setattr(rivals, "_torch", lambda: Torch)
    assert rivals.versions() == {"torch": "2.11.0", "cudnn": None}


def test_a_way_that_fails_beside_one_that_runs_leaves_its_side_present(world, monkeypatch):
    """The library is missing only where none of its ways ran."""

    def bind(arrays):
        return lambda: np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])

    def refuse(_):
        raise RuntimeError("not in this version")

    both = attrs.evolve(Rival("refused", refuse), alternatives=(Rival("taken", bind),))
    monkeypatch.setitem(rivals.RIVALS, "vendor", lambda *_, **__: both)
    result = timed(world, Gpu())
    assert [entry.name for entry in result.entries][1:] == ["taken"]
    assert result.missing == {}
