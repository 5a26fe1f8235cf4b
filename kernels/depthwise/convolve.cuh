// SPDX-License-Identifier: MIT
//
// Forward pass and input gradient: taps in shared memory, sums of the open rows in registers.
//
// Per step and channel, GROUPS * UP outputs take TAPS products each: 3x3 at stride 1 loads 6 pixels for 4 outputs (the
// two outer ones are a neighbour's too, which is what L1 is for), and a strip of n rows loads n + 2.  The shift of the
// open rows costs nothing: the first product of a row goes to another register than it came from.
#pragma once

#include "depthwise/walk.cuh"

constexpr int SLAB_VECTORS = 32;  // most channel vectors of a block, whose taps lie in shared memory
constexpr int PLANE = VECTOR < 4 ? VECTOR : 4;  // neighboring floats of a tap: one access of 8 or 16 bytes without conflicts
constexpr int PLANES = VECTOR / PLANE;

CB_DEVICE float* tap_place(float* taps, int tap, int plane, int vector) {
  return taps + ((tap * PLANES + plane) * SLAB_VECTORS + vector) * PLANE;
}

// Bring the taps of channels [first, first + count) from w[c, r, s] to tap_place, converted; turned around if asked.
CB_DEVICE void stage_taps(float* taps, const CB_ELEMENT* w, int first, int count, bool turn) {
  const CB_ELEMENT* source = w + (i64)first * TAPS;
  for (int i = cb_thread() * VECTOR; i < count * TAPS; i += THREADS * VECTOR) {
    const Vec<CB_ELEMENT, VECTOR> values = cb_load<CB_ELEMENT, VECTOR>(source + i);
    CB_UNROLL
    for (int e = 0; e < VECTOR; ++e) {
      const int channel = (i + e) / TAPS, tap = (i + e) % TAPS, lane = channel % VECTOR;
      float* place = tap_place(taps, turn ? TAPS - 1 - tap : tap, lane / PLANE, channel / VECTOR);
      place[lane % PLANE] = to_float(values.v[e]);
    }
  }
}

// Add the products of a row of pixels, the `a`-th of group row j = 0, to the sums of all open rows.  Row of taps by row
// of taps from the last, and planes outside of that: the other orders keep more values in registers.
template <class W>
CB_DEVICE void add_row(float (&sum)[W::OPEN][W::UP][W::GROUPS * W::UP][VECTOR],
                       const Held<Vec<CB_ELEMENT, VECTOR>> (&pixels)[W::COLUMNS], float* taps, int vector, int a) {
  CB_UNROLL
  for (int plane = 0; plane < PLANES; ++plane) {
    CB_UNROLL
    for (int r = FILTER - 1; r >= 0; --r) {
      const int back = W::UP * a - r;
      const int j = back / (W::UP * W::DOWN), u = back % (W::UP * W::DOWN);
      if (back < 0 || u >= W::UP) continue;
      CB_UNROLL
      for (int s = 0; s < FILTER; ++s) {
        const Vec<float, PLANE> tap = cb_read<float, PLANE>(tap_place(taps, r * FILTER + s, plane, vector));
        CB_UNROLL
        for (int k = 0; k < W::GROUPS * W::UP; ++k) {
          const int ahead = s + k % W::UP + k / W::UP * (W::UP * W::DOWN);
          if (ahead % W::UP != 0) continue;
          CB_UNROLL
          for (int e = 0; e < PLANE; ++e) {
            const float value = to_float(pixels[ahead / W::UP].get().v[plane * PLANE + e]);
            float& target = sum[j][u][k][plane * PLANE + e];
            target = fmaf(value, tap.v[e], target);
          }
        }
      }
    }
  }
}

