"""Device keeps facts and refuses nonsense; SM limits are those of NVIDIA's tables."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import attrs
import pytest

from cubatch.errors import UnknownName
from cubatch.hardware.facts import SM_LIMITS, Device, sm_limits

# Typed from the table of compute capabilities in the CUDA C++ Programming Guide:
# warps, blocks, shared KiB per SM and per block, registers per block in units of 1024.
PUBLISHED = {
    (5, 2): (64, 32, 96, 48, 64),
    (6, 1): (64, 32, 96, 48, 64),
    (6, 2): (64, 32, 64, 48, 32),
    (7, 0): (64, 32, 96, 96, 64),
    (7, 5): (32, 16, 64, 64, 64),
    (8, 0): (64, 32, 164, 163, 64),
    (8, 6): (48, 16, 100, 99, 64),
    (8, 9): (48, 24, 100, 99, 64),
    (9, 0): (64, 32, 228, 227, 64),
    (10, 0): (64, 32, 228, 227, 64),
    (12, 0): (48, 24, 100, 99, 64),
}


@pytest.mark.parametrize("compute_capability", PUBLISHED, ids=str)
def test_limits_are_the_published_ones(compute_capability):
    """A slip in the table would move every occupancy of that architecture."""
    warps, blocks, shared, shared_block, registers = PUBLISHED[compute_capability]

    limits = sm_limits(compute_capability)

    assert (limits.warps_per_sm, limits.blocks_per_sm, limits.threads_per_sm) == (warps, blocks, 32 * warps)
    assert limits.shared_bytes_per_sm == shared * 1024
    assert limits.shared_bytes_per_block == shared_block * 1024
    assert (limits.registers_per_sm, limits.registers_per_block) == (64 * 1024, registers * 1024)


@pytest.mark.parametrize("compute_capability", SM_LIMITS, ids=str)
def test_limits_hang_together(compute_capability):
    """A block fits the SM, its reserved share included, and the largest carve-out is all there is."""
    limits = SM_LIMITS[compute_capability]

    assert limits.shared_bytes_per_block + limits.reserved_shared_bytes <= limits.shared_bytes_per_sm
    assert max(limits.shared_carveouts) == limits.shared_bytes_per_sm
    assert list(limits.shared_carveouts) == sorted(set(limits.shared_carveouts))
    assert (limits.reserved_shared_bytes, limits.shared_unit_bytes) == (
        (1024, 128) if compute_capability >= (8, 0) else (0, 256)
    )


@pytest.mark.parametrize("asked", [(3, 5), (99, 0), "sm_70", None, [7, 0]])
def test_unknown_compute_capability_is_an_error(asked):
    """Nothing is guessed for an architecture outside the table, whatever was written for it."""
    with pytest.raises(UnknownName) as caught:
        sm_limits(asked)

    assert caught.value.field == "compute_capability"
    assert "7.0" in caught.value.known


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_sms", 0), ("memory_bytes", -1), ("clock_hz", 0.0), ("threads", 0), ("peak_bytes_per_second", -1.0)],
)
def test_facts_are_positive(field, value):
    """Zero stands for "unknown" in many a driver; here that is None, so zero is a mistake."""
    with pytest.raises(ValueError, match=field):
        Device(name="made up", **{field: value})


def test_a_device_is_a_cpu_or_a_gpu():
    """No third kind slips in by a typo."""
    with pytest.raises(ValueError, match="kind"):
        Device(name="made up", kind="gpu")


def test_a_device_goes_into_json():
    """Every fact survives as plain JSON, the pair of the compute capability as a list."""
    device = Device(name="made up", compute_capability=(7, 0), num_sms=80, peak_flops_per_second={"float32": 1.5e13})

    facts = json.loads(json.dumps(device.to_mapping()))

    assert facts["compute_capability"] == [7, 0]
    assert facts["num_sms"] == 80
    assert facts["peak_flops_per_second"] == {"float32": 1.5e13}
    assert facts["memory_bytes"] is None


def test_a_device_names_itself_by_its_number_only_where_it_is_here():
    """Messages say which of several equal GPUs they mean, and do not invent a number for one that is elsewhere."""
    assert str(Device(name="NVIDIA H200", live=True, index=1)) == "NVIDIA H200 (cuda:1)"
    assert str(Device(name="NVIDIA H200")) == "NVIDIA H200"
    assert Device(name="NVIDIA H200", compute_capability=(9, 0)).arch == "sm_90"
    assert Device(name="AMD EPYC", kind="cpu").arch is None


def rated(**rates):
    return Device(name="card", compute_capability=(8, 0), peak_flops_per_second=rates, caches={"L2": 3, "L3": 4})


def test_equal_devices_are_one_key():
    """What follows from a device is kept by it: equal facts, in whatever order, are the same key; others are not."""
    one, same = rated(float32=1.5e12, float16=2e12), rated(float16=2e12, float32=1.5e12)
    assert one == same
    assert {one: "kept"}[same] == "kept"
    others = [rated(float32=1.5e12), rated(float32=2e12, float16=1.5e12), attrs.evolve(one, caches={})]
    assert not {one}.intersection(others)


def test_a_key_keeps_its_place_when_it_goes_to_another_process():
    """Hashes of text differ between processes; one that came along would not be found again."""
    one = rated(float32=1.5e12)
    hash(one)
    script = "import pickle, sys; d = pickle.load(sys.stdin.buffer); print(hash(d) == hash(attrs.evolve(d)))"
    asked = [sys.executable, "-c", f"import attrs; {script}"]
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.run(asked, input=pickle.dumps(one), capture_output=True, check=True, env=environ)
    assert told.stdout.split() == [b"True"]


def test_facts_of_a_device_cannot_be_changed_and_read_as_what_was_given():
    """Neither by the mapping that they came from nor by the one that is held; repr and JSON are those of a dict."""
    given = {"float32": 1.5e12}
    device = Device(name="card", peak_flops_per_second=given)
    given["float32"] = 3.0
    assert device.peak_flops_per_second == {"float32": 1.5e12}
    with pytest.raises(TypeError):
        device.peak_flops_per_second["float32"] = 3.0
    assert "peak_flops_per_second={'float32': 1500000000000.0}" in repr(device)
    assert "caches={}" in repr(device)
    facts = json.loads(json.dumps(device.to_mapping()))
    assert (facts["peak_flops_per_second"], facts["caches"]) == ({"float32": 1.5e12}, {})
    assert device.peak_flops_per_second.get("float16") is None
    assert list(device.peak_flops_per_second) == ["float32"]
    assert len(device.peak_flops_per_second) == 1
