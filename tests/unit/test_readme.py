"""README.md as a newcomer reads it: short, each snippet works as printed, each link and extra is there."""

from __future__ import annotations

import inspect
import re
import shutil
import tomllib

import pytest

import cubatch
from tests.unit.readme import ELSEWHERE, README, ROOT, run, snippets

PAGES = ["README.md", "cubatch/README.md", "kernels/README.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "benchmarks").rglob("README.md"))
HERE = [one for one in snippets() if one.marker not in ELSEWHERE and not one.needs]
MOST_LINES = 200


@pytest.mark.parametrize("snippet", HERE, ids=str)
def test_a_snippet_works_as_printed(snippet, tmp_path):
    """All that need nothing but cubatch; MNIST is the sample of it that the tests have."""
    shutil.copytree(ROOT / "tests/data/mnist-sample", tmp_path / "mnist")
    printed = run(snippet, tmp_path)
    assert printed or snippet.language == "python"


def test_every_snippet_is_run_somewhere():
    """Here, by the tests of tests/parity where it needs more, or by .ci/run, which knows it by its mark."""
    marks = {one.marker for one in snippets() if one.marker}
    judge = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert marks == {mark for mark in ELSEWHERE if f"readme_command {mark}" in judge}
    assert {one.language for one in snippets()} == {"sh", "python"}
    assert len(HERE) > 4


def test_the_readme_is_short():
    """What a newcomer reads in five minutes; the rest is in the rooms' own pages."""
    assert len(README.read_text(encoding="utf-8").splitlines()) < MOST_LINES


REFERENCE = ROOT / "cubatch/README.md"


def test_every_function_is_in_the_reference():
    """Whatever `cubatch` gives that can be called and is no class."""
    functions = [name for name in cubatch.__all__ if inspect.isfunction(getattr(cubatch, name))]
    text = REFERENCE.read_text(encoding="utf-8")
    assert len(functions) > 10
    assert [name for name in functions if f"`cb.{name}(" not in text] == []


def test_the_spec_file_of_the_reference_is_a_network(tmp_path):
    """Two convolutions that an addition joins; 32 pixels wide, with 16 channels."""
    (example,) = [one.text for one in snippets(REFERENCE) if one.language == "toml" and "[[layers]]" in one.text]
    (tmp_path / "net.toml").write_text(example, encoding="utf-8")
    network = cubatch.load_spec(tmp_path / "net.toml")
    assert [layer.type for layer in network.layers] == ["conv2d", "relu", "conv2d", "add"]
    assert network.output_shape == (32, 32, 16)


def anchors(page):
    """Give what headings of a page are called in links, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """To a file of the repository, and to a heading of it."""
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    targets = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


@pytest.mark.parametrize("name", PAGES)
def test_extras_that_are_named_exist(name):
    """In `pip install '.[extra]'`, or the bare `'.[extra]'`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r"'(?:\.|cubatch)\[([\w,]+)\]'", (ROOT / name).read_text(encoding="utf-8"))
             for extra in group.split(",")}  # fmt: skip
    assert named <= set(extras)
