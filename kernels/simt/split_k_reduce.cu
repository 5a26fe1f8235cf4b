// SPDX-License-Identifier: MIT
//
// split_k_reduce — adds up what the slices of a split gemm_k left, and finishes it as an unsplit product would have.
//
//   y[row, column] = epilogue(sum over slices of partials[slice][row][column])
//
// A product with few tiles leaves SMs idle, so several blocks share a tile, each with its own run of gemm_k.  Their
// sums are added here, in an order that the number of slices fixes: the same result every time.  A thread owns 4
// neighbouring elements.  Of many slices there are few elements, and one thread after the other would wait for memory
// as often as there are slices: each warp of a block adds up its share of them instead.
//
//   grid    ceil(elements / 1024), with 32 slices or more ceil(elements / 128)
//   needs   nothing; elements are loaded 4 at a time where the epilogue is wide
#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif

#include "common/epilogue.cuh"

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr int EACH = 4;
constexpr int AHEAD = 4;
constexpr int MANY = 32;  // slices that are shared out to the warps

// Add up the sums of every STEP-th slice from the first on.
static CB_DEVICE void add_up(const Epilogue& epilogue, const float* partials, i64 place, int first, int step,
                             float (&sum)[EACH]) {
  const i64 stride = step * epilogue.elements;
  const float* partial = partials + first * epilogue.elements + place;
  int slice = first;
  if (!epilogue.wide) {
    for (; slice < epilogue.slices; slice += step, partial += stride) {
      CB_UNROLL
      for (int j = 0; j < EACH; ++j) {
        if (place + j < epilogue.elements) sum[j] += partial[j];
      }
    }
    return;
  }
  for (; slice + (AHEAD - 1) * step < epilogue.slices; slice += AHEAD * step, partial += AHEAD * stride) {
    Vec<float, EACH> parts[AHEAD];  // all on their way before the first is added
    CB_UNROLL
    for (int i = 0; i < AHEAD; ++i) parts[i] = cb_load<float, EACH>(partial + i * stride);
    CB_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      CB_UNROLL
      for (int j = 0; j < EACH; ++j) sum[j] += parts[i].v[j];
    }
  }
  for (; slice < epilogue.slices; slice += step, partial += stride) {
    const Vec<float, EACH> part = cb_load<float, EACH>(partial);
    CB_UNROLL
    for (int j = 0; j < EACH; ++j) sum[j] += part.v[j];
  }
}

CB_KERNEL(THREADS, 4)
split_k_reduce(CB_ELEMENT* out, const CB_ELEMENT* bias, const float* scale, const float* shift,
               const CB_ELEMENT* residual, const CB_ELEMENT* mask, const float* partials, const Output output) {
  cb_dependent_launch();
  CB_SHARED(float, shares, WARPS * WARP * EACH);
  const Epilogue epilogue{output, out, bias, scale, shift, residual, mask, nullptr, nullptr};
  const bool many = epilogue.slices >= MANY;
  const int thread = cb_thread(), warp = thread / WARP;
  const i64 owner = many ? (i64)cb_block_x() * WARP + thread % WARP : (i64)cb_block_x() * THREADS + thread;
  const i64 place = owner * EACH;
  float sum[1][EACH] = {};
  if (place < epilogue.elements) {
    add_up(epilogue, partials, place, many ? warp : 0, many ? WARPS : 1, sum[0]);
  }
  if (many) {
    float* const mine = shares + thread * EACH;
    CB_UNROLL
    for (int j = 0; j < EACH; ++j) mine[j] = sum[0][j];
    cb_sync();
    if (warp > 0) return;
    for (int other = 1; other < WARPS; ++other) {
      CB_UNROLL
      for (int j = 0; j < EACH; ++j) sum[0][j] += mine[other * WARP * EACH + j];
    }
  }
  if (place >= epilogue.elements) return;
  if (epilogue.is_wide()) {
    const int column = (int)(place % epilogue.columns);
    const i64 places[1] = {place};
    finish_wide<1>(epilogue, places, column, sum);
    return;
  }
  // One copy of the code, to which the sums move up.
  CB_NO_UNROLL
  for (i64 one = place; one < place + EACH && one < epilogue.elements; ++one) {
    finish_one(epilogue, one, (int)(one % epilogue.columns), sum[0][0]);
    CB_UNROLL
    for (int j = 1; j < EACH; ++j) sum[0][j - 1] = sum[0][j];
  }
}
