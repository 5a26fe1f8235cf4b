// SPDX-License-Identifier: MIT
//
// Filter gradient: the same walk, with dy instead of the sums.
//
//   dw[c,r,s] = sum over n,p,q of dy[n,p,q,c] * x[n, p*stride - top + r, q*stride - left + s, c]
//   db[c]     = sum over n,p,q of dy[n,p,q,c]
//
// A row of x that arrives is multiplied with the OPEN rows of dy that it is read for, which stay in registers with
// the TAPS sums: x and dy are loaded once.  A block walks its share of all strips, adds up its threads' sums in
// shared memory and leaves one partial result of its channels; depthwise_wgrad_reduce adds those in a fixed order.
//
//   registers    (TAPS + 1) * CHANNELS sums and OPEN * GROUPS * CHANNELS of dy, so a thread takes 4 channels of a 3x3
//                filter, 2 of a 5x5 and 1 of a 7x7
//   partials     [block][TAPS + 1][c] float32; the last row of each is of db
#pragma once

#include "depthwise/walk.cuh"

constexpr int CHANNELS = FILTER == 3 ? 4 : FILTER == 5 ? 2 : 1;
constexpr int SUMS_AT_ONCE = (TAPS + 1) / 2;  // that go through shared memory together

// Add a strip's products to the sums.
template <class W>
CB_DEVICE void add_strip(float (&sum)[TAPS + 1][CHANNELS], const CB_ELEMENT* x, const CB_ELEMENT* dy,
                         const Window& window, const Strip& strip, int channel) {
  constexpr int DOWN = W::DOWN, OPEN = W::OPEN, GROUPS = W::GROUPS;
  const int c = window.c, left = strip.column * DOWN + window.in_left;
  const u32 inside = inside_bits<W::COLUMNS>(left, window.in_w);
  const u32 out_inside = inside_bits<GROUPS>(strip.column, window.out_w);
  const CB_ELEMENT* in = image(x, strip.n, window.in_h, window.in_w, c, left, channel);
  const CB_ELEMENT* out = image(dy, strip.n, window.out_h, window.out_w, c, strip.column, channel);
  const int top = strip.first * DOWN + window.in_top;

  float errors[OPEN][GROUPS][CHANNELS] = {};
  CB_NO_UNROLL
  for (int g = strip.first - (OPEN - 1); g < strip.last; ++g) {
    const int newest = g + OPEN - 1;
    Held<Vec<CB_ELEMENT, CHANNELS>> fresh[GROUPS];
    load_row(fresh, out + (i64)newest * (window.out_w * c), c, newest < strip.last ? out_inside : 0);
    CB_UNROLL
    for (int k = 0; k < GROUPS; ++k) {
      CB_UNROLL
      for (int e = 0; e < CHANNELS; ++e) {
        errors[OPEN - 1][k][e] = to_float(fresh[k].get().v[e]);
        sum[TAPS][e] += errors[OPEN - 1][k][e];
      }
    }
    CB_UNROLL
    for (int a = W::LAST - DOWN + 1; a <= W::LAST; ++a) {
      const int row = g * DOWN + a + window.in_top;
      Held<Vec<CB_ELEMENT, CHANNELS>> pixels[W::COLUMNS];
      const bool is_read = row_is_read<DOWN>(row, top, window.in_h);
      load_row(pixels, in + (i64)row * (window.in_w * c), c, is_read ? inside : 0);
      CB_UNROLL
      for (int r = 0; r < FILTER; ++r) {
        if (a < r || (a - r) % DOWN != 0) continue;
        CB_UNROLL
        for (int s = 0; s < FILTER; ++s) {
          CB_UNROLL
          for (int k = 0; k < GROUPS; ++k) {
            CB_UNROLL
            for (int e = 0; e < CHANNELS; ++e) {
              float& target = sum[r * FILTER + s][e];
              target = fmaf(to_float(pixels[k * DOWN + s].get().v[e]), errors[(a - r) / DOWN][k][e], target);
            }
          }
        }
      }
    }
    CB_UNROLL
    for (int j = 0; j + 1 < OPEN; ++j) {
      CB_UNROLL
      for (int k = 0; k < GROUPS; ++k) {
        CB_UNROLL
        for (int e = 0; e < CHANNELS; ++e) errors[j][k][e] = errors[j + 1][k][e];
      }
    }
  }
}

template <class W>
CB_DEVICE void sum_strips(const CB_ELEMENT* x, const CB_ELEMENT* dy, float* partials, const Window& window) {
  CB_SHARED(float, shared, SUMS_AT_ONCE * THREADS * CHANNELS);
  const int c = window.c, slab_channels = window.slab_vectors * CHANNELS, slab = (int)cb_block_y() * slab_channels;
  const int walkers = THREADS / window.slab_vectors, walker = cb_thread() / window.slab_vectors;
  const int channel = slab + cb_thread() % window.slab_vectors * CHANNELS;

  float sum[TAPS + 1][CHANNELS] = {};
  if (walker < walkers && channel < c) {
    CB_NO_UNROLL
    for (u32 item = cb_block_x() * (u32)walkers + (u32)walker; item < window.num_items;
         item += cb_num_blocks_x() * (u32)walkers) {
      add_strip<W>(sum, x, dy, window, strip_of(window, item, W::GROUPS), channel);
    }
  }
  CB_UNROLL
  for (int first = 0; first <= TAPS; first += SUMS_AT_ONCE) {
    CB_UNROLL
    for (int i = 0; i < SUMS_AT_ONCE; ++i) {
      Vec<float, CHANNELS> own;
      CB_UNROLL
      for (int e = 0; e < CHANNELS; ++e) own.v[e] = sum[first + i][e];
      cb_write<float, CHANNELS>(shared + (i * THREADS + cb_thread()) * CHANNELS, own);
    }
    cb_sync();
    float* target = partials + (((i64)cb_block_x() * (TAPS + 1) + first) * c + slab);
    for (int place = cb_thread(); place < SUMS_AT_ONCE * slab_channels; place += THREADS) {
      const int i = place / slab_channels, of_slab = place - i * slab_channels;
      if (slab + of_slab >= c) continue;
      const float* each = shared + (i * THREADS * CHANNELS + of_slab);
      float total = 0.0f;
      for (int from = 0; from < walkers; ++from) total += each[from * slab_channels];
      target[(i64)i * c + of_slab] = total;
    }
    cb_sync();
  }
}
