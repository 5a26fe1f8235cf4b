// SPDX-License-Identifier: MIT
//
// After the main loop: each warp takes its 16 rows of sums, of each of the products that are one below the other,
// through shared memory, a strip of 64 columns at a time, so that a row is finished and stored by neighbouring lanes, 4
// elements each.
//
//   registers        lane holds 2 columns of rows lane / 4 and 8 + lane / 4, 8 times
//   shared memory    [16 rows][64 floats], groups of 8 floats of row r swapped by r % 4: no bank is met twice at a time
//   finished         lane % 16 has 4 columns, lane / 16 is one of two rows at a time
//
// Where rows follow each other and all that is left to do is a bias and a ReLU, sums are finished in registers instead,
// and the copy engine stores them while the warp goes on (store_tile, store_swapped).  Scale, shift, residual and mask
// came before (main_loop.cuh).
//
// PHASE_ROWS: where the pixels of a phase lie apart, sums are finished in registers as well, and the warp itself stores
// them from shared memory (store_rows).
//
// SWAPPED: the warp has 16 columns of 256 rows, a strip of 64 rows at a time, which shared memory transposes:
//
//   registers        lane holds 2 rows of columns lane / 4 and 8 + lane / 4, 8 times
//   shared memory    [32 pairs of rows][2 x 16 floats], groups of 4 floats of pair p swapped by p % 4: as above
//   finished         lane % 4 has 4 columns, lane / 4 is one of eight rows at a time: whole sectors of 32 bytes
//
// The copy engine's rows of 128 bytes belong to the four warps of a consumer, which fill them together.
#pragma once

#include "common/epilogue.cuh"
#include "hopper/walk.cuh"

constexpr int STRIP = WARP_ROWS * COLUMNS / 32;         // sums of a lane
constexpr int STRIPS = SUMS / STRIP;                    // of one product
constexpr int LANES = COLUMNS / 4, APART = 32 / LANES;  // that finish a row; rows from one of a lane's to the next
constexpr int AT_ONCE = 4;                              // rows that a lane finishes together

// What a copy stores: 16 rows of 128 bytes.  A strip is one or two of them; two fit into what a warp stores through.
constexpr u32 PART_BYTES = WARP_ROWS * SWIZZLE_ROW;
constexpr int PARTS = SWAPPED ? 1 : COLUMNS / ROW_ELEMENTS, TURNS = 2 / PARTS;
static_assert(SWAPPED || Shared::STAGING_BYTES == 2 * PART_BYTES, "two parts fit");
constexpr u32 SWAPPED_BYTES = 64 * SWIZZLE_ROW;  // the same of the four warps of a consumer
static_assert(!SWAPPED || 4 * Shared::STAGING_BYTES >= 2 * SWAPPED_BYTES, "two of them fit");
static_assert(Shared::STAGING % SWIZZLE_ATOM == 0 && Shared::STAGING_BYTES % SWIZZLE_ATOM == 0, "atoms are aligned");

CB_DEVICE float* staged(float* staging, int row, int column) {
  if constexpr (SWAPPED) {
    return staging + row / 2 * 32 + ((row % 2 * 4 + column / 4) ^ (row / 2 & 3) * 2) * 4 + column % 4;
  } else {
    return staging + row * COLUMNS + ((column / 8) ^ (row & 3)) * 8 + column % 8;
  }
}

// Take the sums of one strip.  Sums are registers, which cannot be indexed: a tree of uniform branches ends at copies,
// so that what follows is there once.
template <int LOW, int HIGH>
CB_DEVICE void take_strip(const float (&sum)[STACKED][SUMS], int wanted, float (&strip)[STRIP]) {
  if constexpr (HIGH - LOW > 1) {
    constexpr int MIDDLE = (LOW + HIGH) / 2;
    if (wanted < MIDDLE) {
      take_strip<LOW, MIDDLE>(sum, wanted, strip);
    } else {
      take_strip<MIDDLE, HIGH>(sum, wanted, strip);
    }
  } else {
    CB_UNROLL
    for (int i = 0; i < STRIP; ++i) strip[i] = sum[LOW / STRIPS][LOW % STRIPS * STRIP + i];
  }
}

