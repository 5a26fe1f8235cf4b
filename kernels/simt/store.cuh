// SPDX-License-Identifier: MIT
//
// After the main loop: a thread's tile of sums goes through the epilogue to the output, or to a slice's partials.
#pragma once

#include "common/epilogue.cuh"
#include "simt/main_loop.cuh"

// Sums are registers, which cannot be indexed.  A thread moves a piece of them at a time to its own place in shared
// memory, and one copy of the code, in a loop, handles every piece: unrolled over a thread's tile, what a product may
// end with would be most of the kernel's text, and of the time to compile it.
constexpr int SHARED_FLOATS = NUM_STAGES * TILE_K * (row_floats(TILE_M) + row_floats(TILE_N));
constexpr int PIECE_ROWS = 2;  // the sums that are still to come leave no registers for more
constexpr int DOWN = THREAD_M / PIECE_ROWS, ACROSS = THREAD_N / PIECE;
static_assert(NUM_THREADS * PIECE_ROWS * PIECE <= SHARED_FLOATS, "a piece of every thread fits");

// Copy a thread's piece of the wanted number, counted down first: a tree of uniform branches ends at stores.
template <int LOW = 0, int HIGH = DOWN * ACROSS>
CB_DEVICE void copy_piece(const Sums& sums, int wanted, float* copy) {
  if constexpr (HIGH - LOW > 1) {
    constexpr int MIDDLE = (LOW + HIGH) / 2;
    if (wanted < MIDDLE) {
      copy_piece<LOW, MIDDLE>(sums, wanted, copy);
    } else {
      copy_piece<MIDDLE, HIGH>(sums, wanted, copy);
    }
  } else {
    constexpr int M = LOW % DOWN * PIECE_ROWS, N = LOW / DOWN * PIECE;
    CB_UNROLL
    for (int i = 0; i < PIECE_ROWS; ++i) {
      const Vec<float, 4> row{{sums.value[M + i][N], sums.value[M + i][N + 1], sums.value[M + i][N + 2],
                             sums.value[M + i][N + 3]}};
      cb_write<float, 4>(copy + i * NUM_THREADS * PIECE, row);
    }
  }
}

// A piece that was copied, in registers again.
struct Piece {
  float value[PIECE_ROWS][PIECE];

  CB_DEVICE explicit Piece(const float* copy) {
    CB_UNROLL
    for (int i = 0; i < PIECE_ROWS; ++i) {
      const Vec<float, 4> row = cb_read<float, 4>(copy + i * NUM_THREADS * PIECE);
      CB_UNROLL
      for (int j = 0; j < PIECE; ++j) value[i][j] = row.v[j];
    }
  }
};

// Store a piece whose rows are whole vectors: `m` is its first row of the block's tile.
CB_DEVICE void store_wide(const Epilogue& epilogue, const OutputTile& tile, int m, int column, const float* copy) {
  if (column >= tile.columns) return;
  Piece piece(copy);
  i64 place[PIECE_ROWS];
  CB_UNROLL
  for (int i = 0; i < PIECE_ROWS; ++i) {
    place[i] = tile.place(m + i, column, epilogue.columns);
  }
  if (epilogue.slices > 1) {
    float* partials = epilogue.partials + tile.slice * epilogue.elements;
    CB_UNROLL
    for (int i = 0; i < PIECE_ROWS; ++i) {
      const Vec<float, 4> row{{piece.value[i][0], piece.value[i][1], piece.value[i][2], piece.value[i][3]}};
      if (place[i] >= 0) cb_write<float, 4>(partials + place[i], row);
    }
  } else {
    finish_wide<PIECE_ROWS>(epilogue, place, tile.first_column + column, piece.value);
  }
}

// Store a piece element by element: any activation, any number of columns.
CB_DEVICE void store_each(const Epilogue& epilogue, const OutputTile& tile, int m, int first_column,
                          const float* copy) {
  CB_NO_UNROLL
  for (int i = 0; i < PIECE_ROWS * PIECE; ++i) {
    const int column = first_column + i % PIECE;
    const i64 place = tile.place(m + i / PIECE, column, epilogue.columns);
    if (place < 0 || column >= tile.columns) continue;
    const float value = copy[i / PIECE * NUM_THREADS * PIECE + i % PIECE];
    if (epilogue.slices > 1) {
      epilogue.partials[tile.slice * epilogue.elements + place] = value;
    } else {
      finish_one(epilogue, place, tile.first_column + column, value);
    }
  }
}

