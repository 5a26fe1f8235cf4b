"""The list of studies; running one, and writing its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.hardware import cpu_load
from cubatch.report import study_page as report
from cubatch.studies.generalisation import generalisation
from cubatch.studies.memory_rules import memory_rules
from cubatch.studies.numpy_mnist import numpy_mnist
from cubatch.studies.search_space import hyperparameter
from cubatch.studies.study_cache import not_writable
from cubatch.studies.study_request import Study, StudyRequest
from cubatch.studies.sweep import powers_of_two, small_batch_floor
from cubatch.studies.wave_quantization import waves
from cubatch.tuning import notes
from cubatch.tuning.request import Request
from cubatch.units import join_words

SCHEMA = 1
STUDIES: dict[str, Study] = {
    "powers-of-two": powers_of_two,
    "waves": waves,
    "small-batch-floor": small_batch_floor,
    "hyperparameter": hyperparameter,
    "memory-rules": memory_rules,
    "numpy-mnist": numpy_mnist,
    "generalisation": generalisation,
}
"""Studies by name; a new one also needs its table in `report.tables.study` and its figures in `report.study_page`."""


def run(name: str, request: StudyRequest, *, command: str) -> dict[str, Any]:
    """
    Measure, and answer the question of a study; measurements that are cached in the request's folder are used again.

    `command` is the shell command that repeats the study, for its page.

    Returns:
        The study in the JSON form of schema 1.

    Raises:
        InvalidArgument: If there is no such study, an option does not apply, or the folder cannot be written.
    """
    if name not in STUDIES:
        raise InvalidArgument("study", name, "one of " + ", ".join(STUDIES))
    study = STUDIES[name]
    if request.data is not None and not study.uses_images:
        users = join_words([other for other in STUDIES if STUDIES[other].uses_images])
        raise InvalidArgument("data", str(request.data), f"left out: only {users} train on images")
    if request.budget is not None:
        Request.of(budget=request.budget)
    try:
        request.folder.mkdir(exist_ok=True)
    except OSError as error:
        allowed = "a folder that exists or can be created"
        raise InvalidArgument("out", str(request.folder), allowed, f"{error.strerror or error}.") from error
    if not os.access(request.folder, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidArgument("out", str(request.folder), "a folder that this user may write to")
    budget = study.budgets[request.quick] if request.budget is None else request.budget
    before = cpu_load.snapshot()
    findings = study.run(attrs.evolve(request, modes=request.modes or study.modes), budget)
    interference = cpu_load.between(before, cpu_load.snapshot()) if study.is_timed else None
    threads = findings.facts["device"].get("threads") or 1
    busy = None if interference is None else notes.interference(interference, threads)
    return {
        "schema": SCHEMA,
        "study": name,
        "model": request.model,
        "command": command,
        **findings.facts,
        "title": study.title,
        "question": [study.question, *findings.notes],
        "method": list(findings.method),
        "answer": findings.answer,
        "points": [*findings.points, *([notes.sentence(busy)] if busy else [])],
        **findings.details,
        **({"files": findings.files} if findings.files else {}),
    }


def describe() -> list[dict[str, Any]]:
    """Return "name", "title", "question" and defaults ("model", "modes" and "budget_seconds") of every study."""
    return [
        {
            "name": name,
            "title": study.title,
            "question": study.question,
            "model": study.model,
            "modes": list(study.modes),
            "budget_seconds": study.budgets[0],
        }
        for name, study in STUDIES.items()
    ]


def write(payload: dict[str, Any], folder: Path) -> list[Path]:
    """
    Write a study as JSON, as an HTML page and, if Matplotlib is installed, as figures.

    Returns:
        The written files, the page first.

    Raises:
        InvalidData: If a file cannot be written.
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
                report.draw(payload, folder / name, number)
                written.append(folder / name)
    except MissingDependency:
        pass  # an extra; the page has the figure all the same
    return written
