// SPDX-License-Identifier: MIT
//
// batch_norm — normalise each channel of (rows, channels) by mean and variance over the rows; and its gradient.
//
//   y  = (x - mean) * inv_std * gamma + beta [+ residual], then max(y, 0) on request
//   dx = gamma * inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)),  xhat = (x - mean) * inv_std
//
//   batch_norm_statistics        partials[tile][3][C] = count, mean - x[0] and M2 = sum (x - mean)^2 of a tile of rows
//   batch_norm_merge             fewer partials out of many (those an epilogue writes, one for each row tile)
//   batch_norm_finish            mean, inv_std = 1 / sqrt(variance + eps), running statistics
//   batch_norm_apply             y, from the batch's statistics or from running ones
//   batch_norm_activate          activation(y)
//   batch_norm_fold              scale and shift of a product's epilogue, from running statistics: many norms at once
//   batch_norm_backward_sums     partials[tile][2][C] = sums of dy * xhat and of dy
//   batch_norm_backward_finish   dgamma, dbeta, and both divided by the rows
//   batch_norm_backward_apply    dx
//   batch_norm_slope_sums        the same two where dy is the gradient of activation(y), whose slope is computed from x
//   batch_norm_slope_apply       by the expression of the forward pass: y need not be stored.  Both add the gradient of
//                                a global pool that also reads the result: one value for each sample and channel
//
// Within a tile, sums are of x - pivot and its square, pivot being the tile's first row, and means of tiles are
// kept as their distance to the first row of all, x[0]: a large mean costs no digits until it is stored itself.
// Tiles are merged pairwise with their means (Chan, Golub and LeVeque, 1983), in one order.
//
//   grid    (tiles, ceil(C / (lanes * V))) for what reads activations; (ceil(C / 8), slices) for merge and finish;
//           (ceil(C / 256), norms) for fold
//   needs   statistics and partials in float32; gamma, beta and their gradients stored as activations are
//   (who owns which channel: common/columns.cuh)
#include "common/activation.cuh"
#include "misc/moments.cuh"

CB_KERNEL(THREADS, 3)
batch_norm_statistics(const CB_ELEMENT* x, float* partials, i64 num_rows, int rows_per_tile, int channels, int lanes,
                      int vector) {
  cb_dependent_launch();
  CB_SHARED(float, shared, 2 * COLUMN_SHARED);
  const SummedRows rows = summed_rows(rows_per_tile, num_rows, lanes);
  if (vector > 1) {
    tile_moments<WIDE>(x, partials, rows, channels, lanes, shared);
  } else {
    tile_moments<1>(x, partials, rows, channels, lanes, shared);
  }
}

CB_KERNEL(THREADS, 4)
batch_norm_merge(const float* partials, int tiles, int tiles_per_slice, int channels, float* merged) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS * FINISH_LANES * 3);
  const int begin = (int)cb_block_y() * tiles_per_slice;
  const int end = begin + tiles_per_slice < tiles ? begin + tiles_per_slice : tiles;
  const Moments total = merge_tiles(partials, begin, end, channels, shared);
  const int c = finish_column();
  if (cb_thread() < FINISH_LANES && c < channels) {
    float* slice = merged + (i64)cb_block_y() * 3 * channels + c;
    slice[0] = total.count;
    slice[channels] = total.mean;
    slice[2 * channels] = total.m2;
  }
}

// origin is what the means of tiles are distances to: x[0], or null where they are the means (those of an epilogue).
CB_KERNEL(THREADS, 4)
batch_norm_finish(const float* partials, const CB_ELEMENT* origin, int tiles, int channels, float* mean, float* inv_std,
                  float* running_mean, float* running_var, float momentum, float eps) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS * FINISH_LANES * 3);
  const Moments total = merge_tiles(partials, 0, tiles, channels, shared);
  const int c = finish_column();
  if (cb_thread() < FINISH_LANES && c < channels) {
    const float center = origin != nullptr ? to_float(origin[c]) + total.mean : total.mean;
    mean[c] = center;
    inv_std[c] = 1.0f / sqrtf(total.m2 / total.count + eps);
    if (running_mean != nullptr) running_mean[c] += momentum * (center - running_mean[c]);
    if (running_var != nullptr && total.count > 1.0f) {  // one value has no unbiased variance
      running_var[c] += momentum * (total.m2 / (total.count - 1.0f) - running_var[c]);
    }
  }
}

