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

// The results of this block: first row and column of a tile, and the sample; its head is the grid's second axis.
template <int TILE>
struct HeadsTile {
  int m, n;
  i64 sample;

  CB_DEVICE explicit HeadsTile(const HeadsProduct& product) {
    const u32 tiles_m = (u32)((product.m + TILE - 1) / TILE), tiles_n = (u32)((product.n + TILE - 1) / TILE);
    const u32 number = cb_block_x() % (tiles_m * tiles_n);
    sample = cb_block_x() / (tiles_m * tiles_n);
    m = (int)(number / tiles_n) * TILE;
    n = (int)(number % tiles_n) * TILE;
  }
};

// Elements before the first of this block's head.
CB_DEVICE i64 begin_of(const Heads& heads, i64 sample) {
  return sample * heads.sample_stride + (i64)cb_block_y() * heads.head_stride;
}
