// SPDX-License-Identifier: MIT
//
// Y = A B, row-major: 64 x 64 tiles, two buffers in shared memory, 4 x 4 outputs a thread; or, by -DMUTANT, with one
// of these bugs.
#include "common/device.cuh"

enum Mutant {
  CORRECT,
  NO_FIRST_BARRIER,
  NO_SECOND_BARRIER,
  SHARED_OVERRUN,
  GLOBAL_OVERRUN,
  GLOBAL_WRITE_OVERRUN,
  MISALIGNED,
};
constexpr Mutant mutant = MUTANT;

constexpr int TILE = 64, STEP = 8, THREADS = 256, SHARE = STEP * TILE / THREADS;

CB_KERNEL(THREADS, 1) sgemm(const float* a, const float* b, float* y, int m, int n, int k) {
  CB_SHARED(float, a_tiles, 2 * STEP * TILE);
  CB_SHARED(float, b_tiles, 2 * STEP * TILE);
  const int row = (int)cb_block_x() * TILE, column = (int)cb_block_y() * TILE;
  const int ty = cb_thread() / 16, tx = cb_thread() % 16;
  float a_next[SHARE], b_next[SHARE], sum[4][4] = {};

  for (int step = -STEP; step < k; step += STEP) {  // the first round only loads
    const int next = step + STEP;
    CB_UNROLL
    for (int i = 0; i < SHARE; ++i) {
      const int index = i * THREADS + cb_thread();
      const int am = row + index / STEP, ak = next + index % STEP;
      const int bk = next + index / TILE, bn = column + index % TILE;
      const int k_end = mutant == GLOBAL_OVERRUN ? k + 1 : k;  // the last row's next element is no element
      a_next[i] = am < m && ak < k_end ? a[(i64)am * k + ak] : 0.0f;
      b_next[i] = bn < n && bk < k ? b[(i64)bk * n + bn] : 0.0f;
    }
    if (step >= 0) {
      const int slot = step / STEP % 2 * STEP * TILE;
      CB_UNROLL
      for (int kk = 0; kk < STEP; ++kk) {
        const int shift = mutant == MISALIGNED ? 1 : 0;
        const Vec<float, 4> left = cb_read<float, 4>(&a_tiles[slot + kk * TILE + 4 * ty + shift]);
        const Vec<float, 4> right = cb_read<float, 4>(&b_tiles[slot + kk * TILE + 4 * tx]);
        CB_UNROLL
        for (int i = 0; i < 4; ++i) {
          CB_UNROLL
          for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(left.v[i], right.v[j], sum[i][j]);
        }
      }
    }
    if (next < k) {
      const int slot = next / STEP % 2 * STEP * TILE;
      CB_UNROLL
      for (int i = 0; i < SHARE; ++i) {
        const int index = i * THREADS + cb_thread();
        a_tiles[slot + index % STEP * TILE + index / STEP] = a_next[i];
        b_tiles[slot + index] = b_next[i];
      }
      if (mutant == SHARED_OVERRUN && cb_thread() == 0) b_tiles[4 * cb_num_threads()] = 0.0f;
    }
    if (mutant != (step < 0 ? NO_FIRST_BARRIER : NO_SECOND_BARRIER)) cb_sync();
  }

  CB_UNROLL
  for (int i = 0; i < 4; ++i) {
    CB_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int at_m = row + 4 * ty + i, at_n = column + 4 * tx + j;
      if (at_m < m && at_n < (mutant == GLOBAL_WRITE_OVERRUN ? n + 1 : n)) y[(i64)at_m * n + at_n] = sum[i][j];
    }
  }
}