template <int V>
struct Branches {
  Vec<CB_ELEMENT, V> x;
  Vec<CB_ELEMENT, V> residual;
};

// last is 1 to clamp the result at zero; if it ACTIVATES, it is an activation of the kinds of with_activation().
template <int V, bool ACTIVATES>
CB_DEVICE void normalise(const CB_ELEMENT* x, const CB_ELEMENT* residual, CB_ELEMENT* y, const float* mean,
                         const float* spread, const CB_ELEMENT* gamma, const CB_ELEMENT* beta, Rows rows, int channels,
                         int lanes, float eps, int is_variance, int last) {
  const Column at = column_of_thread(lanes);
  const int channel = ((int)cb_block_y() * lanes + at.lane) * V;
  if (channel >= channels) return;
  float center[V], factor[V], shift[V], scale[V];
  load_channels<V>(mean + channel, center);
  load_channels<V>(spread + channel, factor);
  load_channels<V>(gamma + channel, scale);
  load_channels<V>(beta + channel, shift);
  CB_UNROLL
  for (int v = 0; v < V; ++v) factor[v] = scale[v] * (is_variance ? 1.0f / sqrtf(factor[v] + eps) : factor[v]);
  walk<2>(
      rows.begin + at.row_lane, rows.end, at.num_row_lanes,
      [&](i64 row) {
        const i64 at_row = row * channels + channel;
        Branches<V> loaded = {cb_read<CB_ELEMENT, V>(x + at_row), {}};
        if (residual != nullptr) loaded.residual = cb_read<CB_ELEMENT, V>(residual + at_row);
        return loaded;
      },
      [&](i64 row, const Branches<V>& loaded) {
        float values[V];
        Vec<CB_ELEMENT, V> result;
        CB_UNROLL
        for (int v = 0; v < V; ++v) {
          const float normed = fmaf(to_float(loaded.x.v[v]) - center[v], factor[v], shift[v]);
          const float value = normed + to_float(loaded.residual.v[v]);
          if constexpr (ACTIVATES) {
            values[v] = value;
          } else {
            result.v[v] = from_float<CB_ELEMENT>(last ? rectify(value) : value);
          }
        }
        if constexpr (ACTIVATES) {
          with_activation(last, ActivateAll<V>{values});
          CB_UNROLL
          for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(values[v]);
        }
        cb_write<CB_ELEMENT, V>(y + row * channels + channel, result);
      });
}

// spread is 1 / sqrt(variance + eps), or the variance itself.  residual may be null; y may be x or residual.
CB_KERNEL(THREADS, 3)
batch_norm_apply(const CB_ELEMENT* x, const CB_ELEMENT* residual, CB_ELEMENT* y, const float* mean,
                 const float* spread, const CB_ELEMENT* gamma, const CB_ELEMENT* beta, i64 num_rows, int rows_per_tile,
                 int channels, int lanes, int vector, float eps, int is_variance, int relu) {
  cb_dependent_launch();
  const Rows rows = rows_of_tile(cb_block_x(), rows_per_tile, num_rows);
  if (vector > 1) {
    normalise<WIDE, false>(x, residual, y, mean, spread, gamma, beta, rows, channels, lanes, eps, is_variance, relu);
  } else {
    normalise<1, false>(x, residual, y, mean, spread, gamma, beta, rows, channels, lanes, eps, is_variance, relu);
  }
}

