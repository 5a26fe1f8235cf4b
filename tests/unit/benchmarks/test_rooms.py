"""The map in cubatch/README.md, and the contract that it is made from."""

from __future__ import annotations

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
