"""GPUs and memory that are said to be here."""

from __future__ import annotations

import pytest

from cubatch.errors import DeviceNotAvailable
from cubatch.hardware import driver, host, nvml as nvml_module
from cubatch.hardware.nvml import Snapshot
from tests.unit.hardware.gpus import GIB


@pytest.fixture
def gpus(monkeypatch):
    """Give the machine GPUs, or an error in their place, and a monitor that knows them all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*found, free_bytes=10 * GIB, power_limit_watts=250.0, nvml=True, total_bytes=None, processes=()):
        def visible():
            if isinstance(found[0], Exception):
                raise found[0]
            return found

        class FakeMonitor:
            def __init__(self, uuid):
                if not nvml:
                    raise DeviceNotAvailable(uuid, "no NVML")
                assert uuid in {gpu.uuid for gpu in found}

            def memory(self):
                used_bytes = None if total_bytes is None else total_bytes - free_bytes
                return Snapshot(free_bytes=free_bytes, used_bytes=used_bytes, total_bytes=total_bytes)

            def power_limit_watts(self):
                return power_limit_watts

            def driver_version(self):
                return "580.95.05"

            def processes(self):
                return processes

        monkeypatch.setattr(driver, "visible_gpus", visible)
        monkeypatch.setattr(nvml_module, "Monitor", FakeMonitor)

    put(DeviceNotAvailable("cuda", "no driver", "use the CPU"))
    return put


@pytest.fixture
def memory(monkeypatch):
    """Give the machine available memory, and room in its cgroup."""

    def put(available, room):
        monkeypatch.setattr(host, "available_memory_bytes", lambda: available)
        monkeypatch.setattr(host, "cgroup_left_bytes", lambda: room)

    return put
