// SPDX-License-Identifier: MIT
//
// After the main loop: a warp's sums go through the epilogue to the output, or to a slice's partials.
//
// A lane's sums lie scattered over the warp's part of the tile.  16 rows of it at a time go through the warp's own slab
// of shared memory, so that a lane then has 4 neighbouring columns and neighbouring lanes store whole rows; one copy of
// the code, in a loop, handles every 16 rows.
#pragma once

#include "common/epilogue.cuh"
#include "mma/main_loop.cuh"

constexpr int PIECE = 4;                 // columns of a lane at a time
constexpr int SLAB_PITCH = WARP_N + 8;   // floats: rows that are written together lie 8 banks apart
constexpr int SLAB = GROUP * SLAB_PITCH;
constexpr int COLUMN_LANES = WARP_N / PIECE, ROW_LANES = WARP / COLUMN_LANES;
constexpr int EACH = SIZE == 4 ? 2 : 4;  // rows of a lane at a time: 16 bytes of each take registers
constexpr int WARPS_M = TILE_M / WARP_M;
constexpr int LANE_COLUMNS = WARP_N / WARP;  // of the statistics
constexpr int RING_FLOATS = NUM_STAGES * (TILE_M + TILE_N) * TILE_K * SIZE / sizeof(float);
static_assert(NUM_WARPS * SLAB + 2 * WARPS_M * TILE_N <= RING_FLOATS, "slabs and statistics fit");
static_assert(GROUP % (ROW_LANES * EACH) == 0, "lanes share a slab's rows evenly");

// Copy the wanted 16 rows of sums to the slab.  Sums are registers, which cannot be indexed: a tree of uniform branches
// ends at stores.
template <int LOW = 0, int HIGH = GROUPS_M>
CB_DEVICE void copy_group(const Sums& sums, int wanted, float* slab) {
  if constexpr (HIGH - LOW > 1) {
    constexpr int MIDDLE = (LOW + HIGH) / 2;
    if (wanted < MIDDLE) {
      copy_group<LOW, MIDDLE>(sums, wanted, slab);
    } else {
      copy_group<MIDDLE, HIGH>(sums, wanted, slab);
    }
  } else {
    CB_UNROLL
    for (int n = 0; n < GROUPS_N; ++n) {
      CB_UNROLL
      for (int i = 0; i < 8; i += 2) {
        float* at = slab + WarpAtom::row(cb_lane(), i) * SLAB_PITCH + n * GROUP + WarpAtom::column(cb_lane(), i);
        cb_write<float, 2>(at, Vec<float, 2>{{sums.value[LOW][n][i], sums.value[LOW][n][i + 1]}});
      }
    }
  }
}

// Store 4 columns of EACH rows of the slab, whose row 0 is row `m` of the tile.
CB_DEVICE void store_wide(const Epilogue& epilogue, const OutputTile& tile, int m, int row, int column,
                          const float* slab) {
  float piece[EACH][PIECE];
  i64 place[EACH];
  CB_UNROLL
  for (int i = 0; i < EACH; ++i) {
    const int at = row + i * ROW_LANES;
    const Vec<float, PIECE> four = cb_read<float, PIECE>(slab + at * SLAB_PITCH);
    CB_UNROLL
    for (int j = 0; j < PIECE; ++j) piece[i][j] = four.v[j];
    place[i] = tile.place(m + at, column, epilogue.columns);
  }
  if (epilogue.slices > 1) {
    float* partials = epilogue.partials + tile.slice * epilogue.elements;
    CB_UNROLL
    for (int i = 0; i < EACH; ++i) {
      const Vec<float, PIECE> four{{piece[i][0], piece[i][1], piece[i][2], piece[i][3]}};
      if (place[i] >= 0) cb_write<float, PIECE>(partials + place[i], four);
    }
  } else {
    finish_wide<EACH>(epilogue, place, tile.first_column + column, piece);
  }
}

CB_DEVICE void store_one(const Epilogue& epilogue, const OutputTile& tile, int m, int column, float value) {
  const i64 place = tile.place(m, column, epilogue.columns);
  if (place < 0 || column >= tile.columns) return;
  if (epilogue.slices > 1) {
    epilogue.partials[tile.slice * epilogue.elements + place] = value;
  } else {
    finish_one(epilogue, place, tile.first_column + column, value);
  }
}

