// SPDX-License-Identifier: MIT
//
// Which tile of the output a block owns: neighbours in time should share operands in the L2 cache.
//
// Tiles are numbered in bands of `band` tile rows; inside a band the row is fastest:
//
//   band = 2:   0 2 4      band = 1:   0 1 2      blocks that run together then cover a nearly square
//               1 3 5                  3 4 5      piece of the output.  With few tile columns a band of
//               6 8 10                 6 7 8      one row does: a whole row of tiles runs at a time.
#pragma once

#include "common/device.cuh"

struct TilePlace {
  int m, n;
};

CB_DEVICE TilePlace tile_place(u32 index, u32 tiles_m, u32 tiles_n, u32 band) {
  const u32 band_tiles = band * tiles_n;
  const u32 number = index / band_tiles;
  const u32 inside = index - number * band_tiles;
  const u32 first = number * band;
  const u32 height = tiles_m - first < band ? tiles_m - first : band;
  const u32 column = inside / height;
  return TilePlace{(int)(first + inside - column * height), (int)column};
}
