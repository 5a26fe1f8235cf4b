"""Mounts, as the kernel lists them."""

from __future__ import annotations

import os
from pathlib import Path

from cubatch import mounts


def test_the_innermost_and_latest_mount_counts(monkeypatch):
    """Lines as in proc(5): the deepest mount point that holds the path, the last of two at one place."""
    lines = [
        b"1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw",
        b"2 1 0:9 / /home rw - autofs systemd rw",
        b"3 1 0:10 / /home rw - nfs4 server:/home rw",
        rb"4 1 0:11 / /mnt/my\040share rw - fuse.sshfs host rw",
        b"5 1 0:12 / /homework rw - xfs /dev/sdb rw",
        b"6 1 0:13 / /media/caf\xe9 rw - vfat /dev/sdc rw",
    ]
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"\n".join(lines))
    places = {"/home/me/x": True, "/homework/x": False, "/mnt/my share/x": True, "/mnt/x": False}
    places[os.fsdecode(b"/media/caf\xe9/x")] = False
    assert {path: mounts.is_on_network(Path(path)) for path in places} == places
