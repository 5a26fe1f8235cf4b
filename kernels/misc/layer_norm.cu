// SPDX-License-Identifier: MIT
//
// layer_norm — normalise each row of (rows, channels) by the mean and variance of its channels; and its gradient.
//
//   y  = (x - mean) * inv_std * gamma + beta,  inv_std = 1 / sqrt(variance + eps)
//   dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)),  g = gamma * dy,  xhat = (x - mean) * inv_std
//
//   layer_norm            y, and in training statistics[2][rows] = mean and inv_std
//   layer_norm_backward   dx; layer_norm_backward_add: dx + residual, the gradient of other readers of x.  Both also
//                         partials[block][2][C] = sums of dy * xhat and of dy over the block's rows
//   layer_norm_sums       the same of a tile of rows that are too long for shared memory; without statistics xhat is x
//   batch_norm_backward_finish makes dgamma and dbeta of the partials
//
// A row is read once from memory and again from the cache.  The first mean is off by the rounding of a sum of x; the
// second pass sums the deviations from it and their squares, which shows by how much, so that a mean of many deviations
// costs no digits of the variance.  The gradient takes the last rows first: the L2 cache still has those of dy.
//
//   grid    rows: some blocks for each SM (common/rows.cuh); sums: (tiles, ceil(C / (lanes * V))) (common/columns.cuh)
//   needs   statistics and partials in float32; gamma and beta stored as activations are; of gamma a gradient loads
//           vectors too
#include "common/columns.cuh"
#include "common/rows.cuh"

// use(column, load(column)) over this thread's vectors of a row.
template <int V, class Load, class Use>
CB_DEVICE void for_vectors(const RowWalk& at, Load load, Use use) {
  if (!at.active) return;
  walk<2>(at.lane, at.columns / V, at.lanes, [&](i64 i) { return load((int)i * V); },
          [&](i64 i, const decltype(load(0))& loaded) { use((int)i * V, loaded); });
}

template <int V>
CB_DEVICE void normalise_rows(const CB_ELEMENT* x, const CB_ELEMENT* gamma, const CB_ELEMENT* beta, CB_ELEMENT* y,
                              float* statistics, i64 num_rows, int channels, int lanes, float eps, float* shared) {
  for_rows(num_rows, channels, lanes, [&](const RowWalk& at) {
    const CB_ELEMENT* row = x + at.row * channels;
    const auto load = [&](int c) { return cb_load<CB_ELEMENT, V>(row + c); };
    const float share = 1.0f / (float)channels;
    float sum = 0.0f;
    for_vectors<V>(at, load, [&](int, const Vec<CB_ELEMENT, V>& loaded) {
      CB_UNROLL
      for (int v = 0; v < V; ++v) sum += to_float(loaded.v[v]);
    });
    const float first = combine_row(sum, lanes, shared, Sum()) * share;
    float off = 0.0f, squares = 0.0f;
    for_vectors<V>(at, load, [&](int, const Vec<CB_ELEMENT, V>& loaded) {
      CB_UNROLL
      for (int v = 0; v < V; ++v) {
        const float deviation = to_float(loaded.v[v]) - first;
        off += deviation;
        squares = fmaf(deviation, deviation, squares);
      }
    });
    off = combine_row(off, lanes, shared, Sum()) * share;
    const float variance = combine_row(squares, lanes, shared, Sum()) * share - off * off;
    const float inv_std = 1.0f / sqrtf((variance < 0.0f ? 0.0f : variance) + eps);
    if (statistics != nullptr && at.active && at.lane == 0) {
      statistics[at.row] = first + off;
      statistics[num_rows + at.row] = inv_std;
    }
    CB_ELEMENT* target = y + at.row * channels;
    for_vectors<V>(at, load, [&](int c, const Vec<CB_ELEMENT, V>& loaded) {
      float scale[V], shift[V];
      load_channels<V>(gamma + c, scale);
      load_channels<V>(beta + c, shift);
      Vec<CB_ELEMENT, V> result;
      CB_UNROLL
      for (int v = 0; v < V; ++v) {
        const float normed = (to_float(loaded.v[v]) - first - off) * inv_std;
        result.v[v] = from_float<CB_ELEMENT>(fmaf(normed, scale[v], shift[v]));
      }
      cb_write<CB_ELEMENT, V>(target + c, result);
    });
  });
}