CB_DEVICE void stage_strip(const float (&strip)[STRIP], float* staging) {
  const int single = cb_lane() / 4, pair = cb_lane() % 4 * 2;
  CB_UNROLL
  for (int i = 0; i < STRIP / 4; ++i) {
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float first = strip[4 * i + 2 * half], second = strip[4 * i + 2 * half + 1];
      if constexpr (SWAPPED) {
        *staged(staging, 8 * i + pair, single + 8 * half) = first;
        *staged(staging, 8 * i + pair + 1, single + 8 * half) = second;
      } else {
        cb_write<float, 2>(staged(staging, single + 8 * half, 8 * i + pair), Vec<float, 2>{{first, second}});
      }
    }
  }
}

// Finish a strip in registers and lay it out as a copy to the output takes it: swizzled rows of 128 bytes, of float32
// two tiles one after the other.  All loads come first, and a ReLU is a floor: a branch for each would make them wait
// for one another.
CB_DEVICE void finish_tile(const Epilogue& epilogue, const float (&strip)[STRIP], int first, int columns,
                           unsigned char* tile) {
  const int lane = cb_lane(), row = lane / 4, pair = lane % 4 * 2;
  const bool rectifies = HAS_FORWARD_TERMS && epilogue.activation == ACTIVATION_RELU;
  const float floor = rectifies ? 0.0f : -to_float(bfloat16_t{0x7f80});
  Vec<CB_ELEMENT, 2> bias[COLUMNS / 8] = {}, out[COLUMNS / 8][2];
  if (HAS_FORWARD_TERMS && epilogue.bias) {
    CB_UNROLL
    for (int i = 0; i < COLUMNS / 8; ++i) {
      if (8 * i + pair < columns) bias[i] = cb_load<CB_ELEMENT, 2>(epilogue.bias + first + 8 * i + pair);
    }
  }
  CB_UNROLL
  for (int i = 0; i < STRIP; ++i) {
    const float value = strip[i] + to_float(bias[i / 4].v[i % 2]);
    out[i / 4][i / 2 % 2].v[i % 2] = from_float<CB_ELEMENT>(value < floor ? floor : value);
  }
  if constexpr (sizeof(CB_ELEMENT) == 2) {  // two pieces of 16 rows at a time
    CB_UNROLL
    for (int i = 0; i < COLUMNS / 8; i += 2) {
      u32 words[4];
      CB_UNROLL
      for (int j = 0; j < 4; ++j) words[j] = *reinterpret_cast<const u32*>(&out[i + j / 2][j % 2]);
      cb_store_matrices(tile + lane % 16 * SWIZZLE_ROW + (((i + lane / 16) ^ lane % 8) * 16), words);
    }
  } else {
    CB_UNROLL
    for (int i = 0; i < COLUMNS / 4; ++i) {
      const u32 at = (8 * (i / 2) + pair) * sizeof(CB_ELEMENT), part = at / SWIZZLE_ROW, inside = at % SWIZZLE_ROW;
      unsigned char* to = tile + part * PART_BYTES + (row + i % 2 * 8) * SWIZZLE_ROW;
      cb_write<CB_ELEMENT, 2>(reinterpret_cast<CB_ELEMENT*>(to + ((inside / 16 ^ row) * 16 + inside % 16)),
                              out[i / 2][i % 2]);
    }
  }
}

// Number of a row's first element in the output, negative where the row does not exist.
CB_DEVICE i64 place_of(const Walk& walk, i64 columns, int row) {
  if (row >= walk.m) return -1;
#if defined(OPERATION_CONV2D_DGRAD)
  const int line = row / walk.columns, image = line / walk.rows;
  const int h = walk.out_top + (line - image * walk.rows) * walk.out_stride_h;
  const int w = walk.out_left + (row - line * walk.columns) * walk.out_stride_w;
  return (((i64)image * walk.out_h + h) * walk.out_w + w) * columns;
#else
  return row * columns;
#endif
}

