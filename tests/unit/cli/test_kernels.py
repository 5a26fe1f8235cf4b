"""`cubatch kernels`: the figures of every variant, and a check that fails where it must."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cubatch.errors import InvalidArgument, InvalidData, UnknownName
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import occupancy
from cubatch.kernels import resources, survey, variant as kernel_module
from cubatch.kernels.toolchain import compile as compiler, nvrtc
from tests.unit import kernel_tree
from tests.unit.commands import in_process


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Put small kernels in the place of the real ones, and a cache of their own; there is no GPU."""

    def make(configs=kernel_tree.CONFIGS, **sources):
        return kernel_tree.make(tmp_path / "kernels", configs, **sources)

    monkeypatch.setattr(kernel_module, "_PACKAGE", tmp_path / "cubatch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "device", lambda: Device(name="a CPU", kind="cpu"))
    return make


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd, "kernels")


def line_of(out, name):
    """Give the cells of a variant's line."""
    return next(line for line in out.splitlines() if line.startswith(name)).split("  ")


def test_json_is_that_of_the_contract(run, tree):
    """One entry for each kernel, in it every variant on every architecture asked for."""
    tree()

    code, out, _ = run("--arch", "sm_70", "--arch", "sm_120", "--json", "-")

    data = json.loads(out)
    assert (code, data["schema"]) == (0, 1)
    assert [(one["operation"], one["dtype"], one["family"]) for one in data["kernels"]] == [
        ("doubled", "float32", "small"),
        ("sums", "float32", "small"),
    ]
    variants = data["kernels"][1]["variants"]
    assert [(one["name"], one["arch"], one["status"]) for one in variants] == [
        ("sums_f32", "sm_70", "ok"),
        ("sums_f32", "sm_120", "ok"),
    ]
    for one in variants:
        assert (one["spill_bytes"], one["shared_bytes"], one["threads"]) == (0, 1024, 256)
        held = occupancy(
            compute_capability=(7, 0) if one["arch"] == "sm_70" else (12, 0),
            threads_per_block=256,
            registers_per_thread=one["registers"],
            shared_bytes_per_block=1024,
        )
        assert (one["blocks_per_sm"], one["occupancy"]) == (held.blocks_per_sm, held.occupancy)


def test_shared_memory_asked_for_at_the_launch_counts(run, tree):
    """30 KiB beside the static one, and one that the system takes: the 164 KiB of an SM of sm_80 hold 5 blocks."""
    tree(kernel_tree.CONFIGS + "dynamic_shared_bytes = 30720\n")

    variants = json.loads(run("--arch", "sm_80", "--json", "-")[1])["kernels"][1]["variants"]

    assert (variants[0]["shared_bytes"], variants[0]["blocks_per_sm"]) == (31 * 1024, 5)


def test_what_is_not_meant_for_an_architecture_is_not_compiled_for_it(run, tree):
    """Its JSON says not applicable, with no figures; the table counts it only."""
    tree(kernel_tree.CONFIGS + "min_arch = 80\n")

    _, out, _ = run("--arch", "sm_75", "--json", "-")

    (variant,) = json.loads(out)["kernels"][0]["variants"]
    assert (variant["status"], variant["registers"], variant["shared_bytes"]) == ("not_applicable", None, None)
    text = run("--arch", "sm_75")[1]
    assert "other architectures only: 2 variants." in " ".join(text.split())
    assert variant["name"] not in text


def test_a_selection_takes_one_family_or_one_operation(run, tree):
    """By its name alone."""
    tree(kernel_tree.CONFIGS + kernel_tree.SPILLING, spills=kernel_tree.SPILLS)

    def names(*options):
        listed = json.loads(run(*options, "--arch", "sm_80", "--json", "-")[1])["kernels"]
        return [variant["name"] for one in listed for variant in one["variants"]]

    assert names("--family", "greedy") == ["spills_f32"]
    assert names("--operation", "sums") == ["sums_f32"]


def test_without_a_gpu_the_recorded_figures_are_listed_and_nothing_is_compiled(run, tree, monkeypatch):
    """The budget's figures, over its architectures; a variant without any is unknown."""
    root = tree()
    (root / "resources.toml").write_text('nvrtc = "1.2.3"\n[figures]\nsums_f32 = "52=20/1024 80=33/1024+8"\n')
    monkeypatch.setattr(nvrtc, "candidates", lambda: ())

    code, out, _ = run()

    assert code == 0
    assert "NVRTC 1.2.3" in out
    line = " ".join(line_of(out, "sums_f32"))
    assert "20 to 33" in line
    assert "0 to 8" in line
    variants = json.loads(run("--json", "-")[1])["kernels"][0]["variants"]
    assert {one["status"] for one in variants} == {"unknown"}


def test_with_a_gpu_its_own_architecture_is_compiled(run, tree, monkeypatch):
    """Nothing has to be named."""
    tree()
    monkeypatch.setattr(probe, "device", lambda: Device(name="a GPU", compute_capability=(8, 6)))

    _, out, _ = run("--json", "-")

    assert {one["arch"] for one in json.loads(out)["kernels"][0]["variants"]} == {"sm_86"}


def test_a_check_compiles_for_every_surveyed_architecture_and_passes(run, tree):
    """Two variants, each for all architectures."""
    tree()
    code, out, _ = run("--check")
    count = len(survey.ARCHS)
    assert code == 0
    assert f"2 variants on {count} architectures, {2 * count} compiled by NVRTC 12.9.86: no problems" in out


