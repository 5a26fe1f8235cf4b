"""What another framework runs, on runners of a known curve: what is kept of it, and what a rerun makes of that."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from cubatch.errors import DoesNotFit, NothingMeasured
from cubatch.frameworks import loader_rate
from cubatch.hardware import cpu_load, probe
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.tuning import session
from cubatch.tuning.request import Request
from cubatch.tuning.subjects.bounded_subject import BoundedSubject
from cubatch.tuning.subjects.module_subject import NamedModuleSubject
from cubatch.tuning.subjects.onnx_subject import OnnxSubject
from tests.fakes import FakeDevice, FakeRunner, affine
from tests.unit.tuning.small_runs import statuses

pytestmark = pytest.mark.usefixtures("quiet")

KIB = 1024
DEVICE = FakeDevice(affine(0.02, 1e-6))  # the largest size is the best by far


class Bounded(FakeRunner):
    """A session that knows beforehand that a sample takes 1 KiB."""

    worker_pid, forecast = None, None

    def __init__(self, memory_limit):
        super().__init__(DEVICE)
        self.memory_limit = memory_limit

    def look(self, **_):
        return {"largest": self.memory_limit // KIB, "why_not": None, "first": KIB, "dtype": "float32"}

    def predicted(self, batch_size):
        return KIB * batch_size

    def report(self):
        """Of memory it has learned nothing but what is foreseen."""
        return {"history": [], "forecast": self.forecast, "remarks": []}


@attrs.define(kw_only=True)
class Net(BoundedSubject):
    """Something that a fake runner steps."""

    make: type
    identity = {"spec": {"name": "net"}}  # noqa: RUF012 - of the class, as in the protocol a property

    def make_runner(self):
        return self.make(self.memory.bytes)


def tune(path, *sizes, kib, progress=None, budget=60.0, make=Bounded, loader=None, **given):
    """Tune in so many KiB, of which a sample takes one."""
    memory = MemoryLimit(KIB * kib, KIB * kib, "")
    net = Net(
        name="net", library="torch", device=probe.device("cpu"), memory=memory, mode="inference", seed=0, make=make,
        loader=loader,
    )  # fmt: skip
    request = Request.of(batch_sizes=sizes or None, budget=budget, progress=progress, **given)
    return session.tune(net, attrs.evolve(request, store=False if path is None else path))


class Reads(Bounded):
    """A session whose data set has 48 samples."""

    def look(self, **given):
        return {**super().look(**given), "num_samples": 48}


class Threes(Bounded):
    """A session whose data make batches of multiples of 3 only."""

    def look(self, **given):
        return {**super().look(**given), "multiple": 3}


@pytest.mark.parametrize(
    ("given", "make", "last", "decided_by"),
    [
        ({}, Bounded, 100, "memory"),
        ({}, Reads, 48, "max_batch_size"),
        ({}, Threes, 99, "max_batch_size"),
        ({"multiple_of": 4}, Threes, 96, "max_batch_size"),
        ({"divides": 64}, Bounded, 64, "max_batch_size"),
        ({"multiple_of": 30}, Bounded, 90, "max_batch_size"),
    ],
)
def test_what_ends_the_sizes_below_the_memory_plan_is_the_limit(path, given, make, last, decided_by):
    """Memory for 100 samples is not the limit where no size near it was allowed; a rerun answers alike."""
    for _ in range(2):
        result = tune(path, kib=100, make=make, **given)
        assert (result.batch_size, result.largest_batch_size) == (last, 100)
        assert result.decided_by == decided_by
        assert make is not Threes or all(m.batch_size % 3 == 0 for m in result.measurements)


def test_sizes_that_a_search_adds_are_multiples_too(monkeypatch):
    """Between two candidates it would try others, at which the data make no batch."""
    given, search = {}, session.loop.Search

    def noted(**arguments):
        given.update(arguments)
        return search(**arguments)

    monkeypatch.setattr(session.loop, "Search", noted)
    tune(None, kib=100, make=Threes, multiple_of=4)
    assert given["multiple"] == 12


def test_no_batch_is_larger_than_the_data_set_of_the_loader(monkeypatch):
    """Random batches may be of any size, but the loop has none of more samples than the loader."""
    monkeypatch.setattr(loader_rate, "num_samples", len)
    assert tune(None, kib=100, loader=range(48)).largest_measured == 48


class Learns(Bounded):
    """A session in which a sample turns out to take as much more."""

    TIMES = 1.0

    @property
    def forecast(self):
        each = int(self.TIMES * KIB)
        return {"largest": self.memory_limit // each, "is_rough": False, "bytes": [[n, n * each] for n in (1, 64)]}


class Rough(Learns):
    """A session whose sizes took too little memory to tell how large a batch may be."""

    @property
    def forecast(self):
        return {**super().forecast, "is_rough": True}


class Untraced(Rough):
    """A session without a trace."""

    def look(self, **given):
        return {**super().look(**given), "why_not": "it reads numbers"}


@pytest.mark.parametrize(
    ("make", "given", "last", "largest", "decided_by"),
    [
        (Rough, {}, 64, 64, "memory"),  # the largest by the trace ran
        (Rough, {"max_batch_size": 32}, 32, None, "max_batch_size"),
        (Untraced, {}, 64, None, None),
        (Untraced, {"max_batch_size": 32}, 32, None, "max_batch_size"),
        (Untraced, {"divides": 32}, 32, None, "max_batch_size"),
    ],
)
def test_a_largest_size_that_was_not_checked_is_none(path, make, given, last, largest, decided_by):
    """The proposed one may be far off, and neither memory nor max_batch_size ended at it; a rerun answers alike."""
    for _ in range(2):
        result = tune(path, kib=64, make=make, **given)
        assert (result.largest_batch_size, result.largest_measured) == (largest, last)
        assert result.decided_by == decided_by
        assert sum("took too little" in reason for reason in result.reasons) == (largest is None)


@pytest.mark.parametrize(("times", "largest"), [(2.0, 32), (0.5, 64)])
def test_what_is_known_of_memory_at_last_is_told_and_nothing_larger_than_was_proposed(monkeypatch, times, largest):
    """Of 64 KiB: twice as much a sample halves the largest size; half as much adds none to what was proposed."""
    monkeypatch.setattr(Learns, "TIMES", times)
    result = tune(None, kib=64, make=Learns)
    assert result.largest_batch_size == largest
    assert {m.batch_size: m.predicted_peak_bytes for m in result.measurements}[64] == times * 64 * KIB
    if times < 1:
        assert result.decided_by == "memory"


def interrupt(event):
    """Stop after the first timing."""
    if event.kind == "timing":
        raise KeyboardInterrupt


@pytest.mark.parametrize("kib", [50, 0])
def test_a_finished_run_is_told_as_it_was_measured_however_little_memory_is_free_now(path, kib):
    """A limit of now would be below the answer, and where nothing fits none at all."""
    first = tune(path, 8, 64, kib=100)
    assert (first.batch_size, first.largest_batch_size) == (64, 100)
    again = tune(path, 8, 64, kib=kib)
    assert (again.batch_size, again.decided_by) == (64, first.decided_by)
    assert (again.largest_batch_size, again.limits) == (first.largest_batch_size, first.limits)


def test_a_run_that_went_on_in_less_memory_is_told_with_that(path):
    """64 was refused for what was free then, and stays refused where as little is free again."""
    with pytest.raises(KeyboardInterrupt):
        tune(path, 8, 64, kib=100, progress=interrupt)
    for _ in range(2):
        result = tune(path, 8, 64, kib=50)
        assert statuses(result) == {8: "ok", 64: "over_limit"}
        assert (result.largest_batch_size, result.limits["memory_bytes"]) == (8, 50 * KIB)


def test_an_interrupted_run_of_which_nothing_fits_any_more_says_so(path):
    """As at the first time: not even one sample, or none of the sizes that were asked for."""
    with pytest.raises(KeyboardInterrupt):
        tune(path, 8, 64, kib=100, progress=interrupt)
    with pytest.raises(DoesNotFit) as caught:
        tune(path, 8, 64, kib=0)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (KIB, 0)
    with pytest.raises(NothingMeasured, match="over the memory limit: 8 and 64"):
        tune(path, 8, 64, kib=4)


def test_what_a_worker_computed_before_it_measured_is_told_from_what_others_took(path, monkeypatch):
    """It has looked what steps take before this process had its turn, and ends within it: it is named at both ends."""
    asked = []
    monkeypatch.setattr(cpu_load, "snapshot", lambda worker_pid=None: asked.append(worker_pid))

    class InWorker(Bounded):
        worker_pid = 4711

    tune(path, 8, kib=100, make=InWorker)
    assert asked == [4711, 4711]


class Compiled(Bounded):
    """A session whose steps are compiled, once for a size of 1 and once for all others."""

    def look(self, **given):
        return {**super().look(**given), "is_compiled": True}


@pytest.mark.parametrize(
    ("sizes", "given", "has_one"), [((), {}, False), ((), {"current": 1}, True), ((1, 2), {}, True)]
)
def test_a_size_of_one_is_compiled_only_if_it_is_asked_for(sizes, given, has_one):
    """It would cost a second compilation; a note says that it was left out."""
    result = tune(None, *sizes, kib=16, make=Compiled, **given)
    assert (1 in statuses(result)) == has_one
    assert any("A batch of 1 was left out" in reason for reason in result.reasons) != has_one


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (OnnxSubject, {"path": Path("net.onnx"), "versions": {"provider": "CPUExecutionProvider"}}),
        (NamedModuleSubject, {"inputs": [8], "kind": {}, "sources": ()}),
    ],
)
def test_instances_of_other_threads_have_cached_timings_of_their_own(kind, fields):
    """Four CPUs have room for one instance of 3 threads or of 4: neither discards the timings of the other."""
    fields |= {"name": "net", "library": "torch", "mode": "inference", "seed": 0, "memory": MemoryLimit(1, 1, "")}
    subjects = [kind(**fields, device=probe.device("cpu"), shares=[range(threads)]) for threads in (3, 4)]
    assert subjects[0].identity != subjects[1].identity
    assert subjects[0].identity["instances"] == subjects[1].identity["instances"] == 1
