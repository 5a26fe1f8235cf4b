// SPDX-License-Identifier: MIT
//
// Matrix products and the three passes of a convolution, as one: a tiled product on float32 lanes, for every GPU.
//
// What is multiplied, and how the grid is cut, is common/product_kernel.cuh.  An operand is gathered on its way to
// shared memory and never stored.
//
// One block owns a TILE_M x TILE_N tile of the output and walks gemm_k in steps of TILE_K; the picture is of 128x128x8:
//
//                          TILE_N = 128
//                        +-------+-------+
//                   B    |       |       |  TILE_K = 8         shared memory, NUM_STAGES = 2 buffers of
//                        +-------+-------+                     (132 + 132) * 8 * 4 B = 8.25 KiB
//      TILE_K = 8
//        +--+            +-------+-------+
//        |  |            |  w0   |  w1   |
//   A    |  |  TILE_M    +-------+-------+    8 warps, each a 32 x 64 warp tile, 4 x 8 lanes,
//        |  |   = 128    |  w2   |  w3   |    each thread 8 x 8 sums in registers: 2 x 2 pieces of 4 x 4,
//        |  |            +-------+-------+    16 rows and 32 columns apart (main_loop.cuh)
//        |  |            |  ...  |  ...  |
//        +--+            +-------+-------+    --> epilogue (common/epilogue.cuh): + bias, ReLU, ..., store
//
//   needs     VECTOR = 4: the contiguous extents of A and B are multiples of 4, addresses of 4 elements
//   adds to naive   reuse: an element of A feeds TILE_N sums, one of B feeds TILE_M; of 10 instructions of the main
//             loop 9 are multiply-adds
#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif
#ifndef TILE_M
#define TILE_M 128
#define TILE_N 128
#define TILE_K 8
#define THREAD_M 8
#define THREAD_N 8
#define NUM_STAGES 2
#define MIN_BLOCKS 2
#endif
#ifndef VECTOR
#define VECTOR 4
#endif

#include "simt/store.cuh"

static_assert(NUM_STAGES == 2 || sizeof(CB_ELEMENT) == 4, "cp.async cannot convert 16-bit elements on their way");
static_assert(NUM_STAGES == 2 || CB_ARCH >= 80, "cp.async is there from sm_80 on");

#define DECLARE_SHARED(name) CB_SHARED(float, name, NUM_STAGES * (A::FLOATS + B::FLOATS))

#include "common/product_kernel.cuh"
