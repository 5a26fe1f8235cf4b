"""What the tests of the commands share: a tuning that answers at once, and the command line in this process."""

from __future__ import annotations

import json
import sys
import types

import pytest

import cubatch.tuning
from cubatch.tuning.results import TuningResult
from tests.unit.commands import in_process
from tests.unit.tuned import tuned


class Recorded:
    """An autotune that answers at once and remembers what it was asked."""

    def __init__(self, error=None):
        self.spec, self.options, self.error, self.result = None, None, error, tuned()

    def __call__(self, layer_spec, **options):
        """Answer, or raise."""
        self.spec, self.options = layer_spec, options
        if self.error is not None:
            raise self.error
        return TuningResult.from_json(json.dumps(self.result))


@pytest.fixture
def autotune(monkeypatch):
    """Put a recorded autotune in the place of the real one."""
    recorded = Recorded()
    module = types.ModuleType("cubatch.tuning.tune")
    module.autotune = recorded
    monkeypatch.setitem(sys.modules, "cubatch.tuning.tune", module)
    monkeypatch.setattr(cubatch.tuning, "tune", module, raising=False)
    return recorded


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command line in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd)
