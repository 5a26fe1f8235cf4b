"""A function is found by name without running anything, with the files that its module depends on."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

import cubatch as cb
from cubatch.frameworks import module_source
from cubatch.frameworks.module_source import ModuleSource

FILES = {
    "shop/__init__.py": "raise SystemExit('imported')",
    "shop/model.py": "import json\nimport numpy\nfrom .parts import block\nfrom shop import tools\nimport helpers.deep",
    "shop/parts/__init__.py": "",
    "shop/parts/block.py": "from ..shared import x\nfrom torch import nn",
    "shop/shared.py": "import shop.model",
    "shop/tools.py": "def (",
    "shop/unused.py": "",
    "helpers/__init__.py": "",
    "helpers/deep.py": "import not_there_at_all",
}
MODEL = "shop.model:build"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_users_own_files_are_followed_and_nothing_is_run(tree):
    """Relative, absolute and circular imports, packages on the way, one that does not parse; no library."""
    found = ModuleSource.of(MODEL)
    assert {str(path.relative_to(tree)) for path in found.files} == set(FILES) - {"shop/unused.py"}
    assert set(found.packages) - {"torch"} == {"numpy"}
    assert "shop" not in sys.modules


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_change_of_any_of_them_changes_the_conditions(tree, name):
    """And of no other file."""
    before = ModuleSource.of(MODEL).conditions()
    assert ModuleSource.of(MODEL).conditions() == before
    with (tree / name).open("a") as file:
        file.write("\n# changed\n")
    changed = ModuleSource.of(MODEL).conditions() != before
    assert changed == (name != "shop/unused.py")


def test_what_is_installed_counts_by_its_version(tree, monkeypatch):
    """A package that is imported: its version stands in the conditions under its name, its files are not read."""
    before = ModuleSource.of(MODEL).conditions()
    monkeypatch.setattr(module_source, "_version", lambda package: f"{package} of tomorrow")
    after = ModuleSource.of(MODEL).conditions()
    assert {name for name in after if after[name] != before.get(name)} >= {"numpy", "torch"}
    assert after["source_sha256"] == before["source_sha256"]
    numpys = ModuleSource.of("numpy.linalg:norm")
    assert len(numpys.files) == 1
    assert set(numpys.packages) == {"numpy"}


def test_a_package_of_another_distribution_counts_by_that_ones_version(tree):
    """`import attr` is of attrs, as PIL is of Pillow: no distribution has the package's name."""
    (tree / "shop" / "tools.py").write_text("import attr")
    assert ModuleSource.of(MODEL).packages["attr"] == metadata.version("attrs")


def test_a_package_of_no_distribution_is_not_the_users_own_and_counts_by_its_first_file(tree, monkeypatch):
    """As those on PYTHONPATH and of a user's or the system's site-packages: nothing that it imports is followed."""
    place = tree / "python3" / "site-packages"
    (place / "lone").mkdir(parents=True)
    (place / "lone" / "__init__.py").write_text("import lone.more")
    (place / "lone" / "more.py").write_text("")
    monkeypatch.syspath_prepend(place)
    (tree / "shop" / "tools.py").write_text("import lone")
    before = ModuleSource.of(MODEL)
    assert not any("lone" in str(path) for path in before.files)
    (place / "lone" / "__init__.py").write_text("VERSION = 2")
    assert ModuleSource.of(MODEL).packages["lone"] != before.packages["lone"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("shop.model", "package.module:build"),
        ("shop.model:", "package.module:build"),
        ("shop model:build", "package.module:build"),
        ("__main__:build", "a file that can be imported"),
        ("shop.missing:build", "sys.path"),
        ("nowhere:build", "sys.path"),
        ("math:sin", "sys.path"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(tree, name, match):
    """With what it should look like, or where it was looked for."""
    with pytest.raises(cb.InvalidArgument, match=match):
        ModuleSource.of(name)


def test_what_is_not_there_or_no_function_is_refused_where_it_is_imported(tree):
    """The worker says so."""
    with pytest.raises(cb.InvalidArgument, match=r"a function of .*Did you mean 'dumps'"):
        module_source.load("json:dmups")
    with pytest.raises(cb.InvalidArgument, match="it is a str"):
        module_source.load("json:__name__")
    assert module_source.load("json:dumps") is __import__("json").dumps
