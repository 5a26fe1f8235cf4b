// SPDX-License-Identifier: MIT
//
// Sums over the rows of a tile for the batch norm next to a product, compiled with -DNORM_SUMS=1 alone: a norm reads its
// input once less then.  Terms are values as they are stored, rounded.
//
//   partials[tile][3][columns]   count, mean and M2 = sum (y - mean)^2: the norm behind gemm_nt, conv2d_fprop
//   partials[tile][2][columns]   sums of dy * xhat and of dy, where dy, the result, is the gradient of a norm's result
//                                and xhat = (x - mean) * inv_std: the norm before gemm_nn, conv2d_dgrad
//   partials[tile][columns]      with -DCURVE=... sums of dy before it is rounded, the result times the slope of the
//                                activation at x: the bias before it.  May be null
//
// A tile is the ROWS of a consumer.  x comes through the ring like a mask.  Where a ReLU alone lies between the norm
// and the product, x has its slope too, by the expression of the forward pass (misc/batch_norm.cu).
//
//   registers        a lane has 2 or 4 rows of 16 columns out of 64; 7 other lanes have the other rows of its warp
//   exchange         with lane ^ 16, then ^ 8, then ^ 4 it gives half of its columns away and takes the same of the
//                    others: 14 shuffles for each of two quantities leave columns 2 lane and 2 lane + 1, of 16 rows
//   shared memory    [2][TILE_N] floats of each warp, where strips are staged later; a thread adds up a column of four
//
// Means and M2 are merged in pairs (Chan, Golub and LeVeque, 1983), always in one order.  SWAPPED: a lane has 64 rows
// of two columns, taken relative to the first, and three other lanes have the other rows.
#pragma once

#include "hopper/curve.cuh"
#include "hopper/main_loop.cuh"

constexpr bool MOMENTS = HAS_FORWARD_TERMS;
constexpr int TERMS = CURVE ? 1 : 2, QUANTITIES = MOMENTS ? 3 : TERMS, LANE_COLUMNS = 16;
static_assert(sizeof(CB_ELEMENT) == 2, "float32 has too few registers for them");
static_assert(SWAPPED || 2 * TILE_N * sizeof(float) <= Shared::STAGING_BYTES, "sums of a warp fit where it stages");

// What of the norm is read, and where sums go.  gamma and beta are null where no slope is computed from x.
struct Norm {
  float* partials;
  const CB_ELEMENT* bias;
  const float *mean, *inv_std;
  const CB_ELEMENT *gamma, *beta;
};

// How a second set of rows weighs in with a first, given how many each has.
struct Share {
  float mean, square;

  CB_DEVICE Share(float own, float other) : mean(other > 0.0f ? other / (own + other) : 0.0f), square(own * mean) {}
};

CB_DEVICE void join(float (&own)[2], const float (&other)[2], const Share& share) {
  if constexpr (MOMENTS) {
    const float delta = other[0] - own[0];
    own[0] = fmaf(delta, share.mean, own[0]);
    own[1] = fmaf(delta * delta, share.square, own[1] + other[1]);
  } else {
    CB_UNROLL
    for (int q = 0; q < TERMS; ++q) own[q] += other[q];
  }
}

CB_DEVICE float as_stored(float value) { return to_float(from_float<CB_ELEMENT>(value)); }

// The norm's parameters of a column, for a gradient.
struct Curve {
  float mean = 0.0f, inv_std = 0.0f, scale = 0.0f, shift = 0.0f;

  // Take a gradient, to which the slope is applied, into the two sums of the column.
  CB_DEVICE void take(const Norm& norm, float& gradient, float x, float (&sums)[2]) const {
    if constexpr (CURVE != 0) {
      gradient = activate_backward_short<CURVE>(gradient, x);
      sums[0] += gradient;
      return;
    }
    const float centered = x - mean;
    if (norm.gamma && as_stored(fmaf(centered, scale, shift)) <= 0.0f) gradient = 0.0f;
    gradient = as_stored(gradient);
    sums[0] = fmaf(gradient, centered * inv_std, sums[0]);
    sums[1] += gradient;
  }
};

// Load the parameters of COUNT neighbouring columns.
template <int COUNT>
CB_DEVICE void load_curves(const Norm& norm, int column, Curve* curves) {
  if constexpr (CURVE != 0) return;
  const Vec<float, COUNT> mean = cb_read<float, COUNT>(norm.mean + column);
  const Vec<float, COUNT> inv_std = cb_read<float, COUNT>(norm.inv_std + column);
  Vec<CB_ELEMENT, COUNT> gamma = {}, beta = {};
  if (norm.gamma) {
    gamma = cb_read<CB_ELEMENT, COUNT>(norm.gamma + column);
    beta = cb_read<CB_ELEMENT, COUNT>(norm.beta + column);
  }
  CB_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    curves[j] = {mean.v[j], inv_std.v[j], to_float(gamma.v[j]) * inv_std.v[j], to_float(beta.v[j])};
  }
}

// Rows of the output among `count` from `first` on.
CB_DEVICE float rows_from(const Walk& walk, int first, int count) {
  const int left = walk.m - first;
  return (float)(left < 0 ? 0 : left < count ? left : count);
}

