"""The snippets of README.md that need PyTorch, ONNX or a trainer, as printed."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

import cubatch as cb
from tests.unit.readme import run, snippets

torch = pytest.importorskip("torch")

from tests.parity.onnx_files import SHAPE, Small, export  # noqa: E402


@pytest.mark.parametrize("snippet", [one for one in snippets() if one.needs], ids=str)
def test_a_snippet_works_as_printed(snippet, tmp_path):
    """On the CPU; `model.onnx` is a small network that PyTorch wrote, `my_project` a small module of Lightning's."""
    for name in sorted(snippet.needs):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if "onnx" in snippet.needs:
        export(Small(), tmp_path / "model.onnx", torch.randn(2, *SHAPE))
    shutil.copy(Path(__file__).with_name("readme_project.py"), tmp_path / "my_project.py")
    run(snippet, tmp_path)


def test_the_loss_of_the_reference_takes_any_batch_size():
    """Labels of a fixed number of samples would be of one size only: every other one raised."""
    (printed,) = re.findall("`loss=(lambda [^`]+)`", (Path(cb.__file__).parent / "README.md").read_text())
    loss = eval(printed, {"F": torch.nn.functional})  # noqa: S307 - our own
    result = cb.autotune_module(torch.nn.Linear(3, 5), (3,), mode="training", loss=loss, batch_sizes=[2, 4], budget=60)
    assert {m.status for m in result.measurements} <= {"ok", "dropped"}
