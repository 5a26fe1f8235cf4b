"""The map of the package, from the import contract in pyproject.toml."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "cubatch"
CONTRACT = "Packages, top to bottom"


def floors(project: dict[str, Any]) -> list[list[str]]:
    """Return the packages by layer, the highest first; packages of one layer do not import each other."""
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == CONTRACT)
    return [floor.split(" | ") for floor in layers]


def rooms(project: dict[str, Any]) -> str:
    """Return one line for each package: its path and the first sentence of its docstring."""
    listed = floors(project)
    named = {room: _label(room) for floor in listed for room in floor}
    width = max(map(len, named.values()))
    lines = [f"{named[room]:<{width}}  {_first_line(room)}" for floor in listed for room in floor]
    return "\n".join(["```text", *lines, "```"])


def _label(room: str) -> str:
    return f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py"


def _first_line(room: str) -> str:
    folder = PACKAGE / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")
