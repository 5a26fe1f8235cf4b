"""`library="onnxruntime"` without ONNX Runtime: what is refused, and how it is said."""

from __future__ import annotations

import pytest

import cubatch as cb
from cubatch.errors import MissingDependency
from cubatch.tuning.subjects import onnx_subject


@pytest.fixture
def file(tmp_path):
    """A file of the right name; what is in it is read later."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("wrong", "field", "text"),
    [
        ({"mode": "training"}, "mode", "autotune_module trains"),
        ({"devices": 2}, "devices", "left out"),
        ({"dtype": "float16"}, "dtype", "the file has its own"),
        ({"recompute": True}, "recompute", "for inference only"),
        ({"objective": "energy"}, "objective", '"throughput" or "latency"'),
        ({"isolate": False}, "isolate", "a process that may die"),
        ({"store": 3}, "store", "a path"),
        ({"progress": 3}, "progress", "callable"),
        ({"layer_spec": "resnet50"}, "layer_spec", "torch.onnx.export"),
        ({"layer_spec": "nowhere.onnx"}, "layer_spec", "a file that exists"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(file, wrong, field, text):
    """Before ONNX Runtime is looked for."""
    asked = {"layer_spec": file, "device": "cpu", "library": "onnxruntime", "store": False} | wrong
    with pytest.raises(cb.CubatchError, match=text) as refused:
        cb.autotune(asked.pop("layer_spec"), **asked)
    assert refused.value.field == field


@pytest.mark.parametrize("missing", ["onnxruntime", "onnx"])
def test_a_missing_library_is_told_with_its_line_for_pip(file, monkeypatch, missing):
    """The extra brings both that are needed."""
    monkeypatch.setattr(onnx_subject.importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[onnxruntime\]'"):
        cb.autotune(file, device="cpu", library="onnxruntime", store=False)


@pytest.mark.parametrize("function", [cb.footprint, cb.candidates])
def test_where_nothing_is_measured_it_is_no_library(function):
    """No plan is right for it."""
    with pytest.raises(cb.CubatchError, match="library must be one of auto, cubatch, im2col"):
        function("mlp", device="cpu", library="onnxruntime", **({"batch_size": 1} if function is cb.footprint else {}))
