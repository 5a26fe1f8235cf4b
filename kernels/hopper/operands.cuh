// SPDX-License-Identifier: MIT
//
// How each operation's operands come to shared memory, and how wgmma finds them there.
//
// A tile of A is TILE_M places along gemm_m, of B TILE_N along gemm_n; "outer" below.  In memory the contiguous axis is
//
//   gemm_k   one box of [outer][128 bytes of gemm_k]: pixels or filters, with their channels
//   outer    boxes of [TILE_K][64 outer] side by side; "turned", 16-bit elements only: wgmma reads tf32 along gemm_k
//            alone, so that B of a float NN or DGRAD comes transposed, b[n, k] or w[tap, c, k] (see the host's launch)
//
// A convolution's pixels of few channels overlap: the taps of a filter's row are channels of one pixel then
// (cubatch/kernels/tensor_map.py).
//
// Every operand but a matrix is one tap of a filter at a time, so that what lies outside of the image, beyond the last
// channel or the last pixel is zero on both sides and nothing of another tap is met.
#pragma once

#include "hopper/walk.cuh"

#if defined(OPERATION_GEMM_NT)
#define ENTRY gemm_nt
constexpr bool A_TURNED = false, B_TURNED = false;
#elif defined(OPERATION_GEMM_NN)
#define ENTRY gemm_nn
constexpr bool A_TURNED = false, B_TURNED = sizeof(CB_ELEMENT) == 2;
#elif defined(OPERATION_GEMM_TN)
#define ENTRY gemm_tn
constexpr bool A_TURNED = true, B_TURNED = true;
#elif defined(OPERATION_CONV2D_FPROP)
#define ENTRY conv2d_fprop
constexpr bool A_TURNED = false, B_TURNED = false;
#elif defined(OPERATION_CONV2D_DGRAD)
#define ENTRY conv2d_dgrad
constexpr bool A_TURNED = false, B_TURNED = sizeof(CB_ELEMENT) == 2;
#elif defined(OPERATION_CONV2D_WGRAD)
#define ENTRY conv2d_wgrad
constexpr bool A_TURNED = true, B_TURNED = true;
#endif

constexpr int BOX = 64;  // outer places of a turned box
constexpr u32 BOX_BYTES = TILE_K * SWIZZLE_ROW;

static_assert(!SWAPPED || !A_TURNED, "filters are rows already: swapping would put taps and channels there");

// Each block of a cluster loads its share of B for all of them.
constexpr int B_SHARE = TILE_N / CLUSTER;
static_assert(B_SHARE % BOX == 0, "the share of a cluster's block is whole boxes");

// The pixel with the given number among all images.
struct Pixel {
  int n, row, column;

  CB_DEVICE Pixel(const Walk& walk, int number) {
    const int line = number / walk.columns;
    n = line / walk.rows;
    row = line - n * walk.rows;
    column = number - line * walk.columns;
  }
  // Where the first tap reads.
  CB_DEVICE int h(const Walk& walk) const { return row * walk.stride_h + walk.origin_h; }
  CB_DEVICE int w(const Walk& walk) const { return column * walk.stride_w + walk.origin_w; }
  // Go on by as many pixels as another's number.
  CB_DEVICE void advance(const Walk& walk, const Pixel& by) {
    column += by.column;
    row += by.row + (column >= walk.columns);
    if (column >= walk.columns) column -= walk.columns;
    n += by.n + (row >= walk.rows);
    if (row >= walk.rows) row -= walk.rows;
  }
};

#if defined(OPERATION_CONV2D_FPROP) || defined(OPERATION_CONV2D_DGRAD)
// Gathers the pixels of gemm_m, tap by tap.
struct Gather {
  Pixel pixel;
  int within, tap_h, tap_w;  // channels of the tap so far, in steps; the tap

  CB_DEVICE Gather(const Walk& walk, const Task& task) : pixel(walk, task.m) {
    const int tap = task.first / walk.depth;
    within = task.first - tap * walk.depth;
    tap_h = tap / walk.taps_w;
    tap_w = tap - tap_h * walk.taps_w;
  }
  CB_DEVICE void advance(const Walk& walk) {
    if (++within < walk.depth) return;
    within = 0;
    if (++tap_w < walk.taps_w) return;
    tap_w = 0;
    ++tap_h;
  }
};
#elif defined(OPERATION_CONV2D_WGRAD)
// Gathers the pixels of gemm_k for the taps and channels of gemm_n: columns are taps times boxes of 64 channels, the
// last box of a tap filled up with zeros; boxes beyond the last tap lie beyond its channels.
struct Gather {
  static constexpr int BOXES = B_SHARE / BOX;
  Pixel pixel, ahead;
  int channel[BOXES];
  u16 offset_h[BOXES], offset_w[BOXES];

