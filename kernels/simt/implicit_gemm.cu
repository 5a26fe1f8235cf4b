// SPDX-License-Identifier: MIT
//
// Matrix products and the three passes of a convolution, as one: a tiled product on float32 lanes, for every GPU.
//
//   -DOPERATION_...   gemm_m             gemm_n            gemm_k                A                  B
//   GEMM_NN           m                  n                 k                     a[m, k]            b[k, n]
//   GEMM_NT           m                  n                 k                     a[m, k]            b[n, k]
//   GEMM_TN           m                  n                 k                     a[k, m]            b[k, n]
//   CONV2D_FPROP      output pixel       filter k          filter tap, c         x, gathered        w[k, (r, s, c)]
//   CONV2D_DGRAD      input pixel of     channel c         taps of the phase, k  dy, gathered       w[k, tap, c]
//                     one phase
//   CONV2D_WGRAD      filter k           filter tap, c     output pixel          dy[pixel, k]       x, gathered
//
// The batch enters a convolution's pixels and nothing else.  An operand is gathered on its way to shared memory and
// never stored; index arithmetic is common/conv_geometry.cuh.  The input's gradient is cut into stride_h x stride_w
// phases, each a convolution of dy at stride 1 with its own taps: no tap is wasted, and a phase without any writes what
// its epilogue makes of zero.
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
//   grid      x: tiles (common/tile_order.cuh), the phase slowest; z: groups x slices of gemm_k
//   needs     VECTOR = 4: the contiguous extents of A and B are multiples of 4, addresses of 4 elements.
//             gemm_n and one image below 2^31 elements; gemm_m and offsets of the batch are 64-bit
//   slices    of a split gemm_k leave their sums in `partials`; split_k_reduce adds them up and finishes them
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

#include "common/conv_geometry.cuh"
#include "common/epilogue.cuh"
#include "common/tile_order.cuh"
#include "simt/main_loop.cuh"
#include "simt/store.cuh"

static_assert(NUM_STAGES == 2 || sizeof(CB_ELEMENT) == 4, "cp.async cannot convert 16-bit elements on their way");
static_assert(NUM_STAGES == 2 || CB_ARCH >= 80, "cp.async is there from sm_80 on");

// Extents of the product and its tiles.  Mirrored by cubatch/engine/native/product.py: no padding.
struct Product {
  i64 m, k;              // of a group; of a gradient's phases the largest m, and k is not used
  int n;
  int groups;
  int tiles_m, tiles_n;  // of one phase
  int band;              // see tile_order.cuh
  int batch;             // images
};

// Which way each operand comes (loaders.cuh).
#if defined(OPERATION_GEMM_NN)
#define ENTRY gemm_nn
using A = Operand<MatrixSource<AlongK<TILE_M>>, AlongK<TILE_M>>;
using B = Operand<MatrixSource<AlongOuter<TILE_N>>, AlongOuter<TILE_N>>;
#elif defined(OPERATION_GEMM_NT)
#define ENTRY gemm_nt
using A = Operand<MatrixSource<AlongK<TILE_M>>, AlongK<TILE_M>>;
using B = Operand<MatrixSource<AlongK<TILE_N>>, AlongK<TILE_N>>;
#elif defined(OPERATION_GEMM_TN)
#define ENTRY gemm_tn
using A = Operand<MatrixSource<AlongOuter<TILE_M>>, AlongOuter<TILE_M>>;
using B = Operand<MatrixSource<AlongOuter<TILE_N>>, AlongOuter<TILE_N>>;
#elif defined(OPERATION_CONV2D_FPROP)
#define ENTRY conv2d_fprop
using A = Operand<WindowSource<AlongK<TILE_M>>, AlongK<TILE_M>>;
using B = Operand<MatrixSource<AlongK<TILE_N>>, AlongK<TILE_N>>;
#elif defined(OPERATION_CONV2D_DGRAD)
#define ENTRY conv2d_dgrad
using A = Operand<WindowSource<AlongK<TILE_M>>, AlongK<TILE_M>>;
using B = Operand<FilterSource<AlongOuter<TILE_N>>, AlongOuter<TILE_N>>;
#elif defined(OPERATION_CONV2D_WGRAD)
#define ENTRY conv2d_wgrad
using A = Operand<MatrixSource<AlongOuter<TILE_M>>, AlongOuter<TILE_M>>;
using B = Operand<TapSource<AlongOuter<TILE_N>>, AlongOuter<TILE_N>>;
#endif

