"""
The ladders of real networks: 3 networks on 4 GPUs, training in float32 and inference in float16.

The truth is the prediction of the time model for every batch size.  The search must not get the truth as its guess.  So
its candidates have no predicted seconds, or wrong ones: twice as long, with the knee at a quarter or four times its
place.
"""

from __future__ import annotations

import functools
import itertools
import random

import attrs

import cubatch as cb
from benchmarks.search.cases import ORDINARY_START, TOLERANCE, Case, judged
from benchmarks.search.finders import GIB, Task
from benchmarks.search.sessions import LoadsCode, Noise, SearchDevice
from cubatch.estimate import expected
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.workload import Workload
from tests.fakes import Drift

NETWORKS = tuple(
    itertools.product(
        ("resnet50", "vgg16", "mobilenet-v3-large"),
        ("titan-x-pascal", "v100-sxm2-16gb", "a100-sxm4-40gb", "h100-sxm"),
        (("training", "float32"), ("inference", "float16")),
    )
)
NO_PRIOR, WRONG_PRIOR = "networks, no prior", "networks, wrong prior"
BUDGETS = (5.0, 10.0, 20.0, 40.0, 60.0)
NOISE, DRIFT, PREPARE_SECONDS, LOAD_SECONDS = 0.01, 0.03, 0.1, 0.5


class Model:
    """Predicted times of a network, each size computed once."""

    def __init__(self, name: str, gpu: str, mode: str, dtype: str) -> None:
        self.work = Workload.of(name, gpu, mode=mode, dtype=dtype)
        self.candidates = cb.candidates(self.work.spec, device=self.work.device, mode=mode, dtype=dtype)
        self._seconds = {candidate.batch_size: candidate.predicted_seconds for candidate in self.candidates}

    def seconds(self, batch_size: int) -> float:
        """Return the predicted seconds of a step."""
        if batch_size not in self._seconds:
            (self._seconds[batch_size],) = expected.step_seconds(self.work, [batch_size])
        seconds = self._seconds[batch_size]
        if seconds is None:
            raise ValueError(f"{self.work.device} lacks a fact that predictions need")
        return seconds


@functools.cache
def model_of(number: int) -> Model:
    """Return the time model of a network by its index in NETWORKS."""
    name, gpu, (mode, dtype) = NETWORKS[number]
    return Model(name, gpu, mode, dtype)


def make(kind: str, seed: int, number: int) -> Case:
    """
    Make the case of a network.

    Args:
        kind: NO_PRIOR or WRONG_PRIOR.
        seed: Of the whole comparison.
        number: Its place in NETWORKS.
    """
    model = model_of(number)
    sizes = [candidate.batch_size for candidate in model.candidates]
    moved = 4.0 if number % 2 else 0.25

    def prior(batch_size: int) -> float | None:
        if kind == NO_PRIOR:
            return None
        return 2.0 * model.seconds(max(1, round(batch_size * moved))) / moved

    def candidates() -> list[Candidate]:
        return [attrs.evolve(step, predicted_seconds=prior(step.batch_size)) for step in model.candidates]

    goal = Goal(tolerance=TOLERANCE)
    bytes_per_sample = (16 * GIB) // (sizes[-1] + 1) + 1
    device = SearchDevice(
        model.seconds,
        noise_of_timings=Noise(NOISE),
        is_stationary=False,
        bytes_needed=lambda n: n * bytes_per_sample,
        memory_bytes=16 * GIB,
        prepare_seconds=PREPARE_SECONDS,
        behaviours=(ORDINARY_START, Drift(DRIFT), LoadsCode(LOAD_SECONDS)),
        seed=random.Random(f"{seed}/network/{number}").randrange(2**31),
    )
    task = Task(
        max_batch_size=sizes[-1], total_bytes=16 * GIB, fixed_bytes=0, bytes_per_sample=bytes_per_sample, goal=goal
    )
    return judged(kind, device, goal, task, candidates, planned_limit=sizes[-1], sizes=sizes)
