// SPDX-License-Identifier: MIT
//
// A matrix product or a pass of a convolution, as one tile of a block: what families of tiled kernels have in common.
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
// The batch enters a convolution's pixels and nothing else.  The input's gradient is cut into stride_h x stride_w
// phases, each a convolution of dy at stride 1 with its own taps: no tap is wasted, and a phase without any writes what
// its epilogue makes of zero.
//
// A family defines, before it includes this:
//
//   CB_ELEMENT               storage of the elements
//   TILE_M, TILE_N, TILE_K   the block's tile, and its step along gemm_k
//   VECTOR                   elements of a load
//   NUM_STAGES               buffers in shared memory (common/ring.cuh)
//   MIN_BLOCKS               blocks that an SM is to hold, which bounds registers
//   DECLARE_SHARED(name)     a statement: its buffers in shared memory, as `name`
//   NUM_THREADS              a constant: threads of a block, at least TILE_M
//   AlongK<EXTENT>, AlongOuter<EXTENT>   how threads divide a tile whose neighbours in memory lie along gemm_k, or not
//   Operand<Source, Map>     how a tile of a source (operand_sources.cuh) comes to shared memory: see common/ring.cuh
//   Place, Sums              a thread's place in the tile, and its part of the sums, zeros at first
//   main_loop(a, b, run, place, shared, sums)         multiplies the tiles of a run (product_run.cuh)
//   store(epilogue, output, place, sums, shared)      hands the sums to common/epilogue.cuh
//
// and is compiled with one -DOPERATION_... of the table.
//
//   grid      x: tiles (common/tile_order.cuh), the phase slowest; z: groups x slices of gemm_k.
//             With -DSIDE_BY_SIDE groups of GEMM_NN and GEMM_NT are products, the matrices of each behind the last's
//   needs     contiguous extents of A and B are multiples of VECTOR, their addresses of VECTOR elements.
//             gemm_n and one image below 2^31 elements; gemm_m and offsets of the batch are 64-bit
//   slices    of a split gemm_k leave their sums in `partials`; split_k_reduce adds them up and finishes them
#pragma once

#ifndef CB_ELEMENT
#error "a family defines CB_ELEMENT: storage of the elements"
#endif
#ifndef TILE_M
#error "a family defines TILE_M: rows of a block's tile"
#endif
#ifndef TILE_N
#error "a family defines TILE_N: columns of a block's tile"
#endif
#ifndef TILE_K
#error "a family defines TILE_K: its step along gemm_k"
#endif
#ifndef VECTOR
#error "a family defines VECTOR: elements of a load"
#endif
#ifndef NUM_STAGES
#error "a family defines NUM_STAGES: buffers in shared memory"
#endif
#ifndef MIN_BLOCKS
#error "a family defines MIN_BLOCKS: blocks that an SM is to hold"
#endif
#ifndef DECLARE_SHARED
#error "a family defines DECLARE_SHARED(name): its buffers in shared memory"
#endif

#include "common/conv_geometry.cuh"
#include "common/epilogue.cuh"
#include "common/operand_sources.cuh"
#include "common/product_run.cuh"
#include "common/structs.cuh"
#include "common/tile_order.cuh"

// Which way each operand comes.
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
#else
#error "a family is compiled with one -DOPERATION_... of the table above"
#endif

CB_KERNEL(NUM_THREADS, MIN_BLOCKS)
ENTRY(const CB_ELEMENT* a_elements, const CB_ELEMENT* b_elements, CB_ELEMENT* out, const CB_ELEMENT* bias,
      const float* scale, const float* shift, const CB_ELEMENT* residual, const CB_ELEMENT* mask, float* statistics,
      float* partials, const Product product, const Output whole, [[maybe_unused]] const Conv conv) {
  cb_dependent_launch();
  const Epilogue epilogue{whole, out, bias, scale, shift, residual, mask, statistics, partials};
  DECLARE_SHARED(shared);
  const Place place;
  const int slice = (int)(cb_block_z() % (u32)epilogue.slices), group = (int)(cb_block_z() / (u32)epilogue.slices);
  Sums sums;

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
#ifdef SIDE_BY_SIDE
  a_elements += group * m * k;
  b_elements += group * k * product.n;
  [[maybe_unused]] const i64 rows_before = group * m;
#else
  [[maybe_unused]] constexpr i64 rows_before = 0;
#endif
  const i64 first = (i64)tile.m * TILE_M;
  const int left = tile.n * TILE_N, n = product.n;
  if (first >= m) return;  // a phase with fewer pixels than the largest

  // Where the tile goes, worked out now and kept in shared memory: nothing of it stays in registers.
  CB_SHARED(OutputTile, output, 1);
#if defined(OPERATION_CONV2D_WGRAD) || defined(SIDE_BY_SIDE)
  const int first_column = left;
#else
  const int first_column = group * n + left;
#endif
  static_assert(TILE_M <= NUM_THREADS, "a thread for each row");
  if (cb_thread() < TILE_M) {
#if defined(OPERATION_CONV2D_DGRAD)
    const i64 image_pixels = (i64)phase_rows * phase_columns;
    const i64 image = first / image_pixels;
    const int within = (int)(first - image * image_pixels) + cb_thread();
    const int line = divide(within, by_columns), ahead = divide(line, by_rows);
    const int h = phase_row + (line - ahead * phase_rows) * conv.stride_h;
    const int w = phase_column + (within - line * phase_columns) * conv.stride_w;
    const i64 base = image * conv.h * conv.w;
    const int further = (ahead * conv.h + h) * conv.w + w;
#elif defined(OPERATION_CONV2D_WGRAD)
    const i64 base = group * m + first;
    const int further = cb_thread();
#else
    const i64 base = rows_before + first;
    const int further = cb_thread();
#endif
    output->set_row(cb_thread(), base, further, first + cb_thread() < m);
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

  main_loop(a, b, Run(k, slice, epilogue.slices), place, shared, sums);
  cb_sync();  // shared memory is free again, and the output's place is known to all
  store(epilogue, *output, place, sums, shared);
}
