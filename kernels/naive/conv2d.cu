// SPDX-License-Identifier: MIT
//
// conv2d_{fprop,dgrad,wgrad} - convolution, one thread for one output: the second opinion on every other kernel
//
//   y[n,p,q,k]  = bias[k] + sum over r,s,c of x[n,h,w,c] * w[k,r,s,c]     h = p*stride_h - top  + r*step_h
//   dx[n,h,w,c] = sum over r,s,k of dy[n,p,q,k] * w[k,r,s,c]              w = q*stride_w - left + s*step_w
//   dw[k,r,s,c] = sum over n,p,q of dy[n,p,q,k] * x[n,h,w,c]              c, k: of one group
//   db[k]       = sum over n,p,q of dy[n,p,q,k]
//
// The obvious loops.  Indices are written out here once more, rather than taken from common/conv_geometry.cuh,
// which is among what this checks.
//
//   threads   128;  grid = ceil(outputs / 128)
//   needs     nothing: any stride, pad, dilation, groups and address; offsets are 64-bit
#include "common/device.cuh"

#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif

constexpr int THREADS = 128;

// Mirrored by native/naive.py.
struct Convolution {
  i64 n;
  int h, w, c, p, q, k, r, s;
  int stride_h, stride_w, step_h, step_w, top, left;
  int groups, relu;
};

CB_DEVICE i64 own_index() { return (i64)cb_block_x() * THREADS + cb_thread(); }

CB_KERNEL(THREADS, 1)
conv2d_fprop(const CB_ELEMENT* x, const CB_ELEMENT* filter, const CB_ELEMENT* bias, CB_ELEMENT* y,
             const Convolution conv) {
  cb_dependent_launch();
  const i64 index = own_index(), pixel = index / conv.k, row = pixel / conv.q, n = row / conv.p;
  if (n >= conv.n) return;
  const int k = (int)(index % conv.k), q = (int)(pixel % conv.q), p = (int)(row % conv.p);
  const int group_c = conv.c / conv.groups, first_c = k / (conv.k / conv.groups) * group_c;
  float sum = bias ? to_float(bias[k]) : 0.0f;
  for (int r = 0; r < conv.r; ++r) {
    for (int s = 0; s < conv.s; ++s) {
      const int h = p * conv.stride_h - conv.top + r * conv.step_h;
      const int w = q * conv.stride_w - conv.left + s * conv.step_w;
      if (h < 0 || h >= conv.h || w < 0 || w >= conv.w) continue;
      const CB_ELEMENT* pixel_x = x + (((n * conv.h + h) * conv.w + w) * conv.c + first_c);
      const CB_ELEMENT* tap = filter + ((i64)(k * conv.r + r) * conv.s + s) * group_c;
      for (int c = 0; c < group_c; ++c) sum = fmaf(to_float(pixel_x[c]), to_float(tap[c]), sum);
    }
  }
  y[index] = from_float<CB_ELEMENT>(conv.relu && sum < 0.0f ? 0.0f : sum);
}

CB_KERNEL(THREADS, 1)
conv2d_dgrad(const CB_ELEMENT* dy, const CB_ELEMENT* filter, CB_ELEMENT* dx, const Convolution conv) {
  cb_dependent_launch();
  const i64 index = own_index(), pixel = index / conv.c, row = pixel / conv.w, n = row / conv.h;
  if (n >= conv.n) return;
  const int c = (int)(index % conv.c), w = (int)(pixel % conv.w), h = (int)(row % conv.h);
  const int group_c = conv.c / conv.groups, group_k = conv.k / conv.groups, first_k = c / group_c * group_k;
  float sum = 0.0f;
  for (int r = 0; r < conv.r; ++r) {
    for (int s = 0; s < conv.s; ++s) {
      const int above = h + conv.top - r * conv.step_h, before = w + conv.left - s * conv.step_w;
      if (above < 0 || above % conv.stride_h != 0 || before < 0 || before % conv.stride_w != 0) continue;
      const int p = above / conv.stride_h, q = before / conv.stride_w;
      if (p >= conv.p || q >= conv.q) continue;
      const CB_ELEMENT* pixel_dy = dy + ((n * conv.p + p) * conv.q + q) * conv.k;
      for (int k = first_k; k < first_k + group_k; ++k) {
        const i64 tap = ((i64)(k * conv.r + r) * conv.s + s) * group_c + c % group_c;
        sum = fmaf(to_float(pixel_dy[k]), to_float(filter[tap]), sum);
      }
    }
  }
  dx[index] = from_float<CB_ELEMENT>(sum);
}

// Threads beyond the filter's elements own those of the bias's gradient.
CB_KERNEL(THREADS, 1)
conv2d_wgrad(const CB_ELEMENT* x, const CB_ELEMENT* dy, CB_ELEMENT* dw, CB_ELEMENT* db, const Convolution conv) {
  cb_dependent_launch();
  const int group_c = conv.c / conv.groups;
  const i64 index = own_index(), elements = (i64)conv.k * conv.r * conv.s * group_c;
  const bool is_bias = index >= elements;
  if (index >= elements + (db ? conv.k : 0)) return;
  const i64 tap = index / group_c;
  const int s = (int)(tap % conv.s), r = (int)(tap / conv.s % conv.r);
  const int k = is_bias ? (int)(index - elements) : (int)(tap / conv.s / conv.r);
  const int c = k / (conv.k / conv.groups) * group_c + (int)(index % group_c);
  float sum = 0.0f;
  for (i64 n = 0; n < conv.n; ++n) {
    for (int p = 0; p < conv.p; ++p) {
      for (int q = 0; q < conv.q; ++q) {
        const float error = to_float(dy[((n * conv.p + p) * conv.q + q) * conv.k + k]);
        if (is_bias) {
          sum += error;
          continue;
        }
        const int h = p * conv.stride_h - conv.top + r * conv.step_h;
        const int w = q * conv.stride_w - conv.left + s * conv.step_w;
        if (h < 0 || h >= conv.h || w < 0 || w >= conv.w) continue;
        sum = fmaf(error, to_float(x[((n * conv.h + h) * conv.w + w) * conv.c + c]), sum);
      }
    }
  }
  (is_bias ? db[k] : dw[index]) = from_float<CB_ELEMENT>(sum);
}
