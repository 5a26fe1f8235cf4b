"""What the GPU pass does on tensor cores: its lists, and the families it may leave out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import gpu_pass, render
from benchmarks.gpu import cases as gpu_cases, items, stages as gpu_stages
from cubatch.bench import measure
from cubatch.bench.implementations import TENSOR_FAMILIES
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from tests.unit.benchmarks.passes import FACTS

H200, V100 = catalogue.find("h200-sxm"), catalogue.find("v100-sxm2-16gb")


# --- lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slug",
    [
        "t4",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("h200-sxm", "v100-sxm2-16gb", "a100-sxm4-40gb")),
    ],
)
def test_every_variant_on_tensor_cores_is_checked(slug):
    """By the cases that come first in the stage: none is left to chance, whatever the GPU."""
    device = catalogue.find(slug)
    arch = items.arch_of(device)
    checked = [k for k in variant.kernels() if k.operation not in gpu_cases.ELSEWHERE]
    wanted = {k.name for k in checked if k.family in TENSOR_FAMILIES and k.runs_on(arch)}
    launched = {
        launch.kernel
        for case in gpu_cases.odd_products()
        if arch >= 80 or case.dtype != "tf32"
        for entry in measure.plan(case, device, variants="all", compiled=False).entries
        for launch in entry.launches
    }
    assert wanted
    assert wanted <= launched


def test_the_commands_of_the_readme_choose_what_they_say():
    """float32 alone by leaving out the other types, whose names say so."""
    text = (render.ROOT / "benchmarks/gpu/README.md").read_text()
    only = "^(?!.*, [bt]?f[l3])"
    assert f"--only '{only}'" in text
    for name in ("gemm", "steps"):
        stage = gpu_stages.stage_named(name)
        found = gpu_stages.chosen(stage, H200, only)
        assert found == [item for item in found if item.case.dtype == "float32"]
        assert len(found) == sum(item.case.dtype == "float32" and not item.keyword for item in stage.items(H200))


# --- what is left out ----------------------------------------------------------------------------------------------


def test_what_is_left_out_reaches_the_stages(monkeypatch, tmp_path):
    """By the child's command line, into its session, and into the file; a kernel that falls, into all that follows."""
    commands = []

    def stand_in(command, run, save, skipped, _):
        commands.append(command(0, 5.0))
        skipped["bad"] = "an illegal address"
        save()

    monkeypatch.setattr(gpu_pass, "run_stage", stand_in)
    stages = [gpu_stages.stage_named("gemm"), gpu_stages.stage_named("steps")]
    found = gpu_pass.run_all(
        stages,
        tmp_path / "f.json",
        H200,
        seconds=60.0,
        only="",
        without=["hopper", "mma"],
        skipped=["slow"],
        facts=FACTS,
    )
    assert found["without"] == ["hopper", "mma"]
    assert found["skipped_kernels"] == {"slow": "named by --skip-kernel", "bad": "an illegal address"}
    assert commands[0][-6:] == ["--without", "hopper", "--without", "mma", "--skip-kernel", "slow"]
    assert commands[1][-4:] == ["--skip-kernel", "slow", "--skip-kernel", "bad"]
    opened = []
    monkeypatch.setattr(items, "session_here", lambda *_, **given: opened.append(given) or SimpleNamespace(device=H200))
    with (tmp_path / "lines").open("w") as lines, pytest.raises(AttributeError):
        gpu_pass.child(
            stages[0], start=0, seconds=5.0, only="gemm nt 4096", lines=lines, without=["hopper"], skipped=["bad"]
        )
    assert opened == [{"without": ["hopper"], "skipped": ["bad"], "small": False}]
