// SPDX-License-Identifier: MIT
//
// Y = A^T B for A (k, m) and B (k, n): 64 x 64 tiles, a ring of three slots that cp.async fills two steps ahead,
// 4 x 8 outputs a thread; or, by -DMUTANT, with one of these bugs.  m and n are multiples of 4.
#include "common/device.cuh"

enum Mutant { CORRECT, NO_BARRIER, WEAK_WAIT, WRONG_STAGE, ISSUE_BEFORE_BARRIER, NO_DRAIN, NO_ZERO_FILL };
constexpr Mutant mutant = MUTANT;

constexpr int TILE = 64, STEP = 8, THREADS = 128, STAGES = 3;

#if CB_ARCH >= 80
CB_KERNEL(THREADS, 1) pipeline(const float* a, const float* b, float* y, int m, int n, int k) {
  CB_DYNAMIC_SHARED(arena);
  float* a_tiles = reinterpret_cast<float*>(arena);
  float* b_tiles = a_tiles + STAGES * STEP * TILE;
  const int row = (int)cb_block_x() * TILE, column = (int)cb_block_y() * TILE;
  const int ty = cb_thread() / 8, tx = cb_thread() % 8;
  float sum[4][8] = {};

  // One copy of A and one of B a thread; what is outside becomes zeros.
  auto issue = [&](int step) {
    const int slot = step % STAGES * STEP * TILE + 4 * cb_thread();
    const int kk = step * STEP + cb_thread() / 16, at = cb_thread() % 16 * 4;
    const bool in_k = kk < k, in_m = in_k && row + at < m, in_n = in_k && column + at < n;
    const bool fill = mutant != NO_ZERO_FILL;
    if (in_m || fill) cb_copy_async<16>(a_tiles + slot, in_m ? a + (i64)kk * m + row + at : a, in_m ? 16 : 0);
    if (in_n || fill) cb_copy_async<16>(b_tiles + slot, in_n ? b + (i64)kk * n + column + at : b, in_n ? 16 : 0);
  };

  CB_UNROLL
  for (int step = 0; step < STAGES - 1; ++step) {
    issue(step);
    cb_copy_commit();
  }
  for (int step = 0; step * STEP < k; ++step) {
    if (mutant == WEAK_WAIT) {
      cb_copy_wait<STAGES - 1>();
    } else {
      cb_copy_wait<STAGES - 2>();
    }
    if (mutant == ISSUE_BEFORE_BARRIER) issue(step + STAGES - 1);  // into the slot that others may still read
    if (mutant != NO_BARRIER) cb_sync();
    if (mutant != ISSUE_BEFORE_BARRIER) issue(step + STAGES - 1);
    cb_copy_commit();
    const int slot = (mutant == WRONG_STAGE ? step + 1 : step) % STAGES * STEP * TILE;
    CB_UNROLL
    for (int kk = 0; kk < STEP; ++kk) {
      const Vec<float, 4> left = cb_read<float, 4>(a_tiles + slot + kk * TILE + 4 * ty);
      const Vec<float, 4> right[2] = {cb_read<float, 4>(b_tiles + slot + kk * TILE + 8 * tx),
                                      cb_read<float, 4>(b_tiles + slot + kk * TILE + 8 * tx + 4)};
      CB_UNROLL
      for (int i = 0; i < 4; ++i) {
        CB_UNROLL
        for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(left.v[i], right[j / 4].v[j % 4], sum[i][j]);
      }
    }
  }
  if (mutant != NO_DRAIN) cb_copy_wait<0>();

  CB_UNROLL
  for (int i = 0; i < 4; ++i) {
    CB_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int at_m = row + 4 * ty + i, at_n = column + 8 * tx + j;
      if (at_m < m && at_n < n) y[(i64)at_m * n + at_n] = sum[i][j];
    }
  }
}
#endif
