"""Which studies there are; running one, and writing its folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.hardware import load
from cubatch.report import study as report
from cubatch.report.plots import study as figure
from cubatch.report.tables.common import joined
from cubatch.studies import (
    generalisation,
    hyperparameter,
    memory_rules,
    numpy_mnist,
    powers_of_two,
    small_batch_floor,
    waves,
)
from cubatch.studies.asked import Asked
from cubatch.studies.kept import not_writable
from cubatch.tuning.limits import Limits

SCHEMA = 1
LEARNING = ("numpy-mnist", "generalisation")
"""Those that train on images, where there are some."""
TIMELESS = ("memory-rules",)
"""Those whose answer is the same on a busy machine."""
STUDIES: dict[str, ModuleType] = {
    "powers-of-two": powers_of_two,
    "waves": waves,
    "small-batch-floor": small_batch_floor,
    "hyperparameter": hyperparameter,
    "memory-rules": memory_rules,
    "numpy-mnist": numpy_mnist,
    "generalisation": generalisation,
}
"""Modules with a `study`, by name; one more also needs its rows in `report`: `tables.study` and `study`."""


def run(name: str, asked: Asked, *, command: str) -> dict[str, Any]:
    """
    Measure what a study needs, and answer its question; what was measured before in its folder is not measured again.

    Args:
        name: One of STUDIES.
        asked: What the user asks of it.
        command: What repeats it, for its page.

    Returns:
        dict: The study in the JSON form of schema 1.

    Raises:
        InvalidArgument: If there is no such study, or an option makes no sense for it.
        CubatchError: Whatever measuring raises.

    Example:
        >>> import tempfile
        >>> place = tempfile.TemporaryDirectory()
        >>> asked = Asked(spec="mlp", model="mlp", folder=Path(place.name), device="cpu", max_batch_size=5, quick=True)
        >>> found = run("powers-of-two", asked, command="cubatch study powers-of-two mlp")
        >>> [(c["batch_size"], c["power"]) for c in found["comparisons"]]
        [(3, 4), (5, 4)]
        >>> place.cleanup()
    """
    if name not in STUDIES:
        raise InvalidArgument("study", name, "one of " + ", ".join(STUDIES))
    if asked.data is not None and name not in LEARNING:
        raise InvalidArgument("data", str(asked.data), f"left out: only {joined(LEARNING)} train on images")
    if asked.budget is not None:
        Limits.of(None, None, budget=asked.budget)
    try:
        asked.folder.mkdir(exist_ok=True)
    except OSError as error:
        wanted = "a folder that is there or can be made"
        raise InvalidArgument("out", str(asked.folder), wanted, f"{error.strerror or error}.") from error
    if not os.access(asked.folder, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidArgument("out", str(asked.folder), "a folder that this user may write to")
    chosen = STUDIES[name]
    before, kept = load.snapshot(), _kept(asked.folder)
    answered = chosen.study(attrs.evolve(asked, modes=asked.modes or chosen.MODES))
    is_timed = name not in TIMELESS and _kept(asked.folder) != kept
    met = load.between(before, load.snapshot()) if is_timed else None
    if met is not None and (sentence := met.sentence(answered["device"].get("threads") or 1)):
        answered["points"] = [*answered["points"], sentence]
    return {"schema": SCHEMA, "study": name, "model": asked.model, "command": command, **answered}


def _kept(folder: Path) -> dict[str, int]:
    """Give when each file of a folder was written: one that is written while a study runs holds what it measured."""
    found = {}
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # as of a link that leads nowhere
            found[path.name] = path.stat().st_mtime_ns
    return found


def write(payload: dict[str, Any], folder: Path) -> list[Path]:
    """
    Write JSON, page and, where Matplotlib is installed, figures.

    Args:
        payload: What `run` gave.
        folder: Where they go.

    Returns:
        list[Path]: What was written, the page first.

    Raises:
        InvalidArgument: If a file cannot be written.
    """
    text = json.dumps(payload, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    written = []
    files = {"index.html": report.page(payload), "study.json": text}
    files |= {name: json.dumps(content) + "\n" for name, content in payload.get("files", {}).items()}
    for name, content in files.items():
        try:
            (folder / name).write_text(content, encoding="utf-8")
        except OSError as error:
            raise not_writable(folder, error) from error
        written.append(folder / name)
    try:
        for number in range(len(report.figures(payload))):
            stem = f"figure-{number + 1}" if number else "figure"
            for name in (f"{stem}.png", f"{stem}.svg"):
                figure.draw(payload, folder / name, number)
                written.append(folder / name)
    except MissingDependency:
        pass  # an extra; the page has the figure all the same
    return written