def test_a_spill_fails_the_check_unless_the_recorded_figures_allow_it(run, tree):
    """The exemption is written by hand in resources.toml, with a reason."""
    root = tree(kernel_tree.SPILLING + "min_arch = 80\nmax_arch = 80\n", spills=kernel_tree.SPILLS)
    code, out, _ = run("--check")
    assert (code, "bytes of registers spilled per thread" in " ".join(out.split())) == (1, True)
    (root / "resources.toml").write_text('nvrtc = "12.9.86"\n[may_spill]\nspills_f32 = "it is made to"\n[figures]\n')
    assert run("--check")[0] == 0


def test_a_kernel_that_does_not_compile_fails_the_check_with_its_log(run, tree):
    """The log is shown once for a source, not once for each architecture."""
    root = tree()
    (root / "small/small.cu").write_text("void nonsense(;\n")

    code, out, err = run("--check")

    assert code == 1
    assert err.count("does not compile for") == 1
    assert "small.cu(1): error" in err
    assert "it does not compile" in out
    assert line_of(out, "doubled_f32")[-1].strip() == "all"
    code, out, _ = run("--arch", "sm_80", "--json", "-")
    assert code == 1  # the listing is whole, and a script that asked for figures learns that some are missing
    variants = json.loads(out)["kernels"][0]["variants"]
    assert variants[0]["status"] == "error"
    assert "small.cu(1): error" in variants[0]["log"]


@pytest.mark.parametrize(
    ("source", "configs", "problem"),
    [
        (kernel_tree.SOURCE + "#warning look here\n", kernel_tree.CONFIGS, "look here"),
        (kernel_tree.SOURCE.replace("(256)", "(128)"), kernel_tree.CONFIGS, "its launch bounds say 128"),
        (kernel_tree.SOURCE.replace("__launch_bounds__(256)", ""), kernel_tree.CONFIGS, "its launch bounds say none"),
        (kernel_tree.SOURCE, kernel_tree.CONFIGS.replace("sums", "differences"), 'no extern "C" entry differences'),
        (kernel_tree.SOURCE, kernel_tree.CONFIGS + "dynamic_shared_bytes = 65537\n", "no SM can hold a block: shared"),
    ],
    ids=["warning", "other bounds", "no bounds", "no entry", "too much shared memory"],
)  # fmt: skip
def test_whatever_would_fail_or_surprise_at_a_launch_fails_the_check(run, tree, source, configs, problem):
    """sm_75 has 64 KiB of shared memory for a block."""
    root = tree(configs)
    (root / "small/small.cu").write_text(source)

    code, out, _ = run("--check", "--arch", "sm_75")

    assert code == 1
    assert problem in " ".join(out.split())


def test_the_second_check_compiles_nothing(run, tree, monkeypatch):
    """A warm cache makes a check of everything a matter of seconds."""
    tree()
    run("--check")
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    _, out, _ = run("--check", "--arch", "sm_80", "--json", "-")
    assert {one["status"] for one in json.loads(out)["kernels"][0]["variants"]} == {"ok"}


def test_progress_counts_compile_units(tree, tmp_path):
    """Two entries of one source are one unit, on three architectures three."""
    root = tree()
    seen = []
    survey.survey(
        kernel_module.kernels(),
        ("sm_80", "sm_89", "sm_100"),
        root=root,
        folder=tmp_path / "c",
        progress=lambda *at: seen.append(at),
    )
    assert [at[:2] for at in seen] == [(1, 3), (2, 3), (3, 3)]
    assert {at[2] for at in seen} == {f"small/small.cu {arch}" for arch in ("sm_80", "sm_89", "sm_100")}


def test_what_ends_a_survey_ends_it_between_architectures_too(tree, tmp_path, monkeypatch):
    """Units that have not begun are cancelled."""
    root, real = tree(), compiler.compile_unit
    stopping, seen = threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def __init__(self, _):
            super().__init__(1)

        def shutdown(self, *arguments, **options):
            stopping.set()
            super().shutdown(*arguments, **options)

    def compile_unit(kernel, arch, **options):
        seen.append(arch)
        if arch == "sm_70":
            stopping.wait(60)
        return real(kernel, arch, **options)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(survey, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(compiler, "compile_unit", compile_unit)
    archs = ("sm_100", "sm_70", "sm_80")
    with pytest.raises(KeyboardInterrupt):
        survey.survey(
            kernel_module.kernels(), archs, root=root, folder=tmp_path / "c", progress=interrupted
        )  # fmt: skip
    assert "sm_80" not in seen


def test_an_architecture_counts_once_however_it_is_spelled(run, tree):
    """sm_90a is a target of sm_90's, which a family takes that needs it."""
    tree()
    _, out, _ = run("--arch", "sm_90a", "--arch", "sm_90", "--json", "-")
    assert [one["arch"] for one in json.loads(out)["kernels"][0]["variants"]] == ["sm_90"]


def test_an_error_that_is_no_kernels_ends_the_survey(tree):
    """Without limits of an SM, or without NVRTC, there is no row to give."""
    tree()
    with pytest.raises(UnknownName, match="compute_capability"):
        survey.survey(kernel_module.kernels(), ("sm_71",))
    with pytest.raises(InvalidArgument, match="NVRTC"):
        survey.survey(kernel_module.kernels(), ("sm_110",))


@pytest.mark.parametrize("text", [None, "nvrtc = ", "[figures]", 'nvrtc = "1"\n[figures]\na = "80=x"', 'nvrtc = "1"'])
def test_a_budget_that_cannot_be_read_is_an_error_with_its_path(tmp_path, text):
    """Not a table with nothing in it."""
    path = Path(tmp_path / "resources.toml")
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidData, match=r"resources\.toml"):
        resources.read(path)
