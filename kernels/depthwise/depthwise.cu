// SPDX-License-Identifier: MIT
//
// depthwise_s1, depthwise_{fprop,dgrad}_s2, depthwise_wgrad_{s1,s2} - convolution of each channel by itself, filter
// 3x3, 5x5 or 7x7, stride 1 or 2, any pad
//
//   y[n,p,q,c]  = max(floor, bias[c] + sum over r,s of x[n, p*stride - top + r, q*stride - left + s, c] * w[c,r,s])
//   dx[n,h,w,c] = sum over r,s of dy[n, (h + top - r) / stride, (w + left - s) / stride, c] * w[c,r,s], where whole
//   dw[c,r,s]   = sum over n,p,q of dy[n,p,q,c] * x[n, p*stride - top + r, q*stride - left + s, c]
//
// No product of matrices and nothing to reuse between channels: 2 * TAPS operations per output, so memory is the
// limit and the aim is to read each input once, 16 bytes a lane.  (index arithmetic: depthwise/window.cuh)
//
//              channels ->
//            +----+----+----+----+----+     a block: 128 neighbouring (strip, channel vector) pairs, vectors first,
//   strip 0  | t0 | t1 | t2 | t3 | t4 |     so that lanes read whole runs of channels and none idles for a small C;
//   strip 1  | t5 | t6 | t7 | t8 | t9 |     its taps lie in shared memory, its open rows in registers.
//            +----+----+----+----+----+     a strip: 4 columns of outputs times as many rows as still fill the device
//
//   shared memory   fprop, dgrad: TAPS * 32 * VECTOR * 4 B of taps: 4.5 KiB (3x3 float) .. 12.5 KiB (5x5 float, 7x7)
//                   wgrad: half of 128 threads' sums, 10 KiB (3x3), 13 KiB (5x5) or 12.5 KiB (7x7)
//   threads         128;  fprop, dgrad: grid = (strips * slab_vectors / 128, slabs);  wgrad: grid = (shares, slabs)
//   needs           C % VECTOR == 0 and all addresses multiples of a vector, otherwise depthwise/scalar.cu; a row of an
//                   image below 2^31 elements, any image and any N: offsets of images and rows are 64-bit
//   adds to naive   each input is loaded once for all taps instead of TAPS times; no multiplication with a stride's
//                   zeros in dgrad; sums of wgrad in as many threads as the device holds
#include "depthwise/convolve.cuh"
#include "depthwise/wgrad.cuh"

// Registers: 128 allow 4 blocks on an SM, 168 allow 3.  Stride 2 loads two rows a step: enough under way with 2.
constexpr int MIN_BLOCKS = (VECTOR < 8 && FILTER == 3) || VECTOR == 2 ? 4 : 3;
constexpr int MIN_FPROP_S2_BLOCKS = VECTOR == 8 ? 2 : MIN_BLOCKS;

// At stride 1 the input's gradient is a forward pass of dy with the taps turned around.
CB_KERNEL(THREADS, MIN_BLOCKS)
depthwise_s1(const CB_ELEMENT* x, const CB_ELEMENT* w, const CB_ELEMENT* bias, CB_ELEMENT* y, const Window window,
             float floor, int turn) {
  cb_dependent_launch();
  convolve<Walk<1, 1>>(x, w, bias, y, window, floor, turn);
}

CB_KERNEL(THREADS, MIN_FPROP_S2_BLOCKS)
depthwise_fprop_s2(const CB_ELEMENT* x, const CB_ELEMENT* w, const CB_ELEMENT* bias, CB_ELEMENT* y,
                   const Window window, float floor) {
  cb_dependent_launch();
  convolve<Walk<1, 2>>(x, w, bias, y, window, floor, false);
}

CB_KERNEL(THREADS, MIN_BLOCKS)
depthwise_dgrad_s2(const CB_ELEMENT* dy, const CB_ELEMENT* w, CB_ELEMENT* dx, const Window window) {
  cb_dependent_launch();
  const float no_floor = to_float(bfloat16_t{0xff80});  // minus infinity
  convolve<Walk<2, 1>>(dy, w, nullptr, dx, window, no_floor, true);
}

CB_KERNEL(THREADS, 3)
depthwise_wgrad_s1(const CB_ELEMENT* x, const CB_ELEMENT* dy, float* partials, const Window window) {
  cb_dependent_launch();
  sum_strips<Walk<1, 1>>(x, dy, partials, window);
}

CB_KERNEL(THREADS, 2)
depthwise_wgrad_s2(const CB_ELEMENT* x, const CB_ELEMENT* dy, float* partials, const Window window) {
  cb_dependent_launch();
  sum_strips<Walk<1, 2>>(x, dy, partials, window);
}