CB_DEVICE void leave_stage(int consumer, const Shared& shared, Ring& ring, u32& joins) {
  cb_proxy_fence();  // as behind a mask
  cb_barrier_arrive(shared.joined(consumer));
  cb_barrier_wait(shared.joined(consumer), joins++ & 1);
  release(shared, ring.stage);
  ring.advance();
}

CB_DEVICE void write_sums(const Norm& norm, const Walk& walk, int tile, int column, float count,
                          const float (&sums)[2]) {
  if (CURVE && !norm.partials) return;
  float* target = norm.partials + (i64)tile * QUANTITIES * walk.n + column;
  if constexpr (MOMENTS) {
    *target = count;
    target += walk.n;
  }
  CB_UNROLL
  for (int q = 0; q < TERMS; ++q) target[q * walk.n] = sums[q];
}

// Give half of a lane's columns away and take the other rows of the rest, until two columns are left: those of all rows
// of the warp.  Indices are constants: an array of registers has no others.
template <int HALF>
CB_DEVICE void exchange(float (&sums)[LANE_COLUMNS][2], float count) {
  constexpr int BIT = 2 * HALF;
  const bool keeps_upper = cb_lane() & BIT;
  const float more = MOMENTS ? cb_shuffle_xor(count, BIT) : 0.0f;
  const Share share(count, more);
  CB_UNROLL
  for (int i = 0; i < HALF; ++i) {
    float own[2] = {}, other[2] = {};
    CB_UNROLL
    for (int q = 0; q < TERMS; ++q) {
      const float lower = sums[i][q], upper = sums[i + HALF][q];
      own[q] = keeps_upper ? upper : lower;
      other[q] = cb_shuffle_xor(keeps_upper ? lower : upper, BIT);
    }
    join(own, other, share);
    sums[i][0] = own[0];
    sums[i][1] = own[1];
  }
  if constexpr (HALF > 2) exchange<HALF / 2>(sums, count + more);
}

// Sum 64 columns of a warp's rows into shared memory; x of a gradient is in the ring's next stage.
CB_DEVICE void sum_columns(const Norm& norm, const Walk& walk, const Task& task, int number, int consumer,
                           const Shared& shared, Ring& ring, u32& joins, float (&sum)[STACKED][SUMS]) {
  // A shuffle, so that what follows from the thread is not computed before all tiles, in registers that are not there.
  const int thread = cb_shuffle_xor(cb_thread(), 0), lane = thread % 32, warp = thread / 32 % 4, pair = lane % 4 * 2;
  const int top = warp * WARP_ROWS + lane / 4;
  const int first = task.n + number * ROW_ELEMENTS, sums_before = number * (ROW_ELEMENTS / 2);
  float sums[LANE_COLUMNS][2] = {}, count = 0.0f;
  if constexpr (!MOMENTS) cb_barrier_wait(shared.full(ring.stage), ring.parity);
  CB_UNROLL
  for (int group = 0; group < LANE_COLUMNS / 2; ++group) {  // of 8 columns
    const int column = first + 8 * group + pair;
    const bool exists = column < walk.n;
    Vec<CB_ELEMENT, 2> bias = {};
    if (MOMENTS && norm.bias && exists) bias = cb_load<CB_ELEMENT, 2>(norm.bias + column);
    Curve curves[2];
    if (!MOMENTS && exists) load_curves<2>(norm, column, curves);
    count = 0.0f;
    CB_UNROLL
    for (int i = 0; i < 2 * STACKED; ++i) {
      cb_wgmma_hold(sum[i / 2]);  // loads that move ahead spill registers
      const int row = (consumer * STACKED + i / 2) * WGMMA_M + top + i % 2 * 8;
      if constexpr (MOMENTS) {
        const float more = rows_from(walk, task.m + row, 1);
        CB_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float value = sum[i / 2][sums_before + 4 * group + i % 2 * 2 + j] + to_float(bias.v[j]);
          const float other[2] = {as_stored(value), 0.0f};
          if (i == 0) sums[2 * group + j][0] = other[0];
          if (i > 0) join(sums[2 * group + j], other, Share(count, more));
        }
        count += more;
      } else {
        const u32 byte = (8 * group + pair) * sizeof(CB_ELEMENT);
        const unsigned char* from = shared.a(ring.stage) + row * SWIZZLE_ROW + (byte / 16 ^ row % 8) * 16 + byte % 16;
        const Vec<CB_ELEMENT, 2> x = cb_read<CB_ELEMENT, 2>(reinterpret_cast<const CB_ELEMENT*>(from));
        CB_UNROLL
        for (int j = 0; j < 2; ++j) {
          float& gradient = sum[i / 2][sums_before + 4 * group + i % 2 * 2 + j];
          curves[j].take(norm, gradient, to_float(x.v[j]), sums[2 * group + j]);
        }
      }
    }
  }
  if constexpr (!MOMENTS) leave_stage(consumer, shared, ring, joins);
  exchange<LANE_COLUMNS / 2>(sums, count);
  if (number == 0) {  // strips of the tile before were staged there
    if (lane == 0) cb_tma_store_wait_read<0>();
    cb_sync_warp();
  }
  float* mine = shared.staging(consumer * 4 + warp) + number * ROW_ELEMENTS + 2 * lane;
  CB_UNROLL
  for (int q = 0; q < TERMS; ++q) cb_write<float, 2>(mine + q * TILE_N, Vec<float, 2>{{sums[0][q], sums[1][q]}});
}

