"""Which studies there are; running one, and writing its folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.report import study as report
from cubatch.report.plots import study as figure
from cubatch.studies import hyperparameter, memory_rules, numpy_mnist, powers_of_two, small_batch_floor
from cubatch.studies.asked import Asked

SCHEMA = 1
STUDIES: dict[str, ModuleType] = {
    "powers-of-two": powers_of_two,
    "small-batch-floor": small_batch_floor,
    "hyperparameter": hyperparameter,
    "memory-rules": memory_rules,
    "numpy-mnist": numpy_mnist,
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
    try:
        asked.folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            "out", str(asked.folder), "a folder that is there or can be made", f"{error.strerror or error}."
        ) from error
    return {
        "schema": SCHEMA, "study": name, "model": asked.model, "command": command, **STUDIES[name].study(asked),
    }  # fmt: skip


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
            raise InvalidArgument("out", str(folder), "a folder to write to", f"{error.strerror or error}.") from error
        written.append(folder / name)
    try:
        for name in ("figure.png", "figure.svg"):
            figure.draw(payload, folder / name)
            written.append(folder / name)
    except MissingDependency:
        pass  # an extra; the page has the figure all the same
    return written
