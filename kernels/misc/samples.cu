// SPDX-License-Identifier: MIT
//
// samples — what has one value for each sample and channel of (n, rows, c), rows being its h * w pixels.
//
//   global_avg_pool            y[n,c] = sum over rows of x[n,row,c] / rows
//   global_avg_pool_backward   dx[n,row,c] = dy[n,c] / rows [+ residual]
//   scale                      y[n,row,c] = x[n,row,c] * s[n,c]; scale_add: + residual[n,row,c]
//   scale_backward             dx[n,row,c] = dy[n,row,c] * s[n,c],  ds[n,c] = sum over rows of dy * x
//
//   grid    (n, blocks of channels) where rows are summed: a block sums all of them, in one order
//           (n * tiles, blocks of channels) where not: a block owns a tile of one sample's rows
//   (who owns which channel: common/columns.cuh)
#include "common/columns.cuh"

// This block's rows of all samples' rows one after the other, and the sample they are of.
struct SampleRows {
  i64 n;
  Rows rows;
};

CB_DEVICE SampleRows rows_of_sample(int num_rows, int rows_per_tile) {
  const u32 tiles = (u32)((num_rows + rows_per_tile - 1) / rows_per_tile);
  const i64 n = cb_block_x() / tiles;
  const int begin = (int)(cb_block_x() % tiles) * rows_per_tile;
  const int end = begin + rows_per_tile < num_rows ? begin + rows_per_tile : num_rows;
  return {n, {n * num_rows + begin, n * num_rows + end}};
}

// Store a sum of each channel of this block, times a factor, for sample n.
template <int V>
CB_DEVICE void store_sums(float (&sums)[1][V], CB_ELEMENT* out, i64 n, int channels, int lanes, float divisor,
                          float* shared) {
  share_sums(sums, lanes, shared);
  const int first = (int)cb_block_y() * lanes * V;
  CB_NO_UNROLL
  for (int i = cb_thread(); i < lanes * V && first + i < channels; i += THREADS) {
    out[n * channels + first + i] = from_float<CB_ELEMENT>(block_sum<1>(shared, 0, i, lanes * V) / divisor);
  }
}

template <int V>
CB_DEVICE void sample_mean(const CB_ELEMENT* x, CB_ELEMENT* y, int num_rows, int channels, int lanes, float* shared) {
  const Column at = column_of_thread(lanes);
  const int channel = ((int)cb_block_y() * lanes + at.lane) * V;
  const i64 n = cb_block_x();
  float sums[1][V] = {};
  if (channel < channels) {
    walk<LOADS>(
        n * num_rows + at.row_lane, (n + 1) * num_rows, at.num_row_lanes,
        [&](i64 row) { return cb_load<CB_ELEMENT, V>(x + row * channels + channel); },
        [&](i64, const Vec<CB_ELEMENT, V>& loaded) {
          CB_UNROLL
          for (int v = 0; v < V; ++v) sums[0][v] += to_float(loaded.v[v]);
        });
  }
  store_sums<V>(sums, y, n, channels, lanes, (float)num_rows, shared);
}

CB_KERNEL(THREADS, 4)
global_avg_pool(const CB_ELEMENT* x, CB_ELEMENT* y, int num_rows, int channels, int lanes, int vector) {
  cb_dependent_launch();
  CB_SHARED(float, shared, COLUMN_SHARED);
  if (vector > 1) {
    sample_mean<WIDE>(x, y, num_rows, channels, lanes, shared);
  } else {
    sample_mean<1>(x, y, num_rows, channels, lanes, shared);
  }
}

template <int V>
CB_DEVICE void spread_mean(const CB_ELEMENT* dy, const CB_ELEMENT* residual, CB_ELEMENT* dx, int num_rows,
                           int rows_per_tile, int channels, int lanes) {
  const Column at = column_of_thread(lanes);
  const SampleRows of = rows_of_sample(num_rows, rows_per_tile);
  const int channel = ((int)cb_block_y() * lanes + at.lane) * V;
  if (channel >= channels) return;
  float share[V];
  load_channels<V>(dy + of.n * channels + channel, share);
  CB_UNROLL
  for (int v = 0; v < V; ++v) share[v] /= (float)num_rows;
  walk<LOADS>(
      of.rows.begin + at.row_lane, of.rows.end, at.num_row_lanes,
      [&](i64 row) {
        Vec<CB_ELEMENT, V> added = {};
        if (residual != nullptr) added = cb_read<CB_ELEMENT, V>(residual + row * channels + channel);
        return added;
      },
      [&](i64 row, const Vec<CB_ELEMENT, V>& added) {
        Vec<CB_ELEMENT, V> result;
        CB_UNROLL
        for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(share[v] + to_float(added.v[v]));
        cb_write<CB_ELEMENT, V>(dx + row * channels + channel, result);
      });
}

// residual may be null; dx may be residual.
CB_KERNEL(THREADS, 4)
global_avg_pool_backward(const CB_ELEMENT* dy, const CB_ELEMENT* residual, CB_ELEMENT* dx, int num_rows,
                         int rows_per_tile, int channels, int lanes, int vector) {
  cb_dependent_launch();
  if (vector > 1) {
    spread_mean<WIDE>(dy, residual, dx, num_rows, rows_per_tile, channels, lanes);
  } else {
    spread_mean<1>(dy, residual, dx, num_rows, rows_per_tile, channels, lanes);
  }
}

template <int V>
CB_DEVICE Vec<CB_ELEMENT, V> multiply(const Vec<CB_ELEMENT, V>& values, const float (&factors)[V]) {
  Vec<CB_ELEMENT, V> result;
  CB_UNROLL
  for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(to_float(values.v[v]) * factors[v]);
  return result;
}

