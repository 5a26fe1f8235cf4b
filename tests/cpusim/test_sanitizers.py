"""The planted bugs once more, under each sanitizer in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cpusim import building
from tests.cpusim.__main__ import LIBRARIES, main

pytestmark = [
    pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip()),
    pytest.mark.skipif("CUBATCH_CPUSIM" in os.environ, reason="already under a sanitizer"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("build", LIBRARIES)
def test_planted_bugs_are_reported(build):
    """Its own reports name the lines, and correct kernels raise none; see the table of test_planted_bugs.py."""
    command = [sys.executable, "-m", "tests.cpusim", build, "tests/cpusim/test_planted_bugs.py"]
    done = subprocess.run(command, cwd=building.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " failed" not in done.stdout


def test_the_command_explains_itself(capsys):
    """A build that does not exist is no run without a sanitizer."""
    assert main(["adress"]) == 2
    assert "python -m tests.cpusim address|thread" in capsys.readouterr().err
