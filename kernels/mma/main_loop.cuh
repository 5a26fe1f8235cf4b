// SPDX-License-Identifier: MIT
//
// The one main loop of the family: a block multiplies two operands on tensor cores, tile by tile along gemm_k.
//
// Tiles come by the ring of common/ring.cuh, of two buffers on sm_70 and sm_75.  One barrier for a tile: behind it the
// tile is there for all, and the buffer that is filled next was read by all.  A tile is STEPS products of a warp's
// part.  Where registers allow, the fragments of a step are read while those of the one before are multiplied, across
// the barrier too; where two blocks share an SM, warps of one cover for the other.
#pragma once

#include "common/ring.cuh"
#include "mma/fragments.cuh"

constexpr int WARPS_N = TILE_N / WARP_N;
constexpr int GROUPS_M = WARP_M / GROUP, GROUPS_N = WARP_N / GROUP;

static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "warps tile the block's tile");
static_assert(STEPS % 2 == 0, "two sets of fragments take turns");

// Whether a thread has registers for two sets of fragments, its sums, addresses and loads for a buffer.
template <class A, class B>
CB_DEVICE constexpr bool reads_ahead() {
  constexpr int VECTORS = A::Map::COUNT + B::Map::COUNT;
  constexpr int SUMS = 8 * GROUPS_M * GROUPS_N, FRAGMENTS = 4 * (GROUPS_M + GROUPS_N);
  constexpr int HELD = NUM_STAGES == 2 ? VECTORS * VECTOR * (int)SIZE / 4 : 0;
  return 65536 / (NUM_THREADS * MIN_BLOCKS) >= SUMS + 2 * FRAGMENTS + 4 * VECTORS + HELD + 32;
}

// A warp's part of the tile, 16 x 16 at a time; see the atom for what a lane holds of it.
struct Sums {
  float value[GROUPS_M][GROUPS_N][8];

  CB_DEVICE Sums() {
    CB_UNROLL
    for (int m = 0; m < GROUPS_M; ++m) {
      CB_UNROLL
      for (int n = 0; n < GROUPS_N; ++n) {
        CB_UNROLL
        for (int i = 0; i < 8; ++i) value[m][n][i] = 0.0f;
      }
    }
  }
};

// The warp's place in the tile.
struct Place {
  int m, n;

  CB_DEVICE Place() : m(cb_warp() / WARPS_N * WARP_M), n(cb_warp() % WARPS_N * WARP_N) {}
};

template <class MapA, class MapB>
CB_DEVICE void multiply(Sums& sums, const Fragments<MapA, WARP_M, true>& a, const Fragments<MapB, WARP_N, false>& b) {
  CB_UNROLL
  for (int m = 0; m < GROUPS_M; ++m) {
    CB_UNROLL
    for (int n = 0; n < GROUPS_N; ++n) {
      if constexpr (WarpAtom::READS_MATRICES) {
        WarpAtom::multiply(sums.value[m][n], a.value[m], b.value[n]);
      } else {
#if CB_ARCH < 75
        WarpAtom::multiply<!MapA::IS_ALONG_K, !MapB::IS_ALONG_K>(sums.value[m][n], a.value[m], b.value[n]);
#endif
      }
    }
  }
}

template <class A, class B>
CB_DEVICE void main_loop(A& a, B& b, const Run& run, const Place& place, unsigned char* shared, Sums& sums) {
  constexpr u32 STAGE = A::BYTES + B::BYTES;
  if (run.tiles <= 0) return;
  using FragmentsA = Fragments<typename A::Map, WARP_M, true>;
  using FragmentsB = Fragments<typename B::Map, WARP_N, false>;
  constexpr bool READS_AHEAD = reads_ahead<A, B>();
  constexpr int SETS = READS_AHEAD ? 2 : 1;
  FragmentsA left[SETS];
  FragmentsB right[SETS];
  u32 rows = FragmentsA::place(place.m), columns = A::BYTES + FragmentsB::place(place.n);
  u32 a_target = a.shared_place(), b_target = A::BYTES + b.shared_place();

  fill_ring<STAGE>(a, b, run, shared, a_target, b_target);
  if constexpr (READS_AHEAD) {
    left[0].read(shared, rows, 0);
    right[0].read(shared, columns, 0);
  }

  // Reading is at stage `read` of the ring, writing at the one before it.
  constexpr u32 AROUND = 0u - (NUM_STAGES - 1) * STAGE;
  int read = 0;
  CB_NO_UNROLL
  for (int tiles = run.tiles; tiles > 0; --tiles) {
    if (tiles >= NUM_STAGES) fetch_next(a, b, shared, a_target, b_target);
    commit_copies();
    CB_UNROLL
    for (int step = 0; step < STEPS; ++step) {
      if constexpr (!READS_AHEAD) {
        left[0].read(shared, rows, step);
        right[0].read(shared, columns, step);
      }
      if (step == STEPS - 1) {
        if (tiles >= NUM_STAGES) {
          a.put(shared, a_target);
          b.put(shared, b_target);
        }
        const u32 written = read == 0 ? AROUND : STAGE, onward = read == NUM_STAGES - 1 ? AROUND : STAGE;
        a_target += written;
        b_target += written;
        rows += onward;
        columns += onward;
        read = read == NUM_STAGES - 1 ? 0 : read + 1;
        if constexpr (READS_AHEAD) {
          wait_for_copies();
          cb_sync();
        }
      }
      if constexpr (READS_AHEAD) {
        left[(step + 1) % 2].read(shared, rows, (step + 1) % STEPS);
        right[(step + 1) % 2].read(shared, columns, (step + 1) % STEPS);
      }
      multiply(sums, left[READS_AHEAD ? step % 2 : 0], right[READS_AHEAD ? step % 2 : 0]);
    }
    if constexpr (!READS_AHEAD) {
      wait_for_copies();
      cb_sync();
    }
  }
}
