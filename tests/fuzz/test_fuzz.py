"""What others wrote raises nothing but `CubatchError`: the corpus as it is, and edits of it that hypothesis draws."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.edits import CORPUS, documents
from tests.fuzz.targets import BINARY, TARGETS, TEXTS, run, try_command
from tests.thorough import examples

WHOLE = {
    "specs": documents("specs"),
    "spec-files": [(path.suffix, content) for path, content in TEXTS.items()],
    "results": documents("results"),
    "files": [(path.suffix, content) for path, content in BINARY.items()],
    "commands": [],
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_raises_nothing_but_our_errors(name):
    """What it was begun with, and what was found with it: each is handled as it is."""
    for value in WHOLE[name]:
        run(TARGETS[name], value)


@pytest.mark.parametrize("name", TARGETS)
def test_an_edited_input_raises_nothing_but_our_errors(name):
    """Values, keys and bytes that nobody means well with, in a few places each."""

    @settings(max_examples=examples(1000), suppress_health_check=list(HealthCheck))
    @given(TARGETS[name].inputs)
    def claim(value):
        run(TARGETS[name], value)

    claim()


@pytest.mark.parametrize("line", json.loads((CORPUS / "commands.json").read_text(encoding="utf-8")), ids=" ".join)
def test_command_lines_that_were_found_end_as_they_should(line):
    """Each was once a traceback."""
    try_command(line)
