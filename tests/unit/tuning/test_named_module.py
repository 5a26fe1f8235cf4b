"""A module in a worker: what is asked of it between the steps of a walk."""

from __future__ import annotations

import os
import signal

from cubatch.frameworks.remote_bounded_runner import RemoteBoundedRunner
from cubatch.measure.runner import FactoryRef


def test_a_worker_that_died_between_two_visits_predicts_nothing_and_steps_again():
    """Killed while nothing is asked of it: no bytes are said, and the next size is prepared in another worker."""
    runner = RemoteBoundedRunner(FactoryRef("tests.unit.worker_fakes:make"), prepare_seconds=30.0, remedy="")
    try:
        runner.prepare(1)
        first = runner.worker_pid
        os.kill(first, signal.SIGKILL)
        assert runner.predicted(8) is None
        runner.prepare(8)
        assert runner.time(1).seconds > 0
        assert runner.worker_pid != first
    finally:
        runner.close()
