"""The whole walk on the CPU: what is asked, measured and answered."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.hardware import host, memory_limit as hardware_memory, probe
from cubatch.network.layers import Conv2d
from cubatch.tuning import ladder
from cubatch.tuning.results import TuningResult
from cubatch.tuning.step_memory import footprint, max_batch_size
from cubatch.tuning.tune import autotune
from cubatch.units import format_bytes
from tests.unit.tuning.small_runs import statuses, tune

pytestmark = pytest.mark.usefixtures("quiet")

CLOSE = 0.005
"""One standard deviation of a timing before any was taken: no more may a posterior depart from timings that agree."""
CONV = Conv2d(h=6, w=6, c=3, k=4, r=3, s=3, pad=1)


# --- an answer -----------------------------------------------------------------------------------------------


def test_what_a_step_should_take_stands_beside_what_it_took(monkeypatch, tmp_path, virtual):
    """The model's seconds of each candidate, also in a result that is answered from the store."""
    expected = {4: 0.5, 32: 2.0}
    monkeypatch.setattr(ladder, "step_seconds", lambda _, sizes: [expected[n] for n in sizes])
    for _ in range(2):
        result = tune(store=tmp_path / "store.sqlite3")
        assert {m.batch_size: m.predicted_seconds for m in result.measurements} == expected


@pytest.mark.case("watch")
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("spec", ["mlp", CONV], ids=["network", "layer"])
def test_an_answer_follows_from_its_measurements(spec, mode, virtual):
    """The contract's rule, applied to the rates in the result, gives the result's answer; JSON gives it back."""
    result = autotune(spec, device="cpu", mode=mode, batch_sizes=[1, 8, 64], budget=30.0, store=False, tolerance=0.05)
    assert [m.batch_size for m in result.measurements] == [1, 8, 64]
    assert (result.mode, result.dtype, result.library, result.objective) == (mode, "float32", "im2col", "throughput")
    rate = {m.batch_size: m.samples_per_second for m in result.measurements if m.status == "ok"}
    assert result.fastest_batch_size == max(rate, key=rate.get)
    assert result.batch_size == min(n for n, value in rate.items() if value >= 0.95 * max(rate.values()))
    for m in result.measurements:
        assert m.reasons == ("asked for",)
        assert m.status in {"ok", "dropped"}
        assert m.latency_seconds == pytest.approx(float(np.median(m.timings_seconds)), rel=CLOSE)
        assert m.predicted_peak_bytes == footprint(spec, batch_size=m.batch_size, mode=mode, device="cpu").total
        assert m.peak_bytes == pytest.approx(m.predicted_peak_bytes, abs=1024)
    again = TuningResult.from_json(result.to_json())
    assert again.to_mapping() == result.to_mapping()
    assert result.device["kind"] == "cpu"
    assert 0 < result.seconds_spent < 60


def test_candidates_come_from_the_plan_and_the_largest_ignores_max_batch_size(virtual):
    """Without a list: powers of two, 1.5 times them, and the maximum; `largest_batch_size` is the plan's alone."""
    limit = footprint("mlp", batch_size=1000, device="cpu", mode="inference").total
    result = tune(batch_sizes=None, max_batch_size=10, memory_limit=limit)
    assert [m.batch_size for m in result.measurements] == [1, 2, 3, 4, 6, 8, 10]
    assert result.measurements[-1].reasons == ("max_batch_size",)
    assert result.largest_batch_size == max_batch_size("mlp", memory=limit, device="cpu", mode="inference")
    assert result.largest_batch_size >= 1000 > result.largest_measured == 10
    assert result.limits == {"max_batch_size": 10, "memory_bytes": limit, "latency_seconds": None}


@pytest.mark.case("allow-growth")
def test_a_memory_limit_as_text_bounds_the_candidates(virtual, monkeypatch):
    """4 MiB, or the same as a share of what is free: sizes planned above it are listed and never tried."""
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(host, "cgroup_left_bytes", lambda: 2**23)
    for limit in ("4MiB", "50%"):
        result = tune(batch_sizes=[16, 10_000], memory_limit=limit)
        assert statuses(result) == {16: "ok", 10_000: "over_limit"}
        assert result.measurements[1].timings_seconds == ()
        assert result.measurements[1].predicted_peak_bytes > 2**22
        assert (result.batch_size, result.fastest_batch_size) == (None, 16)  # it was compared with no other size
        assert result.decided_by == "batch_sizes"  # it holds nothing near the limit
        assert result.limits["memory_bytes"] == 2**22
        assert result.largest_batch_size == max_batch_size("mlp", memory=2**22, device="cpu", mode="inference")


def test_a_limit_above_what_is_free_is_lowered_and_said(virtual, monkeypatch):
    """Nothing is silently replaced: the result names the limit that held, and what was asked for."""
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2**23)
    monkeypatch.setattr(host, "cgroup_left_bytes", lambda: None)
    (said,) = [reason for reason in tune(batch_sizes=[16], memory_limit="1GiB").reasons if "1GiB" in reason]
    assert said.startswith(
        f"Memory is limited to {format_bytes(hardware_memory.memory_limit(probe.device('cpu')).bytes)}: "
    )
    assert not any("Memory is limited" in reason for reason in tune(batch_sizes=[16], memory_limit="1MiB").reasons)


def test_a_budget_too_small_for_all_says_so(virtual):
    """A step that would take 50 times as long is `not_run`, with the reason; nothing is guessed."""
    result = tune(batch_sizes=[100, 10_000], budget=0.2)
    assert statuses(result) == {100: "ok", 10_000: "not_run"}
    assert "budget" in result.measurements[1].stop_reason
    assert result.decided_by == "budget"


def test_progress_tells_every_timing(virtual):
    """Every timing of the result was told as it was taken, by size and round."""
    events = []
    result = tune(progress=events.append)
    told = [event.batch_size for event in events if event.kind == "timing"]
    taken = [m.batch_size for m in result.measurements for _ in m.timings_seconds]
    assert sorted(told) == sorted(taken)
    assert events[-1].kind == "end"
    assert {event.batch_size for event in events if event.kind == "outcome"} == {4, 32}
