"""Records that many tests need, with usual facts where a test does not care."""

from __future__ import annotations

from cubatch.hardware.facts import Device
from cubatch.network.graph import Spec
from cubatch.workload import Workload


def workload(
    spec: Spec,
    device: Device,
    *,
    mode: str = "inference",
    dtype: str = "float32",
    optimizer: str = "sgd",
    library: str = "im2col",
    recompute: bool = False,
) -> Workload:
    """Give a workload as it stands, nothing resolved or checked."""
    return Workload(
        spec=spec, device=device, mode=mode, dtype=dtype, optimizer=optimizer, library=library, recompute=recompute
    )  # fmt: skip
