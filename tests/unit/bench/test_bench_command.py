"""What `cubatch bench` reports, and the command."""

from __future__ import annotations

import json
import math
from unittest.mock import Mock

import attrs
import pytest

from cubatch.bench import cases, figure, measure, target
from cubatch.bench.contest import Contest
from cubatch.errors import DeviceFailed, DeviceNotAvailable, InvalidArgument, OutOfMemory
from cubatch.hardware import catalogue, probe
from cubatch.network.passes import Pass
from tests.unit.bench.building import GEMM
from tests.unit.bench_fakes import DEVICE
from tests.unit.commands import in_process

# --- what is reported ----------------------------------------------------------------------------------------------


def test_a_result_is_json_with_every_timing(world):
    """The raw timings, the launches and what identifies the case."""
    result = measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    facts = json.loads(json.dumps(result.to_mapping(), allow_nan=False))
    assert facts["case"]["flops"] == GEMM.flops
    assert facts["entries"][0]["launches"][0]["grid"] == [30, 1, 1]
    assert facts["entries"][0]["launches"][0]["busiest_sm_blocks"] == 3
    assert [t["seconds"] for t in facts["entries"][0]["timings"]] == [1e-3] * 5


def test_a_figure_is_drawn_of_what_was_timed(world, tmp_path):
    """And refused, with the reason, where nothing was."""
    pytest.importorskip("matplotlib")
    result = measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    figure.rates([result], tmp_path / "f.png", title="bench")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument, match="known peak rate"):
        figure.rates([measure.plan(GEMM, DEVICE)], tmp_path / "g.png", title="bench")
    assert math.isfinite(result.best.roofline_fraction)


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command line in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd, "bench")


@pytest.fixture
def on_a_gpu(world, monkeypatch):
    """Let the commands find a GPU of this world."""
    gpu = attrs.evolve(DEVICE, live=True, memory_bytes=1 << 24)
    monkeypatch.setattr(probe, "resolve", lambda name, *, live=True: gpu)
    monkeypatch.setattr(target, "on_gpu", world.target)
    return world


GEMM_OPTIONS = ("gemm", "--m", 70, "--n", 50, "--k", 30)


@pytest.mark.usefixtures("world")
def test_a_dry_run_says_what_would_run_on_a_gpu_that_is_not_here(run):
    """Variants, blocks, fill and the roofline, in the model's order, and that it is no more; nothing from measuring."""
    code, out, err = run(*GEMM_OPTIONS, "--dry-run", "--device", "v100-sxm2-16gb", "--variants", "all")
    assert (code, err) == (0, "")
    assert "planned for" in out
    assert "V100" in out
    assert out.count("fake 64x64x16") == 0
    assert out.count("fake") == 2
    notes = " ".join(out.split())
    assert "order of the cost model" in notes
    assert "`cubatch predict MODEL --library cubatch --explain` predicts the time" in notes
    assert "ratio" not in out


@pytest.mark.usefixtures("recorded")
def test_attention_is_planned_in_inference_and_both_passes_of_training(run):
    """On Hopper too, where the blocks of each projection share the tiles of that one; nothing left out or twice."""
    options = ("--tokens", 197, "--c", 192, "--heads", 3, "--dtype", "float16", "--device", "h200-sxm", "--dry-run")
    code, out, err = run("attention", *options, "--json", "-")
    assert (code, err) == (0, "")
    found = json.loads(out)["results"]
    names = [[launch["kernel"] for launch in result["entries"][0]["launches"]] for result in found]
    between = [[name for name in each if "attention" in name or "softmax" in name] for each in names]
    assert between == [
        ["attend_f16_attention_mma"],
        ["heads_nt_f16_attention_mma", "softmax_f16_misc", "heads_nn_f16_attention_mma"],
        ["heads_tn_f16_attention_mma", "heads_nt_f16_attention_mma", "softmax_backward_f16_misc",
         "heads_nn_f16_attention_mma", "heads_tn_f16_attention_mma"],
    ]  # fmt: skip
    assert all(sum(name.startswith("gemm_") for name in each) >= 2 for each in names)
    assert run("attention", *options, "--heads", 5)[0] == 2


@pytest.mark.usefixtures("recorded")
def test_a_model_is_the_operations_of_its_step(run, tmp_path):
    """Training with the loss and the optimizer that is asked for; inference without, with norms folded."""
    path = tmp_path / "bench.json"
    options = ("--dry-run", "--device", "h200-sxm", "--json", path, "--batch-size", 4)
    found = {}
    for mode in ("training", "inference"):
        assert run("model", "mnist-cnn", "--mode", mode, "--optimizer", "adam", *options)[0] == 0
        found[mode] = {result["case"]["operation"] for result in json.loads(path.read_text())["results"]}
    assert {"softmax_cross_entropy", "adam", "conv2d_wgrad"} <= found["training"]
    assert not {"softmax_cross_entropy", "adam", "conv2d_wgrad"} & found["inference"]


@pytest.mark.usefixtures("world")
def test_fused_cases_are_listed_beside_the_plain_ones(run):
    """Three passes; forward with a norm and ReLU and back with a mask, each without and with a residual."""
    options = ("conv", "--h", 6, "--w", 5, "--c", 4, "--k", 3, "--dry-run", "--device", "h200-sxm")
    plain, whole = (run(*options, *more)[1] for more in ((), ("--fused", "--dtype", "float16")))
    assert "then relu" not in plain
    assert plain.count("conv2d 6x5x4 to 3") == 3
    assert whole.count("conv2d 6x5x4 to 3") == 7
    for ending in ("fprop, float16, then scale, shift, relu", "fprop, float16, then scale, shift, residual, relu"):
        assert ending in whole
    for ending in ("dgrad, float16, then mask", "dgrad, float16, then residual, mask"):
        assert ending in whole


