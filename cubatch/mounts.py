"""Which file systems hold a path, by the mounts that the kernel lists."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

# What may be open on two machines at once, whose memory is not the same.
NETWORK_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "vboxsf", "virtiofs",
})  # fmt: skip


def filesystem_type(path: Path) -> str:
    """
    Name the kind of file system that holds a path, as /proc/self/mountinfo does; empty where that is unknown.

    Example:
        >>> filesystem_type(Path("/proc/self"))
        'proc'
    """
    path = path.resolve()
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            left, _, right = os.fsdecode(line).partition(" - ")  # names of folders are bytes, of any encoding
            written = left.split(" ")[4]  # with a space as \040
            mount = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), written))
            if path.is_relative_to(mount) and len(mount.parts) >= best:  # of two at one place, the later is on top
                best, kind = len(mount.parts), right.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """
    Say whether a file system of this kind may be mounted on several machines at once.

    What a FUSE program does behind its mount is not known, so it counts as one.

    Example:
        >>> is_network("nfs4"), is_network("fuse.sshfs"), is_network("ext4")
        (True, True, False)
    """
    return kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")
