// SPDX-License-Identifier: MIT
//
// What happens to an accumulator before it is stored, fused into every product.
//
//   y = activation(scale[col] * sum + shift[col] + bias[col] + residual[row, col]), or 0 where mask[row, col] <= 0
//
// A null pointer leaves its term out; all branches are uniform.  `residual` may be `out` itself: y += ... .  `mask`
// is the saved output of a ReLU, whose gradient passes where that was positive, or NaN.
//
// Only those terms are compiled into a pass that its layer can ask for:
//
//   forward (gemm_nt, conv2d_fprop)              all but the mask
//   an input's gradient (gemm_nn, conv2d_dgrad)  residual and mask
//   a filter's gradient (gemm_tn, conv2d_wgrad)  residual
//   split_k_reduce, which finishes any of them   all but statistics
#pragma once

#include "common/activation.cuh"
#include "common/structs.cuh"

#if defined(OPERATION_GEMM_NT) || defined(OPERATION_CONV2D_FPROP)
constexpr bool HAS_FORWARD_TERMS = true, HAS_MASK = false;
#elif defined(OPERATION_GEMM_NN) || defined(OPERATION_CONV2D_DGRAD)
constexpr bool HAS_FORWARD_TERMS = false, HAS_MASK = true;
#elif defined(OPERATION_GEMM_TN) || defined(OPERATION_CONV2D_WGRAD)
constexpr bool HAS_FORWARD_TERMS = false, HAS_MASK = false;
#else
constexpr bool HAS_FORWARD_TERMS = true, HAS_MASK = true;
#endif

struct Epilogue : Output {
  CB_ELEMENT* out;             // rows x columns
  const CB_ELEMENT* bias;      // columns
  const float* scale;          // columns, with shift: a batch norm folded for inference
  const float* shift;
  const CB_ELEMENT* residual;  // rows x columns
  const CB_ELEMENT* mask;      // rows x columns
  float* statistics;           // [row tiles][count, mean, sum of squared deviations][columns] of sum + bias
  float* partials;             // [slices][rows][columns]: sums of a split gemm_k, finished by split_k_reduce

  // Whether 4 neighbouring columns are finished at once: other activations than ReLU would be long four times over.
  CB_DEVICE bool is_wide() const { return wide && (!HAS_FORWARD_TERMS || activation <= ACTIVATION_RELU); }
};

// Finish one element: `place` is its number in the output.
CB_DEVICE void finish_one(const Epilogue& epilogue, i64 place, int column, float sum) {
  if (HAS_FORWARD_TERMS && epilogue.scale) sum = fmaf(sum, epilogue.scale[column], epilogue.shift[column]);
  if (HAS_FORWARD_TERMS && epilogue.bias) sum += to_float(epilogue.bias[column]);
  if (epilogue.residual) sum += to_float(epilogue.residual[place]);
  if (HAS_FORWARD_TERMS) sum = activate(epilogue.activation, sum);
  if (HAS_MASK && epilogue.mask) sum = to_float(epilogue.mask[place]) <= 0.0f ? 0.0f : sum;
  epilogue.out[place] = from_float<CB_ELEMENT>(sum);
}

// Finish the same 4 neighbouring columns of ROWS rows, where the epilogue is wide.
// `place` is the number of a row's first element in the output, negative where the row does not exist.  Loads of all
// rows come before their use, so that they are waited for together.
template <int ROWS>
CB_DEVICE void finish_wide(const Epilogue& epilogue, const i64 (&place)[ROWS], int column, float (&sum)[ROWS][4]) {
  if (HAS_FORWARD_TERMS && epilogue.scale) {
    const Vec<float, 4> scale = cb_load<float, 4>(epilogue.scale + column);
    const Vec<float, 4> shift = cb_load<float, 4>(epilogue.shift + column);
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      CB_UNROLL
      for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(sum[i][j], scale.v[j], shift.v[j]);
    }
  }
  if (HAS_FORWARD_TERMS && epilogue.bias) {
    const Vec<CB_ELEMENT, 4> bias = cb_load<CB_ELEMENT, 4>(epilogue.bias + column);
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      CB_UNROLL
      for (int j = 0; j < 4; ++j) sum[i][j] += to_float(bias.v[j]);
    }
  }
  if (epilogue.residual) {
    Vec<CB_ELEMENT, 4> residual[ROWS];
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      if (place[i] >= 0) residual[i] = cb_read<CB_ELEMENT, 4>(epilogue.residual + place[i]);
    }
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      CB_UNROLL
      for (int j = 0; j < 4; ++j) sum[i][j] += to_float(residual[i].v[j]);
    }
  }
  if (HAS_FORWARD_TERMS && epilogue.activation == ACTIVATION_RELU) {
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      CB_UNROLL
      for (int j = 0; j < 4; ++j) sum[i][j] = rectify(sum[i][j]);
    }
  }
  if (HAS_MASK && epilogue.mask) {
    Vec<CB_ELEMENT, 4> mask[ROWS];
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      if (place[i] >= 0) mask[i] = cb_read<CB_ELEMENT, 4>(epilogue.mask + place[i]);
    }
    CB_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      CB_UNROLL
      for (int j = 0; j < 4; ++j) sum[i][j] = to_float(mask[i].v[j]) <= 0.0f ? 0.0f : sum[i][j];
    }
  }
  CB_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    Vec<CB_ELEMENT, 4> stored;
    CB_UNROLL
    for (int j = 0; j < 4; ++j) stored.v[j] = from_float<CB_ELEMENT>(sum[i][j]);
    if (place[i] >= 0) cb_write<CB_ELEMENT, 4>(epilogue.out + place[i], stored);
  }
}