template <int V>
struct Scaled {
  Vec<CB_ELEMENT, V> x, added;
};

template <int V, bool ADDS>
CB_DEVICE void scale_rows(const CB_ELEMENT* x, const CB_ELEMENT* s, [[maybe_unused]] const CB_ELEMENT* residual,
                          CB_ELEMENT* y, int num_rows, int rows_per_tile, int channels, int lanes) {
  const Column at = column_of_thread(lanes);
  const SampleRows of = rows_of_sample(num_rows, rows_per_tile);
  const int channel = ((int)cb_block_y() * lanes + at.lane) * V;
  if (channel >= channels) return;
  float factors[V];
  load_channels<V>(s + of.n * channels + channel, factors);
  if constexpr (ADDS) {
    walk<LOADS>(
        of.rows.begin + at.row_lane, of.rows.end, at.num_row_lanes,
        [&](i64 row) {
          const i64 place = row * channels + channel;
          return Scaled<V>{cb_read<CB_ELEMENT, V>(x + place), cb_read<CB_ELEMENT, V>(residual + place)};
        },
        [&](i64 row, const Scaled<V>& loaded) {
          Vec<CB_ELEMENT, V> result;
          CB_UNROLL
          for (int v = 0; v < V; ++v) {
            const float sum = fmaf(to_float(loaded.x.v[v]), factors[v], to_float(loaded.added.v[v]));
            result.v[v] = from_float<CB_ELEMENT>(sum);
          }
          cb_write<CB_ELEMENT, V>(y + row * channels + channel, result);
        });
    return;
  }
  walk<LOADS>(
      of.rows.begin + at.row_lane, of.rows.end, at.num_row_lanes,
      [&](i64 row) { return cb_read<CB_ELEMENT, V>(x + row * channels + channel); },
      [&](i64 row, const Vec<CB_ELEMENT, V>& loaded) {
        cb_write<CB_ELEMENT, V>(y + row * channels + channel, multiply<V>(loaded, factors));
      });
}

template <bool ADDS>
CB_DEVICE void scale_all(const CB_ELEMENT* x, const CB_ELEMENT* s, const CB_ELEMENT* residual, CB_ELEMENT* y,
                         int num_rows, int rows_per_tile, int channels, int lanes, int vector) {
  if (vector > 1) {
    scale_rows<WIDE, ADDS>(x, s, residual, y, num_rows, rows_per_tile, channels, lanes);
  } else {
    scale_rows<1, ADDS>(x, s, residual, y, num_rows, rows_per_tile, channels, lanes);
  }
}

// y may be x.
CB_KERNEL(THREADS, 3)
scale(const CB_ELEMENT* x, const CB_ELEMENT* s, CB_ELEMENT* y, int num_rows, int rows_per_tile, int channels, int lanes,
      int vector) {
  cb_dependent_launch();
  scale_all<false>(x, s, nullptr, y, num_rows, rows_per_tile, channels, lanes, vector);
}

// y may be x or residual.
CB_KERNEL(THREADS, 3)
scale_add(const CB_ELEMENT* x, const CB_ELEMENT* s, const CB_ELEMENT* residual, CB_ELEMENT* y, int num_rows,
          int rows_per_tile, int channels, int lanes, int vector) {
  cb_dependent_launch();
  scale_all<true>(x, s, residual, y, num_rows, rows_per_tile, channels, lanes, vector);
}

template <int V>
CB_DEVICE void scale_gradients(const CB_ELEMENT* dy, const CB_ELEMENT* x, const CB_ELEMENT* s, CB_ELEMENT* dx,
                               CB_ELEMENT* ds, int num_rows, int channels, int lanes, float* shared) {
  const Column at = column_of_thread(lanes);
  const int channel = ((int)cb_block_y() * lanes + at.lane) * V;
  const i64 n = cb_block_x();
  float sums[1][V] = {};
  if (channel < channels) {
    float factors[V];
    load_channels<V>(s + n * channels + channel, factors);
    walk<2>(
        n * num_rows + at.row_lane, (n + 1) * num_rows, at.num_row_lanes,
        [&](i64 row) {
          const i64 offset = row * channels + channel;
          return Pair<V>{cb_read<CB_ELEMENT, V>(dy + offset), cb_load<CB_ELEMENT, V>(x + offset)};
        },
        [&](i64 row, const Pair<V>& loaded) {
          CB_UNROLL
          for (int v = 0; v < V; ++v) {
            sums[0][v] = fmaf(to_float(loaded.dy.v[v]), to_float(loaded.x.v[v]), sums[0][v]);
          }
          if (dx != nullptr) cb_write<CB_ELEMENT, V>(dx + row * channels + channel, multiply<V>(loaded.dy, factors));
        });
  }
  if (ds != nullptr) store_sums<V>(sums, ds, n, channels, lanes, 1.0f, shared);
}

// dx may be dy; dx or ds may be null.
CB_KERNEL(THREADS, 3)
scale_backward(const CB_ELEMENT* dy, const CB_ELEMENT* x, const CB_ELEMENT* s, CB_ELEMENT* dx, CB_ELEMENT* ds,
               int num_rows, int channels, int lanes, int vector) {
  cb_dependent_launch();
  CB_SHARED(float, shared, COLUMN_SHARED);
  if (vector > 1) {
    scale_gradients<WIDE>(dy, x, s, dx, ds, num_rows, channels, lanes, shared);
  } else {
    scale_gradients<1>(dy, x, s, dx, ds, num_rows, channels, lanes, shared);
  }
}
