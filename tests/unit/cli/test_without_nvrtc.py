"""What the commands answer on a machine without a CUDA compiler: the figures recorded with the sources."""

from __future__ import annotations

import json

import pytest

from cubatch.bench import bench_results
from cubatch.kernels import survey
from cubatch.kernels.toolchain import nvrtc
from tests.unit.commands import in_process

GEMM = ("gemm", "--m", "512", "--n", "512", "--k", "512", "--dry-run", "--variants", "all")


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Run a command where NVRTC is nowhere and nothing was ever compiled: (exit code, stdout, stderr)."""
    monkeypatch.setattr(nvrtc, "candidates", tuple)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bench_results._figures.cache_clear()
    yield lambda name, *arguments: in_process(monkeypatch, capfd, name)(*arguments)
    bench_results._figures.cache_clear()


def test_kernels_are_listed_for_an_architecture(run):
    """With registers and occupancy, and the line that would install the compiler."""
    code, out, err = run("kernels", "--arch", "sm_80", "--arch", "sm_90", "--family", "mma")
    assert code == 0
    assert "mma, sm_80 to sm_90" in out
    assert "Compiled by NVRTC 12.9.86." in out
    assert "recorded with the sources" in err
    assert "pip install '.[kernels]'" in err


def test_kernels_are_listed_where_the_compiler_no_longer_knows_the_architecture(run, monkeypatch):
    """NVRTC 13, which PyTorch brings, compiles for no V100: its figures are recorded all the same."""
    monkeypatch.setattr(survey, "survey", lambda *_, **__: (_ for _ in ()).throw(nvrtc._unknown(70, {"13.0": [75]})))
    code, out, err = run("kernels", "--arch", "sm_70", "--family", "simt")
    assert code == 0
    assert "simt, sm_70" in out
    assert "recorded with the sources" in err
    assert "NVRTC 13.0 knows sm_75" in err
    assert run("kernels", "--arch", "sm_70", "--check")[0] != 0


@pytest.mark.parametrize("arguments", [("--arch", "sm_72"), ("--arch", "sm_80", "--check")])
def test_what_is_not_recorded_needs_the_compiler(run, arguments):
    """Nor does a check pass that compiled nothing."""
    code, out, err = run("kernels", *arguments)
    assert code != 0
    assert out == ""
    assert "compiling CUDA kernels needs NVRTC" in err


def test_a_bench_is_planned_with_the_recorded_figures(run, tmp_path):
    """Every variant's registers and occupancy are those that compiling gives."""
    code, out, _ = run("bench", *GEMM, "--device", "v100-sxm2-16gb", "--json", str(tmp_path / "a.json"))
    assert code == 0
    assert "error" not in out
    (result,) = json.loads((tmp_path / "a.json").read_text())["results"]
    launches = [launch for entry in result["entries"] for launch in entry["launches"]]
    assert len(launches) > 5
    assert all(launch["registers"] and launch["occupancy"] for launch in launches)


def test_a_bench_is_planned_for_what_is_not_recorded(run, tmp_path):
    """Blocks and fill need no compiler; the rest is unknown."""
    code, out, _ = run("bench", *GEMM, "--device", "p100-pcie-16gb", "--json", str(tmp_path / "a.json"))
    assert code == 0
    assert "error" not in out
    (result,) = json.loads((tmp_path / "a.json").read_text())["results"]
    launches = [launch for entry in result["entries"] for launch in entry["launches"]]
    assert all(launch["fill"] and launch["registers"] is None for launch in launches)
