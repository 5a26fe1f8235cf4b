"""The map in cubatch/README.md, and the contract that it is made from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import cubatch
from benchmarks.pages import rooms

ROOT = Path(cubatch.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_room_of_the_contract_is_on_the_map():
    """A room that moves into the contract moves onto the map, with what its docstring says it is for."""
    text = (ROOT / "cubatch/README.md").read_text(encoding="utf-8")
    for floor in rooms.floors(PROJECT):
        for room in floor:
            assert f"\n{room}/ " in text or f"\n{room}.py" in text
    assert rooms.rooms(PROJECT) in text


def test_every_module_and_room_of_the_package_is_in_the_contract():
    """What `exhaustive` demands, said here by name."""
    listed = {room for floor in rooms.floors(PROJECT) for room in floor}
    inside = {path.stem for path in (ROOT / "cubatch").glob("*.py") if path.stem != "__init__"}
    inside |= {path.parent.name for path in (ROOT / "cubatch").glob("*/__init__.py")}
    assert inside == listed


def test_rooms_are_described_from_the_sources():
    """The first sentence of the room's docstring."""
    line = next(line for line in rooms.rooms(PROJECT).splitlines() if line.startswith("search/"))
    (docstring,) = re.findall(r'^"""(.*?[.])', (ROOT / "cubatch/search/__init__.py").read_text())
    assert line.endswith(f"  {docstring}")
