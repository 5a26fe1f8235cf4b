"""Every kind of layer that the engine runs: on scratch memory of the plan, and on our kernels too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from cubatch.engine import functional, layers
from cubatch.engine.native import operations
from cubatch.engine.network import Model
from cubatch.errors import UnsupportedLayer
from cubatch.hardware import probe
from tests.engine.every_kind import EVERY_KIND


def test_the_network_of_every_kind_has_every_kind():
    """A kind that is written is run beside our kernels in every type, see tests/kernels/test_networks.py."""
    assert {type(node.layer) for node in EVERY_KIND.nodes} == {
        kind for kind, ops in layers.TABLE.items() if ops is not layers.NOT_WRITTEN
    }


def test_no_operation_of_a_step_takes_scratch_memory_that_is_not_planned(monkeypatch):
    """A kind whose row in memory/workspace.py says that it needs none, or that is not handed it, would allocate."""
    modules = [module for name, module in sys.modules.items() if name.startswith("cubatch.engine.")]
    for module in modules:
        if hasattr(module, "take_workspace"):
            taken = module.take_workspace

            def take(workspace, *arguments, taken=taken):
                assert workspace is not None
                return taken(workspace, *arguments)

            monkeypatch.setattr(module, "take_workspace", take)
    with Model(EVERY_KIND, device=probe.device("cpu"), mode="training") as model:
        model.prepare(3)
        model.load_random()
        model.step()
        assert np.isfinite(model.loss())


def test_every_operation_is_tested_on_numpy():
    """Kernels are compared with these, so each must be compared with something else first."""
    here = Path(__file__)
    text = "".join(path.read_text(encoding="utf-8") for path in here.parent.glob("test_*.py") if path != here)
    assert set(functional.__all__) <= set(re.findall(r"\w+", text))


def test_every_operation_has_a_kernel():
    """Else a layer would run on NumPy and CuPy, and fail where it is tuned first: on a GPU."""
    assert set(operations.written()) == set(functional.__all__)


def test_an_operation_without_a_kernel_says_so(monkeypatch):
    """In words of ours, that name the operation and what runs it, when the layer is bound."""
    monkeypatch.setattr(operations, "written", dict)
    with pytest.raises(UnsupportedLayer, match=r"cannot run relu: it has no hand-written kernel; library='im2col'"):
        operations.operations(None).relu(np.zeros(3))
