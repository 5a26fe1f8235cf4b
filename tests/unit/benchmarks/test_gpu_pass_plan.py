"""What a GPU pass would do: its dry run, its items and its sweeps."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from benchmarks import gpu_pass
from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import items as gpu_items
from benchmarks.gpu import plan, steps, sweep
from benchmarks.gpu import stages as gpu_stages
from cubatch.bench import cases, measure, rivals
from cubatch.bench.contest import Contest
from cubatch.bench.rivals import Rival
from cubatch.errors import CompileError, DeviceFailed, InvalidArgument
from cubatch.hardware import catalogue
from cubatch.network import layers as kinds
from cubatch.network.passes import Pass
from tests.thorough import THOROUGH
from tests.unit.benchmarks.passes import H200

# --- what it would do ----------------------------------------------------------------------------------------------


def test_stages_come_in_the_order_of_their_worth_and_fit_eight_minutes():
    """The device first, correctness before speed; the shares are within the default time, which is under 480 s."""
    names = [stage.name for stage in gpu_stages.STAGES]
    assert names.index("facts") < names.index("correctness") < names.index("gemm") < names.index("sweep")
    assert sum(stage.seconds for stage in gpu_stages.STAGES) <= gpu_pass.SECONDS + 20 < 480


def test_a_dry_run_lists_what_would_run(capsys):
    """With counts and guesses, and no problem where there is none."""
    arguments = ["--dry-run", "--no-compile", "--stage", "gemm", "--stage", "sweep", "--only", "gemm|14x14x256"]
    assert gpu_pass.main(arguments) == 0
    out = capsys.readouterr().out
    assert "Planned for NVIDIA H200" in out
    assert "matrix products against cuBLAS" in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidArgument("w", 1, "a filter"), "problem: gemm: gemm nt 1024 x 1024 x 1024: w must be a filter"),
        (CompileError("k", "sm_90", (), "line 3"), "problem: gemm: gemm nt 1024 x 1024 x 1024: "),
    ],
)
def test_a_dry_run_fails_with_what_cannot_be_planned(error, said, monkeypatch, capsys):
    """So that CI sees it."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(measure, "plan", refuse)
    assert gpu_pass.main(["--dry-run", "--no-compile", "--stage", "gemm", "--only", "gemm nt 1024"]) == 1
    assert said in capsys.readouterr().out


def test_a_dry_run_fails_with_a_kernel_that_does_not_compile(monkeypatch, capsys):
    """Whatever stage it is for."""
    broken = gpu_items.units(90)[0]
    monkeypatch.setattr(gpu_items, "compile_all", lambda *_: [(broken, "line 7: error")])
    assert gpu_pass.main(["--dry-run", "--stage", "facts"]) == 1
    assert f"problem: {broken.name}: line 7: error" in capsys.readouterr().out


def test_a_dry_run_fails_with_a_case_that_does_not_fit(monkeypatch, capsys):
    """The largest products take more than a card of half a GiB has; operations of steps are then left out."""
    tiny = attrs.evolve(plan.hardware_memory.memory_limit(H200), bytes=1 << 29)
    before = gpu_stages.stage_named("steps").items(H200)
    monkeypatch.setattr(plan.hardware_memory, "memory_limit", lambda _: tiny)
    after = gpu_stages.stage_named("steps").items(H200)
    assert max(item.case.num_bytes for item in after) <= 1 << 29 < max(item.case.num_bytes for item in before)
    assert 0 < len(after) < len(before)
    assert gpu_pass.main(["--dry-run", "--no-compile", "--stage", "gemm", "--only", "gemm nt 8192"]) == 1
    assert "512.00 MiB are there" in capsys.readouterr().out


@pytest.mark.parametrize("stage", gpu_stages.STAGES, ids=lambda stage: stage.name)
def test_items_have_names_of_their_own_and_limits(stage):
    """A process that begins behind an item must find the same list."""
    items = stage.items(H200)
    assert len({item.name for item in items}) == len(items) > 0
    assert [item.name for item in items] == [item.name for item in stage.items(H200)]
    assert all(item.seconds > 0 and item.limit_seconds > 0 for item in items)


def test_odd_shapes_are_odd_and_always_the_same():
    """Every storage type, extents that differ and leave residues, strides, dilation, one-sided pads, groups."""
    found = gpu_cases.odd_shapes()
    assert [case.name for case in found] == [case.name for case in gpu_cases.odd_shapes()]
    assert {case.name for case in found} != {case.name for case in gpu_cases.odd_shapes(seed=1)}
    convolutions = [case.layer for case in found if isinstance(case.layer, kinds.Conv2d)]
    assert {3, 2, 1} <= {layer.stride[0] for layer in convolutions}
    assert any(layer.dilation[0] == 2 for layer in convolutions)
    assert any(1 < layer.groups < layer.c for layer in convolutions)
    assert any(layer.h != layer.w and layer.pad[0] != layer.pad[1] for layer in convolutions)
    assert {case.dtype for case in found} == {"float32", "float16", "bfloat16"}
    assert max(case.num_bytes for case in found) < 16 * 2**20


