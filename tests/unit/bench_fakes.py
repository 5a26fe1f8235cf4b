"""Kernels that NumPy computes, on a clock that knows how long each takes: for the tests of `cubatch bench`."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import attrs
import numpy as np

from cubatch.bench import implementations
from cubatch.bench.target import Target
from cubatch.engine import functional
from cubatch.hardware.facts import Device
from cubatch.kernels.problem import Problem
from cubatch.kernels.variant import Kernel, Tile
from cubatch.measure.runner import Reading

DEVICE = Device(
    name="Test GPU",
    compute_capability=(9, 0),
    num_sms=10,
    l2_bytes=1 << 16,
    peak_flops_per_second={"float32": 1e12},
    peak_bytes_per_second=1e11,
)
PRODUCTS = {"linear": "gemm_nt", "linear_dgrad": "gemm_nn", "linear_wgrad": "gemm_tn", "conv2d": "conv2d_fprop"}


def kernel(operation, tile="64x64x16"):
    """A kernel that is in no file."""
    size = Tile(tile, 64, 64, 16, 4, 4, 256, 2)
    return Kernel(
        f"{operation}_{tile}", "fake", "fake.cu", operation, operation, "float32", 256, (),
        tile=size if operation in PRODUCTS.values() else None,
    )  # fmt: skip


@attrs.define
class World:
    """
    Kernels, launcher and clock in one: `wrong` kernels give a wrong last element, `seconds` is what each takes.

    Attributes:
        tiles: Variants of every product, in the order of their rank.
        seconds: By kernel name or the operation of one; "vendor" for what launches nothing.
        wrong: Names of kernels.
        sm_clock_mhz: Gives the clock of each reading.
    """

    tiles: list[str] = attrs.field(factory=lambda: ["a", "b"])
    seconds: dict[str, float] = attrs.field(factory=dict)
    wrong: set[str] = attrs.field(factory=set)
    sm_clock_mhz: object = None
    module = np
    launched: list[str] = attrs.field(factory=list)
    readings: list[tuple[str, int]] = attrs.field(factory=list)
    data: list[int] = attrs.field(factory=list)
    _now: float = 0.0

    def ranked(self, problem, device):
        """Rank as listed."""
        return [kernel(problem.operation, tile) for tile in self.tiles]

    def operations(self, context):
        """Give functional's operations as launches of kernels."""
        return SimpleNamespace(
            **{name: functools.partial(self._operation, context, name) for name in functional.__all__}
        )

    def _operation(self, context, name, *arrays, **keywords):
        if name in PRODUCTS:
            found = context.choose(Problem(PRODUCTS[name], "float32", 8, 8, 8)).kernel
        else:
            found = kernel(name, "only")
        context.launch(found, (30, 1, 1), (name, arrays, keywords))

    def bind(self, found, grid, arguments):
        """Run the operation by NumPy."""
        name, arrays, keywords = arguments

        def launch():
            self.launched.append(found.name)
            self.data.append(id(next(iter(keywords.values()))))
            getattr(functional, name)(*arrays, **keywords)
            if found.name in self.wrong:
                keywords["out"].reshape(-1)[-1] += 0.01

        return launch

    def now(self):
        """Seconds of this world."""
        return self._now

    def sleep(self, seconds):
        """Pass time."""
        self._now += seconds

    def time(self, step, repeats):
        """Run the step as often as it needs to be seen; tell its kernel's time."""
        before = len(self.launched)
        step()
        done = self.launched[before:]
        name = done[0] if done else "vendor"
        seconds = self.seconds.get(name, 1e-3)
        self._now += repeats * seconds
        self.readings.append((name, repeats))
        clock = self.sm_clock_mhz(len(self.readings)) if self.sm_clock_mhz else None
        return Reading(seconds=seconds, sm_clock_mhz=clock)

    def target(self, device=DEVICE):
        """Give the place where cases run in this world."""
        return Target(device, self, np, self)


def enter(world, monkeypatch):
    """Put a world in the place of ours."""
    monkeypatch.setattr(implementations, "operations", world.operations)
    monkeypatch.setattr(implementations, "ranked", world.ranked)
    monkeypatch.setattr(implementations, "_naive", lambda _: SimpleNamespace())
    from cubatch.bench import bench_results

    facts = bench_results.launch_facts
    monkeypatch.setattr(
        bench_results, "launch_facts", lambda *given, **named: facts(*given, **{**named, "compiled": False})
    )
    return world


class CupysGenerator:
    """Draws as CuPy's generators do: one number unless it is told a size, which is then all that `out` holds."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)

    def random(self, size=None, dtype=np.float64, out=None):
        """Draw from [0, 1)."""
        drawn = self._random.random(size=() if size is None else size, dtype=dtype)
        if out is None:
            return drawn
        out[...] = drawn
        return out


def events(durations):
    """Give an event maker and an elapsed function for a KernelClock: each pair lasts as listed."""
    left, made = iter(durations), itertools.count()

    class Event:
        def __init__(self):
            self.number = next(made)

        def record(self):
            pass

        def synchronize(self):
            pass

    return Event, lambda start, end: next(left)