// Finish what is staged, or leave it as the partial sums of a slice.
CB_DEVICE void finish_strip(const Epilogue& epilogue, const Task& task, const i64* places, float* staging, int first,
                            int columns) {
  float* partials = epilogue.slices > 1 ? epilogue.partials + task.slice * epilogue.elements : nullptr;
  if (!epilogue.is_wide()) {  // rare: any activation, any number of columns
    CB_NO_UNROLL
    for (int i = cb_lane(); i < WARP_ROWS * COLUMNS; i += 32) {
      const int row = i / COLUMNS, column = i % COLUMNS;
      const i64 place = places[row] + first + column;
      if (places[row] < 0 || column >= columns) continue;
      const float value = *staged(staging, row, column);
      if (partials) {
        partials[place] = value;
      } else {
        finish_one(epilogue, place, first + column, value);
      }
    }
    return;
  }
  const int column = cb_lane() % LANES * 4;
  if (column >= columns) return;
  CB_NO_UNROLL
  for (int row = cb_lane() / LANES; row < WARP_ROWS; row += APART * AT_ONCE) {
    float sum[AT_ONCE][4];
    i64 place[AT_ONCE];
    CB_UNROLL
    for (int i = 0; i < AT_ONCE; ++i) {
      const Vec<float, 4> part = cb_read<float, 4>(staged(staging, row + APART * i, column));
      CB_UNROLL
      for (int j = 0; j < 4; ++j) sum[i][j] = part.v[j];
      place[i] = places[row + APART * i];
      if (place[i] >= 0) place[i] += first + column;
    }
    if (partials) {
      CB_UNROLL
      for (int i = 0; i < AT_ONCE; ++i) {
        const Vec<float, 4> part{{sum[i][0], sum[i][1], sum[i][2], sum[i][3]}};
        if (place[i] >= 0) cb_write<float, 4>(partials + place[i], part);
      }
    } else {
      finish_wide<AT_ONCE>(epilogue, place, first + column, sum);
    }
  }
}

// Store 16 rows of 128 bytes that the copy engine does not reach at once: 8 lanes a row, 16 bytes each.
CB_DEVICE void store_rows(CB_ELEMENT* out, const unsigned char* tile, const i64* places, int first, int columns) {
  constexpr int PIECE = 16 / sizeof(CB_ELEMENT);
  const int piece = cb_lane() % 8;
  if (piece * PIECE >= columns) return;
  CB_UNROLL
  for (int row = cb_lane() / 8; row < 16; row += 4) {
    const unsigned char* from = tile + row * SWIZZLE_ROW + (piece ^ row % 8) * 16;
    const Vec<CB_ELEMENT, PIECE> value = cb_read<CB_ELEMENT, PIECE>(reinterpret_cast<const CB_ELEMENT*>(from));
    if (places[row] >= 0) cb_write<CB_ELEMENT, PIECE>(out + places[row] + first + piece * PIECE, value);
  }
}

// Store a strip by the copy engine, which leaves out what lies outside of the output.  Where a strip is one part, two
// take turns, so that one is filled while the other is read.
CB_DEVICE void store_tile(const Epilogue& epilogue, const TensorMap* out_map, const float (&strip)[STRIP], int row,
                          int first, int columns, float* staging, const i64* places, u32& turn) {
  unsigned char* tile = reinterpret_cast<unsigned char*>(staging) + turn % TURNS * PART_BYTES;
  ++turn;
  if constexpr (PHASE_ROWS) {
    finish_tile(epilogue, strip, first, columns, tile);
    cb_sync_warp();
    store_rows(epilogue.out, tile, places, first, columns);
    cb_sync_warp();
  } else {
    if (cb_lane() == 0) cb_tma_store_wait_read<TURNS - 1>();
    cb_sync_warp();
    finish_tile(epilogue, strip, first, columns, tile);
    cb_proxy_fence();
    cb_sync_warp();
    if (cb_lane() == 0) {
      CB_UNROLL
      for (int part = 0; part < PARTS; ++part) {
        cb_tma_store_2d(out_map, tile + part * PART_BYTES, first + part * ROW_ELEMENTS, row);
      }
      cb_tma_store_commit();
    }
  }
}

