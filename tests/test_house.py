"""Rules of the tests: files that exist, and test modules that stand alone."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_files_that_the_code_names_are_there():
    """By their whole path: a reader who is sent to a file finds it."""
    named = re.compile(r"(?<![\w/.])(?:benchmarks|cubatch|kernels|tests)/[\w/-]+\.(?:cuh?|json|md|py|toml)\b")
    found = {
        (str(path.relative_to(TESTS.parent)), name)
        for room in ("benchmarks", "cubatch")
        for path in TESTS.parent.joinpath(room).rglob("*.py")
        for name in named.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 10
    assert {place for place in found if not TESTS.parent.joinpath(place[1]).exists()} == set()


def test_no_file_of_the_tests_imports_a_test_module():
    """What tests share is in a module of its own, not in one whose tests whoever imports it would have to read."""
    imports = re.compile(r"^ *(?:from|import) tests\b(?:[^(\n]*\([^)]*\)|.*)", re.MULTILINE)
    modules = {path.stem for path in TESTS.rglob("test_*.py")}
    found = {
        (path.relative_to(TESTS).as_posix(), name)
        for path in TESTS.rglob("*.py")
        for line in imports.findall(path.read_text(encoding="utf-8"))
        for name in (modules - {path.stem}).intersection(re.findall(r"\w+", line))
    }
    assert found == set()


def test_what_needs_pytorch_is_where_a_stage_has_it():
    """Elsewhere no run of the tests has it installed, and a test that is always skipped holds nothing."""
    asks = re.compile(r"importorskip\(\s*[\"']torch|^ *(import|from) torch\b", re.MULTILINE)
    files = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    found = {path.as_posix() for path in files if asks.search((TESTS / path).read_text(encoding="utf-8"))}
    assert len(found) > 20
    assert {name for name in found if not name.startswith(("parity/", "gpu/"))} == set()
