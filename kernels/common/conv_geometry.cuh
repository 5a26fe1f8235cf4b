// SPDX-License-Identifier: MIT
//
// The only index arithmetic of convolution on the device; its twin on the host is cubatch/network/windows.py.
//
// Along one axis, output position o and tap t read the source at  o * stride + t * step + offset;  what lies
// outside the source reads as zero.  A forward pass reads x (offset = -pad, step = dilation); the input's gradient
// reads dy, one phase of the stride at a time, at stride 1 and with a step of its own (see phase_along).
#pragma once

#include "common/structs.cuh"

// Division of numbers below 2^31 by a number known at the launch: multiply, keep the high half, shift.
//   shift = ceil(log2 divisor) - 1,  multiplier = ceil(2^(32 + shift) / divisor)
// The product exceeds 2^(32 + shift) * quotient by less than one divisor's worth for every dividend below 2^31.
CB_DEVICE int divide(int dividend, Divisor by) {
  const u32 x = (u32)dividend;
  return (int)(by.divisor == 1 ? x : cb_mul_high(x, by.multiplier) >> by.shift);
}

// One axis, see above.  `size` is the source's extent.
struct Axis {
  int size, taps, stride, step, offset;
};

CB_DEVICE bool inside(int position, int size) { return (u32)position < (u32)size; }

// One axis of one phase of the input's gradient: input positions first, first + stride, ...
//
// Output o is read by tap t where o * stride = position + pad - t * dilation, so all positions of a phase see the
// same taps: those with (first + pad - t * dilation) a multiple of the stride, an arithmetic progression.
struct PhaseAxis {
  int first_tap, tap_step;  // the taps it sees are first_tap + j * tap_step
  Axis axis;                // how its i-th position and j-th tap read dy, at stride 1
};

CB_DEVICE PhaseAxis phase_along(int first, int taps, int stride, int dilation, int pad, int source, int tap_step,
                                int source_step) {
  int tap = 0;
  while (tap < tap_step && (first + pad - tap * dilation) % stride) ++tap;
  const int seen = tap < tap_step && tap < taps ? (taps - tap + tap_step - 1) / tap_step : 0;
  return PhaseAxis{tap, tap_step, Axis{source, seen, 1, -source_step, (first + pad - tap * dilation) / stride}};
}
