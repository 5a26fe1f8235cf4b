// SPDX-License-Identifier: MIT
//
// split_k_reduce — adds up what the slices of a split gemm_k left, and finishes it as an unsplit product would have.
//
//   y[row, column] = epilogue(sum over slices of partials[slice][row][column])
//
// A product with few tiles leaves SMs idle, so several blocks share a tile, each with its own run of gemm_k.  Their
// sums are added here, always in the order of the slices: the same result every time.  A thread owns 4 neighbouring
// elements.
//
//   grid    ceil(elements / 1024)
//   needs   nothing; elements are loaded 4 at a time where the epilogue is wide
#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif

#include "common/epilogue.cuh"

constexpr int THREADS = 256;
constexpr int EACH = 4;

CB_KERNEL(THREADS, 4)
split_k_reduce(CB_ELEMENT* out, const CB_ELEMENT* bias, const float* scale, const float* shift,
               const CB_ELEMENT* residual, const CB_ELEMENT* mask, const float* partials, const Output output) {
  const Epilogue epilogue{output, out, bias, scale, shift, residual, mask, nullptr, nullptr};
  const i64 place = ((i64)cb_block_x() * THREADS + cb_thread()) * EACH;
  if (place >= epilogue.elements) return;
  float sum[1][EACH] = {};
  const float* partial = partials + place;
  if (epilogue.wide) {
    for (int slice = 0; slice < epilogue.slices; ++slice, partial += epilogue.elements) {
      const Vec<float, EACH> part = cb_load<float, EACH>(partial);
      CB_UNROLL
      for (int j = 0; j < EACH; ++j) sum[0][j] += part.v[j];
    }
    if (epilogue.is_wide()) {
      const int column = (int)(place % epilogue.columns);
      const i64 places[1] = {place};
      finish_wide<1>(epilogue, places, column, sum);
      return;
    }
  } else {
    for (int slice = 0; slice < epilogue.slices; ++slice, partial += epilogue.elements) {
      CB_UNROLL
      for (int j = 0; j < EACH; ++j) {
        if (place + j < epilogue.elements) sum[0][j] += partial[j];
      }
    }
  }
  // One copy of the code, to which the sums move up.
  CB_NO_UNROLL
  for (i64 one = place; one < place + EACH && one < epilogue.elements; ++one) {
    finish_one(epilogue, one, (int)(one % epilogue.columns), sum[0][0]);
    CB_UNROLL
    for (int j = 1; j < EACH; ++j) sum[0][j - 1] = sum[0][j];
  }
}
