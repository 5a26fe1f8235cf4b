"""The page of a whole step: measured and predicted times, both with the floor."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_page as command
from benchmarks.gpu.steps import STEPS, step_named
from cubatch.hardware import catalogue
from tests.unit.benchmarks.passes import entry, item_of, result_of

H200 = catalogue.find("h200-sxm")
RESNET = step_named("resnet50, training, batch 256, float16")


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