CB_KERNEL(NUM_THREADS, MIN_BLOCKS)
ENTRY(const CB_ELEMENT* a_elements, const CB_ELEMENT* b_elements, CB_ELEMENT* out, const CB_ELEMENT* bias,
      const float* scale, const float* shift, const CB_ELEMENT* residual, const CB_ELEMENT* mask, float* statistics,
      float* partials, const Product product, const Output whole, [[maybe_unused]] const Conv conv) {
  const Epilogue epilogue{whole, out, bias, scale, shift, residual, mask, statistics, partials};
  CB_SHARED(float, shared, NUM_STAGES * (A::FLOATS + B::FLOATS));
  const ThreadPlace place;
  const int slice = (int)(cb_block_z() % (u32)epilogue.slices), group = (int)(cb_block_z() / (u32)epilogue.slices);
  float sum[THREAD_M][THREAD_N];
  CB_UNROLL
  for (int i = 0; i < THREAD_M; ++i) {
    CB_UNROLL
    for (int j = 0; j < THREAD_N; ++j) sum[i][j] = 0.0f;
  }

#if defined(OPERATION_CONV2D_DGRAD)
  // Phases are the slowest part of the tile's index; each is a convolution of dy at stride 1.
  const u32 phase_tiles = (u32)product.tiles_m * (u32)product.tiles_n;
  const u32 phase = cb_block_x() / phase_tiles;
  const int phase_row = (int)(phase / (u32)conv.stride_w), phase_column = (int)(phase % (u32)conv.stride_w);
  const TilePlace tile = tile_place(cb_block_x() % phase_tiles, product.tiles_m, product.tiles_n, product.band);
  const PhaseAxis vertical = phase_along(phase_row, conv.r, conv.stride_h, conv.step_h, conv.top, conv.p,
                                         conv.tap_step_h, conv.source_step_h);
  const PhaseAxis horizontal = phase_along(phase_column, conv.s, conv.stride_w, conv.step_w, conv.left, conv.q,
                                           conv.tap_step_w, conv.source_step_w);
  const int phase_rows = (conv.h - phase_row + conv.stride_h - 1) / conv.stride_h;
  const int phase_columns = (conv.w - phase_column + conv.stride_w - 1) / conv.stride_w;
  const bool is_short_h = conv.h % conv.stride_h && phase_row >= conv.h % conv.stride_h;
  const bool is_short_w = conv.w % conv.stride_w && phase_column >= conv.w % conv.stride_w;
  const Divisor by_rows = is_short_h ? conv.short_rows : conv.rows;
  const Divisor by_columns = is_short_w ? conv.short_columns : conv.columns;
  const i64 m = (i64)product.batch * phase_rows * phase_columns;
  const i64 k = (i64)vertical.axis.taps * horizontal.axis.taps * conv.group_k;
#else
  const TilePlace tile = tile_place(cb_block_x(), product.tiles_m, product.tiles_n, product.band);
  const i64 m = product.m, k = product.k;
#endif
  const i64 first = (i64)tile.m * TILE_M;
  const int left = tile.n * TILE_N, n = product.n;
  if (first >= m) return;  // a phase with fewer pixels than the largest

  // Where the tile goes, worked out now and kept in shared memory: nothing of it stays in registers.
  CB_SHARED(OutputTile, output, 1);
#if defined(OPERATION_CONV2D_WGRAD)
  const int first_column = left;
#else
  const int first_column = group * n + left;
#endif
  static_assert(TILE_M <= NUM_THREADS, "a thread for each row");
  if (cb_thread() < TILE_M) {
    const i64 place_m = first + cb_thread();
#if defined(OPERATION_CONV2D_DGRAD)
    const i64 image_pixels = (i64)phase_rows * phase_columns;
    const i64 image = first / image_pixels;
    const int within = (int)(first - image * image_pixels) + cb_thread();
    const int line = divide(within, by_columns), ahead = divide(line, by_rows);
    const int h = phase_row + (line - ahead * phase_rows) * conv.stride_h;
    const int w = phase_column + (within - line * phase_columns) * conv.stride_w;
    const i64 row = ((image + ahead) * conv.h + h) * conv.w + w;
#elif defined(OPERATION_CONV2D_WGRAD)
    const i64 row = group * m + place_m;
#else
    const i64 row = place_m;
#endif
    output->place[cb_thread()] = place_m < m ? row * epilogue.columns + first_column : -1;
  }
  if (cb_thread() == 0) {
    output->first_column = first_column;
    output->columns = n - left;
    output->slice = slice;
    output->number = tile.m;
    output->rows = m - first < TILE_M ? (int)(m - first) : TILE_M;
  }

#if defined(OPERATION_GEMM_NN)
  A a(a_elements, first, m, (int)k);
  B b(b_elements, left, n, n);
#elif defined(OPERATION_GEMM_NT)
  A a(a_elements, first, m, (int)k);
  B b(b_elements, left, n, (int)k);
#elif defined(OPERATION_GEMM_TN)
  A a(a_elements, first, m, (int)m);
  B b(b_elements, left, n, n);
#elif defined(OPERATION_CONV2D_FPROP)
  const WindowRows rows{a_elements + group * conv.group_c, first, m,
                        Axis{conv.h, conv.r, conv.stride_h, conv.step_h, -conv.top},
                        Axis{conv.w, conv.s, conv.stride_w, conv.step_w, -conv.left}, conv.p, conv.q, conv.rows,
                        conv.columns, conv.c, conv.group_c};
  A a(rows);
  B b(b_elements + group * n * k, left, n, (int)k);
#elif defined(OPERATION_CONV2D_DGRAD)
  const WindowRows rows{a_elements + group * conv.group_k, first, m, vertical.axis, horizontal.axis, phase_rows,
                        phase_columns, by_rows, by_columns, conv.k, conv.group_k};
  const int filter_elements = conv.r * conv.s * conv.group_c;
  const FilterTaps taps{b_elements, group * conv.group_k * filter_elements, left, n, conv.group_c, conv.s,
                        filter_elements, vertical, horizontal, conv.group_k};
  A a(rows);
  B b(taps);
#elif defined(OPERATION_CONV2D_WGRAD)
  const WindowTaps taps{b_elements + group * conv.group_c, left, n,
                        Axis{conv.h, conv.r, conv.stride_h, conv.step_h, -conv.top},
                        Axis{conv.w, conv.s, conv.stride_w, conv.step_w, -conv.left}, conv.p, conv.q, conv.c,
                        conv.group_c};
  A a(a_elements + group * conv.group_k, first, m, conv.k);
  B b(taps);
#endif

  main_loop(a, b, Run(k, slice, epilogue.slices), place, shared, sum);
  cb_sync();  // shared memory is free again, and the output's place is known to all
#if !defined(OPERATION_CONV2D_DGRAD) && !defined(OPERATION_CONV2D_WGRAD)
  if (epilogue.statistics) keep_statistics(epilogue, *output, place, sum, shared);
#endif
  store(epilogue, *output, place, sum, shared);
}
