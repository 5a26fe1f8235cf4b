"""What vendors print of boards: the rows of the catalogue, and what stands out among them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import cubatch

TABLE = tomllib.loads((Path(cubatch.__file__).parent / "data/devices.toml").read_text(encoding="utf-8"))
FIELDS = {
    "name", "aliases", "shared_names", "architecture", "chip", "compute_capability", "num_sms", "cuda_cores",
    "tensor_cores", "base_clock_mhz", "boost_clock_mhz", "memory_gib", "usable_mib", "memory_type",
    "memory_bus_bits", "bandwidth_gb_per_second", "l2_mib", "peak_tflops", "tdp_watts", "source", "note",
}  # fmt: skip

WITHOUT_TENSOR_CORES = {"TU116", "TU117"}  # the chips of Turing that have none: GeForce GTX 16
HALF_RATE = {"a10g"}  # beside GeForce boards: its Tensor Cores do half of what others of the architecture do
LOWER_CLOCK = {
    "h100-nvl": 1545,
    "h200-nvl": 1545,
}  # of printed tensor rates, where it is further from the boost clock than elsewhere
