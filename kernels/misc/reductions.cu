// SPDX-License-Identifier: MIT
//
// column_sums — sum over all rows of (rows, channels), per channel: the gradient of a bias.
//
//   out[c] = sum over rows of x[row, c], in float32, in two stages and one order
//
//   column_sums          a tile of rows per block: partials[tile][c]    grid = (tiles, ceil(C / (lanes * V)) in y, z)
//   column_sums_finish   sums of the partials, converted and stored     grid = (ceil(C / 8))
//   (who owns which channel: common/columns.cuh)
#include "common/columns.cuh"

template <int V>
CB_DEVICE void sum_tile(const CB_ELEMENT* x, float* partials, SummedRows rows, int channels, int lanes, float* shared) {
  const Column at = column_of_thread(lanes);
  const int first = column_block() * lanes * V;
  const int channel = first + at.lane * V;
  float sums[1][V] = {};
  if (channel < channels) {
    walk<LOADS>(
        rows.begin + at.row_lane, rows.end, rows.step,
        [&](i64 place) { return cb_load<CB_ELEMENT, V>(x + rows.row(place) * channels + channel); },
        [&](i64, const Vec<CB_ELEMENT, V>& loaded) {
          CB_UNROLL
          for (int v = 0; v < V; ++v) sums[0][v] += to_float(loaded.v[v]);
        });
  }
  store_tile(sums, partials, first, channels, lanes, shared);
}

CB_KERNEL(THREADS, 4)
column_sums(const CB_ELEMENT* x, float* partials, i64 num_rows, int rows_per_tile, int channels, int lanes,
            int vector) {
  cb_dependent_launch();
  CB_SHARED(float, shared, COLUMN_SHARED);
  const SummedRows rows = summed_rows(rows_per_tile, num_rows, lanes);
  if (vector > 1) {
    sum_tile<WIDE>(x, partials, rows, channels, lanes, shared);
  } else {
    sum_tile<1>(x, partials, rows, channels, lanes, shared);
  }
}

CB_KERNEL(THREADS, 4)
column_sums_finish(const float* partials, int tiles, int channels, CB_ELEMENT* out) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS * FINISH_LANES);
  const float sum = finish_sum(partials, tiles, channels, shared);
  if (cb_thread() < FINISH_LANES && finish_column() < channels) out[finish_column()] = from_float<CB_ELEMENT>(sum);
}
