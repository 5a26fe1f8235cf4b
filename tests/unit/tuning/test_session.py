"""A new kind of subject: a fake device of a known best, in one class, through the whole pipeline."""

from __future__ import annotations

import attrs
import pytest

import cubatch as cb
from cubatch.hardware import probe
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.tuning import session
from cubatch.tuning.notes import note
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subject import Revision, SubjectFacts
from tests.fakes import FakeDevice, affine
from tests.unit.tuning.sheets import KIB, Sheet

pytestmark = pytest.mark.usefixtures("quiet")

ROOM = MemoryLimit(100 * KIB, 100 * KIB, "all there is")


def tune(path, *sizes, memory=ROOM, kind=Sheet):
    fake = FakeDevice(affine(0.02, 1e-6))
    subject = kind(device=probe.device("cpu"), memory=memory, fake=fake)
    request = Request.of(batch_sizes=sizes or None, store=path)
    return session.tune(subject, request), subject


def test_a_subject_of_four_members_is_tuned_and_cached(tmp_path):
    """Its largest size is recommended; a second call answers from the cache and makes no runner."""
    first, subject = tune(tmp_path / "kept")
    assert (first.batch_size, first.decided_by, first.largest_batch_size) == (100, "memory", 100)
    assert len(subject.made) == 1
    assert TuningResult.from_json(first.to_json()) == first
    again, subject = tune(tmp_path / "kept")
    assert (again.batch_size, subject.made) == (100, [])
    assert [m.timings_seconds for m in again.measurements] == [m.timings_seconds for m in first.measurements]


class Told(Sheet):
    """Knows something before, and something after measuring: then that half as much fits."""

    def start(self, *, refresh):
        return [note("ranks", count=3)]

    def revise(self, ladder, measured, request):
        return Revision(ladder=attrs.evolve(ladder, largest=50), measured=measured, notes=[note("host_clock")])

    def describe(self, ladder):
        return {"spec": {"name": "sheet"}, "environment": {"sheets": 1}}

    def facts(self, sizes):
        return SubjectFacts(roofline_seconds=dict.fromkeys(sizes, 0.01))

    def close(self):
        self.made[:] = ["closed"]


def test_what_a_subject_tells_reaches_the_result():
    """Notes of all stages in their order, the revised ladder, the description, and figures of the sizes."""
    lowered = MemoryLimit(100 * KIB, 100 * KIB, "little is free", is_lowered=True)
    result, subject = tune(False, 8, 64, kind=Told, memory=lowered)
    words = ("3 ranks", "100.00 KiB: little is free", "host's clock")
    assert all(word in reason for word, reason in zip(words, result.reasons[-3:], strict=True))
    assert (result.largest_batch_size, result.spec, result.environment["sheets"]) == (50, {"name": "sheet"}, 1)
    assert [m.roofline_fraction for m in result.measurements] == [
        pytest.approx(0.01 / m.latency_seconds) for m in result.measurements
    ]
    assert subject.made == ["closed"]


class Lost(Told):
    """Knows what to try where nothing could be measured."""

    def remedy(self, ladder):
        return "Turn the sheet over."


def test_what_to_try_is_said_where_nothing_could_be_measured():
    """After the usual remedies; and the subject is closed."""
    with pytest.raises(cb.NothingMeasured, match=r"Turn the sheet over\.$"):
        tune(False, 64, kind=Lost, memory=MemoryLimit(KIB, KIB, ""))
