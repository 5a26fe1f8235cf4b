// SPDX-License-Identifier: MIT
//
// The one main loop of the family: a block multiplies two operands, tile by tile along gemm_k.
//
// Fragments of place k + 1 are read from shared memory while those of place k are multiplied.
// Tiles come by the ring of common/ring.cuh; cp.async copies operands that are stored as they come; one that is
// transposed still goes through registers, since 4-byte copies and their addresses would cost more instructions than
// its 5.
//
// A warp is 4 lanes along gemm_m by 8 along gemm_n; a thread's tile is cut into pieces of 4, 16 (32) apart, so that a
// fragment is read 16 bytes at a time.  Lane bits 0 and 4 count along gemm_m, bits 1 to 3 along gemm_n: the lanes that
// are served together then ask for few different addresses.
#pragma once

#include "common/ring.cuh"
#include "simt/loaders.cuh"

constexpr int PIECE = 4;
constexpr int LANES_M = 4, LANES_N = 8;
constexpr int WARPS_N = TILE_N / (THREAD_N * LANES_N);
constexpr int WARP_TILE_M = THREAD_M * LANES_M, WARP_TILE_N = THREAD_N * LANES_N;

static_assert(THREAD_M % PIECE == 0 && THREAD_N % PIECE == 0, "fragments are read 4 floats at a time");
static_assert(TILE_M % WARP_TILE_M == 0 && TILE_N % WARP_TILE_N == 0, "warps tile the block's tile");
static_assert(TILE_K % 2 == 0, "two sets of fragments take turns");

// The thread's place in the tile: row i lies at m + (i / 4) * 16 + i % 4, column j at n + (j / 4) * 32 + j % 4.
struct Place {
  int m, n;

  CB_DEVICE Place()
      : m(cb_warp() / WARPS_N * WARP_TILE_M + ((cb_lane() & 1) | (cb_lane() >> 4 << 1)) * PIECE),
        n(cb_warp() % WARPS_N * WARP_TILE_N + (cb_lane() >> 1 & 7) * PIECE) {}
  CB_DEVICE int row(int i) const { return m + i / PIECE * (PIECE * LANES_M) + i % PIECE; }
  CB_DEVICE int column(int j) const { return n + j / PIECE * (PIECE * LANES_N) + j % PIECE; }
};

// Where Sums::value has the sum of row i, column j.  The epilogue stores four neighbors at a time, so ptxas gives them
// neighboring registers: the k-th lies in register bank k, as a[k] and b[k] of a fragment do.  Up to sm_6x there are four
// banks: the bank of a sum differs from that of a[i] in the lowest bit and from that of b[j] in the second.  2 to 8 % of
// the multiply-adds wait for a bank; 8 to 33 % did with rows stored rotated (store.cuh), 16 to 95 % with plain rows.
#if CB_ARCH < 70
CB_DEVICE constexpr int kept_row(int i, int j) { return i / 2 * 2 + j % 2; }
CB_DEVICE constexpr int kept_column(int i, int j) { return j / PIECE * PIECE + 3 - i % 2 - (j & 2); }
#else
CB_DEVICE constexpr int kept_row(int i, int) { return i; }
CB_DEVICE constexpr int kept_column(int, int j) { return j; }
#endif

// The column that is multiplied at a turn of row i.  Up to sm_6x a[i] stays in the operand cache along a row, where
// nothing comes between two multiply-adds.  So the column whose b[j] shares its bank comes last.  Of the orders that do
// so, ptxas keeps the banks with the one that goes through one row of Sums::value after the other.
CB_DEVICE constexpr int column_at([[maybe_unused]] int i, int turn) {
#if CB_ARCH < 70
  constexpr int AFTER[PIECE] = {1, 3, 2, 0};
  return turn / PIECE * PIECE + (i + AFTER[turn % PIECE]) % PIECE;
#else
  return turn;
#endif
}

