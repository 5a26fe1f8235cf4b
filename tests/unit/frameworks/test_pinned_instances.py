"""Instances that step at the same time, each in a worker bound to CPUs of its own."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cubatch.errors import DeviceNotAvailable, OutOfMemory
from cubatch.frameworks.pinned_instances import PinnedInstances
from cubatch.frameworks.remote_bounded_runner import RemoteBoundedRunner
from cubatch.hardware import host
from cubatch.hardware.device_list import cpu_groups
from cubatch.measure.runner import FactoryRef
from tests.unit import worker_fakes

CPUS = sorted(os.sched_getaffinity(0))
SHARES = [[CPUS[0]], CPUS]


@pytest.fixture
def open_instances():
    """Return a function that makes instances of a fake runner, which are closed at the end."""
    made = []

    def make(factory, shares=SHARES, **arguments):
        made.append(
            PinnedInstances(
                FactoryRef(f"tests.unit.worker_fakes:{factory}", arguments), shares, prepare_seconds=30.0, remedy=""
            )
        )
        return made[-1]

    yield make
    for instances in made:
        instances.close()


def test_each_instance_is_bound_before_its_runner_is_made(open_instances, tmp_path):
    """CPUs and OpenMP threads are those of its share; the process that tunes keeps its own."""
    instances = open_instances("numbered", folder=str(tmp_path))
    instances.prepare(4)
    facts = [json.loads(Path(tmp_path, f"{number}.json").read_text()) for number in range(len(SHARES))]
    assert [each["cpus"] for each in facts] == SHARES
    assert [each["threads"] for each in facts] == [str(len(share)) for share in SHARES]
    assert len({each["pid"] for each in facts}) == len(SHARES)
    assert sorted(os.sched_getaffinity(0)) == CPUS


def test_the_time_stands_for_the_steps_per_second_of_all(open_instances, tmp_path):
    """Steps of 1 s and of 3 s: 4 steps in 3 s by two instances, which is 1.5 s a step for each."""
    instances = open_instances("numbered", folder=str(tmp_path))
    instances.prepare(4)
    reading = instances.time(2)
    assert reading.seconds == pytest.approx(2 / (1 / 1.0 + 1 / 3.0))
    assert reading.reference_before_seconds is None


def test_an_error_of_another_instance_is_raised(open_instances, tmp_path):
    """The first instance prepares the size, the second one is out of memory; the next size runs in both."""
    instances = open_instances("numbered", folder=str(tmp_path), fails_at=8)
    instances.prepare(4)
    with pytest.raises(OutOfMemory):
        instances.prepare(8)
    instances.prepare(2)
    assert instances.time(1).seconds == pytest.approx(1.5)


def test_ctrl_c_ends_the_other_instances(open_instances, tmp_path, monkeypatch):
    """The second instance hangs: nothing waits for the 30 s after which that is noticed."""
    instances = open_instances("numbered", folder=str(tmp_path), fails_at=8, habit="hang")
    instances.prepare(4)
    other = json.loads(Path(tmp_path, "1.json").read_text())["pid"]

    def interrupt(_self, _batch_size):
        raise KeyboardInterrupt

    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(RemoteBoundedRunner, "prepare", interrupt)
        with pytest.raises(KeyboardInterrupt):
            instances.prepare(8)
    assert time.monotonic() - began < 15.0
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
    instances.prepare(4)  # in a new worker


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_failed_start_keeps_the_instances_that_started(open_instances, tmp_path):
    """The next size starts the missing one, and no second process of another."""
    instances = open_instances("refuse_once", shares=[CPUS[:1], CPUS[:1], CPUS], folder=str(tmp_path))
    with pytest.raises(DeviceNotAvailable):
        instances.prepare(4)
    instances.prepare(4)
    assert len(list(tmp_path.glob("[0-9]*"))) == 3


def test_a_reference_is_held_by_all_or_by_none(open_instances, tmp_path):
    """The first instance could hold one and the second cannot: a new worker replaces the first, and holds none."""
    instances = open_instances("numbered", folder=str(tmp_path))
    instances.prepare(4)
    first = instances.worker_pid
    assert not instances.hold_reference(2)
    instances.prepare(4)
    assert instances.worker_pid != first
    assert instances.time(1).seconds == pytest.approx(3.0)  # a new instance is no first one


def test_the_start_of_the_others_counts_as_compiling(open_instances, tmp_path):
    """The budget forgives it, once: a second size starts nothing."""
    instances = open_instances("numbered", folder=str(tmp_path))
    instances.prepare(4)
    assert instances.compile_seconds > 0.05  # a Python that imports NumPy
    instances.prepare(8)
    assert instances.compile_seconds == 0.0


def test_closed_instances_can_be_closed_and_opened_again(open_instances, tmp_path):
    """The search closes its runner, and the subject closes it once more."""
    instances = open_instances("numbered", folder=str(tmp_path))
    instances.prepare(4)
    instances.close()
    instances.close()
    assert instances.worker_pid is None
    instances.prepare(8)
    assert len(list(tmp_path.iterdir())) == 2 * len(SHARES)


def test_groups_of_cpus_are_disjoint_and_of_one_size():
    """CPUs that fill no group stay idle."""
    for threads in range(1, len(CPUS) + 2):
        groups = cpu_groups(threads)
        assert len(groups) == host.cpu_threads() // threads
        assert all(len(group) == threads for group in groups)
        assert len({cpu for group in groups for cpu in group}) == threads * len(groups)


def test_the_fakes_are_told_apart(tmp_path):
    """The first runner of a folder is the first instance."""
    assert [worker_fakes.numbered(str(tmp_path)).seconds for _ in range(2)] == [1.0, 3.0]
