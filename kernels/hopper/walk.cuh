// SPDX-License-Identifier: MIT
//
// What a persistent block does one after another: tiles of the output, of each the steps along gemm_k of one slice; and
// the ring of stages that producer and consumers walk around.
#pragma once

#include "common/device_hopper.cuh"
#include "common/tile_order.cuh"

constexpr int ROW_ELEMENTS = SWIZZLE_ROW / sizeof(CB_ELEMENT);
constexpr int NUM_CONSUMERS = 2, NUM_THREADS = (1 + NUM_CONSUMERS) * WARPGROUP, NUM_WARPS = NUM_CONSUMERS * 4;
constexpr int READERS = SWAPPED ? 1 : NUM_CONSUMERS;  // consumers of a stage
constexpr int ROWS = TILE_M / READERS;                // of the tile, of one of them
constexpr int WGMMA_M = 64, WGMMA_N = SWAPPED ? ROWS : TILE_N;
constexpr int STACKED = (SWAPPED ? TILE_N : ROWS) / WGMMA_M;  // products of a consumer at a time, one below the other
constexpr int SUMS = WGMMA_N / 2;                             // of a thread, of one of them
constexpr u32 A_BYTES = TILE_M * SWIZZLE_ROW, B_BYTES = TILE_N * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;

// Whether the copy engine can load what is added, and the mask of a ReLU: where it stores, and of 16 bits.  Float32 has
// too few registers for it.
#if defined(OPERATION_CONV2D_WGRAD)
constexpr bool ADDS_TILES = false;
#else
constexpr bool ADDS_TILES = sizeof(CB_ELEMENT) == 2;
#endif

static_assert(STACKED >= 1 && !(SWAPPED && STACKED > 1), "64 rows, of the output or, swapped, of its transpose");
static_assert(WGMMA_N <= 256, "and at most 256 columns");
static_assert(TILE_K == ROW_ELEMENTS, "a step along gemm_k is one swizzled row of 128 bytes");

// Extents of a launch.  Mirrored by cubatch/engine/native/hopper.py: integers only, no padding.
//
// gemm_k is walked in steps of TILE_K; of a convolution, `depth` steps over channels for each tap, taps row by row.
// Pixel (p, q) reads tap (r, s) at  p * stride_h + origin_h + r * step_h  and likewise along w; with taps of the
// filter counted  first_tap + r * tap_step_h + s * tap_step_w.  The pixels of a gradient's phase go to the image of
// out_h x out_w from (out_top, out_left) on, out_stride_h and out_stride_w apart.
struct Walk {
  int m, n;                  // of the product; of a filter's gradient n is the channels of one tap
  int tiles_m, tiles_n;
  int band;                  // see tile_order.cuh
  int steps, depth;          // along gemm_k: all, and those of one tap
  int taps, taps_w;          // taps r * s, and s
  int first_tap, tap_step_h, tap_step_w;
  int rows, columns;         // of the grid of pixels
  int stride_h, stride_w, origin_h, origin_w, step_h, step_w;
  int out_h, out_w, out_stride_h, out_stride_w, out_top, out_left;
  int stores_tiles;          // whether sums are finished in registers and the copy engine stores them, see store.cuh
  int adds_tiles;            // whether it also loads what is added, see main_loop.cuh
  int masks_tiles;           // and the mask
};

// A strided gradient's input is cut into phases, whose tiles follow each other: their number is fixed, missing ones
// without tiles.
#if defined(OPERATION_CONV2D_DGRAD)
constexpr int PHASES = 4;
#else
constexpr int PHASES = 1;
#endif
static_assert(!PHASE_ROWS || (PHASES > 1 && ADDS_TILES && !NORM_SUMS), "of a gradient, of 16 bits, without sums");
struct Walks {
  Walk of[PHASES];
};

// A tile, and the steps along gemm_k of one slice.
struct Task {
  int m, n;          // first row and column
  int slice, first, count;