// The same with another activation than relu, of the kinds of with_activation().
CB_KERNEL(THREADS, 3)
batch_norm_activate(const CB_ELEMENT* x, const CB_ELEMENT* residual, CB_ELEMENT* y, const float* mean,
                    const float* spread, const CB_ELEMENT* gamma, const CB_ELEMENT* beta, i64 num_rows,
                    int rows_per_tile, int channels, int lanes, int vector, float eps, int is_variance, int kind) {
  cb_dependent_launch();
  const Rows rows = rows_of_tile(cb_block_x(), rows_per_tile, num_rows);
  if (vector > 1) {
    normalise<WIDE, true>(x, residual, y, mean, spread, gamma, beta, rows, channels, lanes, eps, is_variance, kind);
  } else {
    normalise<1, true>(x, residual, y, mean, spread, gamma, beta, rows, channels, lanes, eps, is_variance, kind);
  }
}

// Pointers are numbers, so that the host hands over many norms by value.
struct Fold {
  u64 gamma, beta, bias;  // bias of the product before it, or 0
  u64 mean, variance;
  u64 scale, shift;
  int channels;
  float eps;
};

struct Folds {
  Fold norms[32];
};

CB_KERNEL(THREADS, 4)
batch_norm_fold(const Folds folds) {
  cb_dependent_launch();
  const Fold& norm = folds.norms[cb_block_y()];
  const int c = (int)cb_block_x() * THREADS + cb_thread();
  if (c >= norm.channels) return;
  const float gamma = to_float(reinterpret_cast<const CB_ELEMENT*>(norm.gamma)[c]);
  const float bias = norm.bias ? to_float(reinterpret_cast<const CB_ELEMENT*>(norm.bias)[c]) : 0.0f;
  const float variance = reinterpret_cast<const float*>(norm.variance)[c];
  const float scale = gamma * (1.0f / sqrtf(variance + norm.eps));
  const float shift = (bias - reinterpret_cast<const float*>(norm.mean)[c]) * scale;
  reinterpret_cast<float*>(norm.scale)[c] = scale;
  reinterpret_cast<float*>(norm.shift)[c] = shift + to_float(reinterpret_cast<const CB_ELEMENT*>(norm.beta)[c]);
}

// The activation behind a norm, with the norm's parameters: dy is the gradient of its result.  If pooled is not null, it
// is the gradient of a global pool of that result.
struct Behind {
  const CB_ELEMENT* gamma;
  const CB_ELEMENT* beta;
  int activation;
  const CB_ELEMENT* pooled;
  int pixels;  // rows of a sample
  int first;   // sample of the tile's first row, so that a row's sample is found by a division of 32 bits
};

CB_DEVICE Behind behind_tile(const CB_ELEMENT* gamma, const CB_ELEMENT* beta, int activation, const CB_ELEMENT* pooled,
                             int pixels, i64 first_row) {
  return {gamma, beta, activation, pooled, pixels, pooled != nullptr ? (int)(first_row / pixels) : 0};
}

// Gradients of the norm's results, which are computed as in normalise(): a slope is that of the very element.
template <int V>
CB_DEVICE void undo(const Behind& behind, i64 row, int channels, int channel, const Pair<V>& loaded,
                    const float (&center)[V], const float (&factor)[V], const float (&shift)[V], float (&errors)[V]) {
  float normed[V];
  CB_UNROLL
  for (int v = 0; v < V; ++v) {
    errors[v] = to_float(loaded.dy.v[v]);
    normed[v] = fmaf(to_float(loaded.x.v[v]) - center[v], factor[v], shift[v]);
  }
  if (behind.pooled != nullptr) {
    const u32 later = ((u32)row - (u32)behind.first * (u32)behind.pixels) / (u32)behind.pixels;
    const i64 sample = behind.first + (i64)later;
    const Vec<CB_ELEMENT, V> pooled = cb_load<CB_ELEMENT, V>(behind.pooled + sample * channels + channel);
    const float share = 1.0f / (float)behind.pixels;
    CB_UNROLL
    for (int v = 0; v < V; ++v) errors[v] = fmaf(to_float(pooled.v[v]), share, errors[v]);
  }
  with_activation(behind.activation, ApplySlopes<V>{normed, errors});
}

