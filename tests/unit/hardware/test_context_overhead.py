"""What a process takes of a GPU beside its arrays: estimated, then what was seen of it."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from cubatch.hardware import context_overhead, memory_limit as hardware_memory, probe
from tests.unit.hardware.gpus import GIB, T4, V100

MIB = 2**20


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """Keep it in a folder that is not there yet."""
    monkeypatch.setattr(context_overhead, "folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "context_overhead.json"


def test_the_most_that_was_seen_is_kept_for_this_gpu_alone(gpus):
    """In the limit of the next run too; a smaller figure, as of a smaller network, changes nothing."""
    gpus(V100, T4)
    one, other = probe.device("cuda:0"), probe.device("cuda:1")
    estimated = context_overhead.overhead_bytes(other)

    for taken in (300 * MIB, 700 * MIB, 500 * MIB):
        context_overhead.record(one, taken)

    assert context_overhead.overhead_bytes(one) == 700 * MIB
    assert hardware_memory.memory_limit(one).overhead_bytes == 700 * MIB
    assert hardware_memory.memory_limit(one).bytes == 10 * GIB - 700 * MIB
    assert context_overhead.overhead_bytes(other) == estimated == 40 * 1024 * 2048 + 128 * MIB
    assert context_overhead.overhead_bytes(attrs.evolve(one, live=False)) == 80 * 2048 * 2048 + 128 * MIB


def test_another_driver_is_another_matter(gpus, monkeypatch):
    """Its context may be larger."""
    gpus(V100)
    context_overhead.record(probe.device(), 300 * MIB)
    monkeypatch.setattr("cubatch.hardware.nvml.Monitor.driver_version", lambda _: "599.1")
    assert context_overhead.overhead_bytes(probe.device()) != 300 * MIB


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": "b"}', '{"a": -5}', "\xff"])
def test_a_damaged_file_is_no_knowledge(gpus, kept, text):
    """It is written anew by the next run."""
    gpus(V100)
    kept.parent.mkdir()
    kept.write_bytes(text.encode("latin-1"))
    estimated = context_overhead.overhead_bytes(probe.device())
    assert estimated == 80 * 2048 * 2048 + 128 * MIB
    context_overhead.record(probe.device(), 200 * MIB)
    assert context_overhead.overhead_bytes(probe.device()) == 200 * MIB
    assert len(json.loads(kept.read_text())) == 1


@pytest.mark.parametrize("place", ["/proc/nothing", "~nobody-of-this-name"])
def test_a_place_that_cannot_be_written_costs_the_knowledge_alone(gpus, monkeypatch, place):
    """No error reaches who measures."""
    gpus(V100)
    monkeypatch.setattr(context_overhead, "folder", lambda: Path(place))
    context_overhead.record(probe.device(), 200 * MIB)
    assert context_overhead.overhead_bytes(probe.device()) == 80 * 2048 * 2048 + 128 * MIB


def test_without_nvml_nothing_is_kept(gpus, kept):
    """There is no driver to keep it under."""
    gpus(V100, nvml=False)
    context_overhead.record(probe.device(), 200 * MIB)
    assert not kept.exists()
