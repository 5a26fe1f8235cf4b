"""`cubatch devices`."""

from __future__ import annotations

import json


def test_devices_lists_the_machine_and_the_catalogue(run):
    """The CPU is always here, a V100 is always known."""
    code, out, _ = run("devices")
    _, text, _ = run("devices", "--json", "-")
    found = json.loads(text)

    assert code == 0
    assert "v100-sxm2-16gb" in out
    assert found["devices"][-1]["kind"] == "cpu"
    assert "v100-sxm2-16gb" in [device["slug"] for device in found["catalogue"]]
