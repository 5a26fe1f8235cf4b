"""`cubatch occupancy`: tables, JSON, pictures and what it refuses, for GPUs that are not here."""

from __future__ import annotations

import json

import pytest

from cubatch.estimate.occupancy_sweep import sweep
from cubatch.hardware import catalogue, probe
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import count_waves
from cubatch.kernels import resources, survey, variant
from cubatch.kernels.resources import Needs
from cubatch.report.plots import occupancy
from tests.unit.commands import in_process

FPROP = "conv2d_fprop_implicit_gemm_f32_simt_128x128x8_v4"
NUMBERS = ("--threads", 256, "--registers", 96)
V100 = ("--device", "v100-sxm2-16gb")
GO = ("--model", "go-net")


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command in this process and give (exit code, stdout, stderr); there is no GPU."""
    named = probe.device
    here = Device(name="a CPU", kind="cpu")
    monkeypatch.setattr(probe, "device", lambda name=None: here if name is None else named(name))

    return in_process(monkeypatch, capfd, "occupancy")


def test_numbers_are_answered_with_what_limits_them(run):
    """96 registers for each of 256 threads: a third block would need more than the 65 536 registers of an SM."""
    code, out, err = run(*NUMBERS, *V100)
    assert (code, err) == (0, "")
    assert "Tesla V100-SXM2-16GB" in out
    (line,) = (line for line in out.splitlines() if line.startswith("    256 "))
    assert line.split() == ["256", "96", "0", "B", "2", "25.0", "%", "registers"]
    assert "warps 8, blocks 32, registers 2" in out


def test_a_launch_that_cannot_be_has_0_blocks_and_the_reason(run):
    """64 KiB in one block is more than a Titan X gives, and all that a T4 has."""
    for device, blocks in (("titan-x-maxwell", 0), ("t4", 1)):
        code, out, _ = run("--threads", 128, "--registers", 32, "--shared", "64KiB", "--device", device, "--json", "-")
        (found,) = json.loads(out)["launches"]
        assert (code, found["blocks_per_sm"], found["limiters"]) == (0, blocks, ["shared_memory"])
    assert "0 blocks: the launch fails" in run("--threads", 1024, "--registers", 96, *V100)[1]


def test_json_holds_all_that_the_table_says(run):
    """The launch, what it takes, the GPU, the layer, the grid and the sweep."""
    code, out, _ = run(FPROP, *V100, *GO, "--batch-size", 29, "--sweep", "batch-size", "--json", "-")
    found = json.loads(out)
    assert (code, found["schema"], found["device"]["slug"]) == (0, 1, "v100-sxm2-16gb")
    assert (found["layer"], found["pass"]) == ("conv1", "fprop")
    budget = resources.recorded_figures()
    needs = resources.recorded_needs(
        variant.find("conv2d_fprop", "float32", tile="128x128x8", vector=4), "sm_70", budget
    )
    (launch,) = found["launches"]
    assert (launch["kernel"], launch["nvrtc"]) == (FPROP, budget.nvrtc)
    taken = (launch["threads"], launch["registers"], launch["shared_bytes"])
    assert taken == (needs.threads, needs.registers, needs.shared_bytes)
    assert launch["warps_per_sm"] == launch["blocks_per_sm"] * needs.threads // 32
    assert launch["spread"] == found["sweep"]["grid"]
    assert launch["spread"]["batch_size"] == 29
    steps = found["sweep"]["steps"]
    assert {28, 56, 85, 113} <= {step["last"]["batch_size"] for step in steps if step["cliff"]}
    assert found["sweep"]["better"]["batch_size"] == 28
    work = {
        end["batch_size"]: end["busiest_sm_blocks"] / end["slices"]
        for step in steps
        for end in (step["first"], step["last"])
    }
    (first,) = [step for step in steps if step["last"]["batch_size"] == 28]
    assert first["drop"] == pytest.approx(1 - 29 / work[29] / (28 / work[28]))


def test_blocks_of_a_grid_are_spread_over_the_sms(run):
    """82 blocks, two resident per SM, are one wave of 160, 51 % full, and two of them on the busiest of 80 SMs."""
    waves = count_waves(82, blocks_per_sm=2, num_sms=80)
    _, out, _ = run(*NUMBERS, *V100, "--blocks", 82, "--json", "-")
    found = json.loads(out)["launches"][0]["spread"]
    assert (found["blocks"], found["waves"], found["last_wave"]) == (82, 1, waves.last_wave_fraction)
    assert (found["busiest_sm_blocks"], found["fill"]) == (2, 82 / 160)
    assert "51.2 %" in run(*NUMBERS, *V100, "--blocks", 82)[1]
    _, out, _ = run("--threads", 1024, "--registers", 96, *V100, "--blocks", 82, "--json", "-")
    assert json.loads(out)["launches"][0]["spread"]["waves"] is None  # it cannot launch


@pytest.mark.parametrize(
    "name", {gpu.arch: gpu.slug for gpu in catalogue.all_devices() if gpu.arch in survey.ARCHS}.values()
)
def test_a_gpu_of_every_architecture_is_answered_for_without_a_gpu(run, name):
    """From the recorded registers and shared memory of the kernel."""
    code, out, err = run(FPROP, "--device", name)
    assert (code, err) == (0, "")
    assert catalogue.find(name).name in out
    assert "NVRTC" in out


def test_all_variants_of_a_kernel_are_listed(run):
    """What names begin with stands for all of them that run on the GPU."""
    code, out, _ = run("gemm_nt_implicit_gemm_f32_simt", *V100)
    assert code == 0
    shown = [line.split()[0] for line in out.splitlines() if line.startswith("gemm_nt_implicit_gemm_f32_simt_")]
    arch = variant.arch_number("sm_70")
    assert shown == [
        one.name
        for one in variant.kernels()
        if one.name.startswith("gemm_nt_implicit_gemm_f32_simt_") and one.runs_on(arch)
    ]
    assert len(shown) > 1


def test_the_picture_holds_the_cliffs_and_the_marks(monkeypatch, tmp_path):
    """What is drawn: each cliff's last value, where the launch stands, and the nearest better, in data coordinates."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    found = sweep(Needs(256, 96), (7, 0), "registers")
    occupancy.staircase(found, tmp_path / "a.png", title="t", subject="s", warps=64)
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    cliffs = lines["drop: the next value is lower"]
    assert list(cliffs.get_xdata()) == [32, 40, 48, 64, 80, 128]
    assert list(cliffs.get_ydata()) == [100, 75, 62.5, 50, 37.5, 25]
    assert (list(lines["now: 96"].get_xdata()), list(lines["now: 96"].get_ydata())) == ([96], [25.0])
    assert list(lines["nearest better: 80"].get_xdata()) == [80]
    assert {text.get_text() for text in axes.texts} >= {"32", "40", "48", "64", "80", "128"}


def test_a_gpu_whose_facts_are_not_known_is_refused(monkeypatch, run):
    """Without its compute capability nothing can be said; the error names what is missing."""
    monkeypatch.setattr(probe, "resolve", lambda *_, **__: Device(name="Riddle"))
    code, _, err = run(*NUMBERS, "--device", "riddle")
    assert (code, "Riddle" in err, "compute capability" in err) == (2, True, True)
    half_known = Device(name="Riddle", compute_capability=(8, 9))
    monkeypatch.setattr(probe, "resolve", lambda *_, **__: half_known)
    assert run(*NUMBERS, "--device", "riddle")[0] == 0
    ours = (FPROP, *GO)
    for arguments in ((*NUMBERS, "--blocks", 4), (*ours, "--batch-size", 4), (*ours, "--sweep", "batch-size")):
        code, _, err = run(*arguments, "--device", "riddle")
        assert (code, "Riddle" in err, "SMs" in err) == (2, True, True)