// Store 16 rows, from the slab.
CB_DEVICE void store_group(const Epilogue& epilogue, const OutputTile& tile, int m, int n, const float* slab) {
  if (epilogue.is_wide()) {
    const int column = cb_lane() % COLUMN_LANES * PIECE;
    if (n + column >= tile.columns) return;
    CB_NO_UNROLL
    for (int row = cb_lane() / COLUMN_LANES; row < GROUP; row += ROW_LANES * EACH) {
      store_wide(epilogue, tile, m, row, n + column, slab + column);
    }
  } else {
    CB_NO_UNROLL
    for (int i = cb_lane(); i < GROUP * WARP_N; i += WARP) {
      const int row = i / WARP_N, column = i % WARP_N;
      store_one(epilogue, tile, m + row, n + column, slab[row * SLAB_PITCH + column]);
    }
  }
}

// Statistics of the block's rows for a batch norm that follows: count, mean, sum of squared deviations from that mean.
// The sums are gone through twice, so nothing cancels; a bias moves the mean only.  A lane has every 32nd column of its
// warp; rows are added up in order, then warps.
struct Statistics {
  float mean[LANE_COLUMNS], sum[LANE_COLUMNS];

  CB_DEVICE Statistics() {
    CB_UNROLL
    for (int i = 0; i < LANE_COLUMNS; ++i) mean[i] = sum[i] = 0.0f;
  }

  // Add 16 rows, or their squared deviations from the mean, from the slab.
  CB_DEVICE void add(const float* slab, int rows, bool squared) {
    CB_NO_UNROLL
    for (int row = 0; row < GROUP && row < rows; ++row) {
      CB_UNROLL
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const float value = slab[row * SLAB_PITCH + i * WARP + cb_lane()] - mean[i];
        sum[i] += squared ? value * value : value;
      }
    }
  }

  // Give each lane the sums of all warps that share its columns, then begin again; `floats` is [WARPS_M][TILE_N].
  CB_DEVICE void add_warps(const Place& warp, float* floats, float (&total)[LANE_COLUMNS]) {
    CB_UNROLL
    for (int i = 0; i < LANE_COLUMNS; ++i) {
      floats[warp.m / WARP_M * TILE_N + warp.n + i * WARP + cb_lane()] = sum[i];
    }
    cb_sync();
    CB_UNROLL
    for (int i = 0; i < LANE_COLUMNS; ++i) {
      total[i] = sum[i] = 0.0f;
      CB_UNROLL
      for (int m = 0; m < WARPS_M; ++m) total[i] += floats[m * TILE_N + warp.n + i * WARP + cb_lane()];
    }
  }

  CB_DEVICE void keep(const Epilogue& epilogue, const OutputTile& tile, const Place& warp,
                      const float (&squares)[LANE_COLUMNS]) const {
    if (warp.m != 0) return;
    float* target = epilogue.statistics + (i64)tile.number * 3 * epilogue.columns + tile.first_column;
    CB_UNROLL
    for (int i = 0; i < LANE_COLUMNS; ++i) {
      const int column = warp.n + i * WARP + cb_lane();
      if (column >= tile.columns) continue;
      const float bias = epilogue.bias ? to_float(epilogue.bias[tile.first_column + column]) : 0.0f;
      target[column] = (float)tile.rows;
      target[epilogue.columns + column] = mean[i] + bias;
      target[2 * epilogue.columns + column] = squares[i];
    }
  }
};

// Go through the sums, 16 rows at a time: for their mean, for their deviations from it, and to store them.
CB_DEVICE void store(const Epilogue& epilogue, const OutputTile& tile, const Place& warp, const Sums& sums,
                     unsigned char* shared) {
  enum { MEAN, DEVIATIONS, STORE };
  float* floats = reinterpret_cast<float*>(shared);
  float* slab = floats + cb_warp() * SLAB;
  Statistics statistics;
  CB_NO_UNROLL
  for (int pass = HAS_FORWARD_TERMS && epilogue.statistics ? MEAN : STORE; pass <= STORE; ++pass) {
    CB_NO_UNROLL
    for (int group = 0; group < GROUPS_M; ++group) {
      copy_group(sums, group, slab);
      cb_sync_warp();
      const int m = warp.m + group * GROUP;
      if (pass == STORE) {
        store_group(epilogue, tile, m, warp.n, slab);
      } else if constexpr (HAS_FORWARD_TERMS) {
        statistics.add(slab, tile.rows - m, pass == DEVIATIONS);
      }
      cb_sync_warp();
    }
    if constexpr (HAS_FORWARD_TERMS) {
      if (pass == STORE) return;
      float total[LANE_COLUMNS];
      statistics.add_warps(warp, floats + NUM_WARPS * SLAB + pass * WARPS_M * TILE_N, total);
      if (pass == DEVIATIONS) {
        statistics.keep(epilogue, tile, warp, total);
      } else {
        CB_UNROLL
        for (int i = 0; i < LANE_COLUMNS; ++i) statistics.mean[i] = total[i] / (float)tile.rows;
      }
    }
  }
}