// A thread's tile of sums.
struct Sums {
  float value[THREAD_M][THREAD_N];

  CB_DEVICE Sums() {
    CB_UNROLL
    for (int i = 0; i < THREAD_M; ++i) {
      CB_UNROLL
      for (int j = 0; j < THREAD_N; ++j) value[i][j] = 0.0f;
    }
  }
  CB_DEVICE float& at(int i, int j) { return value[kept_row(i, j)][kept_column(i, j)]; }
};

struct Fragments {
  float a[THREAD_M], b[THREAD_N];

  // `rows` and `columns` are the bytes to the thread's first element of place 0 along gemm_k.
  CB_DEVICE void read(const float* shared, u32 rows, u32 columns, int k) {
    CB_UNROLL
    for (int i = 0; i < THREAD_M; i += PIECE) {
      const Vec<float, 4> piece = cb_read<float, 4>(at_byte(shared, rows) + k * row_floats(TILE_M) + i * LANES_M);
      CB_UNROLL
      for (int j = 0; j < PIECE; ++j) a[i + j] = piece.v[j];
    }
    CB_UNROLL
    for (int i = 0; i < THREAD_N; i += PIECE) {
      const Vec<float, 4> piece = cb_read<float, 4>(at_byte(shared, columns) + k * row_floats(TILE_N) + i * LANES_N);
      CB_UNROLL
      for (int j = 0; j < PIECE; ++j) b[i + j] = piece.v[j];
    }
  }

  CB_DEVICE void multiply(Sums& sums) const {
    CB_UNROLL
    for (int i = 0; i < THREAD_M; ++i) {
      CB_UNROLL
      for (int turn = 0; turn < THREAD_N; ++turn) {
        const int j = column_at(i, turn);
        sums.at(i, j) = fmaf(a[i], b[j], sums.at(i, j));
      }
    }
  }
};

template <class A, class B>
CB_DEVICE void main_loop(A& a, B& b, const Run& run, const Place& place, float* shared, Sums& sums) {
  constexpr u32 STAGE = (A::FLOATS + B::FLOATS) * sizeof(float);
  if (run.tiles <= 0) return;
  u32 rows = place.m * sizeof(float), columns = (A::FLOATS + place.n) * sizeof(float);
  u32 a_target = a.map.shared_place() * sizeof(float);
  u32 b_target = (A::FLOATS + b.map.shared_place()) * sizeof(float);
  Fragments fragments[2];

  fill_ring<STAGE>(a, b, run, shared, a_target, b_target);
  fragments[0].read(shared, rows, columns, 0);

  // Reading is at stage r of the ring, writing at the one before it.
  constexpr u32 AROUND = 0u - (NUM_STAGES - 1) * STAGE;
  int stage = 0;
  u32 onward = STAGE;
  CB_NO_UNROLL
  for (int left = run.tiles; left > 0; --left) {
    CB_UNROLL
    for (int k = 0; k < TILE_K; ++k) {
      if (k == 0) {
        if (left >= NUM_STAGES) fetch_next(a, b, shared, a_target, b_target);
        commit_copies();
      }
      if (k == TILE_K - 1) {
        if (left >= NUM_STAGES) {
          a.put(shared, a_target);
          b.put(shared, b_target);
        }
        if constexpr (NUM_STAGES == 2) {
          a_target -= onward;
          b_target -= onward;
        } else {
          const u32 written = stage == 0 ? AROUND : STAGE;
          a_target += written;
          b_target += written;
          onward = stage == NUM_STAGES - 1 ? AROUND : STAGE;
          stage = stage == NUM_STAGES - 1 ? 0 : stage + 1;
        }
        rows += onward;
        columns += onward;
        if constexpr (NUM_STAGES == 2) onward = 0u - onward;
        wait_for_copies();
        cb_sync();
      }
      fragments[(k + 1) % 2].read(shared, rows, columns, (k + 1) % TILE_K);
      fragments[k % 2].multiply(sums);
    }
  }
}
