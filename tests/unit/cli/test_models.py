"""`cubatch models`."""

from __future__ import annotations

import json

from cubatch.network import models


def test_models_lists_every_network_and_says_that_all_can_be_measured(run):
    """Names, shapes and counts are the library's; the engine has code for every layer of them."""
    code, out, _ = run("models")
    _, text, _ = run("models", "--json", "-")
    found = {model["name"]: model for model in json.loads(text)["models"]}

    assert code == 0
    assert tuple(found) == models.names()
    assert all(name in out for name in found)
    assert found["resnet50"]["parameters"] == models.build("resnet50").parameters
    assert all(model["runs"] for model in found.values())
    assert ".onnx" in out
