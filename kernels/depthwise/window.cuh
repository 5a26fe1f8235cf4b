// SPDX-License-Identifier: MIT
//
// The geometry of depthwise passes: which input a tap of an output reads, and what a thread owns.
//
// Along each axis all three passes are one relation of output o, input i and tap r (turned around in dgrad):
//
//     i * UP = o * DOWN - pad + r          fprop, wgrad: DOWN = STRIDE, UP = 1;   dgrad: DOWN = 1, UP = STRIDE
//
// Outputs go in groups of UP, so that every output of one place in its group is reached by the same taps and no
// tap is multiplied in vain.  With the origins that host code works out,
//
//     output  o = g * UP + u + out         reads     input  i = g * DOWN + a + in     through tap  UP * a - u
//
// of group g, for 0 <= u < UP, where that is a tap at all.  A thread owns a channel vector of a strip: 4 columns of
// outputs by `strip_rows` rows of groups.
#pragma once

#include "common/device.cuh"

#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif

constexpr int THREADS = 128;
constexpr int STRIP_COLUMNS = 4;

// Mirrored by native/depthwise.py: 32-bit numbers only.
struct Window {
  int in_h, in_w, out_h, out_w, c;          // extents
  int in_top, in_left, out_top, out_left;   // origins, as above
  int group_rows;                           // rows of groups in an image
  int strip_rows;                           // and in a strip
  int num_strips, num_columns;              // strips over an image's height and width
  int slab_vectors;                         // channel vectors of a block
  u32 num_items;                            // strips in the batch
};

// Place of a strip: its image, its rows of groups, its first column of groups.
struct Strip {
  i64 n;
  int first, last;
  int column;
};

CB_DEVICE Strip strip_of(const Window& window, u32 item, int groups) {
  const u32 above = item / (u32)window.num_columns;
  const u32 n = above / (u32)window.num_strips;
  const int first = (int)(above - n * (u32)window.num_strips) * window.strip_rows;
  const int last = first + window.strip_rows;
  return {(i64)n, first, last < window.group_rows ? last : window.group_rows,
          (int)(item - above * (u32)window.num_columns) * groups};
}

// Element 0 of the given channel in column `left`, which may lie outside, of row 0 of image n.
template <class T>
CB_DEVICE T* image(T* base, i64 n, int h, int w, int c, int left, int channel) {
  return base + ((n * h * w + left) * c + channel);
}
