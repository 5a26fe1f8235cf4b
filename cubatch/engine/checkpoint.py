"""
A training run on the disk: all that its next steps depend on, so that after a kill it goes on to the bit.

On a GPU it does where the same kernels are chosen; such choices are timed, and kept elsewhere.
The file holds the model's snapshot (parameters, master weights, running statistics, the optimiser's arrays, the loss's
scale, the count of steps), the losses of the epoch that was begun, the epochs that are done, and the settings.  The
order of the images is drawn from the seed and the epoch, the masks of dropout from the seed, the step and the sample at
which a thread's share of the batch begins: there is no other state of random numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import array_file, checks, files
from cubatch.array_file import CHECKPOINT
from cubatch.engine.training_run import Epoch
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.units import shown

VERSION = 2  # of 1, epochs had another order
_LOSSES = "losses"
_ANEW = "Name another file to begin anew."


class OtherConditions(UserWarning):
    """A run goes on where sums may be rounded, or masks drawn, otherwise than where it was begun."""


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """
    A training run between two steps.

    Attributes:
        settings: By name, what decides the weights it will end with.
        conditions: By name, where and on what it ran, which decides how sums are rounded.
        epochs: The records of the epochs that are done.
        losses: Of the steps of the epoch that was begun.
        seconds: What they took.
        arrays: The model's snapshot.
    """

    settings: Mapping[str, Any]
    conditions: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]] = ()
    losses: Sequence[float] = ()
    seconds: float = 0.0
    arrays: Mapping[str, np.ndarray[Any, Any]] = attrs.field(factory=dict)


def check_files(*, save: str | Path | None, checkpoint: str | Path | None) -> None:
    """
    Refuse files that cannot be written, before anything is computed.

    Raises:
        InvalidArgument: If a path is none for such a file, or both are one.
    """
    given = {"save": save, "checkpoint": checkpoint}
    paths = [array_file.check_path(name, path).resolve() for name, path in given.items() if path is not None]
    if len(set(paths)) < len(paths):
        remedy = "They are two files: one holds weights, the other the run."
        raise InvalidArgument("save", str(save), "another file than the checkpoint", remedy)


def write(path: str | Path, checkpoint: Checkpoint) -> None:
    """
    Write a checkpoint, and put it in the old one's place once it is on the disk.

    Raises:
        InvalidArgument: If the path is none for such a file.
        InvalidData: If it cannot be written.
    """
    told = {
        "version": VERSION,
        "settings": checkpoint.settings,
        "conditions": checkpoint.conditions,
        "epochs": list(checkpoint.epochs),
        "seconds": checkpoint.seconds,
    }
    arrays = {**checkpoint.arrays, _LOSSES: np.array(checkpoint.losses, np.float64)}
    array_file.write(path, arrays, {CHECKPOINT: json.dumps(told)})


def read(path: str | Path) -> Checkpoint | None:
    """
    Read a checkpoint; None where there is no file.

    Raises:
        InvalidArgument: If the path is none for such a file.
        InvalidData: If the file is damaged, or no checkpoint, or one of another version.
    """
    if not files.is_file(array_file.check_path("checkpoint", path)):
        return None
    arrays, notes = array_file.read(path)
    if CHECKPOINT not in notes:
        raise InvalidData(str(path), "is no checkpoint", _ANEW)
    try:
        told = json.loads(notes[CHECKPOINT])
        version = told.pop("version")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidData(str(path), "is damaged: it does not say of what it is a checkpoint", _ANEW) from error
    if version != VERSION:
        raise InvalidData(str(path), f"is a checkpoint of version {shown(version)}, this one reads {VERSION}", _ANEW)
    try:
        kept = Checkpoint(**told, losses=arrays.pop(_LOSSES).tolist(), arrays=arrays)
        _check(kept)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidData(str(path), f"is damaged: {error}", _ANEW) from error
    return kept


def _check(kept: Checkpoint) -> None:
    """Refuse, with what Python or a check raises of it, what no run can go on with."""
    checks.required_size(kept.settings["batch_size"])
    checks.wholes(kept.settings.get("shares", ()))
    epochs = [attrs.astuple(Epoch(**epoch)) for epoch in kept.epochs]
    if not all(checks.is_number(each) for each in itertools.chain([kept.seconds], kept.losses, *epochs)):
        raise TypeError("seconds, losses and epochs are not all numbers")
    if not isinstance(kept.conditions, Mapping):
        raise TypeError(f"conditions must be by name, got {shown(kept.conditions)}")


def resume(
    path: str | Path, settings: Mapping[str, Any], conditions: Mapping[str, Any], *, draws_masks: bool = False
) -> Checkpoint:
    """
    Give the run that a file keeps, or a new one where there is none.

    Args:
        path: The file.
        settings: Those of now.
        conditions: Likewise; others than the file's draw a warning.
        draws_masks: Whether the network has dropout, each thread of which draws for its share of the batch.

    Raises:
        InvalidArgument: If a setting is another than the file's; it names the setting and both values.
        InvalidData: As `read`.
    """
    settings = json.loads(json.dumps(settings))  # as they are read back
    kept = read(path)
    if kept is None:
        return Checkpoint(settings=settings, conditions=conditions)
    begun = {"shares": [kept.settings.get("target_batch_size")], **kept.settings}  # once one device told of none
    for name in {**settings, **begun}:
        if settings.get(name) != begun.get(name):
            allowed = f"{shown(begun.get(name))}, as {path} was begun with"
            raise InvalidArgument(name, settings.get(name), allowed, _ANEW)
    differing = [
        f"{name} was {kept.conditions.get(name) or 'unknown'}, is {value or 'unknown'}"
        for name, value in conditions.items()
        if kept.conditions.get(name) != value
    ]
    if differing:
        redraws = draws_masks and kept.conditions.get("threads") != conditions.get("threads")  # None on a GPU
        effect = "dropout draws other masks" if redraws else "weights may differ in their last bits"
        told = f"{path} goes on under other conditions, so that {effect}: {'; '.join(differing)}"
        warnings.warn(told, OtherConditions, stacklevel=3)
    return attrs.evolve(kept, conditions=conditions)


def digest(arrays: Mapping[str, Any]) -> str:
    """
    Name arrays by their contents.

    Example:
        >>> digest({"a": np.zeros(2)}) == digest({"a": np.zeros(2)}) != digest({"a": np.ones(2)})
        True
    """
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


class Keeper:
    """
    Writes a run's checkpoints, none too often.

    Args:
        path: The file; None keeps nothing.
        seconds: Time between two checkpoints within an epoch, at least.
        begun: The run as it was begun or resumed.
    """

    def __init__(self, path: str | Path | None, seconds: float, begun: Checkpoint) -> None:
        self._path, self._seconds, self._begun = path, seconds, begun
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether that time has gone by."""
        return self._path is not None and time.monotonic() - self._last >= self._seconds

    def write(self, snapshot: Callable[[], Mapping[str, np.ndarray[Any, Any]]], **changed: Any) -> None:
        """Write the run as it is now; `changed` are fields of a `Checkpoint`."""
        if self._path is not None:
            write(self._path, attrs.evolve(self._begun, arrays=snapshot(), **changed))
            self._last = time.monotonic()
