"""Meters tell what was taken since they were started, and nothing of before."""

from __future__ import annotations

import os

import pytest

from cubatch.frameworks import heap
from cubatch.frameworks.memory_meter import RESIDENT_GRAIN, AllocatorMeter, HostMeter, ProcessMeter
from cubatch.measure import resident_meter

MIB = 2**20


def test_the_resident_set_is_told_at_its_peak():
    """128 MiB that were written and given back are found, within the grain; after a new start they are gone."""
    meter = HostMeter()
    meter.start()
    if meter.peak() is None:
        pytest.skip("this kernel does not let the peak be reset")
    held = bytearray(b"x") * (128 * MIB)
    del held
    assert meter.peak() == pytest.approx(128 * MIB, abs=RESIDENT_GRAIN)
    meter.start()
    assert meter.peak() < RESIDENT_GRAIN


def test_where_the_peak_cannot_be_reset_nothing_is_told(monkeypatch, tmp_path):
    """A peak of before would be taken for the step's."""
    monkeypatch.setattr(resident_meter, "_CLEAR", tmp_path / "no such folder" / "clear_refs")
    meter = HostMeter()
    meter.start()
    assert meter.peak() is None


def test_a_heap_is_put_in_order_once(monkeypatch, malloc_is_not_chosen):
    """Readings scatter less from then on; where the user has chosen a threshold himself they do from the beginning."""
    if not heap.is_movable():
        pytest.skip("no glibc")
    assert "package.module:build" in HostMeter().remedy
    monkeypatch.setattr(heap, "_is_owned", True)
    meter = HostMeter()
    assert not meter.remedy
    loose = meter.scatter
    assert meter.tidy()
    assert not meter.tidy()
    assert meter.scatter < loose
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    chosen = HostMeter()
    assert not chosen.tidy()
    assert chosen.scatter == meter.scatter
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")  # all that is freed is kept, found again or not
    kept = HostMeter()
    assert not kept.tidy()
    assert kept.scatter == loose


def test_a_meter_in_the_users_process_never_calls_mallopt(monkeypatch, malloc_is_not_chosen):
    """Outside a worker the heap is not put in order, so readings are expected to scatter as widely as before."""
    calls = []
    monkeypatch.setattr(heap, "_set", calls.append)
    meter = HostMeter()
    loose = meter.scatter
    meter.settle()
    assert not meter.tidy()
    meter.start()
    meter.settle()
    assert (calls, meter.scatter) == ([], loose)


class Allocator:
    """`torch.cuda` as far as the meter asks it: keeps blocks until it is told to give them back."""

    def __init__(self, held):
        self.reserved = self.most = held
        self.unused = 0

    def take(self, num_bytes):
        """Take and give back: from unused blocks, as far as there are any."""
        self.reserved += max(0, num_bytes - self.unused)
        self.most = max(self.most, self.reserved)
        self.unused = max(self.unused, num_bytes)

    def empty_cache(self):
        self.reserved, self.unused = self.reserved - self.unused, 0

    def reset_peak_memory_stats(self, device):
        self.most = self.reserved

    def memory_reserved(self, device):
        return self.reserved

    def max_memory_reserved(self, device):
        return self.most


def test_the_caching_allocator_is_asked_for_all_that_it_holds():
    """What it held before the start is not the step's, unless it is an unused block, which is given back first."""
    cuda = Allocator(held=50)
    meter = AllocatorMeter(cuda, "cuda:0")
    cuda.take(30)
    meter.start()
    assert not meter.tidy()
    cuda.take(7)
    assert meter.peak() == 7
    meter.start()
    assert meter.peak() == 0


def test_a_gpu_that_failed_does_not_stop_the_clearing_up():
    """Every call raises then; whoever asked already knows."""

    class Failed:
        def __getattr__(self, name):
            raise RuntimeError("CUDA error: unspecified launch failure")

    AllocatorMeter(Failed(), "cuda:0").start()


class Monitor:
    """NVML as far as the meter asks it."""

    def __init__(self, held):
        self.held = held

    def process_bytes(self, pid):
        assert pid == os.getpid()
        return self.held


def test_a_process_is_told_by_what_it_holds_more_of_the_gpu():
    """What was held before it was started does not count; without NVML, or where it is blind, nothing is told."""
    monitor = Monitor(300 * MIB)
    meter = ProcessMeter(monitor)
    assert meter.peak() is None
    meter.start()
    monitor.held = 450 * MIB
    assert meter.peak() == 150 * MIB
    monitor.held = None
    assert meter.peak() is None
    assert ProcessMeter(None).peak() is None