template <int V, bool SLOPE>
CB_DEVICE void tile_gradients(const CB_ELEMENT* dy, const CB_ELEMENT* x, const float* mean, const float* inv_std,
                              float* partials, SummedRows rows, int channels, int lanes, float* shared,
                              const Behind& behind) {
  const Column at = column_of_thread(lanes);
  const int first = (int)cb_block_y() * lanes * V;
  const int channel = first + at.lane * V;
  float sums[2][V] = {};
  if (channel < channels) {
    float center[V], factor[V], scale[V] = {}, shift[V] = {};
    load_channels<V>(mean + channel, center);
    load_channels<V>(inv_std + channel, factor);
    if constexpr (SLOPE) {
      load_channels<V>(behind.gamma + channel, scale);
      load_channels<V>(behind.beta + channel, shift);
      CB_UNROLL
      for (int v = 0; v < V; ++v) scale[v] *= factor[v];
    }
    walk<2>(
        rows.begin + at.row_lane, rows.end, rows.step,
        [&](i64 place) {
          const i64 offset = rows.row(place) * channels + channel;
          return Pair<V>{cb_load<CB_ELEMENT, V>(dy + offset), cb_load<CB_ELEMENT, V>(x + offset)};
        },
        [&](i64 place, const Pair<V>& loaded) {
          float errors[V];
          if constexpr (SLOPE) undo(behind, rows.row(place), channels, channel, loaded, center, scale, shift, errors);
          CB_UNROLL
          for (int v = 0; v < V; ++v) {
            const float error = SLOPE ? errors[v] : to_float(loaded.dy.v[v]);
            sums[0][v] = fmaf(error, (to_float(loaded.x.v[v]) - center[v]) * factor[v], sums[0][v]);
            sums[1][v] += error;
          }
        });
  }
  store_tile(sums, partials, first, channels, lanes, shared);
}

CB_KERNEL(THREADS, 3)
batch_norm_backward_sums(const CB_ELEMENT* dy, const CB_ELEMENT* x, const float* mean, const float* inv_std,
                         float* partials, i64 num_rows, int rows_per_tile, int channels, int lanes, int vector) {
  cb_dependent_launch();
  CB_SHARED(float, shared, 2 * COLUMN_SHARED);
  const SummedRows rows = summed_rows(rows_per_tile, num_rows, lanes);
  if (vector > 1) {
    tile_gradients<WIDE, false>(dy, x, mean, inv_std, partials, rows, channels, lanes, shared, {});
  } else {
    tile_gradients<1, false>(dy, x, mean, inv_std, partials, rows, channels, lanes, shared, {});
  }
}

CB_KERNEL(THREADS, 2)
batch_norm_slope_sums(const CB_ELEMENT* dy, const CB_ELEMENT* x, const float* mean, const float* inv_std,
                      float* partials, i64 num_rows, int rows_per_tile, int channels, int lanes, int vector,
                      const CB_ELEMENT* gamma, const CB_ELEMENT* beta, int activation, const CB_ELEMENT* pooled,
                      int pixels) {
  cb_dependent_launch();
  CB_SHARED(float, shared, 2 * COLUMN_SHARED);
  const SummedRows rows = summed_rows(rows_per_tile, num_rows, lanes);
  const Behind behind = behind_tile(gamma, beta, activation, pooled, pixels, REVERSED_SUMS ? 0 : rows.begin);
  if (vector > 1) {
    tile_gradients<WIDE, true>(dy, x, mean, inv_std, partials, rows, channels, lanes, shared, behind);
  } else {
    tile_gradients<1, true>(dy, x, mean, inv_std, partials, rows, channels, lanes, shared, behind);
  }
}

// means[2][C]: of dy * xhat and of dy.
CB_KERNEL(THREADS, 4)
batch_norm_backward_finish(const float* partials, int tiles, int channels, float inv_rows, CB_ELEMENT* dgamma,
                           CB_ELEMENT* dbeta, float* means) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS * FINISH_LANES);
  const float sum = finish_sum(partials, tiles, 2 * channels, shared);
  const int column = finish_column();
  if (cb_thread() < FINISH_LANES && column < 2 * channels) {
    CB_ELEMENT* out = column < channels ? dgamma + column : dbeta + (column - channels);
    *out = from_float<CB_ELEMENT>(sum);
    means[column] = sum * inv_rows;
  }
}