// statistics may be null.
CB_KERNEL(THREADS, 3)
layer_norm(const CB_ELEMENT* x, const CB_ELEMENT* gamma, const CB_ELEMENT* beta, CB_ELEMENT* y, float* statistics,
           i64 num_rows, int channels, int lanes, int vector, float eps) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS);
  if (vector > 1) {
    normalise_rows<WIDE>(x, gamma, beta, y, statistics, num_rows, channels, lanes, eps, shared);
  } else {
    normalise_rows<1>(x, gamma, beta, y, statistics, num_rows, channels, lanes, eps, shared);
  }
}

// Floats of shared memory for the sums of a gradient's block: 48 KiB.  Rows of more threads than a warp leave the last
// WARPS of them to combine_row.
constexpr int ROW_SUMS = 12 * 1024;

// Vectors of dy and x, and with ADDS of residual.
template <int V, bool ADDS>
struct Terms {
  Vec<CB_ELEMENT, V> of[ADDS ? 3 : 2];
};

template <int V, bool ADDS>
CB_DEVICE void row_gradients(const CB_ELEMENT* dy, const CB_ELEMENT* x, const CB_ELEMENT* gamma,
                             const float* statistics, [[maybe_unused]] const CB_ELEMENT* residual, CB_ELEMENT* dx,
                             float* partials, i64 num_rows, int channels, int lanes, float* shared) {
  // The rows of a block have sums of their own, [2][V][rows][vectors]: a warp's threads add to neighbors, each in
  // another bank.
  const int vectors = channels / V, stride = THREADS / lanes * vectors, places = 2 * V * stride;
  float *sums = shared + cb_thread() / lanes * vectors, *combined = shared + ROW_SUMS - WARPS;
  if (partials != nullptr) {
    CB_NO_UNROLL
    for (int i = cb_thread(); i < places; i += THREADS) shared[i] = 0.0f;
    cb_sync();
  }
  for_rows(num_rows, channels, lanes, [&](const RowWalk& at) {
    const i64 row = num_rows - 1 - at.row, begin = row * channels;
    const auto load = [&](int c) {
      return Pair<V>{cb_read<CB_ELEMENT, V>(dy + begin + c), cb_load<CB_ELEMENT, V>(x + begin + c)};
    };
    const float mean = at.active ? statistics[row] : 0.0f;
    const float inv_std = at.active ? statistics[num_rows + row] : 0.0f;
    const float share = 1.0f / (float)channels;
    float sum = 0.0f, product = 0.0f;
    for_vectors<V>(at, load, [&](int c, const Pair<V>& loaded) {
      const Vec<CB_ELEMENT, V> scale = cb_load<CB_ELEMENT, V>(gamma + c);
      float *own = sums + c / V, held[2][V] = {};  // all loads before the first store
      if (partials != nullptr) {
        CB_UNROLL
        for (int i = 0; i < 2 * V; ++i) held[i / V][i % V] = own[i * stride];
      }
      CB_UNROLL
      for (int v = 0; v < V; ++v) {
        const float error = to_float(loaded.dy.v[v]), normed = (to_float(loaded.x.v[v]) - mean) * inv_std;
        const float scaled = error * to_float(scale.v[v]);
        sum += scaled;
        product = fmaf(scaled, normed, product);
        held[0][v] = fmaf(error, normed, held[0][v]);
        held[1][v] += error;
      }
      if (partials != nullptr) {
        CB_UNROLL
        for (int i = 0; i < 2 * V; ++i) own[i * stride] = held[i / V][i % V];
      }
    });
    sum = combine_row(sum, lanes, combined, Sum()) * share;
    product = combine_row(product, lanes, combined, Sum()) * share;
    const auto load_all = [&](int c) {
      const Pair<V> loaded = load(c);
      Terms<V, ADDS> terms = {loaded.dy, loaded.x};
      if constexpr (ADDS) terms.of[2] = cb_read<CB_ELEMENT, V>(residual + begin + c);
      return terms;
    };
    for_vectors<V>(at, load_all, [&](int c, const Terms<V, ADDS>& loaded) {
      const Vec<CB_ELEMENT, V> scale = cb_load<CB_ELEMENT, V>(gamma + c);
      Vec<CB_ELEMENT, V> result;
      CB_UNROLL
      for (int v = 0; v < V; ++v) {
        const float linear = fmaf((to_float(loaded.of[1].v[v]) - mean) * inv_std, product, sum);
        const float own = (to_float(loaded.of[0].v[v]) * to_float(scale.v[v]) - linear) * inv_std;
        result.v[v] = from_float<CB_ELEMENT>(ADDS ? own + to_float(loaded.of[ADDS ? 2 : 0].v[v]) : own);
      }
      cb_write<CB_ELEMENT, V>(dx + begin + c, result);
    });
  });
  if (partials == nullptr) return;
  cb_sync();
  CB_NO_UNROLL
  for (int i = cb_thread(); i < 2 * channels; i += THREADS) {
    const float* own = shared + i / vectors * stride + i % vectors;
    float sum = 0.0f;
    CB_NO_UNROLL
    for (int row = 0; row < stride; row += vectors) sum += own[row];
    const int at = i % channels;
    partials[(i64)cb_block_x() * 2 * channels + i - at + at % vectors * V + at / vectors] = sum;
  }
}

