"""The request of a study, the record that each study returns, and the measurements that they share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import attrs

from cubatch.checks import check_whole
from cubatch.engine.conditions import conditions, environment
from cubatch.engine.data import Dataset
from cubatch.errors import InvalidArgument
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.memory import fit
from cubatch.network.models import SpecLike
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune import autotune
from cubatch.workload import Workload

STORE = "measured.sqlite3"
TOO_FEW_TRIALS = "Unknown: the budget allowed too few trials. The same command with a larger --budget continues."
_MEASURED_FACTS = (
    "created", "input_shape", "mode", "dtype", "optimizer", "library", "recompute", "limits", "budget_seconds",
    "seconds_spent", "seed", "device", "environment",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class StudyRequest:
    """Options of a study, as the user gave them."""

    spec: SpecLike  # the network, as for `autotune`
    model: str  # the network's name on the command line
    folder: Path  # directory for the report and for everything that is measured
    # device, dtype, optimizer, memory_limit, seed: as for `autotune`; None: the first GPU, else the CPU, and its free
    # memory
    device: str | None = None
    modes: tuple[str, ...] = ()  # modes to measure, the one with the largest memory plan last; empty: the study's own
    dtype: str = "float32"
    optimizer: str = "sgd"
    data: Path | None = None  # directory with MNIST's files, for studies that train on images; None: generated
    max_batch_size: int | None = None  # the largest size to measure; None: the study's own limit
    memory_limit: int | str | None = None
    budget: float | None = None  # the largest measuring time in seconds; None: the study's own
    quick: bool = False  # whether to measure less, for an answer in seconds
    seed: int = 0
    # called with the progress: work done, total, current step, and the unit of both numbers (empty: a count)
    show: Callable[..., None] = lambda _done, _total, _text, _unit="": None

    @property
    def mode(self) -> str:
        """The last of `modes`, which has the largest memory plan."""
        return self.modes[-1]

    @property
    def work(self) -> Workload:
        """The workload, on a device of this machine."""
        return Workload.of(
            self.spec, self.device, mode=self.mode, dtype=self.dtype, optimizer=self.optimizer, present=True
        )

    def largest(self, default: int) -> int:
        """Return the largest batch size that fits and is at most `max_batch_size`, or `default` if that is None."""
        if self.max_batch_size is not None:
            check_whole("max_batch_size", self.max_batch_size)
        work = self.work
        fits = fit.largest(work, max(1, hardware_memory.memory_limit(work.device, self.memory_limit).bytes))
        return min(fits, default if self.max_batch_size is None else self.max_batch_size)

    def require_training(self) -> None:
        """Raise InvalidArgument unless the mode is training, for studies whose question is about training."""
        if self.mode != "training":
            raise InvalidArgument("mode", self.mode, '"training": the question is about training')

    def tune(self, *, budget: float, **options: Any) -> TuningResult:
        """
        Tune for `budget` seconds with the user's options and return the result; `options` are those of `autotune`.

        A killed study continues from the cached timings in its folder.
        """
        return autotune(
            self.spec, device=self.device, mode=cast("Any", self.mode), dtype=cast("Any", self.dtype),
            optimizer=cast("Any", self.optimizer), memory_limit=self.memory_limit, budget=budget, seed=self.seed,
            store=self.folder / STORE, **options,
        )  # fmt: skip


@attrs.frozen(kw_only=True)
class Findings:
    """The answer of a study, with its numbers."""

    facts: Mapping[str, Any]  # where, how and when it was measured, in JSON form
    answer: str  # the answer in a sentence or two
    points: Sequence[str]  # further sentences
    method: Sequence[str]  # how it was measured, a paragraph each
    notes: Sequence[str] = ()  # paragraphs for the page, under the question
    details: Mapping[str, Any] = attrs.field(factory=dict)  # the numbers, in JSON form
    files: Mapping[str, Any] = attrs.field(factory=dict)  # further files for the folder: content in JSON form by name


@attrs.frozen(kw_only=True)
class Study:
    """A question about batch sizes and the function that measures its answer."""

    title: str  # the question in short
    question: str  # the question in full
    model: str  # the network that is measured unless the user names one
    modes: tuple[str, ...]  # the modes that are measured unless the user names one
    budgets: tuple[float, float]  # seconds of measuring, at most: of the full and of the quick study
    run: Callable[[StudyRequest, float], Findings]  # measures; receives the request and the budget in seconds
    uses_images: bool = False  # whether the study trains on images
    is_timed: bool = True  # whether load of other processes changes the answer


def tuning_facts(result: TuningResult) -> dict[str, Any]:
    """Return device, settings, time and environment of a tuning run in JSON form, by the names of its attributes."""
    mapping = result.to_mapping()
    return {name: mapping[name] for name in _MEASURED_FACTS}


def training_facts(
    request: StudyRequest, budget: float, images: Iterable[Dataset] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Return the conditions of a study that trains or profiles instead of tuning.

    Args:
        budget: Measuring time in seconds.
        images: Images for training and testing, which belong to the conditions by their checksum.

    Returns:
        The key under which the study's findings are cached, with everything that they depend on except the budget; and
        device, settings, time and environment for the study's JSON.
    """
    work, device = request.work, request.work.device.to_mapping()
    shown = ("name", "kind", "compute_capability", "threads", "memory_bytes")
    key = {
        "spec": work.spec.to_mapping(),
        "settings": work.settings,
        "seed": request.seed,
        "data": None if request.data is None else str(request.data.resolve()),
        "conditions": conditions(work.device),
        "images": [
            [len(part), zlib.crc32(part.images.tobytes()), zlib.crc32(part.labels.tobytes())] for part in images
        ],
    }
    facts = {
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **work.settings,
        "input_shape": list(work.input_shape),
        "budget_seconds": budget,
        "seed": request.seed,
        "device": {name: device[name] for name in shown},
        "environment": environment(work.device),
    }
    return key, facts