template <int V, bool SLOPE>
CB_DEVICE void input_gradient(const CB_ELEMENT* dy, const CB_ELEMENT* x, CB_ELEMENT* dx, const float* mean,
                              const float* inv_std, const CB_ELEMENT* gamma, const float* means, Rows rows,
                              int channels, int lanes, const Behind& behind) {
  const Column at = column_of_thread(lanes);
  const int channel = ((int)cb_block_y() * lanes + at.lane) * V;
  if (channel >= channels) return;
  float center[V], factor[V], slope[V], offset[V], shift[V] = {};
  load_channels<V>(mean + channel, center);
  load_channels<V>(inv_std + channel, factor);
  load_channels<V>(means + channel, slope);
  load_channels<V>(means + channels + channel, offset);
  CB_UNROLL
  for (int v = 0; v < V; ++v) {
    slope[v] *= factor[v];
    factor[v] *= to_float(gamma[channel + v]);
  }
  if constexpr (SLOPE) load_channels<V>(behind.beta + channel, shift);
  walk<2>(
      rows.begin + at.row_lane, rows.end, at.num_row_lanes,
      [&](i64 row) {
        const i64 at_row = row * channels + channel;
        return Pair<V>{cb_read<CB_ELEMENT, V>(dy + at_row), cb_load<CB_ELEMENT, V>(x + at_row)};
      },
      [&](i64 row, const Pair<V>& loaded) {
        float errors[V];
        if constexpr (SLOPE) undo(behind, row, channels, channel, loaded, center, factor, shift, errors);
        Vec<CB_ELEMENT, V> result;
        CB_UNROLL
        for (int v = 0; v < V; ++v) {
          const float linear = fmaf(to_float(loaded.x.v[v]) - center[v], slope[v], offset[v]);
          const float error = SLOPE ? errors[v] : to_float(loaded.dy.v[v]);
          result.v[v] = from_float<CB_ELEMENT>((error - linear) * factor[v]);
        }
        cb_write<CB_ELEMENT, V>(dx + row * channels + channel, result);
      });
}

// dx may be dy.
CB_KERNEL(THREADS, 2)
batch_norm_backward_apply(const CB_ELEMENT* dy, const CB_ELEMENT* x, CB_ELEMENT* dx, const float* mean,
                          const float* inv_std, const CB_ELEMENT* gamma, const float* means, i64 num_rows,
                          int rows_per_tile, int channels, int lanes, int vector) {
  cb_dependent_launch();
  const Rows rows = rows_of_tile(cb_block_x(), rows_per_tile, num_rows);
  if (vector > 1) {
    input_gradient<WIDE, false>(dy, x, dx, mean, inv_std, gamma, means, rows, channels, lanes, {});
  } else {
    input_gradient<1, false>(dy, x, dx, mean, inv_std, gamma, means, rows, channels, lanes, {});
  }
}

// dx may be dy.  In float32 registers last for a third block on an SM.
CB_KERNEL(THREADS, WIDE == 4 ? 3 : 2)
batch_norm_slope_apply(const CB_ELEMENT* dy, const CB_ELEMENT* x, CB_ELEMENT* dx, const float* mean,
                       const float* inv_std, const CB_ELEMENT* gamma, const float* means, i64 num_rows,
                       int rows_per_tile, int channels, int lanes, int vector, const CB_ELEMENT* beta, int activation,
                       const CB_ELEMENT* pooled, int pixels) {
  cb_dependent_launch();
  const Rows rows = rows_of_tile(cb_block_x(), rows_per_tile, num_rows);
  const Behind behind = behind_tile(gamma, beta, activation, pooled, pixels, rows.begin);
  if (vector > 1) {
    input_gradient<WIDE, true>(dy, x, dx, mean, inv_std, gamma, means, rows, channels, lanes, behind);
  } else {
    input_gradient<1, true>(dy, x, dx, mean, inv_std, gamma, means, rows, channels, lanes, behind);
  }
}
