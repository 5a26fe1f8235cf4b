"""`cubatch devices`: the devices of this machine and the GPUs of the catalogue."""

from __future__ import annotations

from cubatch.cli import console
from cubatch.cli.options import JsonOption


def devices(*, json: JsonOption = None) -> None:
    """
    List this machine's devices and every GPU known by name.

    Predictions and memory plans work for all of them.

    Example: cubatch devices --json devices.json
    """
    from cubatch.hardware import catalogue, probe
    from cubatch.report.tables import devices as devices_table

    console.check_writable(json=json)
    here, known = probe.devices(), catalogue.all_devices()
    grids = [
        devices_table.devices(here, title="In this machine"),
        devices_table.devices(known, title="In the catalogue"),
    ]
    payload = {"schema": 1, "devices": [d.to_mapping() for d in here], "catalogue": [d.to_mapping() for d in known]}
    console.emit(grids, payload, json)