  CB_DEVICE Task(const Walk& walk, int slices, u32 number, u32 rank) {
    const u32 rows = (u32)(walk.tiles_m + CLUSTER - 1) / CLUSTER;  // blocks of a cluster are neighbours along gemm_m
    const u32 each = rows * (u32)walk.tiles_n;
    slice = (int)(number / each);
    const TilePlace tile = tile_place(number - (u32)slice * each, rows, (u32)walk.tiles_n, (u32)walk.band);
    m = (tile.m * CLUSTER + (int)rank) * TILE_M;
    n = tile.n * TILE_N;
    const int length = (walk.steps + slices - 1) / slices;
    first = slice * length;
    const int left = walk.steps - first;  // below 0 in a phase of fewer steps than most
    count = left < 0 ? 0 : left < length ? left : length;
  }
  CB_DEVICE static u32 number(const Walk& walk, int slices) {
    return (u32)((walk.tiles_m + CLUSTER - 1) / CLUSTER) * (u32)walk.tiles_n * (u32)slices;
  }
};

// The phase that a tile is of, given its number among all; afterwards its number there.
CB_DEVICE int take_phase(const Walks& walks, int slices, u32& number) {
  int phase = 0;
  CB_UNROLL
  for (int at = 0; at + 1 < PHASES; ++at) {
    const u32 own = Task::number(walks.of[at], slices);
    if (phase == at && number >= own) {
      number -= own;
      ++phase;
    }
  }
  return phase;
}

CB_DEVICE u32 num_tiles(const Walks& walks, int slices) {
  u32 count = 0;
  CB_UNROLL
  for (int phase = 0; phase < PHASES; ++phase) count += Task::number(walks.of[phase], slices);
  return count;
}

// Place in the ring, and the parity of the phase that its barriers are in.
struct Ring {
  int stage = 0;
  u32 parity = 0;

  CB_DEVICE void advance() {
    if (++stage == NUM_STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  CB_DEVICE void skip(int steps) {
    const u32 to = (u32)(stage + steps);
    stage = (int)(to % NUM_STAGES);
    parity ^= to / NUM_STAGES & 1;
  }
};

// A strip, which a warp stores at a time: 64 columns of its 16 rows or, swapped, 64 rows of its 16 columns.
constexpr int WARP_ROWS = SWAPPED ? 64 : 16, COLUMNS = SWAPPED ? 16 : 64;

// Dynamic shared memory: the stages' tiles, what each consuming warp stores through, barriers of stages and of consumers.
struct Shared {
  static constexpr u32 STAGING = NUM_STAGES * STAGE_BYTES;
  static constexpr u32 STAGING_BYTES = WARP_ROWS * COLUMNS * sizeof(float);  // of a warp
  static constexpr u32 PLACES = STAGING + NUM_WARPS * STAGING_BYTES;
  static constexpr u32 BARRIERS = PLACES + NUM_WARPS * WARP_ROWS * sizeof(i64);
  static constexpr u32 BYTES = BARRIERS + (2 * NUM_STAGES + (SWAPPED ? 2 : 1) * NUM_CONSUMERS) * sizeof(u64);

  unsigned char* base;

  CB_DEVICE unsigned char* a(int stage) const { return base + stage * STAGE_BYTES; }
  CB_DEVICE unsigned char* b(int stage) const { return base + stage * STAGE_BYTES + A_BYTES; }
  CB_DEVICE float* staging(int warp) const { return reinterpret_cast<float*>(base + STAGING + warp * STAGING_BYTES); }
  CB_DEVICE i64* places(int warp) const { return reinterpret_cast<i64*>(base + PLACES) + WARP_ROWS * warp; }
  CB_DEVICE u64* full(int stage) const { return reinterpret_cast<u64*>(base + BARRIERS) + stage; }
  CB_DEVICE u64* empty(int stage) const { return full(NUM_STAGES + stage); }
  CB_DEVICE u64* joined(int consumer) const { return full(2 * NUM_STAGES + consumer); }  // its threads
  CB_DEVICE u64* turn(int consumer) const { return joined(NUM_CONSUMERS + consumer); }   // swapped
};
static_assert(Shared::BYTES == DYNAMIC_SHARED_BYTES, "what a block is launched with");
static_assert(Shared::BYTES <= 232448, "what a block may have");
