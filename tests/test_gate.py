"""The judge's gate: what opens it, and that nothing which a stage imports is held harmless to it."""

from __future__ import annotations

import ast
import functools
import subprocess

import pytest

from tests import gate

VERSIONS = ("nvrtc 12.9.86",)
SOURCES = {
    "kernels/simt/gemm.cu": '#include "../common/device.cuh"\n',
    "kernels/common/device.cuh": "// names\n",
    "kernels/configs.toml": "[gemm]\n",
    "cubatch/kernels/variant.py": "KERNELS = ()\n",
    "cubatch/engine/native/gemm.py": "GRID = 1\n",
    "cubatch/tuning/tune.py": "BUDGET = 60\n",
    "tests/cpusim/runtime.cpp": "int fibers;\n",
    "tests/kernels/test_simt.py": "CASES = ()\n",
    "tests/unit/test_errors.py": "CASES = ()\n",
    "benchmarks/gpu/probes.py": "PROBES = ()\n",
    "README.md": "cubatch\n",
}


@pytest.fixture
def tree(tmp_path):
    """A small repository whose sources have passed every stage."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (tmp_path / ".ci").mkdir()
    lines = [f"{stage} {gate.key(stage, tmp_path, VERSIONS)}\n" for stage in gate.HARMLESS]
    (tmp_path / gate.PASSED).write_text("".join(lines))
    return tmp_path


def opened(tree, versions=VERSIONS):
    """The stages that must run."""
    return {stage for stage in gate.HARMLESS if gate.is_open(stage, tree, versions)}


ON_THE_CPU = {"sanitizers", "simulated"}
ALL = {"kernels", "gpu_pass", *ON_THE_CPU}


def test_what_has_passed_need_not_run(tree):
    """The record's own file, which is written after its sums, does not count."""
    assert opened(tree) == set()


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("kernels/simt/gemm.cu", ALL),
        ("kernels/common/device.cuh", ALL),
        ("kernels/configs.toml", ALL),
        ("cubatch/kernels/variant.py", ALL),
        ("cubatch/engine/native/gemm.py", ON_THE_CPU),
        ("tests/cpusim/runtime.cpp", ON_THE_CPU),
        ("tests/kernels/test_simt.py", ON_THE_CPU),
        ("benchmarks/gpu/probes.py", {"gpu_pass", "simulated"}),
        ("cubatch/tuning/tune.py", {"simulated"}),
        ("tests/unit/test_errors.py", set()),
        ("README.md", set()),
    ],
)
def test_a_changed_file_opens_the_stages_that_could_see_it(tree, name, stages):
    """A kernel and a header, the code around them, the simulator; neither the rooms above nor other tests."""
    (tree / name).write_text(SOURCES[name] + "\n")
    assert opened(tree) == stages


@pytest.mark.parametrize(
    "name",
    [
        "kernels/simt/new.cu",
        "cubatch/kernels/new.py",
        "setup.cfg",
        "cubatch/room/new.py",
        "tools/build.sh",
        "tests/new.py",
    ],
)
def test_a_new_file_opens_every_stage(tree, name):
    """Before it is committed, or even added; harmless is only what is listed so."""
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("")
    assert opened(tree) == ALL


def test_a_new_command_opens_none_that_compiles(tree):
    """But for the one that compiles kernels, and what it is made with."""
    (tree / "cubatch/cli").mkdir()
    for name, stages in (("new", set()), ("app", set()), ("kernels", {"kernels", "gpu_pass"})):
        (tree / f"cubatch/cli/{name}.py").write_text("")
        assert opened(tree) - {"simulated"} == stages


def test_a_file_that_is_gone_or_renamed_opens_them(tree):
    """Its name is part of the sum."""
    (tree / "kernels/common/device.cuh").rename(tree / "kernels/common/devices.cuh")
    assert opened(tree) == ALL


@pytest.mark.parametrize("text", [None, "", "kernels 0123\n"])
def test_without_a_record_of_these_sources_they_run(tree, text):
    """No file, none for the stage, or another's."""
    (tree / gate.PASSED).unlink()
    if text is not None:
        (tree / gate.PASSED).write_text(text)
    assert opened(tree) == ALL


def test_without_git_they_run(tree, tmp_path_factory):
    """Which files there are is git's to say."""
    (tree / ".git").rename(tmp_path_factory.mktemp("away") / "git")
    assert opened(tree) == ALL


def test_each_compiler_is_named():
    """A version that is not found would be the same for all versions."""
    assert "(" in gate.compilers("sanitizers")[0] or gate.compilers("sanitizers") == ("no g++",)
    assert not any(version.endswith("None") for version in gate.compilers("kernels"))


# --- the list of what is harmless ----------------------------------------------------------------------------


@functools.cache
def imported(path):
    """Files of this repository that a module imports when it runs, inside functions too."""
    found, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # what only annotations name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    places = [gate.ROOT / name.replace(".", "/") for name in found]
    found = {f for place in places for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()}
    return found - {gate.ROOT / "cubatch" / "__init__.py"}  # its names come from all rooms, when they are asked for


@pytest.mark.parametrize(
    ("stage", "roots"),
    [
        ("kernels", ["tests/gate.py", "cubatch/cli/kernels.py"]),
        ("gpu_pass", ["cubatch/kernels/toolchain/*.py"]),  # what it compiles with; the probes import all that they time
        ("sanitizers", ["tests/kernels/*.py", "tests/cpusim/*.py", "tests/conftest.py"]),
        ("simulated", ["tests/cudasim/*.py", "tests/gpu/*.py", "benchmarks/gpu/*.py", "cubatch/worker.py"]),
    ],
)
def test_nothing_that_a_stage_imports_is_harmless_to_it(stage, roots):
    """Not its own modules, and not what they import in turn, but for how results are shown: that decides nothing."""
    left = {path for root in roots for path in gate.ROOT.glob(root)}
    seen = set()
    while left:
        path = left.pop()
        seen.add(path)
        left |= imported(path) - seen
    names = {path.relative_to(gate.ROOT).as_posix() for path in seen}
    assert {name for name in names if gate.is_harmless(stage, name) and "cubatch/report/" not in name} == set()
    assert len(names) >= 10


def test_a_sample_is_other_kernels_with_each_commit():
    """About one in twenty, and in a hundred commits nearly all."""
    names = [f"kernel {number}" for number in range(400)]
    drawn = [{name for name in names if gate.is_drawn(name, f"commit {number}")} for number in range(100)]
    assert all(5 <= len(some) <= 40 for some in drawn)
    assert len(set.union(*drawn)) > 0.98 * len(names)


@pytest.mark.parametrize(("answer", "status"), [(True, 0), (False, 3)])
def test_no_failure_looks_like_a_closed_gate(answer, status, monkeypatch):
    """Python ends with 1 where anything fails, a shell with more than 100."""
    monkeypatch.setattr(gate, "is_open", lambda stage: answer)
    assert gate.main(["is-open", "kernels"]) == status
