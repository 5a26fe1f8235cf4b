"""GPUs as NVML and the driver would tell of them."""

from __future__ import annotations

import attrs

from cubatch.hardware.driver import VisibleGpu

GIB = 2**30
V100 = VisibleGpu(
    index=0,
    name="Tesla V100-SXM2-16GB",
    uuid="GPU-00000000-0000-0000-0000-000000000001",
    mig=None,
    compute_capability=(7, 0),
    num_sms=80,
    memory_bytes=16_900_000_000,
    l2_bytes=6 * 2**20,
    clock_hz=1.53e9,
)
T4 = attrs.evolve(
    V100,
    index=1,
    name="Tesla T4",
    uuid="GPU-00000000-0000-0000-0000-000000000002",
    compute_capability=(7, 5),
    num_sms=40,
)
SLICE = attrs.evolve(
    V100,
    name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    uuid="MIG-00000000-0000-0000-0000-000000000003",
    mig="3g.20gb",
    compute_capability=(8, 0),
    num_sms=42,
)
