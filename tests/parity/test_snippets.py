"""The snippets of README.md and docs/ that need PyTorch, ONNX, a trainer or a cluster, as printed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import cubatch as cb
from tests.unit.snippets import ROOT, SNIPPETS, missing, run

torch = pytest.importorskip("torch")

from tests.parity import forked_workers  # noqa: E402
from tests.parity.beside_torchvision import registering_nothing  # noqa: E402
from tests.parity.onnx_files import SHAPE, Small, export  # noqa: E402

MY_MODELS = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(7200, 10))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A file that PyTorch wrote, which takes seconds."""
    return export(Small(), tmp_path_factory.mktemp("model") / "model.onnx", torch.randn(2, *SHAPE))


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.needs and not one.marker], ids=str)
def test_a_snippet_works_as_printed(snippet, tmp_path, request):
    """On the CPU; `model.onnx` is a small network that PyTorch wrote, the modules of users are small, too."""
    if absent := missing(snippet.needs):
        pytest.skip(f"{absent[0]} is not installed")
    if "model.onnx" in snippet.text:
        for path in request.getfixturevalue("model").parent.iterdir():
            shutil.copy(path, tmp_path)
    shutil.copy(Path(__file__).with_name("snippet_project.py"), tmp_path / "my_project.py")
    (tmp_path / "my_models.py").write_text(MY_MODELS, encoding="utf-8")
    is_forked = snippet.needs <= {"onnx", "onnxruntime", "torch"}  # others start processes that read the script again
    run(snippet, tmp_path, run_script=forked_workers.run_script if is_forked else None)


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.marker == "torchvision"], ids=str)
def test_a_snippet_of_torchvision_works_as_printed(snippet, tmp_path, monkeypatch):
    """It writes a file and loads it again."""
    monkeypatch.chdir(tmp_path)
    with registering_nothing():
        exec(snippet.text, {})  # noqa: S102 - our own page
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.marker == "torchrun"], ids=str)
def test_a_snippet_of_ranks_works_as_printed(snippet, tmp_path):
    """As two processes on the CPU; the first prints the result."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "snippet.py")
    assert "batch" in run(snippet, tmp_path, program=launcher)


def test_the_loss_of_the_guide_takes_any_batch_size():
    """Labels of a fixed number of samples would fit one size only."""
    (printed,) = re.findall("^loss = (lambda .+)$", (ROOT / "docs/how-to/pytorch.md").read_text(), re.MULTILINE)
    loss = eval(printed, {"F": torch.nn.functional})  # noqa: S307 - our own
    result = cb.autotune_module(torch.nn.Linear(3, 5), (3,), mode="training", loss=loss, batch_sizes=[2, 4], budget=60)
    assert {m.status for m in result.measurements} <= {"ok", "dropped"}
