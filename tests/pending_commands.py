"""The commands of benchmarks/pending.toml, parsed without running them."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest

from benchmarks.gpu import pending

LISTED = pending.load()

IMPORT_PYTORCH = ("benchmarks.bench_footprint", "benchmarks.bench_module", "benchmarks.bench_module_memory")
"""Their options are parsed where PyTorch is installed: tests/parity/test_pending_modules.py."""


class Parsed(Exception):
    """Options were accepted, and nothing has run yet."""


def parse_benchmark(module, arguments, monkeypatch):
    """Parse the options of a benchmark, without running it."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, *given, **options):
        parse(parser, *given, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        importlib.import_module(module).main()
