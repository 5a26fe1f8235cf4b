"""What a study is asked, and how it measures: evenly, kept in its folder, showing how far it is."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

import attrs

from cubatch.checks import check_whole
from cubatch.engine.conditions import conditions, environment
from cubatch.engine.data import Dataset
from cubatch.errors import InvalidArgument
from cubatch.hardware import room
from cubatch.measure.records import PER_VISIT
from cubatch.memory import fit
from cubatch.network.models import SpecLike
from cubatch.search.events import Event
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune import autotune
from cubatch.workload import Workload


class Show(Protocol):
    """Shows how much is done, of how much, what is being done, and in which unit; a number of things has none."""

    def __call__(self, done: float, total: float, text: str, unit: str = "", /) -> None:
        """Show it."""


STORE = "measured.sqlite3"
_SHARED = (
    "created", "input_shape", "mode", "dtype", "optimizer", "library", "recompute", "limits", "budget_seconds",
    "seconds_spent", "seed", "device", "environment",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Asked:
    """
    What a user asks of a study.

    Attributes:
        spec: What is run: a network, or what stands for one.
        model: What the user calls it.
        folder: Where the study writes, and keeps what it measured.
        device, dtype, optimizer: As for `autotune`.
        modes: Those that are looked at, the one that takes most last; empty: the study's own.
        data: Folder with MNIST's files, for studies that train on them.
        max_batch_size: No size is above it; None leaves that to the study.
        memory_limit: As for `autotune`.
        budget: Seconds of measuring, at most; None leaves that to the study.
        quick: Whether a first answer in seconds is enough.
        seed: As for `autotune`.
        show: Told how far it is: done, of how much, what is being done.
    """

    spec: SpecLike
    model: str
    folder: Path
    device: str | None = None
    modes: tuple[str, ...] = ()
    dtype: str = "float32"
    optimizer: str = "sgd"
    data: Path | None = None
    max_batch_size: int | None = None
    memory_limit: int | str | None = None
    budget: float | None = None
    quick: bool = False
    seed: int = 0
    show: Show = lambda _done, _total, _text, _unit="": None

    @property
    def mode(self) -> str:
        """The mode, or of several the one that takes most."""
        return self.modes[-1]

    @property
    def work(self) -> Workload:
        """The workload, on a device of this machine."""
        return Workload.of(
            self.spec, self.device, mode=self.mode, dtype=self.dtype, optimizer=self.optimizer, present=True
        )

    def largest(self, most: int) -> int:
        """
        Give the largest size to look at.

        Args:
            most: What the study looks at where neither memory nor `max_batch_size` says less, or the latter more.

        Raises:
            DoesNotFit: If not even one sample fits.
        """
        if self.max_batch_size is not None:
            check_whole("max_batch_size", self.max_batch_size)
        work = self.work
        fits = fit.largest(work, max(1, room.memory_limit(work.device, self.memory_limit).bytes))
        return min(fits, most if self.max_batch_size is None else self.max_batch_size)

    def seconds(self, usual: float, quick: float) -> float:
        """Give the budget: the user's, or one of the study's."""
        return self.budget if self.budget is not None else quick if self.quick else usual

    def tuned(self, *, budget: float, **more: Any) -> TuningResult:
        """Tune with the user's options, kept in the study's folder, so that a killed study goes on."""
        return autotune(
            self.spec, device=self.device, mode=cast("Any", self.mode), dtype=cast("Any", self.dtype),
            optimizer=cast("Any", self.optimizer), memory_limit=self.memory_limit, budget=budget, seed=self.seed,
            store=self.folder / STORE, **more,
        )  # fmt: skip

    def swept(self, sizes: Sequence[int], sweeps: int, *, budget: float, tolerance: float = 0.01) -> TuningResult:
        """Visit every size in every sweep, and show how many visits are left."""
        seen: set[tuple[int | None, int]] = set()
        before: list[int] = []  # visits of an earlier run that goes on

        def watch(event: Event) -> None:
            if event.kind != "timing":
                return
            sweep = event.round // PER_VISIT
            if not before:
                before.append(max(0, sweep - 1) * len(sizes))
            seen.add((event.batch_size, sweep))
            total = sweeps * len(sizes)
            self.show(min(before[0] + len(seen), total), total, event.message)

        return self.tuned(budget=budget, batch_sizes=sizes, sweeps=sweeps, tolerance=tolerance, progress=watch)


def shared(result: TuningResult) -> dict[str, Any]:
    """Give what a study's JSON says of where, how and when it was measured."""
    mapping = result.to_mapping()
    return {name: mapping[name] for name in _SHARED}


@attrs.frozen
class Situation:
    """
    Under what a study measures that does not tune.

    Attributes:
        known: All that its findings depend on but for the budget.
        facts: What its JSON says of where, how and when.
    """

    known: dict[str, Any]
    facts: dict[str, Any]


def situation(asked: Asked, budget: float, images: Iterable[Dataset] = ()) -> Situation:
    """
    Describe under what a study measures: what is run, device, versions, settings, date.

    Args:
        asked: What the user asks.
        budget: Seconds.
        images: What it trains on and tests with: others may lie in the same folder later.
    """
    work, device = asked.work, asked.work.device.to_mapping()
    shown = ("name", "kind", "compute_capability", "threads", "memory_bytes")
    data = None if asked.data is None else str(asked.data.resolve())
    digests = [[len(one), zlib.crc32(one.images.tobytes()), zlib.crc32(one.labels.tobytes())] for one in images]
    return Situation(
        known={
            "spec": work.spec.to_mapping(), "settings": work.settings, "seed": asked.seed, "data": data,
            "conditions": conditions(work.device),
            "images": digests,
        },
        facts={
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            **work.settings,
            "input_shape": list(work.input_shape),
            "budget_seconds": budget,
            "seed": asked.seed,
            "device": {name: device[name] for name in shown},
            "environment": environment(work.device),
        },
    )  # fmt: skip


def only_training(asked: Asked) -> None:
    """
    Refuse what is not training, where a question is of training.

    Raises:
        InvalidArgument: If inference is asked for.
    """
    if asked.mode != "training":
        raise InvalidArgument("mode", asked.mode, '"training": the question is of training')
