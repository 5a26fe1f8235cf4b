// SPDX-License-Identifier: MIT
//
// Slopes of activations for results of 16 bits, in fewer instructions: tensor cores wait for an epilogue.
#pragma once

#include "common/activation.cuh"
#include "common/device_hopper.cuh"

// Normal distribution function of x and, as `power`, e^(-x^2 / 2), for results of 16 bits: off by at most 2e-7
// (Abramowitz and Stegun, 7.1.26).  A third of the instructions of erff and expf.
CB_DEVICE float short_normal_cdf(float x, float& power) {
  const float root = x * 0.84932180f, t = cb_short_reciprocal(fmaf(fabsf(x), 0.231641888f, 1.0f));
  power = cb_short_exp2(-root * root);
  const float inner = fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f);
  const float tail = t * fmaf(t, inner, 0.127414796f) * power;
  return x < 0.0f ? tail : 1.0f - tail;
}

// activate_backward() of a kind whose slope is computed from the input, for results of 16 bits.
template <int KIND>
CB_DEVICE float activate_backward_short(float dy, float x) {
  if constexpr (KIND != ACTIVATION_GELU) return activate_backward(KIND, dy, x);
  float power;
  const float cdf = short_normal_cdf(x, power);
  return dy * fmaf(x * 0.39894228040143268f, power, cdf);
}
