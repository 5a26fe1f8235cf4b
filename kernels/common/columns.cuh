// SPDX-License-Identifier: MIT
//
// An array (rows, channels) as blocks see it: lanes over the channels, the rest of the block over the rows.
//
//             lanes * V channels, block y
//            +-----+-----+-----+-----+
//            | t0  | t1  | t2  | t3  |  row lane 0         lanes = 4: a warp has 8 row lanes, the block 64;
//            | t4  | t5  | t6  | t7  |  row lane 1         a thread keeps its V channels and steps down the
//            | ... |     |     |     |  ...                block's rows, so what belongs to a channel is
//            +-----+-----+-----+-----+                     loaded once and its sums stay in registers
//
// lanes is a power of two, 32 at most.  V is WIDE where channels are a multiple of it and all pointers are
// aligned, otherwise 1; the host chooses both.  Sums are added in one order for any schedule.
#pragma once

#include "common/elements.cuh"

struct Column {
  int lane;          // among the lanes over channels
  int row_lane;      // among the lanes over rows
  int num_row_lanes;
};

CB_DEVICE Column column_of_thread(int lanes) {
  return {cb_thread() & (lanes - 1), cb_thread() / lanes, THREADS / lanes};
}

// Number of this block over the columns, where there may be more than a grid has in y: the rest goes on in z.
CB_DEVICE int column_block() { return (int)(cb_block_z() * cb_num_blocks_y() + cb_block_y()); }

// Rows [begin, end) of tile `tile`.
struct Rows {
  i64 begin;
  i64 end;
};

CB_DEVICE Rows rows_of_tile(u32 tile, int rows_per_tile, i64 rows) {
  const i64 begin = (i64)tile * rows_per_tile;
  return {begin, begin + rows_per_tile < rows ? begin + rows_per_tile : rows};
}

#ifndef REVERSED_SUMS
#define REVERSED_SUMS 0
#endif

// The rows that this block sums, by places: its tile's.  With -DREVERSED_SUMS=1 place 0 is the last row, and blocks take
// turns at as many rows as they have row lanes.  The L2 cache still has the last rows that the launch before wrote, and
// then the first ones for a launch that reads them next.
struct SummedRows : Rows {
  i64 num_rows;
  int step;  // from a row lane's place to its next

  CB_DEVICE i64 row(i64 place) const { return REVERSED_SUMS ? num_rows - 1 - place : place; }
  // Number of the rows.
  CB_DEVICE i64 count(int num_row_lanes) const {
    if constexpr (!REVERSED_SUMS) return end - begin;
    const i64 left = (end - begin) % step;
    return (end - begin) / step * num_row_lanes + (left < num_row_lanes ? left : num_row_lanes);
  }
};

CB_DEVICE SummedRows summed_rows(int rows_per_tile, i64 num_rows, int lanes) {
  const int num_row_lanes = THREADS / lanes;
  if constexpr (!REVERSED_SUMS) return {rows_of_tile(cb_block_x(), rows_per_tile, num_rows), num_rows, num_row_lanes};
  return {{(i64)cb_block_x() * num_row_lanes, num_rows}, num_rows, (int)cb_num_blocks_x() * num_row_lanes};
}

// Vectors of a gradient and of what it belongs to, both on their way.
template <int V>
struct Pair {
  Vec<CB_ELEMENT, V> dy;
  Vec<CB_ELEMENT, V> x;
};

// V floats of a channel vector such as mean or gamma, converted from how they are stored.
template <int V, class T>
CB_DEVICE void load_channels(const T* pointer, float (&values)[V]) {
  CB_UNROLL
  for (int v = 0; v < V; ++v) values[v] = to_float(pointer[v]);
}

// Floats of shared memory that share_sums needs for each quantity: a value of each channel from each warp.
constexpr int COLUMN_SHARED = WARPS * 32 * WIDE;

// Leave every warp's sums in shared memory; block_sum() then gives the block's.  All threads call it.
template <int Q, int V>
CB_DEVICE void share_sums(float (&sums)[Q][V], int lanes, float* shared) {
  CB_NO_UNROLL
  for (int bits = lanes; bits < 32; bits *= 2) {
    CB_UNROLL
    for (int q = 0; q < Q; ++q) {
      CB_UNROLL
      for (int v = 0; v < V; ++v) sums[q][v] += cb_shuffle_xor(sums[q][v], bits);
    }
  }
  if (cb_lane() < lanes) {
    CB_UNROLL
    for (int q = 0; q < Q; ++q) {
      CB_UNROLL
      for (int v = 0; v < V; ++v) shared[((cb_warp() * Q + q) * lanes + cb_lane()) * V + v] = sums[q][v];
    }
  }
  cb_sync();
}

// Sum of quantity q over the block, for its channel number i; width = lanes * V channels.
template <int Q>
CB_DEVICE float block_sum(const float* shared, int q, int i, int width) {
  float sum = 0.0f;
  CB_UNROLL
  for (int warp = 0; warp < WARPS; ++warp) sum += shared[(warp * Q + q) * width + i];
  return sum;
}

// Write the block's sums to its tile of partials[tile][Q][channels], from channel `first` on.  All threads call it.
template <int Q, int V>
CB_DEVICE void store_tile(float (&sums)[Q][V], float* partials, int first, int channels, int lanes, float* shared) {
  share_sums(sums, lanes, shared);
  float* tile = partials + (i64)cb_block_x() * Q * channels;
  CB_NO_UNROLL
  for (int i = cb_thread(); i < lanes * V && first + i < channels; i += THREADS) {
    CB_UNROLL
    for (int q = 0; q < Q; ++q) tile[q * channels + first + i] = block_sum<Q>(shared, q, i, lanes * V);
  }
}

// --- second stage: partial results of many tiles, 8 columns by 32 groups of tiles in a block ---

constexpr int FINISH_LANES = 8;

// Column of partials that this thread works on.
CB_DEVICE int finish_column() { return (int)cb_block_x() * FINISH_LANES + (cb_thread() & (FINISH_LANES - 1)); }

// Sum of partials[tile][column] over all tiles; valid in the threads of the first group.  All threads call it.
CB_DEVICE float finish_sum(const float* partials, int tiles, int columns, float* shared) {
  const int column = finish_column();
  float sums[1][1] = {};
  if (column < columns) {
    walk<LOADS>(
        cb_thread() / FINISH_LANES, tiles, THREADS / FINISH_LANES,
        [&](i64 tile) { return partials[tile * columns + column]; }, [&](i64, float value) { sums[0][0] += value; });
  }
  share_sums(sums, FINISH_LANES, shared);
  return cb_thread() < FINISH_LANES ? block_sum<1>(shared, 0, cb_thread(), FINISH_LANES) : 0.0f;
}
