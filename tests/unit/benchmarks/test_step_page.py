"""The page of a whole step: measured and predicted times, both with the floor."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_page as command
from benchmarks.gpu.steps import STEPS, Step, step_named
from benchmarks.pages import gpu_step
from cubatch.estimate.step import predict_step
from cubatch.hardware import catalogue
from cubatch.network import models
from tests.unit.benchmarks.passes import entry, item_of, result_of

H200 = catalogue.find("h200-sxm")
SMALL = Step("lenet5", "training", 64, "float16")
RESNET = step_named("resnet50, training, batch 256, float16")


def measured(step, seconds, *, kinds=None, vendor=None, device=H200):
    """A pass in which every operation of a step, or of some kinds, took the same time."""
    items = [
        item_of(case, [entry(seconds), *([entry(vendor, side="vendor")] if vendor else [])])
        for case in step.cases
        if kinds is None or case.kind in kinds
    ]
    return result_of(steps=(items, 0)) | {"device": {"name": device.name}}


def line(text, kind):
    """The cells of a kind of operation."""
    (found,) = (each for each in text.splitlines() if each.startswith(f"| {kind} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_times_are_counted_as_often_as_the_step_has_them():
    """53 convolutions forward at 1 ms each are 53 ms, whichever of them are alike."""
    parts = gpu_step.totals(RESNET, H200, [measured(RESNET, 1e-3)])
    assert parts["conv2d"].measured_seconds == pytest.approx(53e-3)
    assert parts["batch norm backward"].measured_seconds == pytest.approx(53e-3)
    whole = gpu_step.whole(parts)
    assert whole.calls == whole.measured_calls == sum(case.multiplicity for case in RESNET.cases)
    assert whole.seconds == pytest.approx(1e-3 * whole.calls)
    assert whole.predicted_seconds == 0
    assert list(parts) == sorted(parts, key=lambda kind: -parts[kind].seconds)


def test_the_floor_is_bytes_and_flop_at_the_data_sheets_rates():
    """ResNet-50's 12.27 TFLOP less the stem's input gradient; every array of the optimizer once."""
    parts = gpu_step.totals(RESNET, H200, [])
    network = models.build("resnet50")
    whole = gpu_step.whole(parts)
    assert whole.flop_seconds == pytest.approx(256 * network.flops("training") / 989.4e12)
    momentum = network.parameters * (2 + 2 + 8 + 8)
    assert parts["momentum"].floor_seconds == pytest.approx(momentum / H200.peak_bytes_per_second)
    for part in parts.values():
        assert part.floor_seconds >= max(part.bytes_seconds, part.flop_seconds) - 1e-12


def test_what_was_not_measured_is_predicted_and_marked():
    """Convolutions measured, the rest not: the page says of each kind how much of its time is a prediction."""
    text = gpu_step.step_page(RESNET, H200, [measured(RESNET, 1e-3, kinds={"conv2d"}, vendor=0.5e-3)])
    assert "53 of 275 calls were measured (2000-01-01, commit 0000000)" in text
    assert line(text, "conv2d")[5:7] == ["53.0 ms", ""]
    assert line(text, "conv2d")[-1] == "0.50"
    assert line(text, "batch norm train")[6] == "all"
    whole = line(text, "**the whole step**")
    assert whole[1] == "275"
    assert 0 < float(whole[6].removesuffix(" %")) < 100
    nothing = gpu_step.step_page(RESNET, H200, [])
    assert "all 275 calls are predicted" in nothing
    assert line(nothing, "conv2d")[6] == "all"


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
    path.write_text(json.dumps(measured(RESNET, 1e-3)))
    assert command.main([RESNET.name, "--device", "h200-sxm", "--results", str(path)]) == 0
    assert "| conv2d | 53 |" in capsys.readouterr().out
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [step.name for step in STEPS]
    for wrong in (["resnet50"], [RESNET.name, "--device", "h100-sxm", "--results", str(path)], []):
        with pytest.raises(SystemExit) as stop:
            command.main(wrong)
        assert stop.value.code == 2
    assert RESNET.name in capsys.readouterr().err
