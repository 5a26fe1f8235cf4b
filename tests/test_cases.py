"""Every case that users ask about, and the test, command or benchmark that answers it, or what is still missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer.main

from cubatch.cli.app import app

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT.parent / "shared" / "design" / "questions.md"

# The answers of each case: "a test" or more marked `pytest.mark.case`, a benchmark, a command with its options, or what
# comes later.
CASES = {
    "titan-x-test-batch": (
        "cubatch tune --mode --memory-limit",
        "cubatch occupancy --device --model --sweep",
        "cubatch predict --device --mode --explain",
        "a test",
        "later: occupancy and fill of each layer are measured with our own kernels",
    ),
    "coulom-rule": (
        "cubatch candidates --device --explain",
        "a test",
        "cubatch study --device --max-batch-size",
    ),
    "tensor-core-multiples": (
        "cubatch candidates --dtype --explain",
        "a test",
    ),
    "power-of-two": (
        "cubatch tune --batch-sizes",
        "cubatch study --max-batch-size",
        "a test",
    ),
    "mobilenet-v100": (
        "cubatch predict --device --dtype --batch-sizes",
        "a test",
        "cubatch study --dtype --input-shape",
        "a test",
    ),
    "titan-or-tensor": (
        "cubatch predict --devices --dtype",
        "later: one study over dtypes and cards",
    ),
    "numpy-mnist": (
        "cubatch train --data --batch-size",
        "a test",
        "benchmarks/bench_engine_cpu.py",
        "cubatch profile --mode --batch-size",
        "cubatch study --data --budget --out",
    ),
    "small-batch-floor": (
        "cubatch tune",
        "a test",
        "cubatch study --mode --max-batch-size",
    ),
    "oom-shape": ("a test",),
    "max-batch-formula": (
        "cubatch memory --memory",
        "a test",
    ),
    "mlp-memory": (
        "cubatch memory --batch-size --device",
        "a test",
    ),
    "memory-rules": (
        "cubatch memory --optimizer --dtype",
        "a test",
        "later: context, library memory and allocator rounding as named parts of the footprint",
        "cubatch study --optimizer --dtype",
    ),
    "watch": (
        "a test",
        "cubatch watch --seconds --json",
    ),
    "allow-growth": (
        "cubatch tune --memory-limit",
        "a test",
    ),
    "heuristic-finder": (
        "benchmarks/bench_search.py",
        "a test",
    ),
    "generalisation-gap": (
        "a test",
        "cubatch train --batch-size",
        "cubatch study --data --optimizer --quick",
    ),
    "hyperparameter": (
        "cubatch candidates --json",
        "a test",
        "cubatch study --json --out",
    ),
}


def marked(path):
    """Give the cases that tests of a file are marked with, one by one or all at once."""
    text = path.read_text()
    if "mark.case(" not in text:
        return []
    marks = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [mark.args[0].value for mark in marks if ast.unparse(mark.func) == "pytest.mark.case"]


MARKED = {case for path in sorted((ROOT / "tests").rglob("test_*.py")) for case in marked(path)}


def is_there(answer, case=""):
    """Whether what an answer names exists in this tree."""
    if answer == "a test":
        return case in MARKED
    if answer.startswith("later: "):
        return len(answer) > len("later: ")
    if answer.startswith("cubatch "):
        _, name, *options = answer.split()
        command = typer.main.get_command(app).commands.get(name)
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
        return command is not None and known >= set(options)
    return (ROOT / answer).is_file()


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_answered_or_says_what_is_missing(case):
    """The tests, commands with their options, and benchmarks that a case names are in this tree."""
    assert CASES[case]
    assert [answer for answer in CASES[case] if not is_there(answer, case)] == []


@pytest.mark.parametrize(
    "answer",
    [
        "a test",
        "benchmarks/none.py",
        "cubatch guess",
        "cubatch memory --colour",
        "later: ",
    ],
)
def test_an_answer_that_is_not_there_is_noticed(answer):
    """The check can fail: a mark, file, command, option or word that does not exist."""
    assert not is_there(answer)


def test_every_mark_is_of_a_case_that_a_test_answers():
    """A case misspelt in a mark, or a mark that the table does not count on."""
    assert {case for case, answers in CASES.items() if "a test" in answers} == MARKED


def test_what_is_left_for_later_is_not_there_yet():
    """A command that has come is no longer "later"."""
    for answers in CASES.values():
        for answer in answers:
            for name in re.findall(r"`(cubatch \w+)`", answer):
                assert not is_there(name), f"{answer} is there"


@pytest.mark.skipif(not QUESTIONS.exists(), reason="the list of questions is not beside this checkout")
def test_the_table_has_exactly_the_cases_of_the_questions():
    """No case was forgotten, none made up."""
    asked = re.findall(r"^\| `([a-z0-9-]+)` \|", QUESTIONS.read_text(), re.MULTILINE)
    assert sorted(asked) == sorted(CASES)
