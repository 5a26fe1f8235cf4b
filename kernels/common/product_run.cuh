// SPDX-License-Identifier: MIT
//
// What a block of a product owns: a part of the output, and a part of gemm_k that it walks along.
#pragma once

#include "common/device.cuh"

// What part of the output a block owns.  In shared memory, so that it takes no registers during the main loop.
struct OutputTile {
  i64 first_row;        // of the whole output, which the tile's rows are counted from
  int further[TILE_M];  // rows after that; negative where the row does not exist
  int first_column;     // of the whole output
  int columns;          // of this tile that exist
  int slice;            // of gemm_k
  int number, rows;     // of the tile along gemm_m, and how many of its rows exist

  CB_DEVICE void set_row(int i, i64 base, int ahead, bool exists) {
    further[i] = exists ? ahead : -1;
    if (i == 0) first_row = base;
  }
  // Number of a row's element in the output, negative where the row does not exist.
  CB_DEVICE i64 place(int i, int column, int columns_of_all) const {
    return further[i] < 0 ? -1 : (first_row + further[i]) * columns_of_all + first_column + column;
  }
};

// Part of gemm_k: a run of tiles.  What does not fill a tile comes first, so that no later tile is checked for its end.
struct Run {
  i64 first;   // place along gemm_k
  int count;   // places of the first tile that exist
  int tiles;

  CB_DEVICE Run(i64 extent, int slice, int slices) {
    const int all = (int)((extent + TILE_K - 1) / TILE_K);
    const int each = (all + slices - 1) / slices;
    const int begin = slice * each, end = begin + each < all ? begin + each : all;
    const int residue = (int)(extent - (i64)(all - 1) * TILE_K);
    tiles = end - begin;
    first = begin ? residue + (i64)(begin - 1) * TILE_K : 0;
    count = begin ? TILE_K : residue;
  }
};
