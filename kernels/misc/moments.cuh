// SPDX-License-Identifier: MIT
//
// Count, mean and sum of squared deviations of the rows of a tile, and of tiles together, for batch_norm.cu.
#pragma once

#include "common/columns.cuh"

struct Moments {
  float count;
  float mean;
  float m2;
};

CB_DEVICE Moments merge(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float delta = b.mean - a.mean;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

template <int V>
CB_DEVICE void tile_moments(const CB_ELEMENT* x, float* partials, SummedRows rows, int channels, int lanes,
                            float* shared) {
  const Column at = column_of_thread(lanes);
  const int first = (int)cb_block_y() * lanes * V;
  const int channel = first + at.lane * V;
  float sums[2][V] = {};
  if (channel < channels) {
    const Vec<CB_ELEMENT, V> pivot = cb_load<CB_ELEMENT, V>(x + rows.row(rows.begin) * channels + channel);
    walk<LOADS>(
        rows.begin + at.row_lane, rows.end, rows.step,
        [&](i64 place) { return cb_load<CB_ELEMENT, V>(x + rows.row(place) * channels + channel); },
        [&](i64, const Vec<CB_ELEMENT, V>& loaded) {
          CB_UNROLL
          for (int v = 0; v < V; ++v) {
            const float shifted = to_float(loaded.v[v]) - to_float(pivot.v[v]);
            sums[0][v] += shifted;
            sums[1][v] = fmaf(shifted, shifted, sums[1][v]);
          }
        });
  }
  share_sums(sums, lanes, shared);
  const float count = (float)rows.count(at.num_row_lanes);
  float* tile = partials + (i64)cb_block_x() * 3 * channels;
  CB_NO_UNROLL
  for (int i = cb_thread(); i < lanes * V && first + i < channels; i += THREADS) {
    const float sum = block_sum<2>(shared, 0, i, lanes * V);
    const float m2 = block_sum<2>(shared, 1, i, lanes * V) - sum * (sum / count);
    const int c = first + i;
    tile[c] = count;
    tile[channels + c] = to_float(x[rows.row(rows.begin) * channels + c]) - to_float(x[c]) + sum / count;
    tile[2 * channels + c] = m2 < 0.0f ? 0.0f : m2;  // millions of equal rows may round to less than nothing
  }
}

// Moments of tiles [begin, end) in this thread's finish_column(); valid in the first group.  All threads call it.
CB_DEVICE Moments merge_tiles(const float* partials, int begin, int end, int channels, float* shared) {
  const int c = finish_column();
  Moments total = {};
  if (c < channels) {
    walk<LOADS>(
        begin + cb_thread() / FINISH_LANES, end, THREADS / FINISH_LANES,
        [&](i64 tile) {
          const float* of = partials + tile * 3 * channels + c;
          return Moments{of[0], of[channels], of[2 * channels]};
        },
        [&](i64, const Moments& loaded) { total = merge(total, loaded); });
  }
  CB_NO_UNROLL
  for (int bits = FINISH_LANES; bits < 32; bits *= 2) {
    const Moments other = {cb_shuffle_xor(total.count, bits), cb_shuffle_xor(total.mean, bits),
                           cb_shuffle_xor(total.m2, bits)};
    total = merge(total, other);
  }
  if (cb_lane() < FINISH_LANES) {
    float* mine = shared + (cb_warp() * FINISH_LANES + cb_lane()) * 3;
    mine[0] = total.count;
    mine[1] = total.mean;
    mine[2] = total.m2;
  }
  cb_sync();
  if (cb_thread() < FINISH_LANES) {
    CB_NO_UNROLL
    for (int warp = 1; warp < WARPS; ++warp) {
      const float* other = shared + (warp * FINISH_LANES + cb_thread()) * 3;
      total = merge(total, {other[0], other[1], other[2]});
    }
  }
  return total;
}
