"""A small folder of kernels with configs and budget, for tests that must not depend on the real ones."""

from __future__ import annotations

from pathlib import Path

from cubatch.kernels.variant import Kernel

HEADER = "#pragma once\n#define SCALE 2.0f\n"

# Two entries in one unit; `sums` uses 1 KiB of shared memory and a barrier.
SOURCE = """
#include "common/scale.cuh"
#if __CUDA_ARCH__ >= 900
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define WAIT
#endif
extern "C" __global__ void __launch_bounds__(256) doubled(const CB_ELEMENT* x, CB_ELEMENT* y) {
  WAIT;
  y[threadIdx.x] = SCALE * x[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(256) sums(const CB_ELEMENT* x, CB_ELEMENT* y) {
  __shared__ float s[256];
  WAIT;
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x] + s[255 - threadIdx.x];
}
"""

# 64 values live across a barrier in the 32 registers that 2048 threads per SM leave each.
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* x, float* y, int n) {
  float a[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) a[i] = x[i * n + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; i++) y[i * n + threadIdx.x] = a[i] * a[63 - i];
}
"""

CONFIGS = """
[[modules]]
source = "small/small.cu"
family = "small"
operations = ["doubled", "sums"]
name = "{operation}_{dtype}"
threads = 256
dtypes = ["float32"]
"""

SPILLING = """
[[modules]]
source = "small/spills.cu"
family = "greedy"
operations = ["spills"]
name = "{operation}_{dtype}"
threads = 1024
dtypes = ["float32"]
"""


def make(root: Path, configs: str = CONFIGS, **sources: str) -> Path:
    """Write the tree: small/small.cu and its header, further sources by name, configs, and an empty budget."""
    for name in ("common", "small"):
        (root / name).mkdir(parents=True)
    (root / "common/scale.cuh").write_text(HEADER)
    for name, text in {"small": SOURCE, **sources}.items():
        (root / f"small/{name}.cu").write_text(text)
    (root / "configs.toml").write_text(configs)
    (root / "resources.toml").write_text('nvrtc = "12.9.86"\n[may_spill]\n[figures]\n')
    return root


def kernel(entry: str = "doubled", **changed: object) -> Kernel:
    """Give a kernel of small/small.cu."""
    facts = {
        "name": f"{entry}_f32", "family": "small", "source": "small/small.cu", "operation": entry, "entry": entry,
        "dtype": "float32", "threads": 256, "defines": (("CB_ELEMENT", "float"),),
    }  # fmt: skip
    return Kernel(**{**facts, **changed})
