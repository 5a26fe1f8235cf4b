"""The snippets of README.md that need PyTorch, ONNX or a trainer, as printed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

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
