"""
The devices that batch-size finders are compared on: seeded, of stated classes, with a known truth.

Times follow the wave law.  A convolution is a grid of `ceil(n*p*q / TILE_M) * ceil(k / TILE_N)` blocks;
its time is that of the SM with most of them, and a wave that is not full costs somewhat less than a
full one: `tail + (1 - tail) * fill`, with tail = 1 as on V100 or 0.55 as on Turing.  A network's step is
the sum over its layers, each with a launch overhead.  On a plateau time is affine in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

import cubatch as cb
from benchmarks.rivals import GIB, Task
from cubatch import catalogue
from cubatch.spec import Spec, as_network
from tests.fakes import Behaviour, ColdStart, Curve, Drift, FakeDevice, Throttling, affine, cliff

TOLERANCE = 0.01  # what a finder may give up for a smaller batch, here and in what ours is asked
KNOWN_TILE = (128, 128)  # the tile that the candidate generator assumes of a library that is not ours
OTHER_TILES = ((256, 128), (128, 64), (64, 64), (128, 96), (192, 128))
GPUS = (
    "titan-x-maxwell", "titan-x-pascal", "v100-sxm2-16gb", "t4", "rtx-2080", "rtx-2080-ti",
    "a100-sxm4-40gb", "rtx-3090", "p100-pcie-16gb", "h100-pcie", "h200-sxm",
)  # fmt: skip
MAXIMA = (100, 128, 200, 256, 300, 400, 512, 700, 1000, 1024, 1500, 2048, 3000, 4096)
# What any device does: the very first step loads code, and the first of each size fills caches.
ORDINARY_START = ColdStart(slower=0.02, seconds=0.5, first_step=20.0, first_step_of_size=2.0)


@attrs.frozen(kw_only=True)
class Case:
    """
    One device of the comparison.

    Attributes:
        kind: Its class, one of KINDS.
        spec: What is tuned: the candidate generator sees it, the rivals do not need it.
        gpu: The catalogue's device of that name, with memory that never decides.
        device: The truth, and what spoils the measuring of it.
        task: What the finders are told.
        planned_limit: The largest size that fits by the memory plan; equal to the truth except where the class says.
        best_batch_size, best_throughput: The best over every integer up to the user's maximum that fits.
        knee: The smallest integer within TOLERANCE of that: what would be the ideal answer.
    """

    kind: str
    spec: Spec
    gpu: cb.Device
    device: FakeDevice
    task: Task
    planned_limit: int
    best_batch_size: int
    best_throughput: float
    knee: int


def convolution_seconds(conv: cb.Conv2d, gpu: cb.Device, *, tile: tuple[int, int], tail: float) -> Curve:
    """Give the time of a convolution by the wave law, as a function of the batch size and without overhead."""
    p, q, k = conv.output_shape
    tile_m, tile_n = tile
    columns = -(-k // tile_n)
    num_sms = gpu.num_sms
    if num_sms is None:
        raise ValueError(f"{gpu} has no SM count to compute waves with")
    flops_per_block = 2 * tile_m * tile_n * conv.r * conv.s * (conv.c or 1)
    seconds_per_wave = flops_per_block / (0.7 * gpu.peak_flops_per_second["float32"] / num_sms)

    def seconds(batch_size: int) -> float:
        full_waves, rest = divmod(-(-batch_size * p * q // tile_m) * columns, num_sms)
        last_wave = tail + (1.0 - tail) * rest / num_sms if rest else 0.0
        return seconds_per_wave * (full_waves + last_wave)

    return seconds


def wave_curve(
    convolutions: Sequence[cb.Conv2d], gpu: cb.Device, *, tile: tuple[int, int], tail: float, overhead_seconds: float
) -> Curve:
    """Sum the wave law over the layers of a network; equal layers are computed once."""
    counts = {conv: convolutions.count(conv) for conv in convolutions}
    terms = [(count, convolution_seconds(conv, gpu, tile=tile, tail=tail)) for conv, count in counts.items()]
    fixed = overhead_seconds * len(convolutions)
    return lambda batch_size: fixed + sum(count * seconds(batch_size) for count, seconds in terms)


def make(seed: int, index: int) -> Case:
    """
    Make device `index` of a comparison; the classes take turns.

    Args:
        seed: Of the whole comparison.
        index: Number of the device.
    """
    rng = random.Random(f"{seed}/{index}")
    kind = list(KINDS)[index % len(KINDS)]
    traits = Traits(rng)
    KINDS[kind](traits, rng)
    return traits.case(kind, seed=rng.randrange(2**31))


class Traits:
    """What is drawn for every device, before its class changes some of it."""

    def __init__(self, rng: random.Random) -> None:
        self.gpu = attrs.evolve(catalogue.find(rng.choice(GPUS)), memory_bytes=2**50)
        self.spec = _draw_spec(rng)
        self.max_batch_size = rng.choice(MAXIMA)
        self.noise = rng.choice((0.002, 0.003, 0.005, 0.01))
        self.outliers = 0.02
        self.behaviours: list[Behaviour] = [ORDINARY_START]
        self.prepare_seconds = rng.uniform(0.01, 0.1)
        self.overhead_seconds = rng.uniform(2e-6, 2e-5)
        self.tail = rng.choice((1.0, 0.55))
        self.curve = self.plateau(rng) if rng.random() < 0.5 else self.waves(KNOWN_TILE)
        self.total_bytes = rng.choice((8, 11, 16, 24, 40, 80)) * GIB
        self.fixed_bytes = int(rng.uniform(0.3, 1.0) * GIB)
        self.true_limit = int(self.max_batch_size * rng.uniform(1.0, 3.0))
        self.planned_limit: int | None = None
        self.workspace: Callable[[int], int] = lambda batch_size: 0  # noqa: ARG005

    def plateau(self, rng: random.Random) -> Curve:
        """Draw a smooth curve: half of the best throughput at 1 to 100 samples."""
        seconds_per_sample = 10 ** rng.uniform(-5.0, -3.0)
        return affine(seconds_per_sample * 10 ** rng.uniform(0.0, 2.0), seconds_per_sample)

    def waves(self, tile: tuple[int, int]) -> Curve:
        """Follow the wave law with this tile."""
        layers = [node.layer for node in as_network(self.spec).nodes]
        convolutions = [layer for layer in layers if isinstance(layer, cb.Conv2d)]
        return wave_curve(convolutions, self.gpu, tile=tile, tail=self.tail, overhead_seconds=self.overhead_seconds)

    def case(self, kind: str, seed: int) -> Case:
        """Put the device together, and look up its best size over all integers."""
        room = self.total_bytes - self.fixed_bytes
        bytes_per_sample = room // (self.true_limit + 1) + 1
        planned_limit = self.planned_limit or self.true_limit
        device = FakeDevice(
            self.curve,
            noise=self.noise,
            outliers=self.outliers,
            bytes_needed=lambda n: self.fixed_bytes + n * bytes_per_sample + self.workspace(n),
            memory_bytes=self.total_bytes,
            prepare_seconds=self.prepare_seconds,
            behaviours=tuple(self.behaviours),
            seed=seed,
        )
        best, throughput = device.true_best(self.max_batch_size)
        return Case(
            kind=kind,
            spec=self.spec,
            gpu=self.gpu,
            device=device,
            task=Task(
                max_batch_size=self.max_batch_size,
                total_bytes=self.total_bytes,
                fixed_bytes=self.fixed_bytes,
                bytes_per_sample=room / (planned_limit + 1),
                parameters=as_network(self.spec).parameters,
            ),
            planned_limit=planned_limit,
            best_batch_size=best,
            best_throughput=throughput,
            knee=next(
                n
                for n in range(1, best + 1)
                if device.fits(n) and device.throughput(n) >= (1.0 - TOLERANCE) * throughput
            ),
        )


def _draw_spec(rng: random.Random) -> Spec:
    """Draw one convolution, a chain of equal ones as in game networks, or a small network that narrows."""
    shape = rng.choice(("single", "equal", "narrowing"))
    extent = rng.choice((7, 8, 14, 19, 28, 32))
    channels = rng.choice((64, 128, 192, 256, 320))
    if shape == "single":
        taps = rng.choice((1, 3))
        filters = rng.choice((64, 128, 256, 320))
        return cb.Conv2d(h=extent, w=extent, c=channels, k=filters, r=taps, s=taps, pad=taps // 2)
    if shape == "equal":
        layers = [cb.Conv2d(k=channels, r=3, s=3, pad=1) for _ in range(rng.randint(2, 8))]
        return cb.Network(input_shape=(extent, extent, channels), layers=layers)
    layers = [cb.Conv2d(k=64 * 2 ** (i // 2), r=3, s=3, pad=1, stride=1 + i % 2) for i in range(rng.randint(3, 6))]
    return cb.Network(input_shape=(2 * extent, 2 * extent, 16), layers=layers)


def _plateau(traits: Traits, rng: random.Random) -> None:
    traits.curve = traits.plateau(rng)


def _known_waves(traits: Traits, rng: random.Random) -> None:  # noqa: ARG001
    traits.curve = traits.waves(KNOWN_TILE)


def _unknown_waves(traits: Traits, rng: random.Random) -> None:
    traits.curve = traits.waves(rng.choice(OTHER_TILES))


def _cache_cliff(traits: Traits, rng: random.Random) -> None:
    at = int(traits.max_batch_size ** rng.uniform(0.5, 0.95))
    traits.curve = cliff(traits.curve, at, rng.uniform(1.05, 1.6))


def _drift(traits: Traits, rng: random.Random) -> None:
    period = rng.choice((None, 15.0, 60.0))
    traits.behaviours.append(Drift(rng.uniform(0.02, 0.08), seconds=rng.uniform(5.0, 40.0), period=period))


def _cold_start(traits: Traits, rng: random.Random) -> None:
    slower, seconds = rng.uniform(0.1, 0.28), rng.uniform(0.3, 5.0)
    traits.behaviours = [ColdStart(slower, seconds, first_step=50.0, first_step_of_size=rng.uniform(2.0, 10.0))]


def _throttling(traits: Traits, rng: random.Random) -> None:
    traits.behaviours.append(Throttling(rng.uniform(0.15, 0.6), hot_after=rng.uniform(2.0, 10.0)))


def _noise(traits: Traits, rng: random.Random) -> None:
    traits.noise, traits.outliers = rng.choice((0.002, 0.01, 0.02, 0.05)), rng.choice((0.0, 0.05))


def _tight_memory(traits: Traits, rng: random.Random) -> None:
    traits.true_limit = max(8, int(traits.max_batch_size * rng.uniform(0.1, 0.95)))


def _wrong_plan(traits: Traits, rng: random.Random) -> None:
    traits.true_limit = max(8, int(traits.max_batch_size * rng.uniform(0.1, 0.9)))
    traits.planned_limit = int(traits.true_limit * rng.uniform(1.1, 1.6))


def _workspace_switch(traits: Traits, rng: random.Random) -> None:
    """Sizes between a quarter and half of the limit want a workspace that does not fit, larger ones do without."""
    _tight_memory(traits, rng)
    low, high = int(traits.true_limit * 0.25), int(traits.true_limit * rng.uniform(0.4, 0.7))
    total_bytes = traits.total_bytes
    traits.workspace = lambda batch_size: total_bytes if low <= batch_size < high else 0


KINDS: dict[str, Callable[[Traits, random.Random], None]] = {
    "plateau": _plateau,
    "known waves": _known_waves,
    "unknown waves": _unknown_waves,
    "cache cliff": _cache_cliff,
    "drift": _drift,
    "first candidate": _cold_start,
    "throttling": _throttling,
    "noise 0.2 to 5 %": _noise,
    "out of memory at N": _tight_memory,
    "memory plan wrong": _wrong_plan,
    "memory not monotone": _workspace_switch,
}
"""Every class of devices, and what it changes about an ordinary one."""
