"""Device keeps facts and refuses nonsense."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import attrs
import numpy as np
import pytest

import cubatch
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware.facts import Device


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


@pytest.mark.parametrize("given", [[8, 0], (8, 0), np.array([8, 0]).tolist(), (np.int64(8), np.int32(0))])
def test_a_compute_capability_may_be_a_list(given):
    """As JSON and TOML have it; what is kept is a pair of Python's numbers, which occupancy takes too."""
    device = Device(name="made up", compute_capability=given)
    assert (device.compute_capability, device.arch) == ((8, 0), "sm_80")
    assert [type(part) for part in device.compute_capability] == [int, int]
    asked = {"threads_per_block": 256, "registers_per_thread": 64}
    assert cubatch.occupancy(compute_capability=given, **asked).blocks_per_sm == 4


@pytest.mark.parametrize("given", ["8.0", 8.0, (8,), (8.0, 0), ("8", "0")])
def test_a_compute_capability_is_a_pair_of_whole_numbers(given):
    """A text or a number has more than one reading: refused, with how it is written."""
    with pytest.raises(InvalidArgument, match=r"compute_capability must be \(major, minor\), such as \(8, 0\)"):
        Device(name="made up", compute_capability=given)
    if given != (8.0, 0):
        with pytest.raises(UnknownName, match="compute_capability"):
            cubatch.occupancy(compute_capability=given, threads_per_block=256, registers_per_thread=64)


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


def test_facts_of_a_device_are_copies():
    """Of the mapping that they came from, in repr and JSON as it was given."""
    given = {"float32": 1.5e12}
    device = Device(name="card", peak_flops_per_second=given)
    given["float32"] = 3.0
    assert device.peak_flops_per_second == {"float32": 1.5e12}
    facts = json.loads(json.dumps(device.to_mapping()))
    assert (facts["peak_flops_per_second"], facts["caches"]) == ({"float32": 1.5e12}, {})
