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

// From sm_70 on there are two banks, and rows are written rotated: by one place no multiply-add of sm_70 waits for a bank,
// without it up to 18 % do.  On sm_100 and sm_120 4 % wait without it, and a variant spills with it.
#if CB_ARCH >= 70 && CB_ARCH < 100
constexpr int ROTATED = 1;
#else
constexpr int ROTATED = 0;
#endif
CB_DEVICE constexpr int place_in_row(int column) { return (column + PIECE - ROTATED) % PIECE; }
CB_DEVICE constexpr int place_in_piece(int i, int j) {
  return kept_row(i, j) * NUM_THREADS * PIECE + place_in_row(kept_column(i, j));
}

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
      Vec<float, PIECE> row;
      CB_UNROLL
      for (int j = 0; j < PIECE; ++j) row.v[place_in_row(j)] = sums.value[M + i][N + j];
      cb_write<float, 4>(copy + i * NUM_THREADS * PIECE, row);
    }
  }
}

// A piece that was copied, in registers again.
struct Piece {
  float value[PIECE_ROWS][PIECE];

  CB_DEVICE explicit Piece(const float* copy) {
    CB_UNROLL
    for (int k = 0; k < PIECE_ROWS; ++k) {
      const Vec<float, 4> row = cb_read<float, 4>(copy + k * NUM_THREADS * PIECE);
      CB_UNROLL
      for (int number = 0; number < PIECE_ROWS * PIECE; ++number) {
        const int i = number / PIECE, j = number % PIECE;
        if (kept_row(i, j) == k) value[i][j] = row.v[place_in_row(kept_column(i, j))];
      }
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
    const float value = copy[place_in_piece(i / PIECE, i % PIECE)];
    if (epilogue.slices > 1) {
      epilogue.partials[tile.slice * epilogue.elements + place] = value;
    } else {
      finish_one(epilogue, place, tile.first_column + column, value);
    }
  }
}

// Where statistics are worked out, behind the threads' copies: each warp's sums, and the mean of each column.
constexpr int WARPS_M = TILE_M / WARP_TILE_M;
struct ColumnSums {
  float of_warp[WARPS_M][TILE_N];
  float mean[TILE_N];
};
static_assert(NUM_THREADS * PIECE_ROWS * PIECE + sizeof(ColumnSums) / sizeof(float) <= SHARED_FLOATS, "both fit");
static_assert(TILE_N <= NUM_THREADS, "a thread for each column");

// Take a piece into a thread's sums of its columns: of values, or of squared deviations from the mean.
CB_DEVICE void add_piece(float (&total)[PIECE], const float* copy, const float* mean, int rows) {
  const Piece piece(copy);
  CB_UNROLL
  for (int j = 0; j < PIECE; ++j) {
    CB_UNROLL
    for (int i = 0; i < PIECE_ROWS; ++i) {
      const float deviation = piece.value[i][j] - (mean ? mean[j] : 0.0f);
      total[j] += i >= rows ? 0.0f : mean ? deviation * deviation : deviation;
    }
  }
}

// Sum over a warp's rows of 4 neighbouring columns of each thread, and begin again.
CB_DEVICE void sum_lanes(float (&total)[PIECE], float* sums) {
  Vec<float, PIECE> part;
  CB_UNROLL
  for (int j = 0; j < PIECE; ++j) {
    total[j] += cb_shuffle_xor(total[j], 1);
    part.v[j] = total[j] + cb_shuffle_xor(total[j], 16);
    total[j] = 0.0f;
  }
  if ((cb_lane() & 17) == 0) cb_write<float, PIECE>(sums, part);
}

// End a pass over the sums, always in the same order: the first leaves means, the second what a batch norm that follows
// needs of the block's rows: count, mean, sum of squared deviations from that mean.  A bias moves the mean only.
CB_DEVICE void finish_columns(const Epilogue& epilogue, const OutputTile& tile, ColumnSums* sums, bool is_first) {
  const int column = cb_thread(), whole_column = tile.first_column + column;
  cb_sync();
  if (column < tile.columns && column < TILE_N) {
    float total = 0.0f;
    CB_UNROLL
    for (int warp = 0; warp < WARPS_M; ++warp) total += sums->of_warp[warp][column];
    if (is_first) {
      sums->mean[column] = total / (float)tile.rows;
    } else {
      float* target = epilogue.statistics + (i64)tile.number * 3 * epilogue.columns + whole_column;
      target[0] = (float)tile.rows;
      target[epilogue.columns] = sums->mean[column] + (epilogue.bias ? to_float(epilogue.bias[whole_column]) : 0.0f);
      target[2 * epilogue.columns] = total;
    }
  }
  cb_sync();
}

// Passes over a thread's pieces: two for statistics where they are requested, so that nothing cancels, and one that
// stores.
CB_DEVICE void store(const Epilogue& epilogue, const OutputTile& tile, const Place& thread, const Sums& sums,
                     float* shared) {
  enum Pass { MEAN, SQUARES, STORE };
  float* copy = shared + cb_thread() * PIECE;
  ColumnSums* columns = reinterpret_cast<ColumnSums*>(shared + NUM_THREADS * PIECE_ROWS * PIECE);
  CB_NO_UNROLL
  for (int pass = HAS_FORWARD_TERMS && epilogue.statistics ? MEAN : STORE; pass <= STORE; ++pass) {
    float total[PIECE] = {};
    CB_NO_UNROLL
    for (int number = 0; number < DOWN * ACROSS; ++number) {
      const int m = thread.row(number % DOWN * PIECE_ROWS), column = thread.column(number / DOWN * PIECE);
      copy_piece(sums, number, copy);
      if (HAS_FORWARD_TERMS && pass < STORE) {
        add_piece(total, copy, pass == MEAN ? nullptr : columns->mean + column, tile.rows - m);
        if (number % DOWN == DOWN - 1) sum_lanes(total, columns->of_warp[cb_warp() / WARPS_N] + column);
      } else if (epilogue.is_wide()) {
        store_wide(epilogue, tile, m, column, copy);
      } else {
        store_each(epilogue, tile, m, column, copy);
      }
    }
    if (HAS_FORWARD_TERMS && pass < STORE) finish_columns(epilogue, tile, columns, pass == MEAN);
  }
}
