"""What a GPU pass would do: its dry run and its items."""

from __future__ import annotations

import pytest

from benchmarks import gpu_pass
from benchmarks.gpu import cases as gpu_cases, plan, stages as gpu_stages, steps
from cubatch.bench import measure
from cubatch.errors import CompileError, InvalidArgument
from cubatch.hardware import catalogue
from tests.thorough import THOROUGH
from tests.unit.benchmarks.passes import H200

# --- what it would do ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stage", gpu_stages.STAGES, ids=lambda stage: stage.name)
def test_items_have_names_of_their_own_and_limits(stage):
    """A process that begins behind an item must find the same list."""
    items = stage.items(H200)
    assert len({item.name for item in items}) == len(items) > 0
    assert [item.name for item in items] == [item.name for item in stage.items(H200)]
    assert all(item.seconds > 0 and item.limit_seconds > 0 for item in items)


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


def test_a_rehearsal_runs_the_same_operations_on_small_arrays():
    """Of the same operation, pass and type, each some kilobytes; nothing is left as large as it was."""
    planned = set()
    for stage in ("gemm", "steps"):
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
