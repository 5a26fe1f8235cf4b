"""What every study refuses before it begins, and the folders that it works in."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest

from cubatch.errors import InvalidArgument
from cubatch.studies import run
from cubatch.studies.study_request import StudyRequest
from tests.unit.commands import as_nobody


def short(name, folder, **more):
    """Run a study on the smallest network."""
    request = StudyRequest(spec="mlp", model="mlp", folder=Path(folder), device="cpu", quick=True, **more)
    return run.run(name, request, command=f"cubatch study {name} mlp")


@pytest.mark.parametrize("budget", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", run.STUDIES)
def test_a_budget_that_is_no_time_is_refused_before_anything_is_made(name, budget, tmp_path):
    """By each study, those too that train and do not tune; there is no folder then."""
    with pytest.raises(InvalidArgument) as caught:
        short(name, tmp_path / "out", budget=budget)
    assert caught.value.field == "budget"
    assert not (tmp_path / "out").exists()


def test_a_folder_that_this_user_may_not_write_to_is_refused_before_measuring():
    """It is there, and what is found could not be kept in it."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o555)
        with as_nobody(), pytest.raises(InvalidArgument, match="may write") as caught:
            short("memory-rules", place)
        Path(place).chmod(0o755)
    assert (caught.value.field, caught.value.value) == ("out", place)
