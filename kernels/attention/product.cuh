// SPDX-License-Identifier: MIT
//
// What a product of heads is: as the host hands it over, field by field in cubatch/engine/native/heads.py.
#pragma once

#include "common/device.cuh"

// Where the matrix of each head of each sample lies: elements from one to the next, and from a row to the next.
struct Heads {
  i64 sample_stride;
  int head_stride;
  int stride;
};

struct HeadsProduct {
  Heads a, b, c;
  int m, n, k;
  float factor;
};

// Elements before the first of this block's head.
CB_DEVICE i64 begin_of(const Heads& heads, i64 sample) {
  return sample * heads.sample_stride + (i64)cb_block_y() * heads.head_stride;
}