def test_an_uncovered_kernel_is_a_problem():
    """A kernel that no case of the correctness stage runs is named."""
    assert plan._unchecked(set(), H200)
    every = {found.name for found in plan.variant.kernels()}
    assert plan._unchecked(every, H200) == []
    lost = next(name for name in sorted(every) if name.startswith("conv2d_fprop_implicit"))
    assert plan._unchecked(every - {lost}, H200) == [f"no case runs {lost}"]


@pytest.mark.parametrize("slug", ["h200-sxm", pytest.param("v100-sxm2-16gb", marks=pytest.mark.thorough)])
def test_every_kernel_is_run_by_a_case(slug):
    """Of the correctness stage, planned for the newest GPU of ours and for one without its tensor cores."""
    device = catalogue.find(slug)
    items = gpu_stages.chosen(gpu_stages.stage_named("correctness"), device, "")
    launched, problems = plan._planned(items, device, compiled=False)
    assert problems == []
    assert plan._unchecked(launched, device) == []


# --- steps ---------------------------------------------------------------------------------------------------------


def test_an_operation_of_several_steps_is_timed_once():
    """It is found by the name of each; a step's items hold all its operations, and nothing else."""
    found = gpu_stages.stage_named("steps").items(H200)
    assert any(len(item.steps) > 1 for item in found)
    for step in (steps.STEPS[0], steps.STEPS[4]):
        items = gpu_stages.chosen(gpu_stages.stage_named("steps"), H200, f"^{step.name}$")
        assert {item.name for item in items} == {case.name for case in step.cases}
        for item in items:
            (case,) = (case for case in step.cases if case.name == item.name)
            assert set(case.layers) <= set(item.case.layers)
            assert item.case.multiplicity == len(item.case.layers) >= case.multiplicity


def test_norms_and_activations_are_compiled_on_request_only():
    """Another item of the same case, at the end of the stage; products and backward norms have none."""
    stage = gpu_stages.stage_named("steps")
    default = gpu_stages.chosen(stage, H200, "^resnet50, training, batch 256, float16")
    assert all(not item.name.endswith(gpu_stages.COMPILED) for item in default)
    compiled = gpu_stages.chosen(stage, H200, "^resnet50, training, batch 256, float16, compiled$")
    assert compiled
    assert {item.case.operation for item in compiled} == {"batch_norm_train"}
    assert {item.run.keywords["compiled_rivals"] for item in compiled} == {True}
    assert {item.name.removesuffix(gpu_stages.COMPILED) for item in compiled} <= {item.name for item in default}


def test_a_gpu_without_tf32_has_no_steps_of_it():
    """Its cases would be float32's under another name."""
    v100 = catalogue.find("v100-sxm2-16gb")
    for name in ("gemm", "steps", "correctness"):
        dtypes = {item.case.dtype for item in gpu_stages.stage_named(name).items(v100) if item.case}
        assert "tf32" not in dtypes
        assert "float16" in dtypes


