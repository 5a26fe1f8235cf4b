// SPDX-License-Identifier: MIT
//
// Matrix products and the three passes of a convolution on tensor cores by mma.sync, from the V100 on.
//
// What is multiplied, and how the grid is cut, is common/product_kernel.cuh.  Elements are float16 or bfloat16, or
// float multiplied as tf32 (CB_ELEMENT = float): sums are float32 always.
//
// One block owns a TILE_M x TILE_N tile of the output and walks gemm_k in steps of TILE_K; the picture is of
// 128x128x32 of 16 bits in 3 stages:
//
//                          TILE_N = 128
//                        +---+---+---+---+
//                   B    |   |   |   |   |  TILE_K = 32        shared memory, NUM_STAGES = 3 buffers of
//                        +---+---+---+---+                     (128 + 128) * 64 B = 16 KiB
//      TILE_K = 32
//        +--+            +---+---+---+---+
//        |  |            |w0 |w1 |w2 |w3 |    8 warps, each a 64 x 32 warp tile: 4 x 2 atoms of 16 x 16 sums,
//   A    |  |  TILE_M    |   |   |   |   |    multiplied 16 (tf32 and sm_70: 8) places of gemm_k at a time
//        |  |   = 128    +---+---+---+---+    (common/device_mma.cuh)
//        |  |            |w4 |w5 |w6 |w7 |
//        +--+            +---+---+---+---+    --> epilogue (common/epilogue.cuh): + bias, ReLU, ..., store
//
//   atoms     sm_70: m8n8k4.  sm_75: m16n8k8.  From sm_80 on: m16n8k16, and m16n8k8 for tf32
//   adds to simt   16-bit tiles as they are stored, fragments by ldmatrix (transposing where an operand lies along
//             gemm_m or gemm_n), and 2048 multiply-adds of an instruction instead of 32
#ifndef CB_ELEMENT
#define CB_ELEMENT half_t
#endif
#ifndef TILE_M
#define TILE_M 128
#define TILE_N 128
#define TILE_K 32
#define WARP_M 64
#define WARP_N 32
#define NUM_STAGES 3
#define MIN_BLOCKS 2
#define DYNAMIC_SHARED_BYTES 49152
#endif
#ifndef VECTOR
#define VECTOR 8
#endif

#include "mma/store.cuh"

static_assert(NUM_STAGES == 2 || CB_ARCH >= 80, "cp.async is there from sm_80 on");
static_assert(DYNAMIC_SHARED_BYTES == NUM_STAGES * (TILE_M + TILE_N) * TILE_K * sizeof(CB_ELEMENT), "the ring");

#define DECLARE_SHARED(name) CB_DYNAMIC_SHARED(name)

#include "common/product_kernel.cuh"
