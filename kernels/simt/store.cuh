// SPDX-License-Identifier: MIT
//
// After the main loop: a thread's tile of sums goes through the epilogue to the output, or to a slice's partials.
#pragma once

#include "common/epilogue.cuh"
#include "simt/main_loop.cuh"

// What part of the output a block owns.  In shared memory, so that it takes no registers during the main loop.
struct OutputTile {
  i64 place[TILE_M];   // number of a row's first element in the output; negative where the row does not exist
  int first_column;    // of the whole output
  int columns;         // of this tile that exist
  int slice;           // of gemm_k
  int number, rows;    // of the tile along gemm_m, and how many of its rows exist
};

constexpr int COPIED_ROWS = 2, COPIED = COPIED_ROWS * PIECE;  // of a thread's sums at a time
constexpr int ACROSS = THREAD_N / PIECE;

// Copy 2 x 4 of a thread's sums to its own place in shared memory.  Sums are registers, which cannot be indexed: a tree
// of uniform branches ends at stores.
template <int LOW, int HIGH>
CB_DEVICE void copy_sums(const float (&sum)[THREAD_M][THREAD_N], int wanted, float* copy) {
  if constexpr (HIGH - LOW > 1) {
    constexpr int MIDDLE = (LOW + HIGH) / 2;
    if (wanted < MIDDLE) {
      copy_sums<LOW, MIDDLE>(sum, wanted, copy);
    } else {
      copy_sums<MIDDLE, HIGH>(sum, wanted, copy);
    }
  } else {
    constexpr int M = LOW / ACROSS * COPIED_ROWS, N = LOW % ACROSS * PIECE;
    CB_UNROLL
    for (int i = 0; i < COPIED_ROWS; ++i) {
      const Vec<float, 4> row{{sum[M + i][N], sum[M + i][N + 1], sum[M + i][N + 2], sum[M + i][N + 3]}};
      cb_write<float, 4>(copy + i * NUM_THREADS * PIECE, row);
    }
  }
}

// Store a thread's sums where that is rare: any activation, any number of columns; one copy of the code for all.
CB_DEVICE void store_each(const Epilogue& epilogue, const OutputTile& tile, const ThreadPlace& thread,
                          const float (&sum)[THREAD_M][THREAD_N], float* shared) {
  constexpr int COPIES = THREAD_M / COPIED_ROWS * ACROSS;
  static_assert(NUM_THREADS * COPIED <= NUM_STAGES * TILE_K * (TILE_M + TILE_N), "what is copied at a time fits");
  float* copy = shared + cb_thread() * PIECE;
  CB_NO_UNROLL
  for (int number = 0; number < COPIES; ++number) {
    copy_sums<0, COPIES>(sum, number, copy);
    CB_NO_UNROLL
    for (int i = 0; i < COPIED; ++i) {
      const i64 row = tile.place[thread.row(number / ACROSS * COPIED_ROWS + i / PIECE)];
      const int column = thread.column(number % ACROSS * PIECE + i % PIECE);
      if (row < 0 || column >= tile.columns) continue;
      const float value = copy[i / PIECE * NUM_THREADS * PIECE + i % PIECE];
      if (epilogue.slices > 1) {
        epilogue.partials[tile.slice * epilogue.elements + row + column] = value;
      } else {
        finish_one(epilogue, row + column, tile.first_column + column, value);
      }
    }
  }
}