# --- sweeps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 2, 7, 256])
def test_sweeps_go_from_coarse_to_fine(largest):
    """Every size once; after any half of them the widest gap is at most twice the narrowest possible."""
    order = list(sweep.coarse_to_fine(largest))
    assert sorted(order) == list(range(1, largest + 1))
    half = sorted(order[: max(1, largest // 2)])
    assert max(b - a for a, b in zip([0, *half], [*half, largest + 1], strict=True)) <= 4 or largest < 4


def test_a_sweep_times_every_size_on_parts_of_one_set_of_buffers(world):
    """Its rows are ascending and tell what was run; the buffers of the largest batch are all there is."""
    world.seconds = {"gemm_nt_a": 1e-3, "vendor": 2e-3}
    found = sweep.sweep(_linear(9), world.target(), Contest(world), until=time.monotonic() + 60)
    rows = found["rows"]
    assert [row["batch"] for row in rows] == list(range(1, 10))
    assert found["missing"] == []
    assert all(set(row) == set(sweep.COLUMNS) for row in rows)
    assert rows[4] | {"ours_kernel": "gemm_nt_a", "ours_blocks": 30, "ours_busiest_sm_blocks": 3} == rows[4]
    assert rows[4]["ours_ms"] == pytest.approx(1.0)
    assert rows[4]["vendor_ms"] == pytest.approx(2.0)
    assert rows[4]["gflop"] == pytest.approx(2 * 5 * 6 * 4 / 1e9)
    assert (rows[4]["vendor"], rows[4]["gpu"], rows[4]["num_sms"]) == ("numpy.matmul", "Test GPU", 10)


def test_a_sweep_that_is_cut_off_says_what_is_missing(world):
    """Nothing is made up for it."""
    found = sweep.sweep(_linear(4, Pass.WGRAD), world.target(), Contest(world), until=0.0)
    assert (found["rows"], found["missing"]) == ([], [1, 2, 3, 4])


def test_a_sweep_goes_on_without_a_kernel_that_is_left_out(world):
    """The sizes that would have run on it are missing."""

    def refuse_small(found):
        nonlocal asked
        asked += 1
        if asked % 2:
            raise DeviceFailed(f"kernel {found.name}", "the end of an earlier process")
        return contextlib.nullcontext()

    asked = 0
    here = attrs.evolve(world.target(), trying=refuse_small)
    found = sweep.sweep(_linear(4), here, Contest(world), until=time.monotonic() + 60)
    assert ([row["batch"] for row in found["rows"]], found["missing"]) == ([2, 3], [1, 4])


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_sweep_goes_on_where_a_rival_fails(world, monkeypatch, fails_at):
    """When it is bound, and later: ours are there at every size, the rival's where it ran."""
    calls = []

    def bind(arrays):
        def step():
            calls.append(1)
            if len(calls) >= fails_at:
                raise RuntimeError("no workspace")
            np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])

        return step

    monkeypatch.setitem(rivals.RIVALS, "vendor", lambda *_, **__: Rival("library", bind))
    found = sweep.sweep(_linear(3), world.target(), Contest(world), until=time.monotonic() + 60)
    assert [row["ours_timings"] > 0 for row in found["rows"]] == [True] * 3
    assert [row["vendor_ms"] for row in found["rows"]] == [None] * 3


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_ceiling_is_that_of_the_libraries_that_ran(world, monkeypatch, fails_at):
    """One that fails costs its own rate, and says why."""
    calls = []

    def fail(_):
        def step():
            calls.append(1)
            if len(calls) >= fails_at:
                raise RuntimeError("no workspace")

        return step

    def multiply(arrays):
        return lambda: np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])

    both = attrs.evolve(Rival("fails", fail), alternatives=(Rival("runs", multiply),))
    session = SimpleNamespace(target=world.target(), contest=Contest(world), sized=lambda _: cases.gemm(8, 8, 8))
    monkeypatch.setitem(rivals.RIVALS, "vendor", lambda *_, **__: both)
    assert gpu_items.gemm_ceiling("float32", session)["library"] == "runs"
    calls.clear()
    monkeypatch.setitem(rivals.RIVALS, "vendor", lambda *_, **__: Rival("fails", fail))
    found = gpu_items.gemm_ceiling("float32", session)
    assert (found["flops_per_second"], found["reason"]) == (None, "fails failed with RuntimeError: no workspace")


def test_a_rehearsal_runs_the_same_operations_on_small_arrays():
    """Of the same operation, pass and type, each some kilobytes; nothing is left as large as it was."""
    planned = set()
    for stage in ("gemm", "steps", "sweep"):
        for item in gpu_stages.stage_named(stage).items(H200)[:: 1 if THOROUGH else 4]:
            found = gpu_cases.small(item.case)
            assert (found.operation, found.pass_, found.dtype, found.results[:1]) == (
                item.case.operation, item.case.pass_, item.case.dtype, item.case.results[:1]
            )  # fmt: skip
            assert found.epilogue == item.case.epilogue
            assert sum(each.padded for each in found.operands.values()) == sum(
                each.padded for each in item.case.operands.values()
            )
            assert found.num_bytes < 1 << 17
            if found.name not in planned:
                planned.add(found.name)
                assert measure.plan(found, H200, compiled=False).entries


def _linear(batch_size, pass_=Pass.FPROP):
    return cases.of_layer(kinds.Linear(c=6, k=4), pass_, batch_size)


def test_parts_are_disjoint_along_the_batch_and_share_the_filter():
    """Three samples at a time out of eight: two parts, each with its own samples."""
    whole = cases.of_layer(kinds.Linear(c=2, k=3), Pass.FPROP, 8)
    arrays = {name: _numbered(operand.shape) for name, operand in whole.operands.items()}
    parts = sweep._parts(cases.of_layer(kinds.Linear(c=2, k=3), Pass.FPROP, 3), arrays)
    assert [part["x"][0, 0] for part in parts] == [0, 6]
    assert [part["x"].shape for part in parts] == [(3, 2), (3, 2)]
    assert parts[0]["w"] is parts[1]["w"] is arrays["w"]


def _numbered(shape):
    return np.arange(np.prod(shape)).reshape(shape)