// Store the pixels of a row whose bit of `inside` is set, plus bias, raised to the floor.
template <int COUNT>
CB_DEVICE void store_row(CB_ELEMENT* row, int c, u32 inside, const float (&sum)[COUNT][VECTOR], const CB_ELEMENT* bias,
                         int channel, float floor) {
  Held<Vec<CB_ELEMENT, VECTOR>> shift = {};
  if (bias) shift.put(cb_load<CB_ELEMENT, VECTOR>(bias + channel));
  CB_UNROLL
  for (int k = 0; k < COUNT; ++k) {
    if (!(inside >> k & 1)) continue;
    Vec<CB_ELEMENT, VECTOR> pixel;
    CB_UNROLL
    for (int e = 0; e < VECTOR; ++e) {
      const float value = sum[k][e] + to_float(shift.get().v[e]);
      pixel.v[e] = from_float<CB_ELEMENT>(value < floor ? floor : value);
    }
    cb_write<CB_ELEMENT, VECTOR>(row + k * c, pixel);
  }
}

template <class W>
CB_DEVICE void convolve(const CB_ELEMENT* x, const CB_ELEMENT* w, const CB_ELEMENT* bias, CB_ELEMENT* y,
                        const Window& window, float floor, bool turn) {
  constexpr int UP = W::UP, DOWN = W::DOWN, OPEN = W::OPEN, WIDTH = W::GROUPS * UP;
  CB_SHARED(float, taps, TAPS * SLAB_VECTORS * VECTOR);
  const int c = window.c, slab = (int)cb_block_y() * window.slab_vectors * VECTOR;
  const int slab_channels = window.slab_vectors * VECTOR;
  stage_taps(taps, w, slab, slab_channels < c - slab ? slab_channels : c - slab, turn);
  cb_sync();

  const u32 flat = cb_block_x() * THREADS + (u32)cb_thread();
  const u32 item = flat / (u32)window.slab_vectors;
  const int vector = (int)(flat - item * (u32)window.slab_vectors), channel = slab + vector * VECTOR;
  if (item >= window.num_items || channel >= c) return;
  const Strip strip = strip_of(window, item, W::GROUPS);
  const int left = strip.column * DOWN + window.in_left, out_left = strip.column * UP + window.out_left;
  // What lies inside: columns of x, and above them columns of y: in one register, which is what 168 are short of.
  const u32 inside = inside_bits<W::COLUMNS>(left, window.in_w) | inside_bits<WIDTH>(out_left, window.out_w) << 16;
  const CB_ELEMENT* in = image(x, strip.n, window.in_h, window.in_w, c, left, channel);
  CB_ELEMENT* out = image(y, strip.n, window.out_h, window.out_w, c, out_left, channel);
  const int top = strip.first * DOWN + window.in_top;

  float sum[OPEN][UP][WIDTH][VECTOR] = {};
  CB_NO_UNROLL
  for (int g = strip.first - (OPEN - 1); g < strip.last; ++g) {
    CB_UNROLL
    for (int a = W::LAST - DOWN + 1; a <= W::LAST; ++a) {
      const int row = g * DOWN + a + window.in_top;
      Held<Vec<CB_ELEMENT, VECTOR>> pixels[W::COLUMNS];
      const bool is_read = row_is_read<DOWN>(row, top, window.in_h);
      load_row(pixels, in + (i64)row * (window.in_w * c), c, is_read ? inside : 0);
      add_row<W>(sum, pixels, taps, vector, a);
    }
    CB_UNROLL
    for (int u = 0; u < UP; ++u) {
      const int row = g * UP + u + window.out_top;
      if (g >= strip.first && (u32)row < (u32)window.out_h) {
        store_row(out + (i64)row * (window.out_w * c), c, inside >> 16, sum[0][u], bias, channel, floor);
      }
    }
    CB_UNROLL
    for (int j = 0; j < OPEN; ++j) {
      CB_UNROLL
      for (int u = 0; u < UP; ++u) {
        CB_UNROLL
        for (int k = 0; k < WIDTH; ++k) {
          CB_UNROLL
          for (int e = 0; e < VECTOR; ++e) sum[j][u][k][e] = j + 1 < OPEN ? sum[(j + 1) % OPEN][u][k][e] : 0.0f;
        }
      }
    }
  }
}
