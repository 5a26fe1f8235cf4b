"""Whether a path lies on a network file system, by the mounts that the kernel lists."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "vboxsf", "virtiofs",
})  # fmt: skip


def is_on_network(path: Path) -> bool:
    """
    Return whether a path is on a network or FUSE file system, which several machines may share; False if unknown.

    Example:
        >>> is_on_network(Path("/proc/self"))
        False
    """
    path = path.resolve()
    depth, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            left, _, right = os.fsdecode(line).partition(" - ")
            mount = Path(left.split(" ")[4].replace("\\040", " "))
            if path.is_relative_to(mount) and len(mount.parts) >= depth:  # a later mount hides an earlier one
                depth, kind = len(mount.parts), right.split(" ")[0]
    return kind in _NETWORK or kind.startswith("fuse.")