@pytest.mark.parametrize(("device", "code"), [("v100-sxm2-16gb", 2), ("t4", 2), ("a100-sxm4-40gb", 0)])
@pytest.mark.usefixtures("world")
def test_tf32_is_refused_where_a_gpu_has_none(run, device, code):
    """From sm_80 on it is there; before, the error says so."""
    found, out, err = run(*GEMM_OPTIONS, "--dtype", "tf32", "--dry-run", "--device", device)
    assert found == code
    assert "gemm nt 70 x 50 x 30, tf32" in out if code == 0 else "compute capability 8.0" in err


@pytest.mark.usefixtures("on_a_gpu")
def test_a_measured_command_gives_table_json_and_figure(run, tmp_path):
    """The JSON holds device, environment, the copy's bandwidth and every timing."""
    pytest.importorskip("matplotlib")
    files = tmp_path / "r.json", tmp_path / "f.svg"
    code, out, err = run(*GEMM_OPTIONS, "--json", files[0], "--plot", files[1], "--seconds", 5)
    assert code == 0
    assert "ratio" in out
    facts = json.loads(files[0].read_text())
    assert (facts["schema"], facts["measured"]) == (1, True)
    assert facts["device"]["name"] == "Test GPU"
    assert "torch" in facts["environment"]
    assert facts["copy_bytes_per_second"] == pytest.approx(2 * 2**21 / 1e-3)
    assert len(facts["results"][0]["entries"][0]["timings"]) == 5
    assert files[1].read_text().startswith("<?xml")
    assert f"wrote {files[1]}" in err


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpu_that_fails_is_told_whatever_was_to_be_drawn(run, tmp_path, monkeypatch):
    """Nothing was timed, so that there is no figure: the error is that of the GPU, with the exit code of a failure."""

    def fail(*_, **__):
        raise DeviceFailed.by_driver("launching gemm", 700)

    monkeypatch.setattr(measure, "time_case", fail)
    code, _, err = run(*GEMM_OPTIONS, "--plot", tmp_path / "f.svg")
    assert (code, err) == (1, "cubatch: launching gemm failed with CUDA driver status 700\n")


@pytest.mark.usefixtures("on_a_gpu")
def test_what_was_timed_before_ctrl_c_is_shown(run, tmp_path, monkeypatch):
    """The first of three passes is in the table and in the JSON, and the exit code says that it was interrupted."""
    real, path = measure.time_case, tmp_path / "r.json"

    def time_case(case, *rest, **options):
        if case.pass_ is Pass.DGRAD:
            raise KeyboardInterrupt
        return real(case, *rest, **options)

    monkeypatch.setattr(measure, "time_case", time_case)
    options = ("conv", "--h", 6, "--w", 5, "--c", 4, "--k", 3, "--batch-size", 2, "--no-rival", "--seconds", 0.01)
    code, out, err = run(*options, "--json", path)
    assert (code, err) == (130, "cubatch: interrupted\n")
    assert "fprop" in out
    kept = json.loads(path.read_text())
    assert [result["case"]["pass"] for result in kept["results"]] == ["fprop"]
    assert kept["failure"] == "interrupted"
    monkeypatch.setattr(measure, "time_case", Mock(side_effect=KeyboardInterrupt))
    assert run(*options, "--json", path)[:2] == (130, "")
    assert json.loads(path.read_text()) == kept  # which had results


@pytest.mark.parametrize("options", [(), ("--device", "cuda:3"), ("--device", "h200-sxm")])
def test_without_a_gpu_the_error_says_so_and_what_works(run, options, monkeypatch):
    """One message, no traceback, exit code 1."""

    def refuse():
        raise DeviceNotAvailable("cuda", "the CUDA driver is not installed")

    monkeypatch.setattr("cubatch.hardware.driver.visible_gpus", refuse)
    code, out, err = run(*GEMM_OPTIONS, *options)
    assert (code, out) == (1, "")
    assert "the CUDA driver is not installed" in err
    assert "--dry-run --device NAME" in err


def test_shares_of_peaks_that_are_not_known_are_refused_before_timing(run, on_a_gpu, tmp_path, monkeypatch):
    """A GPU that is in no catalogue may be timed, but shares of its peak rates are not drawn."""
    unknown = attrs.evolve(DEVICE, live=True, peak_flops_per_second={}, peak_bytes_per_second=None)
    monkeypatch.setattr(probe, "resolve", lambda name, *, live=True: unknown)
    code, out, err = run(*GEMM_OPTIONS, "--plot", tmp_path / "f.svg")
    assert (code, out, on_a_gpu.launched) == (2, "", [])
    assert "--plot must be left out" in err


@pytest.mark.usefixtures("world")
def test_a_depthwise_convolution_has_nothing_fused(run):
    """Its kernels end with bias and ReLU: the option is refused by name."""
    options = ("--h", 6, "--w", 5, "--c", 4, "--k", 4, "--groups", 4, "--dry-run", "--device", "h200-sxm")
    code, out, err = run("conv", *options, "--fused")
    assert (code, out) == (2, "")
    assert "--fused" in err


def test_what_the_memory_cannot_hold_is_refused_before_anything_is_reserved():
    """Operands of 112 GiB on a GPU of 16 GiB: an error with both numbers, for planning as for timing."""
    v100 = catalogue.find("v100-sxm2-16gb")
    with pytest.raises(OutOfMemory) as caught:
        measure.plan(cases.gemm(10**5, 10**5, 10**5), v100)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (3 * 4 * 10**10, v100.memory_bytes)
