"""
A training run on the disk: all that its next steps depend on, so that a killed run continues with the same bits.

On a GPU that needs the same kernels; their choice is timed, and cached elsewhere. The file holds:

- the model's snapshot: parameters, master weights, running statistics, optimizer state, loss scale, number of steps;
- the losses of the unfinished epoch, the records of finished epochs, and the settings.

There is no other random state. The order of the images is drawn from the seed and the epoch. The masks of dropout are
drawn from the seed, the step, and the sample at which a thread's share of the batch begins.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import array_file, files
from cubatch.array_file import CHECKPOINT
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.units import shown

VERSION = 2  # in version 1 epochs had another order
_LOSSES = "losses"
_RESTART = "Name another file to begin a new run."


class OtherConditions(UserWarning):
    """Warns that a run continues where sums may be rounded, or masks drawn, differently than before."""


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """A training run between two steps."""

    settings: Mapping[str, Any]  # by name, the settings that decide the final weights
    conditions: Mapping[str, Any]  # by name, software and hardware of the run, which decide how sums are rounded
    epochs: Sequence[Mapping[str, Any]] = ()  # the records of the finished epochs
    losses: Sequence[float] = ()  # losses of the unfinished epoch's steps
    seconds: float = 0.0  # seconds that those steps took
    arrays: Mapping[str, np.ndarray[Any, Any]] = attrs.field(factory=dict)  # the model's snapshot


def check_files(*, save: str | Path | None, checkpoint: str | Path | None) -> None:
    """Raise InvalidArgument if a file cannot be written, or both are one file; None: no such file is written."""
    given = {"save": save, "checkpoint": checkpoint}
    paths = [array_file.check_path(name, path).resolve() for name, path in given.items() if path is not None]
    if len(set(paths)) < len(paths):
        remedy = "They are two files: one holds weights, the other the run."
        raise InvalidArgument("save", str(save), "another file than the checkpoint", remedy)


def write(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a file; an older one is replaced only when the new one is on the disk."""
    notes = {
        "version": VERSION,
        "settings": checkpoint.settings,
        "conditions": checkpoint.conditions,
        "epochs": list(checkpoint.epochs),
        "seconds": checkpoint.seconds,
    }
    arrays = {**checkpoint.arrays, _LOSSES: np.array(checkpoint.losses, np.float64)}
    array_file.write(path, arrays, {CHECKPOINT: json.dumps(notes)})


def read(path: str | Path) -> Checkpoint | None:
    """Return the checkpoint in a file; None if there is no file. Raise InvalidData for other files and versions."""
    if not files.is_file(array_file.check_path("checkpoint", path)):
        return None
    arrays, notes = array_file.read(path)
    fields = json.loads(notes.get(CHECKPOINT, "{}"))
    if "version" not in fields:
        raise InvalidData(str(path), "is no checkpoint", _RESTART)
    if (version := fields.pop("version")) != VERSION:
        reason = f"is a checkpoint of version {shown(version)}, and this cubatch reads version {VERSION}"
        raise InvalidData(str(path), reason, _RESTART)
    try:
        return Checkpoint(**fields, losses=arrays.pop(_LOSSES).tolist(), arrays=arrays)
    except (TypeError, KeyError) as error:
        raise InvalidData(
            str(path), f"has other fields than a checkpoint of this version of cubatch ({error})", _RESTART
        ) from error


def resume(
    path: str | Path, settings: Mapping[str, Any], conditions: Mapping[str, Any], *, draws_masks: bool = False
) -> Checkpoint:
    """
    Return the checkpoint in a file, or that of a run that has not begun if there is no file.

    Args:
        settings: Settings of this run by name, which must equal the file's.
        conditions: Software and hardware of this run by name; a warning names differences from the file's.
        draws_masks: Whether the network has dropout, for which each thread draws its share of the batch.

    Raises:
        InvalidArgument: If a setting differs from the file's.
        InvalidData: If the file is no checkpoint of this version.
    """
    settings = json.loads(json.dumps(settings))  # as they are read back
    run = read(path)
    if run is None:
        return Checkpoint(settings=settings, conditions=conditions)
    for name in {**settings, **run.settings}:
        if settings.get(name) != run.settings.get(name):
            allowed = f"{shown(run.settings.get(name))}, as {path} was begun with"
            raise InvalidArgument(name, settings.get(name), allowed, _RESTART)
    differing = [
        f"{name} was {run.conditions.get(name) or 'unknown'}, is {value or 'unknown'}"
        for name, value in conditions.items()
        if run.conditions.get(name) != value
    ]
    if differing:
        redraws = draws_masks and run.conditions.get("threads") != conditions.get("threads")  # None on a GPU
        effect = "dropout draws other masks" if redraws else "weights may differ in their last bits"
        message = f"{path} continues under other conditions, so that {effect}: {'; '.join(differing)}"
        warnings.warn(message, OtherConditions, stacklevel=3)
    return attrs.evolve(run, conditions=conditions)


def digest(arrays: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify the names, types, shapes and contents of arrays."""
    total = hashlib.sha256()
    for name, array in arrays.items():
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()[:16]


class Keeper:
    """
    Writes a run's checkpoints at intervals.

    Args:
        path: The file; None writes nothing.
        seconds: Least seconds between two checkpoints within an epoch.
        begun: The checkpoint at which the run begins, new or read from a file.
    """

    def __init__(self, path: str | Path | None, seconds: float, begun: Checkpoint) -> None:
        self._path, self._seconds, self._begun = path, seconds, begun
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether `seconds` have passed since the last checkpoint, or since the start; False without a file."""
        return self._path is not None and time.monotonic() - self._last >= self._seconds

    def write(self, snapshot: Callable[[], Mapping[str, np.ndarray[Any, Any]]], **changed: Any) -> None:
        """Write a checkpoint with the arrays from `snapshot()` and the `changed` fields; do nothing without a file."""
        if self._path is not None:
            write(self._path, attrs.evolve(self._begun, arrays=snapshot(), **changed))
            self._last = time.monotonic()
