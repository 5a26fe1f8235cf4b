// SPDX-License-Identifier: MIT
//
// depthwise_each, depthwise_wgrad_each - the same element by element, for channels that are no whole vectors, and
// depthwise_wgrad_reduce, which adds up what the blocks of either filter gradient leave
//
// Plain loops over the taps, of any number and for any stride: a thread owns one channel of a strip, and neighbouring
// threads neighbouring channels.  Inputs are loaded once for each tap, mostly from L1.  (terms: depthwise/window.cuh)
//
//   threads   128;  each: grid = (strips * slab_vectors / 128, slabs);  wgrad: grid = (shares, slabs, taps, then one
//             for the bias);  reduce: grid = (ceil(c / 16), taps, then one for the bias)
//   needs     as depthwise.cu, but any C and any address; partials are [block][taps + 1][c] float32
#include "depthwise/window.cuh"

constexpr int REDUCE_CHANNELS = 16, REDUCE_LOADS = 8;

// fprop at `down` = stride and `up` = 1; dgrad at `up` = stride and `down` = 1, with the taps turned around.
CB_KERNEL(THREADS, 4)
depthwise_each(const CB_ELEMENT* x, const CB_ELEMENT* w, const CB_ELEMENT* bias, CB_ELEMENT* y, const Window window,
               float floor, int turn, int filter, int up, int down) {
  cb_dependent_launch();
  const int c = window.c, taps = filter * filter;
  const u32 flat = cb_block_x() * THREADS + (u32)cb_thread();
  const u32 item = flat / (u32)window.slab_vectors;
  const int channel = (int)(cb_block_y() * (u32)window.slab_vectors + flat - item * (u32)window.slab_vectors);
  if (item >= window.num_items || channel >= c) return;
  const Strip strip = strip_of(window, item, STRIP_COLUMNS / up);
  const CB_ELEMENT* in = image(x, strip.n, window.in_h, window.in_w, c, 0, channel);
  CB_ELEMENT* out = image(y, strip.n, window.out_h, window.out_w, c, 0, channel);
  const CB_ELEMENT* own = w + (i64)channel * taps;
  const float shift = bias ? to_float(bias[channel]) : 0.0f;
  CB_NO_UNROLL
  for (int line = strip.first * up; line < strip.last * up; ++line) {
    const int p = line + window.out_top;
    if ((u32)p >= (u32)window.out_h) continue;
    CB_NO_UNROLL
    for (int k = strip.column * up; k < strip.column * up + STRIP_COLUMNS; ++k) {
      const int q = k + window.out_left;
      if ((u32)q >= (u32)window.out_w) continue;
      float sum = 0.0f;
      CB_NO_UNROLL
      for (int r = (up - line % up) % up; r < filter; r += up) {
        const int h = line / up * down + (r + line % up) / up + window.in_top;
        if ((u32)h >= (u32)window.in_h) continue;
        const CB_ELEMENT* row = in + (i64)h * (window.in_w * c);
        CB_NO_UNROLL
        for (int s = (up - k % up) % up; s < filter; s += up) {
          const int column = k / up * down + (s + k % up) / up + window.in_left, tap = r * filter + s;
          if ((u32)column >= (u32)window.in_w) continue;
          sum = fmaf(to_float(row[column * c]), to_float(own[turn ? taps - 1 - tap : tap]), sum);
        }
      }
      const float value = sum + shift;
      out[(i64)p * (window.out_w * c) + q * c] = from_float<CB_ELEMENT>(value < floor ? floor : value);
    }
  }
}

// A block adds up its share of one tap's products; the tap after the last is the bias, whose products are with 1.
CB_KERNEL(THREADS, 4)
depthwise_wgrad_each(const CB_ELEMENT* x, const CB_ELEMENT* dy, float* partials, const Window window, int filter,
                     int stride) {
  cb_dependent_launch();
  CB_SHARED(float, shared, THREADS);
  const int c = window.c, taps = filter * filter, tap = (int)cb_block_z(), r = tap / filter, s = tap % filter;
  const int walkers = THREADS / window.slab_vectors, walker = cb_thread() / window.slab_vectors;
  const int channel = (int)cb_block_y() * window.slab_vectors + cb_thread() % window.slab_vectors;
  const bool is_bias = tap == taps, exists = walker < walkers && channel < c;
  float sum = 0.0f;
  CB_NO_UNROLL
  for (u32 item = cb_block_x() * (u32)walkers + (u32)walker; exists && item < window.num_items;
       item += cb_num_blocks_x() * (u32)walkers) {
    const Strip strip = strip_of(window, item, STRIP_COLUMNS);
    const CB_ELEMENT* in = image(x, strip.n, window.in_h, window.in_w, c, 0, channel);
    const CB_ELEMENT* out = image(dy, strip.n, window.out_h, window.out_w, c, 0, channel);
    CB_NO_UNROLL
    for (int p = strip.first; p < strip.last; ++p) {
      const int h = p * stride + r + window.in_top;
      if (!is_bias && (u32)h >= (u32)window.in_h) continue;
      CB_UNROLL
      for (int k = 0; k < STRIP_COLUMNS; ++k) {
        const int q = strip.column + k, column = q * stride + s + window.in_left;
        if (q >= window.out_w || (!is_bias && (u32)column >= (u32)window.in_w)) continue;
        const float error = to_float(out[(i64)p * (window.out_w * c) + q * c]);
        sum = fmaf(error, is_bias ? 1.0f : to_float(in[(i64)h * (window.in_w * c) + column * c]), sum);
      }
    }
  }
  shared[cb_thread()] = sum;
  cb_sync();
  if (walker > 0 || !exists) return;
  for (int from = 1; from < walkers; ++from) sum += shared[from * window.slab_vectors + cb_thread()];
  partials[((i64)cb_block_x() * (taps + 1) + tap) * c + channel] = sum;
}

// Add up all blocks' partial results of one tap (block y) of REDUCE_CHANNELS channels (block x).
CB_KERNEL(THREADS, 1)
depthwise_wgrad_reduce(const float* partials, CB_ELEMENT* dw, CB_ELEMENT* db, int num_partials, int c, int taps) {
  cb_dependent_launch();
  constexpr int PARTS = THREADS / REDUCE_CHANNELS;
  CB_SHARED(float, shared, THREADS);
  const int part = cb_thread() / REDUCE_CHANNELS, tap = (int)cb_block_y();
  const int channel = (int)cb_block_x() * REDUCE_CHANNELS + cb_thread() % REDUCE_CHANNELS;
  float total = 0.0f;
  for (int first = part; channel < c && first < num_partials; first += PARTS * REDUCE_LOADS) {
    CB_UNROLL
    for (int i = 0; i < REDUCE_LOADS; ++i) {
      const int from = first + i * PARTS;
      if (from < num_partials) total += partials[((i64)from * (taps + 1) + tap) * c + channel];
    }
  }
  shared[cb_thread()] = total;
  cb_sync();
  if (part > 0 || channel >= c) return;
  CB_UNROLL
  for (int i = 1; i < PARTS; ++i) total += shared[i * REDUCE_CHANNELS + cb_thread()];
  if (tap < taps) {
    dw[(i64)channel * taps + tap] = from_float<CB_ELEMENT>(total);
  } else {
    db[channel] = from_float<CB_ELEMENT>(total);
  }
}
