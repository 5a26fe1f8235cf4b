"""The kernels keep to their rules, compile for the oldest and the newest GPU, and are all in the budget."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.kernel_budget import budget as budgets
from cubatch.kernels import resources, survey
from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.toolchain.compile import options as compile_options
from cubatch.kernels.variant import kernels, kernels_path

ROOT = kernels_path()
FILES = sorted([*ROOT.rglob("*.cu"), *ROOT.rglob("*.cuh")])
DEVICES = set(ROOT.glob("common/device*.cuh"))
BUDGET = ROOT / "resources.toml"

# What the compiler of the CPU has as well.
ALLOWED = {"__restrict__"}
INTRINSIC = re.compile(r"\b(?:__\w+|threadIdx|blockIdx|blockDim|gridDim|warpSize|atomic[A-Z]\w*|asm)\b")
INCLUDE = re.compile(r"^\s*#\s*include\s*(\S+)", re.MULTILINE)
MOST_LINES = 400


def code_of(path):
    """Give a file without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", [path for path in FILES if path not in DEVICES], ids=lambda path: path.name)
def test_intrinsics_are_behind_the_names_of_device_cuh(path):
    """Every kernel also runs on the CPU, so none may speak of the GPU; no atomics, so that runs repeat exactly."""
    assert set(INTRINSIC.findall(code_of(path))) <= ALLOWED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_kernel_includes_our_headers_only(path):
    """NVRTC has no headers of its own, and a kernel that needs none compiles from any wheel."""
    known = {f'"{header.relative_to(ROOT)}"' for header in FILES}
    twins = {f'"{path.stem.replace("device", "cpusim")}.h"'} if path in DEVICES else set()
    assert set(INCLUDE.findall(code_of(path))) <= known | twins


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_kernel_begins_with_its_licence_and_with_what_it_is(path):
    """And is short enough to be read."""
    lines = path.read_text().splitlines()
    assert lines[0] == "// SPDX-License-Identifier: MIT"
    assert lines[1] == "//"
    assert re.match(r"// \S", lines[2])
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("path", [path for path in FILES if path not in DEVICES], ids=lambda path: path.name)
def test_every_kernel_waits_for_the_launch_before_it(path):
    """From Hopper on it may begin before that one has ended; what it does first touches no memory of the GPU."""
    kernels_of = re.split(r"^CB_KERNEL\(", code_of(path), flags=re.MULTILINE)[1:]
    preambles = [kernel.partition("{")[2].partition("cb_dependent_launch();") for kernel in kernels_of]
    assert all(wait for _, wait, _ in preambles)
    assert {before.strip() for before, _, _ in preambles if path.parent.name != "hopper"} <= {""}


def test_every_source_is_in_the_configs_and_the_other_way_round():
    """A file that no variant is made of is never compiled, so never checked."""
    with (ROOT / "configs.toml").open("rb") as file:
        data = tomllib.load(file)
    modules = data.get("modules", [])
    assert {module["source"] for module in modules} == {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.cu")}
    borrowed = {("simt", "winograd")}  # whose products are those of the other
    folders = {(Path(module["source"]).parts[0], module["family"]) for module in modules}
    assert {pair for pair in folders if pair[0] != pair[1]} == borrowed
    used = {tile for module in modules for tile in module.get("tiles", ())}
    assert used == set(data.get("tiles", {}))


def test_names_are_unique_and_say_operation_and_type():
    """A name finds one variant in every table."""
    names = [kernel.name for kernel in kernels()]
    assert len(names) == len(set(names))
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
    for kernel in kernels():
        assert kernel.name.startswith(f"{kernel.operation}_")
        assert short[kernel.dtype] in kernel.name.split("_")


def test_every_entry_is_in_its_source():
    """The compiler's front end knows each name that is launched; one unit for each operation, in its first type."""
    first = {(kernel.source, kernel.operation): kernel for kernel in reversed(kernels())}
    units = {}
    for kernel in first.values():
        units.setdefault((kernel.source, kernel.defines), []).append(kernel)
    missing = {}
    for (source, _), found in units.items():
        names = "".join(f"using has_{kernel.entry} = decltype(&{kernel.entry});\n" for kernel in found)
        arch = max(80, found[0].min_arch or 0)
        options = [*compile_options(found[0], f"sm_{arch}"), "-fdevice-syntax-only", f"-I{ROOT}"]
        program = nvrtc.for_arch(arch).compile((ROOT / source).read_text() + "\n" + names, source, options)
        if program.error:
            missing[found[0].name] = program.log
    assert missing == {}


def test_a_kernel_of_each_family_compiles_for_the_oldest_and_the_newest_gpu():
    """Without a spill or a warning; `python -m benchmarks.kernel_budget` checks all of them, for all architectures."""
    shortest = sorted(kernels(), key=lambda kernel: (ROOT / kernel.source).stat().st_size, reverse=True)
    chosen = {kernel.family: kernel for kernel in shortest if kernel.dtype == "float32"}
    archs = [survey.ARCHS[0], survey.ARCHS[-1]]

    rows = survey.survey(list(chosen.values()), archs)

    assert {(row.kernel.name, row.arch): row.problems for row in rows if row.problems} == {}
    assert {row.status for row in rows} <= {"ok", "not_applicable"}


def test_the_budget_has_every_variant_on_every_architecture_and_nothing_else():
    """After a change of kernels: `python -m benchmarks.kernel_budget --update`, and look at the difference."""
    budget = budgets.read(BUDGET)

    rows = survey.recorded(kernels(), budget.recorded)

    assert [f"{row.kernel.name} {row.arch}" for row in rows if row.status == "unknown"] == []
    assert budgets.leftovers(kernels(), budget) == []
    assert all(reason.strip() for reason in budget.recorded.may_spill.values())


def test_the_budget_is_of_these_sources():
    """Registers that grew or fell are looked at with the change that made them so, not by whoever comes next."""
    assert budgets.read(BUDGET).sources == budgets.digest(ROOT), "run `python -m benchmarks.kernel_budget --update`"


@pytest.mark.parametrize(
    ("name", "before", "after", "is_same"),
    [
        ("a.cu", "int a; // one\n", "int a;\n\n/* two\n lines */", True),
        ("a.cu", "int a;", "int b;", False),
        ("common/b.cuh", "int a;", "int b;", False),
        ("configs.toml", "a = 1", "a = 2", False),
        ("README.md", "a", "b", True),
        ("resources.toml", "a", "b", True),
    ],
)
def test_the_digest_of_the_sources_is_that_of_their_code(name, before, after, is_same, tmp_path):
    """Of every source, header and configuration; words about them, and what is made of them, do not count."""
    (tmp_path / "common").mkdir()
    (tmp_path / "configs.toml").touch()
    (tmp_path / name).write_text(before)
    was = budgets.digest(tmp_path)
    (tmp_path / name).write_text(after)
    assert (budgets.digest(tmp_path) == was) == is_same


def test_every_entry_of_a_source_is_in_the_configs():
    """One that is in no variant would never be compiled for a check, nor launched."""
    for path in ROOT.rglob("*.cu"):
        entries = set(re.findall(r"CB_KERNEL\([^)]*\)\s*(\w+)\(", code_of(path)))
        configured = {kernel.entry for kernel in kernels() if kernel.source == str(path.relative_to(ROOT))}
        assert entries <= configured, path.name


def test_the_budget_is_of_the_compiler_that_the_tests_install():
    """Else it would bind nothing."""
    project = kernels_path().parent / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert f"nvidia-cuda-nvrtc-cu12=={resources.read(BUDGET).nvrtc}" in extras["test"]
