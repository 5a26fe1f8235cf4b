"""
Devices that follow the wave law, and the classes that disturb the measuring of networks on them.

A convolution is a grid of `ceil(n*p*q / TILE_M) * ceil(k / TILE_N)` blocks.  Its time is that of the SM with most of
them.  A partial wave costs `tail + (1 - tail) * fill` of a full one, with tail = 1 as on V100 or 0.55 as on Turing.  A
network's step is the sum over its layers, each with a launch overhead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

import cubatch as cb
from benchmarks.search.cases import Case, Traits
from cubatch.hardware import catalogue
from cubatch.measure.records import Candidate
from cubatch.network.graph import Spec, as_network
from tests.fakes import ColdStart, Curve, Throttling, affine

KNOWN_TILE = (128, 128)  # the tile that the candidate generator assumes of a foreign library
OTHER_TILES = ((256, 128), (128, 64), (64, 64), (128, 96), (192, 128))
GPUS = (
    "titan-x-maxwell", "titan-x-pascal", "v100-sxm2-16gb", "t4", "rtx-2080", "rtx-2080-ti",
    "a100-sxm4-40gb", "rtx-3090", "p100-pcie-16gb", "h100-pcie", "h200-sxm",
)  # fmt: skip


def convolution_seconds(conv: cb.Conv2d, gpu: cb.Device, *, tile: tuple[int, int], tail: float) -> Curve:
    """Return the time of a convolution by wave quantization, as a function of batch size, without overhead."""
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


class Network(Traits):
    """A network of convolutions on a GPU of the catalogue, with a memory plan."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.gpu = attrs.evolve(catalogue.find(rng.choice(GPUS)), memory_bytes=2**50)
        self.spec = _draw_spec(rng)
        self.parameters = as_network(self.spec).parameters
        self.overhead_seconds = rng.uniform(2e-6, 2e-5)
        self.tail = rng.choice((1.0, 0.55))
        self.curve = self.smooth(rng) if rng.random() < 0.5 else self.waves(KNOWN_TILE)
        self.planned_limit = self.true_limit

    def smooth(self, rng: random.Random) -> Curve:
        """Draw a smooth curve: half of the best throughput at 1 to 100 samples."""
        seconds_per_sample = 10 ** rng.uniform(-5.0, -3.0)
        return affine(seconds_per_sample * 10 ** rng.uniform(0.0, 2.0), seconds_per_sample)

    def waves(self, tile: tuple[int, int]) -> Curve:
        """Follow the wave law with this tile."""
        layers = [node.layer for node in as_network(self.spec).nodes]
        convolutions = [layer for layer in layers if isinstance(layer, cb.Conv2d)]
        return wave_curve(convolutions, self.gpu, tile=tile, tail=self.tail, overhead_seconds=self.overhead_seconds)

    def candidates(self) -> list[Candidate]:
        """List the candidates for a library whose tiles are not known, 128 x 128, up to the planned limit."""
        limit = min(self.planned_limit or self.max_batch_size, self.max_batch_size)
        return cb.candidates(self.spec, device=self.gpu, max_batch_size=limit, library="im2col")


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


def _known_waves(traits: Network, rng: random.Random) -> None:  # noqa: ARG001
    traits.curve = traits.waves(KNOWN_TILE)


def _unknown_waves(traits: Network, rng: random.Random) -> None:
    traits.curve = traits.waves(rng.choice(OTHER_TILES))


def _cold_start(traits: Network, rng: random.Random) -> None:
    slower, seconds = rng.uniform(0.1, 0.28), rng.uniform(0.3, 5.0)
    traits.behaviours = [ColdStart(slower, seconds, first_step=50.0, first_step_of_size=rng.uniform(2.0, 10.0))]
    traits.is_stationary = False


def _throttling(traits: Network, rng: random.Random) -> None:
    traits.behaviours.append(Throttling(rng.uniform(0.15, 0.6), hot_after=rng.uniform(2.0, 10.0)))
    traits.is_stationary = False


def _tight_memory(traits: Network, rng: random.Random) -> None:
    traits.true_limit = traits.planned_limit = max(8, int(traits.max_batch_size * rng.uniform(0.1, 0.95)))


def _wrong_plan(traits: Network, rng: random.Random) -> None:
    traits.true_limit = max(8, int(traits.max_batch_size * rng.uniform(0.1, 0.9)))
    traits.planned_limit = int(traits.true_limit * rng.uniform(1.1, 1.6))


def _workspace_switch(traits: Network, rng: random.Random) -> None:
    """Sizes between a quarter and half of the limit want a workspace that does not fit, larger ones do without."""
    _tight_memory(traits, rng)
    low, high = int(traits.true_limit * 0.25), int(traits.true_limit * rng.uniform(0.4, 0.7))
    total_bytes = traits.total_bytes
    traits.workspace = lambda batch_size: total_bytes if low <= batch_size < high else 0


CLASSES: dict[str, Callable[[Network, random.Random], None]] = {
    "known waves": _known_waves,
    "unknown waves": _unknown_waves,
    "cold start": _cold_start,
    "throttling": _throttling,
    "out of memory at N": _tight_memory,
    "memory plan wrong": _wrong_plan,
    "memory not monotone": _workspace_switch,
}
"""Classes of networks, and what each changes about an ordinary one."""


def make(kind: str, rng: random.Random) -> Case:
    """Make a network of one class."""
    traits = Network(rng)
    CLASSES[kind](traits, rng)
    return traits.case(kind, rng.randrange(2**31))
