"""The reference step: timed before and after each reading, held by runners, workers and the stopwatch."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from cubatch.errors import OutOfMemory, WorkerDied
from cubatch.measure import clocks, ranks_runner
from cubatch.measure.budget import Budget, OutOfBudget
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.clocks import HostClock
from cubatch.measure.network_runner import NetworkRunner, network_runner
from cubatch.measure.records import Timing
from cubatch.measure.runner import FactoryRef, HoldsReference, Reading
from cubatch.measure.stopwatch import REFERENCE_BLOCK_SECONDS, Stopwatch
from cubatch.network import models
from tests.fakes import FakeDevice, affine
from tests.unit.measure.network_options import OPTIONS

# --- the host's clock ----------------------------------------------------------------------------------------


class Ticks:
    """A clock that steps alone move on; it writes down which step ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 10**9, list[str]()
        fake = types.SimpleNamespace(perf_counter_ns=lambda: self.now, perf_counter=lambda: self.now * 1e-9)
        monkeypatch.setattr(clocks, "time", fake)

    def step(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.now += round(seconds * 1e9)

        return run

    def pass_by(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def test_a_block_of_the_reference_is_timed_before_and_after_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Two steps of 3 s between three reference steps of 1 s on each side; the host then slows the reference down.

    Right after a step of another kind the data are not in the caches, so the first step of a block is not timed.
    """
    ticks, clock = Ticks(monkeypatch), HostClock()
    clock.hold_reference(ticks.step("reference", 1.0), 3)
    reading = clock.time(ticks.step("step", 3.0), 2)
    assert ticks.ran == [*3 * ["reference"], *3 * ["step"], *4 * ["reference"]]
    assert reading.seconds == pytest.approx(3.0)
    assert (reading.reference_before_seconds, reading.reference_after_seconds) == pytest.approx((1.0, 1.0))
    ticks.pass_by(1.0)
    slowing = iter([1.0, 1.0, 1.0, 9.0, 2.0, 2.0, 2.0])
    clock.hold_reference(lambda: ticks.pass_by(next(slowing)), 3)
    reading = clock.time(ticks.step("step", 3.0), 2)
    assert (reading.reference_before_seconds, reading.reference_after_seconds) == pytest.approx((1.0, 2.0))


def test_each_timing_has_both_blocks_however_soon_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run the same number of reference steps: whether one is skipped must not hang on a clock."""
    ticks, clock = Ticks(monkeypatch), HostClock()
    clock.hold_reference(ticks.step("reference", 1.0), 1)
    for _ in range(2):
        clock.time(ticks.step("step", 3.0), 1)
    assert ticks.ran == 2 * ["reference", "step", "reference", "reference"]


def test_without_a_reference_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the steps run, and the reading has no reference."""
    ticks = Ticks(monkeypatch)
    reading = HostClock().time(ticks.step("step", 3.0), 2)
    assert ticks.ran == ["step", "step"]
    assert reading == Reading(seconds=pytest.approx(3.0), longest_step=pytest.approx(1.0))


def test_a_reference_step_is_waited_for_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reference step returns may still be computed: the wait for it is part of its time."""
    ticks, clock = Ticks(monkeypatch), HostClock()
    pending = types.SimpleNamespace(block_until_ready=lambda: ticks.pass_by(0.5))
    clock.hold_reference(lambda: (ticks.pass_by(1.0), pending)[1], 1)
    assert clock.time(ticks.step("step", 3.0), 1).reference_after_seconds == pytest.approx(1.5)


# --- records -------------------------------------------------------------------------------------------------


def test_the_reference_of_a_timing_is_the_geometric_mean_of_both_blocks() -> None:
    """Blocks of 2 and 8 ms are 4 ms; with one of them missing there is none."""
    timing = Timing(
        batch_size=8, round=0, seconds=1.0, reference_batch_size=4, reference_before_seconds=0.002,
        reference_after_seconds=0.008,
    )  # fmt: skip
    assert timing.reference_seconds == pytest.approx(0.004)
    for name in ("reference_before_seconds", "reference_after_seconds"):
        assert attrs.evolve(timing, **{name: None}).reference_seconds is None


# --- the stopwatch -------------------------------------------------------------------------------------------


class Holds:
    """Sessions of a fake device that hold what is prepared, or refuse to."""

    def __init__(self, *, can: bool = True) -> None:
        self.session, self.can, self.held = FakeDevice(affine(0.0, 1e-3), prepare_seconds=0.5)(), can, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def hold_reference(self, repeats: int) -> bool:
        self.held.append((self.session.prepared[-1], repeats))
        return self.can


def stopwatch_of(runner: Any, seconds: float = 60.0) -> Stopwatch:
    stopwatch = Stopwatch(runner, Budget(seconds), span_seconds=0.01)
    stopwatch.budget.start(runner.clock.now)
    return stopwatch


@pytest.mark.parametrize(("step_seconds", "repeats"), [(0.004, 3), (0.0021, 5), (0.01, 1), (2.0, 1)])
def test_the_stopwatch_holds_blocks_of_about_ten_milliseconds(step_seconds: float, repeats: int) -> None:
    """As many steps as span 10 ms, at least one; the size is prepared for it, and again when it is next measured."""
    runner = Holds()
    stopwatch = stopwatch_of(runner)
    assert stopwatch.hold_reference(4, step_seconds)
    assert runner.held == [(4, repeats)]
    assert REFERENCE_BLOCK_SECONDS <= repeats * step_seconds < REFERENCE_BLOCK_SECONDS + step_seconds
    assert stopwatch.reference_batch_size == 4
    timings: list[Timing] = []
    stopwatch.run_trial(4, first_round=0, likely=None, keep=timings.append)
    assert runner.session.prepared == [4, 4]
    assert {timing.repeats for timing in timings} == {13}  # of 4 ms: with a reference step, 50 ms or more
    assert stopwatch.around_seconds == 0  # these sessions run no reference steps, as a new worker that cannot


def test_reference_blocks_are_expected_to_last_as_they_did() -> None:
    """
    A reference step of 0.4 s was expected to take 10 ms: three of them and a step of 0.1 s take 1.3 s a timing.

    Of 3 s two preparations take 1 s and the first timing 1.3 s; the 0.7 s that are left hold no second one.
    """

    class Paired(Holds):
        def time(self, step: Callable[[], object], repeats: int) -> Reading:
            self.session.clock.sleep(3 * 0.4)
            reading = self.session.clock.time(step, repeats)
            return attrs.evolve(reading, reference_before_seconds=0.4, reference_after_seconds=0.5)

        @property
        def clock(self) -> Any:
            clock = self.session.clock
            return types.SimpleNamespace(time=self.time, now=clock.now, sleep=clock.sleep)

    stopwatch = stopwatch_of(Paired(), 3.0)
    assert stopwatch.hold_reference(4, 0.01)
    assert stopwatch.around_seconds == pytest.approx(0.03)
    stopwatch.run_trial(100, first_round=0, likely=None, keep=lambda timing: None)
    assert stopwatch.around_seconds == pytest.approx(1.2)
    assert stopwatch.budget.spent() == pytest.approx(2.3)


def test_a_runner_that_cannot_hold_a_reference_is_timed_without_one() -> None:
    """False of a runner that has no such method, for which nothing is prepared, and of one that refuses."""
    plain = FakeDevice(affine(0.0, 1e-3))()
    assert not isinstance(plain, HoldsReference)
    assert not stopwatch_of(plain).hold_reference(4, 0.004)
    assert plain.prepared == []
    refusing = stopwatch_of(runner := Holds(can=False))
    assert not refusing.hold_reference(4, 0.004)
    assert refusing.reference_batch_size is None
    refusing.run_trial(4, first_round=0, likely=None, keep=lambda timing: None)
    assert runner.session.prepared == [4, 4]  # ranks that could hold it have no step of it any more


def test_a_spent_budget_holds_no_reference() -> None:
    """Once a size was measured, preparing another needs budget."""
    runner = Holds()
    stopwatch = stopwatch_of(runner, 0.3)
    stopwatch.run_trial(4, first_round=0, likely=None, keep=lambda timing: None)
    with pytest.raises(OutOfBudget):
        stopwatch.hold_reference(8, 0.008)
    assert runner.held == []


# --- runners -------------------------------------------------------------------------------------------------


def test_a_callables_step_is_held_and_really_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of batch size 3 runs twice on each side of a timing of another size that is prepared later."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    ran: list[int] = []
    runner = CallableRunner(lambda n: lambda: ran.append(n))
    assert not runner.hold_reference(2)  # nothing is prepared
    runner.prepare(3)
    assert runner.hold_reference(2)
    runner.prepare(8)
    reading = runner.clock.time(runner.step, 1)
    assert ran == [3, 3, 8, 3, 3, 3]
    assert reading.reference_before_seconds > 0
    assert reading.reference_after_seconds > 0


def test_a_callable_timed_by_a_gpus_events_holds_no_reference() -> None:
    """Events do not see the host."""
    runner = CallableRunner(lambda n: lambda: None)
    runner.prepare(3)
    runner.clock = clocks.GpuHostClock(None)
    assert not runner.hold_reference(2)


def test_a_network_is_held_and_another_model_goes_on() -> None:
    """
    The held model keeps its batch of 4 while sizes come and go, and its steps run beside those of the new model.

    Peak bytes are those of the size that is measured alone.
    """
    spec = models.build("mlp")
    runner = network_runner(spec=spec.to_mapping(), **OPTIONS)
    runner.prepare(64)
    alone = runner.peak_bytes
    runner.prepare(4)
    held, counts = runner.model, {4: 0, 64: 0}

    def count(model: Any, size: int) -> None:
        step = model.step

        def run() -> None:
            counts[size] += 1
            step()

        model.step = run

    count(held, 4)
    assert runner.hold_reference(3)
    runner.prepare(64)
    assert runner.model is not held
    assert runner.peak_bytes == alone
    count(runner.model, 64)
    reading = runner.clock.time(runner.step, 2)
    assert counts == {4: 7, 64: 3}  # the first step of a block is not timed
    assert reading.reference_before_seconds > 0
    runner.release()
    assert held.plan is not None
    runner.close()
    assert held.plan is None


def test_a_network_without_memory_for_another_model_keeps_its_reference() -> None:
    """No larger reference is held, and timings go on with the earlier one."""

    def make_no_model() -> Any:
        raise MemoryError

    runner = network_runner(spec=models.build("mlp").to_mapping(), **OPTIONS)
    runner.prepare(4)
    assert runner.hold_reference(1)
    runner.prepare(8)
    runner._make_model = make_no_model
    with pytest.raises(MemoryError):
        runner.hold_reference(1)
    runner.prepare(16)
    assert runner.clock.time(runner.step, 1).reference_after_seconds > 0
    runner.close()


def test_a_network_on_a_gpu_holds_no_reference() -> None:
    """Without a way to make another model the prepared one goes on."""
    model = types.SimpleNamespace(plan=None, step=lambda: None)
    runner = NetworkRunner(model, HostClock())
    assert not runner.hold_reference(3)
    assert runner.model is model


@pytest.mark.parametrize("second", [[True, False], OutOfMemory("rank 1")], ids=["refuses", "fails"])
def test_ranks_hold_a_reference_only_together(monkeypatch: pytest.MonkeyPatch, second: Any) -> None:
    """If one rank cannot hold a larger reference, or fails to, all end; new ones hold the earlier reference again."""
    begun: list[Any] = []

    class Group:
        def __init__(self) -> None:
            self.is_open, self.asked = True, list[Any]()
            begun.append(self)

        def close(self) -> None:
            self.is_open = False

        def do(self, *request: Any) -> list[Any]:
            self.asked.append(request)
            if request != ("hold_reference", 5):
                return [True, True]
            if isinstance(second, OutOfMemory):
                raise second
            return second

    monkeypatch.setattr(ranks_runner.RanksRunner, "_begun", lambda self: Group())
    runner = ranks_runner.RanksRunner(["cpu", "cpu"], {})
    runner.prepare(4)
    assert runner.hold_reference(3)
    runner.prepare(8)
    with contextlib.suppress(OutOfMemory):
        assert not runner.hold_reference(5)
    runner.prepare(16)
    assert [group.is_open for group in begun] == [False, True]
    assert begun[1].asked == [("prepare", 4), ("hold_reference", 3), ("prepare", 16)]


# --- workers -------------------------------------------------------------------------------------------------


def counting_worker(habits: dict[str, str]) -> FactoryRef:
    return FactoryRef("tests.unit.measure.reference_worker:make_holder", {"habits": habits})


def test_a_new_worker_holds_the_reference_that_the_first_one_held(start) -> None:
    """
    The worker dies at batch size 16: the next one prepares 4 and holds it before it serves any request.

    Its readings have the reference of 4, which takes 1 ms a sample, again.
    """
    runner = start(counting_worker({"16": "kill"}))
    runner.prepare(4)
    assert runner.hold_reference(5)
    runner.prepare(8)
    before = runner.clock.time(runner.step, 2)
    with pytest.raises((WorkerDied, MemoryError)):
        runner.prepare(16)
    assert runner.call("log") == [["prepare", 4], ["hold", 4, 5]]  # as `predicted` of a size that the search adds
    runner.prepare(8)
    after = runner.clock.time(runner.step, 2)
    assert before.reference_before_seconds == after.reference_before_seconds == pytest.approx(0.004)
    assert before.reference_after_seconds == after.reference_after_seconds == pytest.approx(0.004 * 5)
    assert runner.call("log") == [["prepare", 4], ["hold", 4, 5], ["prepare", 8]]


def test_a_new_worker_holds_the_reference_that_a_refused_one_was_to_replace(start) -> None:
    """A worker holds 4 and refuses 8, so that 4 stays: the next worker holds 4 too."""
    runner = start(counting_worker({"hold 8": "refuse"}))
    for size, is_held in ((4, True), (8, False)):
        runner.prepare(size)
        assert runner.hold_reference(5) == is_held
    runner.restart()
    runner.prepare(16)
    assert runner.call("log") == [["prepare", 4], ["hold", 4, 5], ["prepare", 16]]


@pytest.mark.parametrize("factory", ["worker_fakes:make", "measure.reference_worker:make_refusing"])
def test_a_worker_whose_runner_cannot_hold_a_reference_says_so(start, factory: str) -> None:
    """A runner without the method, and one that returns False: a worker started later is not asked again."""
    runner = start(FactoryRef(f"tests.unit.{factory}", {}))
    runner.prepare(4)
    assert not runner.hold_reference(5)
    runner.restart()
    runner.prepare(8)
    assert runner.clock.time(runner.step, 1).reference_before_seconds is None
    assert runner.clock.time(runner.step, 1).seconds == pytest.approx(0.3 * 8)