// Sum over the block's rows of 4 neighbouring columns of each thread: lanes, then warps, always in the same order.
CB_DEVICE void sum_columns(float (&value)[PIECE], float* shared, int column) {
  constexpr int WARPS_M = TILE_M / WARP_TILE_M;
  const int warp_m = cb_warp() / WARPS_N;
  cb_sync();  // no thread's copy is needed any more
  CB_UNROLL
  for (int j = 0; j < PIECE; ++j) {
    value[j] += cb_shuffle_xor(value[j], 1);
    value[j] += cb_shuffle_xor(value[j], 16);
    if ((cb_lane() & 17) == 0) shared[warp_m * TILE_N + column + j] = value[j];
  }
  cb_sync();
  CB_UNROLL
  for (int j = 0; j < PIECE; ++j) {
    value[j] = 0.0f;
    CB_UNROLL
    for (int warp = 0; warp < WARPS_M; ++warp) value[j] += shared[warp * TILE_N + column + j];
  }
  cb_sync();
}

// Statistics of the block's rows for a batch norm that follows: count, mean, sum of squared deviations from that mean.
// Two passes over the sums, so nothing cancels; a bias moves the mean only.
CB_DEVICE void keep_statistics(const Epilogue& epilogue, const OutputTile& tile, const Place& thread,
                               const Sums& sums, float* shared) {
  static_assert(TILE_M / WARP_TILE_M * TILE_N <= SHARED_FLOATS, "partial sums fit");
  float* copy = shared + cb_thread() * PIECE;
  const float count = (float)tile.rows;
  float* target = epilogue.statistics + (i64)tile.number * 3 * epilogue.columns + tile.first_column;
  CB_NO_UNROLL
  for (int across = 0; across < ACROSS; ++across) {
    const int column = thread.column(across * PIECE);
    float mean[PIECE] = {0.0f, 0.0f, 0.0f, 0.0f}, squares[PIECE];
    CB_NO_UNROLL
    for (int pass = 0; pass < 2; ++pass) {
      float total[PIECE] = {0.0f, 0.0f, 0.0f, 0.0f};
      CB_NO_UNROLL
      for (int down = 0; down < DOWN; ++down) {
        const int m = thread.row(down * PIECE_ROWS);
        copy_piece(sums, across * DOWN + down, copy);
        const Piece piece(copy);
        CB_UNROLL
        for (int i = 0; i < PIECE_ROWS; ++i) {
          CB_UNROLL
          for (int j = 0; j < PIECE; ++j) {
            const float deviation = m + i < tile.rows ? piece.value[i][j] - mean[j] : 0.0f;
            total[j] = pass ? fmaf(deviation, deviation, total[j]) : total[j] + deviation;
          }
        }
      }
      sum_columns(total, shared, column);
      CB_UNROLL
      for (int j = 0; j < PIECE; ++j) {
        if (pass) {
          squares[j] = total[j];
        } else {
          mean[j] = total[j] / count;
        }
      }
    }
    if (thread.m != 0) continue;
    CB_UNROLL
    for (int j = 0; j < PIECE; ++j) {
      if (column + j >= tile.columns) continue;
      const float bias = epilogue.bias ? to_float(epilogue.bias[tile.first_column + column + j]) : 0.0f;
      target[column + j] = count;
      target[epilogue.columns + column + j] = mean[j] + bias;
      target[2 * epilogue.columns + column + j] = squares[j];
    }
  }
}

template <bool MAY_KEEP_STATISTICS>
CB_DEVICE void store(const Epilogue& epilogue, const OutputTile& tile, const Place& thread,
                     const Sums& sums, float* shared) {
  if constexpr (MAY_KEEP_STATISTICS) {
    if (epilogue.statistics) keep_statistics(epilogue, tile, thread, sums, shared);
  }
  float* copy = shared + cb_thread() * PIECE;
  const bool is_wide = epilogue.wide && epilogue.activation <= ACTIVATION_RELU;
  CB_NO_UNROLL
  for (int number = 0; number < DOWN * ACROSS; ++number) {
    const int m = thread.row(number % DOWN * PIECE_ROWS), column = thread.column(number / DOWN * PIECE);
    copy_piece(sums, number, copy);
    if (is_wide) {
      store_wide(epilogue, tile, m, column, copy);
    } else {
      store_each(epilogue, tile, m, column, copy);
    }
  }
}
