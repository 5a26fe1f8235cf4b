"""What a GPU pass would do: its dry run and its items."""

from __future__ import annotations

import pytest

from benchmarks.gpu import plan, stages as gpu_stages
from cubatch.hardware import catalogue
from tests.unit.benchmarks.passes import H200

# --- what it would do ----------------------------------------------------------------------------------------------


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