  CB_DEVICE Gather(const Walk& walk, const Task& task, int first)
      : pixel(walk, task.first * TILE_K), ahead(walk, TILE_K) {
    CB_UNROLL
    for (int i = 0; i < BOXES; ++i) {
      const int box = first / BOX + i, number = box / walk.depth;
      const int tap = number < walk.taps ? number : walk.taps - 1, row = tap / walk.taps_w;
      channel[i] = (box - tap * walk.depth) * BOX;
      offset_h[i] = (u16)(row * walk.step_h);
      offset_w[i] = (u16)((tap - row * walk.taps_w) * walk.step_w);
    }
  }
  CB_DEVICE void advance(const Walk& walk) { pixel.advance(walk, ahead); }
};
#else
// Matrices: nothing to gather.
struct Gather {
  CB_DEVICE void advance(const Walk&) {}
};
#endif

// Issues the copies of a tile's steps, in order.
struct Loader {
  const TensorMap *a_map, *b_map;
  const Walk& walk;
  int m, n, step;  // n: of this block's share
  u32 rank;
  Gather gather;

  CB_DEVICE Loader(const TensorMap* a_map, const TensorMap* b_map, const Walk& walk, const Task& task, u32 rank)
      : a_map(a_map), b_map(b_map), walk(walk), m(task.m), n(task.n + (int)rank * B_SHARE), step(task.first),
        rank(rank),
#if defined(OPERATION_CONV2D_FPROP) || defined(OPERATION_CONV2D_DGRAD)
        gather(walk, task) {
#elif defined(OPERATION_CONV2D_WGRAD)
        gather(walk, task, n) {
#else
        gather() {
#endif
  }

  CB_DEVICE void load_a(unsigned char* to, u64* barrier) const {
#if defined(OPERATION_CONV2D_FPROP) || defined(OPERATION_CONV2D_DGRAD)
    cb_tma_load_im2col<1>(to, a_map, barrier, gather.within * TILE_K, gather.pixel.w(walk), gather.pixel.h(walk),
                          gather.pixel.n, (u16)(gather.tap_w * walk.step_w), (u16)(gather.tap_h * walk.step_h));
#else
    if constexpr (A_TURNED) {
      CB_UNROLL
      for (int i = 0; i < TILE_M; i += BOX) {
        cb_tma_load_2d<1>(to + i / BOX * BOX_BYTES, a_map, barrier, m + i, step * TILE_K);
      }
    } else {
      cb_tma_load_2d<1>(to, a_map, barrier, step * TILE_K, m);
    }
#endif
  }

  CB_DEVICE void load_b(unsigned char* tile, u64* barrier) const {
    unsigned char* to = tile + rank * (B_SHARE * SWIZZLE_ROW);
#if defined(OPERATION_CONV2D_FPROP)
    const int tap = gather.tap_h * walk.taps_w + gather.tap_w;
    cb_tma_load_3d<CLUSTER>(to, b_map, barrier, gather.within * TILE_K, tap, n);
#elif defined(OPERATION_CONV2D_DGRAD)
    const int tap = walk.first_tap + gather.tap_h * walk.tap_step_h + gather.tap_w * walk.tap_step_w;
    if constexpr (B_TURNED) {
      CB_UNROLL
      for (int i = 0; i < B_SHARE; i += BOX) {
        cb_tma_load_3d<CLUSTER>(to + i / BOX * BOX_BYTES, b_map, barrier, n + i, tap, gather.within * TILE_K);
      }
    } else {
      cb_tma_load_3d<CLUSTER>(to, b_map, barrier, gather.within * TILE_K, n, tap);
    }
#elif defined(OPERATION_CONV2D_WGRAD)
    CB_UNROLL
    for (int i = 0; i < Gather::BOXES; ++i) {
      cb_tma_load_im2col<CLUSTER>(to + i * BOX_BYTES, b_map, barrier, gather.channel[i], gather.pixel.w(walk),
                                  gather.pixel.h(walk), gather.pixel.n, gather.offset_w[i], gather.offset_h[i]);
    }
#else
    if constexpr (B_TURNED) {
      CB_UNROLL
      for (int i = 0; i < B_SHARE; i += BOX) {
        cb_tma_load_2d<CLUSTER>(to + i / BOX * BOX_BYTES, b_map, barrier, n + i, step * TILE_K);
      }
    } else {
      cb_tma_load_2d<CLUSTER>(to, b_map, barrier, step * TILE_K, n);
    }
#endif
  }

  CB_DEVICE void advance() {
    ++step;
    gather.advance(walk);
  }
};

// Descriptors of a stage's tiles, and how far on the next 32 bytes along gemm_k are: 32 bytes of each row, or 16 rows.
CB_DEVICE u64 describe_a(const unsigned char* tile, int sixty_four) {  // rows, counted from the tile's first
  return cb_matrix_descriptor(tile + sixty_four * (WGMMA_M * SWIZZLE_ROW), BOX_BYTES, SWIZZLE_ATOM);
}
CB_DEVICE u64 describe_b(const unsigned char* tile) { return cb_matrix_descriptor(tile, BOX_BYTES, SWIZZLE_ATOM); }
constexpr int PRODUCTS = SWIZZLE_ROW / 32;  // of a step
constexpr u64 A_AHEAD = (A_TURNED ? 16 * SWIZZLE_ROW : 32) >> 4, B_AHEAD = (B_TURNED ? 16 * SWIZZLE_ROW : 32) >> 4;
