// SPDX-License-Identifier: MIT
//
// How a thread walks down its strip, one row of groups a step: each row of inputs is loaded once and used for all
// OPEN rows of groups that it reaches.  LAST is the last input of a group along an axis.  (terms: depthwise/window.cuh)
//
//     FILTER 3, STRIDE 1                          step g: row g + 2 of inputs (a = LAST) arrives and adds to
//     inputs    . # # # # .   COLUMNS = 6           row g + 2 of outputs by its taps of row 0
//                 # # # #     GROUPS  = 4           row g + 1               by its taps of row 1
//                 # # # #                           row g                   by its taps of row 2: complete
#pragma once

#include "common/held.cuh"
#include "depthwise/window.cuh"

#ifndef FILTER
#define FILTER 3
#endif
#ifndef VECTOR
#define VECTOR 4
#endif

constexpr int TAPS = FILTER * FILTER;

static_assert(FILTER == 3 || FILTER == 5 || FILTER == 7, "other filters go to the grouped kernels");
static_assert(VECTOR * sizeof(CB_ELEMENT) <= 16, "a load is of at most 16 bytes");
static_assert(VECTOR == 2 || VECTOR == 4 || VECTOR == 8, "taps lie in shared memory by twos or fours");

template <int UP_, int DOWN_>
struct Walk {
  static constexpr int UP = UP_, DOWN = DOWN_;
  static constexpr int LAST = (FILTER - 1) / UP;
  static constexpr int OPEN = LAST / DOWN + 1;
  static constexpr int GROUPS = STRIP_COLUMNS / UP;
  static constexpr int COLUMNS = (GROUPS - 1) * DOWN + LAST + 1;
};

// Bit j is whether first + j lies in [0, extent).
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
CB_DEVICE void load_row(Held<Vec<CB_ELEMENT, N>> (&pixels)[COUNT], const CB_ELEMENT* row, int c, u32 inside) {
  CB_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    pixels[j] = {};
    if (inside >> j & 1) pixels[j].put(cb_load<CB_ELEMENT, N>(row + j * c));
  }
}