// Store a strip of all four warps of a consumer by the copy engine: 64 rows of 128 bytes.  Two tiles take turns.  A warp
// may fill one once the others are through with the store before the last, for which the storing thread waits before it
// joins them.
CB_DEVICE void store_swapped(const Epilogue& epilogue, const TensorMap* out_map, const float (&strip)[STRIP],
                             const Walk& walk, const Task& task, int row, const Shared& shared, int warp,
                             const i64* places, u32& turn, u32& joins) {
  if constexpr (SWAPPED && sizeof(CB_ELEMENT) == 2) {
    unsigned char* tile = reinterpret_cast<unsigned char*>(shared.staging(warp / 4 * 4)) + turn % 2 * SWAPPED_BYTES;
    ++turn;
    const bool rectifies = HAS_FORWARD_TERMS && epilogue.activation == ACTIVATION_RELU;
    const float floor = rectifies ? 0.0f : -to_float(bfloat16_t{0x7f80});
    float bias[2] = {};
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int column = task.n + swapped_column(half);
      if (HAS_FORWARD_TERMS && epilogue.bias && column < walk.n) {
        bias[half] = to_float(cb_load<CB_ELEMENT, 1>(epilogue.bias + column).v[0]);
      }
    }
    CB_UNROLL
    for (int i = 0; i < WARP_ROWS / 16; ++i) {
      u32 words[4];
      CB_UNROLL
      for (int j = 0; j < 4; ++j) {
        Vec<CB_ELEMENT, 2> pair;
        CB_UNROLL
        for (int k = 0; k < 2; ++k) {
          const float value = strip[8 * i + 2 * j + k] + bias[j % 2];
          pair.v[k] = from_float<CB_ELEMENT>(value < floor ? floor : value);
        }
        words[j] = *reinterpret_cast<const u32*>(&pair);
      }
      cb_store_matrices_transposed(tile + 16 * i * SWIZZLE_ROW + swapped_place(), words);
    }
    cb_proxy_fence();
    const bool stores = !PHASE_ROWS && warp % 4 == 0 && cb_lane() == 0;
    if (stores) cb_tma_store_wait_read<0>();
    cb_barrier_arrive(shared.joined(warp / 4));
    cb_barrier_wait(shared.joined(warp / 4), joins++ & 1);
    if constexpr (PHASE_ROWS) {  // 16 of the rows by each warp
      store_rows(epilogue.out, tile + warp % 4 * 16 * SWIZZLE_ROW, places, task.n, walk.n - task.n);
      cb_sync_warp();
    }
    if (stores) {
      cb_tma_store_2d(out_map, tile, task.n, row);
      cb_tma_store_commit();
    }
  }
}

// Store a warp's sums.
CB_DEVICE void store(const Epilogue& epilogue, const TensorMap* out_map, const Walk& walk, const Task& task,
                     const Shared& shared, int warp, u32& turn, u32& joins, const float (&sum)[STACKED][SUMS]) {
  float* staging = shared.staging(warp);
  i64* places = shared.places(warp);
  CB_NO_UNROLL
  for (int number = 0; number < STACKED * STRIPS; ++number) {
    const int at = number / STRIPS, strip_number = number % STRIPS;
    const int row = task.m + (SWAPPED ? number : (warp / 4 * STACKED + at) * 4 + warp % 4) * WARP_ROWS;
    int first = task.n + (SWAPPED ? warp % 4 : strip_number) * COLUMNS, columns = walk.n - first;
#if defined(OPERATION_CONV2D_WGRAD)
    const int place = first / COLUMNS, tap = place / walk.depth, channel = (place - tap * walk.depth) * COLUMNS;
    columns = tap < walk.taps ? walk.n - channel : 0;
    first = tap * walk.n + channel;
#endif
    if (row >= walk.m) break;
    const bool joins_others = SWAPPED && walk.stores_tiles;
    if (columns <= 0 && !joins_others) continue;  // of the product below there are others
    float strip[STRIP];
    take_strip<0, STACKED * STRIPS>(sum, number, strip);
    if constexpr (PHASE_ROWS) {  // the 16 rows that this warp stores
      const int lane = cb_lane(), place = row + (SWAPPED ? warp % 4 * 16 : 0) + lane;
      const bool is_new = walk.stores_tiles && (SWAPPED || number % STRIPS == 0);
      if (is_new && lane < 16) places[lane] = place_of(walk, epilogue.columns, place);
    }
    if (joins_others) {
      store_swapped(epilogue, out_map, strip, walk, task, row, shared, warp, places, turn, joins);
    } else if (!SWAPPED && walk.stores_tiles) {
      store_tile(epilogue, out_map, strip, row, first, columns, staging, places, turn);
    } else {
      CB_NO_UNROLL
      for (int i = cb_lane(); (SWAPPED || strip_number == 0) && i < WARP_ROWS; i += 32) {
        places[i] = place_of(walk, epilogue.columns, row + i);
      }
      stage_strip(strip, staging);
      cb_sync_warp();
      finish_strip(epilogue, task, places, staging, first, columns);
      cb_sync_warp();
    }
  }
}
