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

# The answers of each case: a test by its path and name, a benchmark, a command with its options, or what comes later.
CASES = {
    "titan-x-test-batch": (
        "cubatch tune --mode --memory-limit",
        "cubatch occupancy --device --model --sweep",
        "cubatch predict --device --mode --explain",
        "tests/unit/tuning/test_forecast.py::test_the_answer_is_the_smallest_size_within_tolerance_of_the_best",
        "tests/unit/tuning/test_tune.py::test_the_smallest_size_within_tolerance_is_the_answer",
        "tests/unit/memory/test_parts.py::test_the_largest_batch_is_the_largest",
        "tests/unit/tuning/test_answer.py::test_the_answer_is_the_contracts_sentence",
        "tests/unit/hardware/test_waves.py::",
        "later: occupancy and fill of each layer are measured with our own kernels",
    ),
    "coulom-rule": (
        "cubatch candidates --device --explain",
        "tests/unit/tuning/test_ladder.py::test_coulom_sizes_of_go_boards_on_a_v100",
        "tests/unit/tuning/test_ladder.py::test_explain_shows_the_arithmetic_of_the_crest",
        "tests/unit/tuning/test_crests.py::test_blocks_of_the_published_cliff",
        "tests/unit/estimate/test_blocks.py::test_the_published_rule_is_the_tile_of_128_by_128",
        "tests/unit/estimate/test_blocks.py::test_the_law_alone_gives_the_cliffs_of_a_chess_network",
        "later: the study of where the rule is right needs our own kernels on a GPU",
    ),
    "tensor-core-multiples": (
        "cubatch candidates --dtype --explain",
        "tests/unit/tuning/test_ladder.py::test_tensor_core_multiples_follow_gpu_and_dtype",
        "tests/unit/tuning/test_ladder.py::test_explain_shows_channels_that_miss_the_tensor_cores",
    ),
    "power-of-two": (
        "cubatch tune --batch-sizes",
        "tests/unit/tuning/test_answer.py::test_powers_of_two_are_called_tied_when_they_are",
        "later: `cubatch study` of powers of two against their neighbours",
    ),
    "mobilenet-v100": (
        "cubatch predict --device --dtype --batch-sizes",
        "tests/unit/network/test_models.py::",
        "later: `cubatch study` of the published sizes",
    ),
    "titan-or-tensor": (
        "cubatch predict --devices --dtype",
        "later: attention in the engine, then `cubatch study` over dtypes and cards",
    ),
    "numpy-mnist": (
        "cubatch train --data --batch-size",
        "tests/engine/test_train.py::test_it_learns_to_read_digits",
        "benchmarks/bench_engine_cpu.py",
        "later: `cubatch profile`, the time by layer and by cause",
    ),
    "small-batch-floor": (
        "cubatch tune",
        "tests/unit/tuning/test_answer.py::test_the_reasons_name_the_answer_the_fastest_and_the_limit",
    ),
    "oom-shape": ("tests/engine/test_network.py::test_out_of_memory_names_all_that_matters",),
    "max-batch-formula": (
        "cubatch memory --memory",
        "tests/unit/memory/test_parts.py::test_the_rules_of_thumb_by_hand",
    ),
    "mlp-memory": (
        "cubatch memory --batch-size --device",
        "tests/unit/memory/test_parts.py::test_the_textbook_counts_of_the_mlp",
        "tests/unit/memory/test_parts.py::test_the_buffers_of_the_mlp_are_the_textbooks",
        "tests/unit/cli/test_memory.py::test_memory_shows_the_textbook_numbers_of_the_mlp",
    ),
    "memory-rules": (
        "cubatch memory --optimizer --dtype",
        "tests/unit/memory/test_parts.py::test_the_rules_of_thumb_by_hand",
        "tests/unit/memory/test_parts.py::test_half_precision_halves_activations_and_keeps_master_weights",
        "tests/unit/memory/test_plan.py::test_parameters_gradients_and_optimizer_state_are_counted_by_hand",
        "later: context, library memory and allocator rounding as named parts of the footprint",
    ),
    "watch": (
        "tests/unit/tuning/test_tune.py::test_an_answer_follows_from_its_measurements",
        "tests/engine/test_network.py::test_the_peak_of_a_whole_step_is_the_plan",
        "later: `cubatch watch`",
    ),
    "allow-growth": (
        "cubatch tune --memory-limit",
        "tests/unit/tuning/test_tune.py::test_a_memory_limit_as_text_bounds_the_candidates",
        "tests/unit/tuning/test_tune.py::test_a_worker_that_is_killed_is_out_of_memory_and_tuning_goes_on",
        "tests/engine/test_network.py::test_memory_is_given_back_and_taken_anew",
        "tests/unit/measure/test_worker.py::test_no_way_to_die_leaks_a_process_a_zombie_or_a_pipe",
    ),
    "heuristic-finder": (
        "benchmarks/bench_search.py",
        "tests/unit/benchmarks/test_rivals.py::test_the_heuristic_finder_looks_at_three_numbers_and_never_runs",
    ),
    "generalisation-gap": (
        "tests/unit/tuning/test_tune.py::test_the_smallest_size_within_tolerance_is_the_answer",
        "cubatch train --batch-size",
        "later: `cubatch study` of accuracy beside speed at several batch sizes",
    ),
    "hyperparameter": (
        "cubatch candidates --json",
        "tests/unit/tuning/test_ladder.py::test_every_ladder_keeps_its_bounds",
    ),
}


def functions_of(path):
    """Names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_there(answer):
    """Whether what an answer names exists in this tree; "path::" is a whole file of tests."""
    if answer.startswith("later: "):
        return len(answer) > len("later: ")
    if answer.startswith("cubatch "):
        _, name, *options = answer.split()
        command = typer.main.get_command(app).commands.get(name)
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
        return command is not None and known >= set(options)
    path, _, test = answer.partition("::")
    return (ROOT / path).is_file() and (not test or test in functions_of(path))


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_answered_or_says_what_is_missing(case):
    """The tests, commands with their options, and benchmarks that a case names are in this tree."""
    assert CASES[case]
    assert [answer for answer in CASES[case] if not is_there(answer)] == []


@pytest.mark.parametrize(
    "answer",
    [
        "tests/unit/memory/test_parts.py::test_that_nobody_wrote",
        "tests/unit/test_nothing.py::test_it",
        "benchmarks/none.py",
        "cubatch guess",
        "cubatch memory --colour",
        "later: ",
    ],
)
def test_an_answer_that_is_not_there_is_noticed(answer):
    """The check can fail: a test, file, command, option or word that does not exist."""
    assert not is_there(answer)


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
