// SPDX-License-Identifier: MIT
//
// The geometry of depthwise passes: which input a tap of an output reads, and what a thread owns.
//
// Along each axis all three passes are one relation of output o, input i and tap r (turned around in dgrad):
//
//     i * UP = o * DOWN - pad + r          fprop, wgrad: DOWN = STRIDE, UP = 1;   dgrad: DOWN = 1, UP = STRIDE
//
// Outputs go in groups of UP, so that every output of one place in its group is reached by the same taps and no
// tap is multiplied in vain.  With the origins that host code works out,
//
//     output  o = g * UP + u + out         reads     input  i = g * DOWN + a + in     through tap  UP * a - u
//
// of group g, for 0 <= u < UP, 0 <= a <= LAST.  A thread owns a channel vector of a strip, GROUPS groups wide and
// `strip_rows` groups high, and walks down it one row of groups a step: each row of inputs is loaded once and used
// for all OPEN rows of groups that it reaches.
//
//     FILTER 3, STRIDE 1                          step g: row g + 2 of inputs (a = LAST) arrives and adds to
//     inputs    . # # # # .   COLUMNS = 6           row g + 2 of outputs by its taps of row 0
//                 # # # #     GROUPS  = 4           row g + 1               by its taps of row 1
//                 # # # #                           row g                   by its taps of row 2: complete
#pragma once

#include "common/device.cuh"

#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif
#ifndef FILTER
#define FILTER 3
#endif
#ifndef STRIDE
#define STRIDE 1
#endif
#ifndef VECTOR
#define VECTOR 4
#endif

constexpr int THREADS = 128;
constexpr int TAPS = FILTER * FILTER;

static_assert(FILTER == 3 || FILTER == 5, "more taps leave no registers: they go to the grouped kernels");
static_assert(STRIDE == 1 || STRIDE == 2, "a group has GROUPS * UP = 4 columns of outputs");
static_assert(VECTOR * sizeof(CB_ELEMENT) <= 16, "a load is of at most 16 bytes");
static_assert(VECTOR == 1 || VECTOR == 4 || VECTOR == 8, "taps lie in shared memory by fours");

// Mirrored by native/depthwise.py: 32-bit numbers only.
struct Window {
  int in_h, in_w, out_h, out_w, c;          // extents
  int in_top, in_left, out_top, out_left;   // origins, as above
  int group_rows;                           // rows of groups in an image
  int strip_rows;                           // and in a strip
  int num_strips, num_columns;              // strips over an image's height and width
  int slab_vectors;                         // channel vectors of a block
  u32 num_items;                            // strips in the batch
};

template <int UP_, int DOWN_>
struct Walk {
  static constexpr int UP = UP_, DOWN = DOWN_;
  static constexpr int LAST = (FILTER - 1) / UP;
  static constexpr int OPEN = LAST / DOWN + 1;
  static constexpr int GROUPS = 4 / UP;
  static constexpr int COLUMNS = (GROUPS - 1) * DOWN + LAST + 1;
};

// Place of a strip: its image, its rows of groups, its first column of groups.
struct Strip {
  i64 n;
  int first, last;
  int column;
};

CB_DEVICE Strip strip_of(const Window& window, u32 item, int groups) {
  const u32 above = item / (u32)window.num_columns;
  const u32 n = above / (u32)window.num_strips;
  const int first = (int)(above - n * (u32)window.num_strips) * window.strip_rows;
  const int last = first + window.strip_rows;
  return {(i64)n, first, last < window.group_rows ? last : window.group_rows,
          (int)(item - above * (u32)window.num_columns) * groups};
}

// Element 0 of the given channel in column `left`, which may lie outside, of row 0 of image n.
template <class T>
CB_DEVICE T* image(T* base, i64 n, int h, int w, int c, int left, int channel) {
  return base + ((n * h * w + left) * c + channel);
}

// Bit j tells whether first + j lies in [0, extent).
template <int COUNT>
CB_DEVICE u32 inside_bits(int first, int extent) {
  u32 bits = 0;
  CB_UNROLL
  for (int j = 0; j < COUNT; ++j) bits |= (u32)((u32)(first + j) < (u32)extent) << j;
  return bits;
}

// Whether a row of inputs is in the image and for this strip; at DOWN = 2 the first step's first row may be above it.
template <int DOWN>
CB_DEVICE bool row_is_read(int row, int top, int extent) {
  return (DOWN == 1 || row >= top) && (u32)row < (u32)extent;
}

// Load the neighbouring pixels whose bit of `inside` is set; the others read as zeros.
template <int N, int COUNT>
CB_DEVICE void load_row(Vec<CB_ELEMENT, N> (&pixels)[COUNT], const CB_ELEMENT* row, int c, u32 inside) {
  CB_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    pixels[j] = {};
    if (inside >> j & 1) pixels[j] = cb_load<CB_ELEMENT, N>(row + j * c);
  }
}
