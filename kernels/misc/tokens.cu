// SPDX-License-Identifier: MIT
//
// tokens — how a vision transformer begins: a class token before the pixels of (n, pixels, c), and a position for each.
//
//   tokens   y[n,0,c] = token[c] + position[0,c],  y[n,i,c] = x[n,i-1,c] + position[i,c]
//
// All else is copies of columns and sums of rows of arrays (n, positions * c): pointwise.cu, reductions.cu.
//
//   grid    (tiles of samples, ceil(columns / (lanes * V)) in y and z), columns = positions * c: a thread keeps its V
//           of a sample's columns, and what is added to them, and steps down the samples (common/columns.cuh)
//   needs   V to divide c, so that a vector lies in one position
#include "common/columns.cuh"

template <int V>
CB_DEVICE void add_positions(const CB_ELEMENT* x, const CB_ELEMENT* token, const CB_ELEMENT* position, CB_ELEMENT* y,
                             Rows samples, int columns, int channels, int lanes) {
  const Column at = column_of_thread(lanes);
  const int column = (column_block() * lanes + at.lane) * V;
  if (column >= columns) return;
  const bool is_class = column < channels;
  float added[V];
  load_channels<V>(position + column, added);
  walk<LOADS>(
      samples.begin + at.row_lane, samples.end, at.num_row_lanes,
      [&](i64 n) {
        const CB_ELEMENT* pixels = x + n * (columns - channels) + (column - channels);
        return cb_load<CB_ELEMENT, V>(is_class ? token + column : pixels);
      },
      [&](i64 n, const Vec<CB_ELEMENT, V>& loaded) {
        Vec<CB_ELEMENT, V> result;
        CB_UNROLL
        for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(to_float(loaded.v[v]) + added[v]);
        cb_write<CB_ELEMENT, V>(y + n * columns + column, result);
      });
}

CB_KERNEL(THREADS, 3)
tokens(const CB_ELEMENT* x, const CB_ELEMENT* token, const CB_ELEMENT* position, CB_ELEMENT* y, i64 num_samples,
       int samples_per_tile, int columns, int channels, int lanes, int vector) {
  cb_dependent_launch();
  const Rows samples = rows_of_tile(cb_block_x(), samples_per_tile, num_samples);
  if (vector > 1) {
    add_positions<WIDE>(x, token, position, y, samples, columns, channels, lanes);
  } else {
    add_positions<1>(x, token, position, y, samples, columns, channels, lanes);
  }
}
