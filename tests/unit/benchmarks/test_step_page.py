"""The page of a whole step: measured and predicted times, both with the floor."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_page as command
from benchmarks.gpu.steps import STEPS, step_named
from benchmarks.pages import gpu_step
from cubatch.estimate.step import predict_step
from cubatch.hardware import catalogue
from cubatch.network import models
from tests.unit.benchmarks.passes import entry, item_of, result_of

H200 = catalogue.find("h200-sxm")
RESNET = step_named("resnet50, training, batch 256, float16")


@pytest.mark.parametrize("step", [step for step in STEPS if step.dtype == "float16"][:3], ids=lambda step: step.name)
def test_predictions_add_up_to_the_predictors_own_step(step):
    """Which is without loss and optimizer, and goes by layers, not by calls: they differ by little."""
    parts = gpu_step.totals(step, H200, [])
    others = {"momentum", "update loss scale", "softmax cross entropy", "fold batch norms"}
    mine = sum(part.seconds for kind, part in parts.items() if kind not in others)
    network = models.build(step.network)
    theirs = predict_step(network, [step.batch_size], H200, mode=step.mode, dtype=step.dtype, library="cubatch")
    assert mine == pytest.approx(theirs.seconds[0], rel=0.15)


def test_norms_take_what_the_predictor_charges():
    """All reads and launches of the 53 norms of `resnet50`; parameters count once more in the predictor."""
    parts, network = gpu_step.totals(RESNET, H200, []), models.build("resnet50")
    theirs = predict_step(network, [256], H200, mode="training", dtype="float16", library="cubatch")
    norms = {node.name for node in network.nodes if node.layer.has_statistics}
    mine = parts["batch norm train"].seconds + parts["batch norm backward"].seconds
    assert mine == pytest.approx(sum(item.seconds[0] for item in theirs.passes if item.layer in norms), rel=1e-3)


def test_the_command_writes_the_page(capsys, tmp_path):
    """Of a step by its name; unknown names list those that there are, files of nothing are refused."""
    path = tmp_path / "pass.json"
    passed = result_of(steps=([item_of(case, [entry(1e-3)]) for case in RESNET.cases], 0))
    path.write_text(json.dumps(passed | {"device": {"name": H200.name}}))
    assert command.main([RESNET.name, "--device", "h200-sxm", "--results", str(path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| conv2d | 53 |"))
    assert "53.0 ms" in line  # each of them at 1 ms, whichever are alike
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [step.name for step in STEPS]
    for wrong in (["resnet50"], [RESNET.name, "--device", "h100-sxm", "--results", str(path)], []):
        with pytest.raises(SystemExit) as stop:
            command.main(wrong)
        assert stop.value.code == 2
    assert RESNET.name in capsys.readouterr().err
