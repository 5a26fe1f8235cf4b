// SPDX-License-Identifier: MIT
//
// y = x minus the sum of its row; a block takes every gridDim-th row; or, by -DMUTANT, with one of these bugs.
// And y = x with each warp's lanes reversed, through shared memory.
#include "common/device.cuh"

enum Mutant {
  CORRECT,
  NO_BARRIER,
  NO_TRAILING_BARRIER,
  ALL_LANES_WRITE,
  UNWRITTEN,
  DIVERGENT_BARRIER,
  HALF_WARP_SHUFFLE,
  TWO_SHUFFLES,
  EARLY_RETURN,
  EXITED_LANE,
  BLOCK_ORDER,
  NO_WARP_BARRIER,
  NO_TRAILING_WARP_BARRIER,
};
constexpr Mutant mutant = MUTANT;

constexpr int THREADS = 128, WARPS = THREADS / 32;

CB_KERNEL(THREADS, 1) center_rows(const float* x, float* y, int rows, int columns) {
  CB_SHARED(float, partials, 32);
  if (mutant == EARLY_RETURN && cb_thread() >= columns) return;
  if (mutant == EXITED_LANE && cb_lane() == 31) return;
  for (int row = (int)cb_block_x(); row < rows; row += (int)cb_num_blocks_x()) {
    const i64 begin = (i64)row * columns;
    float sum = 0.0f;
    for (int c = cb_thread(); c < columns; c += THREADS) sum += x[begin + c];
    if (mutant == HALF_WARP_SHUFFLE) {
      if (cb_lane() < 16) sum += cb_shuffle_down(sum, 16);
    } else if (mutant == TWO_SHUFFLES && cb_lane() < 16) {
      sum += cb_shuffle_down(sum, 16);
    } else {
      sum += cb_shuffle_down(sum, 16);
    }
    CB_UNROLL
    for (int delta = 8; delta > 0; delta /= 2) sum += cb_shuffle_down(sum, delta);
    if (cb_lane() == 0 || mutant == ALL_LANES_WRITE) partials[cb_warp()] = sum;
    if (mutant == DIVERGENT_BARRIER && cb_thread() < 64) {
      cb_sync();
    } else if (mutant != NO_BARRIER) {
      cb_sync();
    }
    float total = mutant == BLOCK_ORDER ? y[0] : 0.0f;  // which another block may have written, or not yet
    for (int i = 0; i < (mutant == UNWRITTEN ? WARPS + 1 : WARPS); ++i) total += partials[i];
    for (int c = cb_thread(); c < columns; c += THREADS) y[begin + c] = x[begin + c] - total;
    if (mutant != NO_TRAILING_BARRIER) cb_sync();
  }
}

CB_KERNEL(THREADS, 1) reverse_lanes(const float* x, float* y, int rounds) {
  CB_SHARED(float, slots, THREADS);
  float value = x[cb_thread()];
  for (int round = 0; round < rounds; ++round) {
    slots[cb_thread()] = value;
    if (mutant != NO_WARP_BARRIER) cb_sync_warp();
    value = slots[cb_thread() ^ 31];
    if (mutant != NO_TRAILING_WARP_BARRIER) cb_sync_warp();
  }
  y[cb_thread()] = value;
}