// Store a thread's sums, one piece of 4 x 4 at a time.
CB_DEVICE void store(const Epilogue& epilogue, const OutputTile& tile, const ThreadPlace& thread,
                     const float (&sum)[THREAD_M][THREAD_N], float* shared) {
  if (!epilogue.wide || epilogue.activation > ACTIVATION_RELU) {
    store_each(epilogue, tile, thread, sum, shared);
    return;
  }
  CB_UNROLL
  for (int m = 0; m < THREAD_M; m += PIECE) {
    CB_UNROLL
    for (int n = 0; n < THREAD_N; n += PIECE) {
      const int column = thread.column(n);
      if (column >= tile.columns) continue;
      float piece[PIECE][PIECE];
      i64 place[PIECE];
      CB_UNROLL
      for (int i = 0; i < PIECE; ++i) {
        const i64 row = tile.place[thread.row(m + i)];
        place[i] = row < 0 ? -1 : row + column;
        CB_UNROLL
        for (int j = 0; j < PIECE; ++j) piece[i][j] = sum[m + i][n + j];
      }
      if (epilogue.slices > 1) {
        CB_UNROLL
        for (int i = 0; i < PIECE; ++i) {
          const Vec<float, 4> row{{piece[i][0], piece[i][1], piece[i][2], piece[i][3]}};
          if (place[i] >= 0) cb_write<float, 4>(epilogue.partials + tile.slice * epilogue.elements + place[i], row);
        }
      } else {
        finish_wide<PIECE>(epilogue, place, tile.first_column + column, piece);
      }
    }
  }
}

// Sum over the block's rows of each of a thread's columns: lanes, then warps, always in the same order.
CB_DEVICE void sum_columns(float (&value)[THREAD_N], float* shared, const ThreadPlace& place) {
  constexpr int WARPS_M = TILE_M / WARP_TILE_M;
  const int warp_m = cb_warp() / WARPS_N;
  CB_UNROLL
  for (int j = 0; j < THREAD_N; ++j) {
    value[j] += cb_shuffle_xor(value[j], 1);
    value[j] += cb_shuffle_xor(value[j], 16);
    if ((cb_lane() & 17) == 0) shared[warp_m * TILE_N + place.column(j)] = value[j];
  }
  cb_sync();
  CB_UNROLL
  for (int j = 0; j < THREAD_N; ++j) {
    value[j] = 0.0f;
    CB_UNROLL
    for (int warp = 0; warp < WARPS_M; ++warp) value[j] += shared[warp * TILE_N + place.column(j)];
  }
  cb_sync();
}

// Statistics of the block's rows for a batch norm that follows: count, mean, sum of squared deviations from that mean.
// Two passes over registers, so nothing cancels; a bias moves the mean only.
CB_DEVICE void keep_statistics(const Epilogue& epilogue, const OutputTile& tile, const ThreadPlace& place,
                               const float (&sum)[THREAD_M][THREAD_N], float* shared) {
  static_assert(TILE_M / WARP_TILE_M * TILE_N <= NUM_STAGES * TILE_K * (TILE_M + TILE_N), "partial sums fit");
  const float count = (float)tile.rows;
  float mean[THREAD_N], squares[THREAD_N];
  CB_UNROLL
  for (int j = 0; j < THREAD_N; ++j) {
    mean[j] = 0.0f;
    CB_UNROLL
    for (int i = 0; i < THREAD_M; ++i) mean[j] += place.row(i) < tile.rows ? sum[i][j] : 0.0f;
  }
  sum_columns(mean, shared, place);
  CB_UNROLL
  for (int j = 0; j < THREAD_N; ++j) {
    mean[j] /= count;
    squares[j] = 0.0f;
    CB_UNROLL
    for (int i = 0; i < THREAD_M; ++i) {
      const float deviation = place.row(i) < tile.rows ? sum[i][j] - mean[j] : 0.0f;
      squares[j] = fmaf(deviation, deviation, squares[j]);
    }
  }
  sum_columns(squares, shared, place);
  if (place.m != 0) return;
  float* target = epilogue.statistics + (i64)tile.number * 3 * epilogue.columns + tile.first_column;
  CB_UNROLL
  for (int j = 0; j < THREAD_N; ++j) {
    const int column = place.column(j);
    if (column >= tile.columns) continue;
    const float bias = epilogue.bias ? to_float(epilogue.bias[tile.first_column + column]) : 0.0f;
    target[column] = count;
    target[epilogue.columns + column] = mean[j] + bias;
    target[2 * epilogue.columns + column] = squares[j];
  }
}
