// SPDX-License-Identifier: MIT
//
// Activation functions and their slopes: the only copy, for epilogues and for elementwise kernels.
//
// The kind is a number known at the launch, so a switch over it is uniform and costs a branch.  What the
// slope is worked out from is what the layer saves: its output y for relu, relu6, sigmoid and
// hard_sigmoid, its input x for silu, hard_swish and gelu.  A NaN goes through every function as one.
#pragma once

#include "common/device.cuh"

// In this order in cubatch/engine/native/activation_functions.py too.
enum Activation : int {
  ACTIVATION_NONE,
  ACTIVATION_RELU,
  ACTIVATION_RELU6,
  ACTIVATION_SILU,
  ACTIVATION_SIGMOID,
  ACTIVATION_HARD_SIGMOID,
  ACTIVATION_HARD_SWISH,
  ACTIVATION_GELU,
};

// min(max(x, low), high), NaN where x is.
CB_DEVICE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

CB_DEVICE float rectify(float x) { return x < 0.0f ? 0.0f : x; }
CB_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
CB_DEVICE float hard_sigmoid(float x) { return clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }
// Normal distribution function.
CB_DEVICE float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678118654752f)); }

CB_DEVICE float activate(int kind, float x) {
  switch (kind) {
    case ACTIVATION_RELU: return rectify(x);
    case ACTIVATION_RELU6: return clamp(x, 0.0f, 6.0f);
    case ACTIVATION_SILU:
    case ACTIVATION_SIGMOID: return (kind == ACTIVATION_SILU ? x : 1.0f) / (1.0f + expf(-x));
    case ACTIVATION_HARD_SIGMOID:
    case ACTIVATION_HARD_SWISH: return (kind == ACTIVATION_HARD_SWISH ? x : 1.0f) * hard_sigmoid(x);
    case ACTIVATION_GELU: return x * normal_cdf(x);
    default: return x;
  }
}

// Gradient by the input.  Where a curve is flat it is zero, even if dy is infinite; a kink has the slope of its
// flat side, and hard_swish at 3 the slope 1, as in PyTorch.  As there relu and relu6 pass on what comes
// back to a NaN.
CB_DEVICE float activate_backward(int kind, float dy, float saved) {
  switch (kind) {
    case ACTIVATION_RELU: return saved <= 0.0f ? 0.0f : dy;
    case ACTIVATION_RELU6: return saved <= 0.0f || saved >= 6.0f ? 0.0f : dy;
    case ACTIVATION_SILU: {
      const float s = sigmoid(saved);
      return dy * (s * (1.0f + saved * (1.0f - s)));
    }
    case ACTIVATION_SIGMOID: return dy * (saved * (1.0f - saved));
    case ACTIVATION_HARD_SIGMOID: return saved > 0.0f && saved < 1.0f ? dy / 6.0f : 0.0f;
    case ACTIVATION_HARD_SWISH:
      return saved <= -3.0f ? 0.0f : saved < 3.0f ? dy * (saved / 3.0f + 0.5f) : dy;
    case ACTIVATION_GELU: {
      const float density = 0.39894228040143268f * expf(-0.5f * saved * saved);
      return dy * (normal_cdf(saved) + saved * density);
    }
    default: return dy;
  }
}

// use.of<KIND>() for the kinds whose slope activate_backward() computes from the input as well: relu and relu6 are flat
// for the same inputs as outputs.  One switch for all elements of a vector, which are unrolled.
template <class Use>
CB_DEVICE void with_activation(int kind, Use use) {
  switch (kind) {
    case ACTIVATION_RELU: return use.template of<ACTIVATION_RELU>();
    case ACTIVATION_RELU6: return use.template of<ACTIVATION_RELU6>();
    case ACTIVATION_SILU: return use.template of<ACTIVATION_SILU>();
    case ACTIVATION_HARD_SWISH: return use.template of<ACTIVATION_HARD_SWISH>();
    case ACTIVATION_GELU: return use.template of<ACTIVATION_GELU>();
  }
}

template <int V>
struct ActivateAll {
  float (&x)[V];

  template <int KIND>
  CB_DEVICE void of() const {
    CB_UNROLL
    for (int v = 0; v < V; ++v) x[v] = activate(KIND, x[v]);
  }
};

// Gradients by the inputs x, from those by the outputs.
template <int V>
struct ApplySlopes {
  const float (&x)[V];
  float (&dy)[V];

  template <int KIND>
  CB_DEVICE void of() const {
    CB_UNROLL
    for (int v = 0; v < V; ++v) dy[v] = activate_backward(KIND, dy[v], x[v]);
  }
};