// Add up the four warps of a consumer, and store the sums of its rows.
CB_DEVICE void add_warps(const Norm& norm, const Walk& walk, const Task& task, int consumer, const Shared& shared,
                         u32& joins) {
  cb_barrier_arrive(shared.joined(consumer));
  cb_barrier_wait(shared.joined(consumer), joins++ & 1);
  const int first = task.m + consumer * ROWS;
  const int columns = first < walk.m ? walk.n - task.n < TILE_N ? walk.n - task.n : TILE_N : 0;
  CB_NO_UNROLL  // shuffled for the reason above
  for (int at = cb_shuffle_xor(cb_thread(), 0) % WARPGROUP; at < columns; at += WARPGROUP) {
    float sums[2] = {}, count = 0.0f;
    CB_UNROLL
    for (int warp = 0; warp < 4; ++warp) {
      const float* part = shared.staging(consumer * 4 + warp) + at;
      float more = 0.0f;
      CB_UNROLL
      for (int i = 0; i < STACKED; ++i) more += rows_from(walk, first + i * WGMMA_M + warp * WARP_ROWS, WARP_ROWS);
      const float other[2] = {part[0], CURVE ? 0.0f : part[TILE_N]};
      join(sums, other, Share(count, more));
      count += more;
    }
    write_sums(norm, walk, first / ROWS, task.n + at, count, sums);
  }
  cb_barrier_arrive(shared.joined(consumer));  // strips are staged there next
  cb_barrier_wait(shared.joined(consumer), joins++ & 1);
}

// Sum a swapped tile, of which a lane has rows 8 i + k of columns lane / 4 and 8 further on.
CB_DEVICE void sum_swapped(const Norm& norm, const Walk& walk, const Task& task, int consumer, const Shared& shared,
                           Ring& ring, u32& joins, float (&sum)[STACKED][SUMS]) {
  const int lane = cb_lane(), top = task.m + lane % 4 * 2;
  float sums[2][2] = {}, pivot[2] = {}, count = 0.0f;
  if constexpr (!MOMENTS) cb_barrier_wait(shared.full(ring.stage), ring.parity);
  const int column[2] = {task.n + swapped_column(0), task.n + swapped_column(1)};
  Curve curves[2];
  float bias[2] = {};
  CB_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (column[half] >= walk.n) continue;
    if constexpr (!MOMENTS) load_curves<1>(norm, column[half], curves + half);
    if (MOMENTS && norm.bias) bias[half] = to_float(norm.bias[column[half]]);
  }
  CB_UNROLL
  for (int i = 0; i < TILE_M / 16; ++i) {
    u32 words[4] = {};
    if constexpr (!MOMENTS) {
      cb_wgmma_hold(sum[0]);  // as where a mask is applied
      cb_load_matrices_transposed(words, shared.a(ring.stage) + 16 * i * SWIZZLE_ROW + swapped_place());
    }
    CB_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Vec<CB_ELEMENT, 2> x = *reinterpret_cast<const Vec<CB_ELEMENT, 2>*>(&words[j]);
      CB_UNROLL
      for (int k = 0; k < 2; ++k) {
        float& value = sum[0][8 * i + 2 * j + k];
        float(&target)[2] = sums[j % 2];
        if constexpr (MOMENTS) {
          const float term = as_stored(value + bias[j % 2]), more = rows_from(walk, top + 16 * i + j / 2 * 8 + k, 1);
          if (i == 0 && j < 2 && k == 0) pivot[j] = term;
          const float deviation = more * (term - pivot[j % 2]);
          target[0] += deviation;
          target[1] = fmaf(deviation, deviation, target[1]);
          if (j % 2) count += more;
        } else {
          curves[j % 2].take(norm, value, to_float(x.v[k]), target);
        }
      }
    }
  }
  if constexpr (!MOMENTS) leave_stage(consumer, shared, ring, joins);
  if constexpr (MOMENTS) {
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float mean = count > 0.0f ? sums[half][0] / count : 0.0f, m2 = sums[half][1] - sums[half][0] * mean;
      sums[half][0] = pivot[half] + mean;
      sums[half][1] = m2 < 0.0f ? 0.0f : m2;
    }
  }
  CB_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) {
    const float more = MOMENTS ? cb_shuffle_xor(count, bit) : 0.0f;
    const Share share(count, more);
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {
      float other[2] = {};
      CB_UNROLL
      for (int q = 0; q < TERMS; ++q) other[q] = cb_shuffle_xor(sums[half][q], bit);
      join(sums[half], other, share);
    }
    count += more;
  }
  CB_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (lane % 4 == 0 && column[half] < walk.n) write_sums(norm, walk, task.m / ROWS, column[half], count, sums[half]);
  }
}
