// SPDX-License-Identifier: MIT
//
// An array (rows, columns) as blocks see it whose rows are reduced: threads side by side over the columns.
//
// `lanes` threads share a row and step over its columns: a power of two up to a warp, or the whole block where rows are
// long; the host chooses.  Blocks step over the rows.
#pragma once

#include "common/elements.cuh"

struct Maximum {
  CB_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }  // a NaN comes back in the row's sum
};
struct Sum {
  CB_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Combine a value over the threads of a row, in one order; all of them get it.  All threads call it.
template <class Combine>
CB_DEVICE float combine_row(float value, int lanes, float* shared, Combine combine) {
  CB_NO_UNROLL
  for (int bits = 1; bits < lanes && bits < 32; bits *= 2) {
    const float other = cb_shuffle_xor(value, bits);
    // The lower lane's value first, so that both lanes get the same bits.
    value = cb_thread() & bits ? combine(other, value) : combine(value, other);
  }
  if (lanes <= 32) return value;
  cb_sync();  // what is shared may still be read from the last time
  if (cb_lane() == 0) shared[cb_warp()] = value;
  cb_sync();
  value = shared[0];
  CB_UNROLL
  for (int warp = 1; warp < WARPS; ++warp) value = combine(value, shared[warp]);
  return value;
}

// This thread's place in its row, and whether there is one: at the end some threads only keep the others company.
struct RowWalk {
  i64 row;
  int lane;
  int lanes;
  int columns;
  bool active;
};

// body(at) for each row of this block's; all threads of the block come along.
template <class Body>
CB_DEVICE void for_rows(i64 num_rows, int columns, int lanes, Body body) {
  const int at_once = THREADS / lanes;
  CB_NO_UNROLL
  for (i64 first = (i64)cb_block_x() * at_once; first < num_rows; first += (i64)cb_num_blocks_x() * at_once) {
    const i64 row = first + cb_thread() / lanes;
    body(RowWalk{row, cb_thread() & (lanes - 1), lanes, columns, row < num_rows});
  }
}