template <bool ADDS>
CB_DEVICE void all_gradients(const CB_ELEMENT* dy, const CB_ELEMENT* x, const CB_ELEMENT* gamma,
                             const float* statistics, const CB_ELEMENT* residual, CB_ELEMENT* dx, float* partials,
                             i64 num_rows, int channels, int lanes, int vector) {
  CB_SHARED(float, shared, ROW_SUMS);
  if (vector > 1) {
    row_gradients<WIDE, ADDS>(dy, x, gamma, statistics, residual, dx, partials, num_rows, channels, lanes, shared);
  } else {
    row_gradients<1, ADDS>(dy, x, gamma, statistics, residual, dx, partials, num_rows, channels, lanes, shared);
  }
}

// dx may be dy.  Without partials, which may be null, there are no sums.
CB_KERNEL(THREADS, 3)
layer_norm_backward(const CB_ELEMENT* dy, const CB_ELEMENT* x, const CB_ELEMENT* gamma, const float* statistics,
                    CB_ELEMENT* dx, float* partials, i64 num_rows, int channels, int lanes, int vector) {
  cb_dependent_launch();
  all_gradients<false>(dy, x, gamma, statistics, nullptr, dx, partials, num_rows, channels, lanes, vector);
}

// dx may be dy or residual; partials may be null.
CB_KERNEL(THREADS, 3)
layer_norm_backward_add(const CB_ELEMENT* dy, const CB_ELEMENT* x, const CB_ELEMENT* gamma, const float* statistics,
                        const CB_ELEMENT* residual, CB_ELEMENT* dx, float* partials, i64 num_rows, int channels,
                        int lanes, int vector) {
  cb_dependent_launch();
  all_gradients<true>(dy, x, gamma, statistics, residual, dx, partials, num_rows, channels, lanes, vector);
}

// A pair of vectors, and what belongs to their row.
template <int V>
struct RowPair {
  Vec<CB_ELEMENT, V> dy;
  Vec<CB_ELEMENT, V> x;
  float mean, inv_std;
};

template <int V>
CB_DEVICE void tile_sums(const CB_ELEMENT* dy, const CB_ELEMENT* x, const float* statistics, float* partials,
                         SummedRows rows, int channels, int lanes, float* shared) {
  const Column at = column_of_thread(lanes);
  const int first = (int)cb_block_y() * lanes * V;
  const int channel = first + at.lane * V;
  float sums[2][V] = {};
  if (channel < channels) {
    walk<2>(
        rows.begin + at.row_lane, rows.end, rows.step,
        [&](i64 place) {
          const i64 row = rows.row(place), offset = row * channels + channel;
          const bool normed = statistics != nullptr;
          return RowPair<V>{cb_load<CB_ELEMENT, V>(dy + offset), cb_load<CB_ELEMENT, V>(x + offset),
                            normed ? statistics[row] : 0.0f, normed ? statistics[rows.num_rows + row] : 1.0f};
        },
        [&](i64, const RowPair<V>& loaded) {
          CB_UNROLL
          for (int v = 0; v < V; ++v) {
            const float error = to_float(loaded.dy.v[v]);
            const float normed = (to_float(loaded.x.v[v]) - loaded.mean) * loaded.inv_std;
            sums[0][v] = fmaf(error, normed, sums[0][v]);
            sums[1][v] += error;
          }
        });
  }
  store_tile(sums, partials, first, channels, lanes, shared);
}

// statistics may be null.
CB_KERNEL(THREADS, 3)
layer_norm_sums(const CB_ELEMENT* dy, const CB_ELEMENT* x, const float* statistics, float* partials, i64 num_rows,
                int rows_per_tile, int channels, int lanes, int vector) {
  cb_dependent_launch();
  CB_SHARED(float, shared, 2 * COLUMN_SHARED);
  const SummedRows rows = summed_rows(rows_per_tile, num_rows, lanes);
  if (vector > 1) {
    tile_sums<WIDE>(dy, x, statistics, partials, rows, channels, lanes, shared);
  } else {
    tile_sums<1>(dy, x, statistics, partials, rows, channels, lanes, shared);
  }
}
