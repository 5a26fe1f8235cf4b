"""Mounts, as the kernel lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cubatch import mounts


def test_filesystem_type_takes_the_innermost_and_latest_mount(monkeypatch):
    """Lines as in proc(5): the deepest mount point that holds the path, the last of two at one place."""
    lines = [
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw",
        "2 1 0:9 / /home rw - autofs systemd rw",
        "3 1 0:10 / /home rw - nfs4 server:/home rw",
        r"4 1 0:11 / /mnt/my\040share rw - cifs //server/share rw",
        "5 1 0:12 / /homework rw - xfs /dev/sdb rw",
    ]
    monkeypatch.setattr(Path, "read_bytes", lambda self: "\n".join(lines).encode())
    expected = {"/home/me/x": "nfs4", "/homework/x": "xfs", "/mnt/my share/x": "cifs", "/mnt/x": "ext4"}
    assert {path: mounts.filesystem_type(Path(path)) for path in expected} == expected


@pytest.mark.parametrize("name", [b"caf\xe9", b"next\xc2\x85line"])
def test_filesystem_type_bears_any_name_of_a_mount(monkeypatch, name):
    """A stick whose label is no UTF-8, or holds what Python takes for the end of a line, stops no measurement."""
    lines = [b"1 0 8:1 / / rw - ext4 /dev/sda rw", b"2 1 0:9 / /media/" + name + b" rw - vfat /dev/sdb rw"]
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"\n".join(lines))
    found = [mounts.filesystem_type(Path("/media") / place) for place in (os.fsdecode(name), "x")]
    assert found == ["vfat", "ext4"]
