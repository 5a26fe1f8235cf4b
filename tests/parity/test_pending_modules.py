"""Pending GPU work on PyTorch modules: its commands take their options."""

from __future__ import annotations

import pytest

from tests.pending_commands import IMPORT_PYTORCH, LISTED, parse_benchmark

pytest.importorskip("torch")


@pytest.mark.parametrize("module", IMPORT_PYTORCH)
def test_a_listed_command_takes_its_options(module, monkeypatch, tmp_path):
    """The list has commands of this module, and the module's parser accepts the options of each."""
    arguments = [item.arguments(tmp_path / "out.json") for item in LISTED]
    listed = [options for _, value, *options in arguments if value == module]
    assert listed
    for options in listed:
        parse_benchmark(module, options, monkeypatch)
