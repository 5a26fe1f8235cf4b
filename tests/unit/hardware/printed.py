"""What vendors print of boards: the rows of the catalogue, and what each architecture has in an SM."""

from __future__ import annotations

import tomllib
from pathlib import Path

import cubatch

TABLE = tomllib.loads((Path(cubatch.__file__).parent / "data/devices.toml").read_text(encoding="utf-8"))
FIELDS = {
    "name", "aliases", "shared_names", "architecture", "chip", "compute_capability", "num_sms", "cuda_cores",
    "tensor_cores", "base_clock_mhz", "boost_clock_mhz", "memory_gib", "memory_type", "memory_bus_bits",
    "bandwidth_gb_per_second", "l2_mib", "peak_tflops", "tdp_watts", "source", "note",
}  # fmt: skip

# CUDA cores and Tensor Cores of one SM, from NVIDIA's architecture papers.
CORES_PER_SM = {
    (3, 7): (192, 0), (7, 2): (64, 8),
    (5, 2): (128, 0), (6, 0): (64, 0), (6, 1): (128, 0), (7, 0): (64, 8), (7, 5): (64, 8), (8, 0): (64, 4),
    (8, 6): (128, 4), (8, 7): (128, 4), (8, 9): (128, 4), (9, 0): (128, 4), (10, 0): (128, 4), (11, 0): (128, 4),
    (12, 0): (128, 4), (12, 1): (128, 4),
}  # fmt: skip
WITHOUT_TENSOR_CORES = {"TU116", "TU117"}  # the chips of Turing that have none: GeForce GTX 16


# Multiply-adds of 16 bits, summed in float32, that a Tensor Core does in a clock, from NVIDIA's architecture papers;
# GeForce boards have half of what their chips do elsewhere.
FMA_PER_CLOCK = {
    (7, 0): 64, (7, 5): 64, (8, 0): 256, (8, 6): 128, (8, 9): 128, (9, 0): 512, (10, 0): 1024, (12, 0): 128,
}  # fmt: skip
LOWER_CLOCK = {"h100-nvl": 1545}  # of printed tensor rates, where it is further from the boost clock than elsewhere
