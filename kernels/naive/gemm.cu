// SPDX-License-Identifier: MIT
//
// gemm_{nn,nt,tn} - matrix product, one thread for one output: the second opinion on every other kernel
//
//   out[m,n] = bias[n] + sum over k of a[m,k] * b[k,n]
//   nn: a is M x K and b is K x N;  nt: b is N x K instead;  tn: a is K x M instead
//
// Each thread walks gemm_k alone.  Neighbouring threads own neighbouring columns, so in nn and tn their loads of b
// are coalesced and those of a are one element for all.
//
//   threads   128;  grid = ceil(M * N / 128)
//   needs     nothing: any extents, any address; offsets are 64-bit
#include "common/device.cuh"

#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif

constexpr int THREADS = 128;

// Mirrored by native/naive.py.
struct Product {
  i64 m, n, k;
  i64 relu;
};

// `a_row`, `a_step`: elements between rows of the product, and between steps of k, in a; so too for b's columns.
CB_DEVICE void multiply(const CB_ELEMENT* a, i64 a_row, i64 a_step, const CB_ELEMENT* b, i64 b_column, i64 b_step,
                        const CB_ELEMENT* bias, CB_ELEMENT* out, const Product& product) {
  const i64 index = (i64)cb_block_x() * THREADS + cb_thread();
  if (index >= product.m * product.n) return;
  const i64 m = index / product.n, n = index % product.n;
  float sum = bias ? to_float(bias[n]) : 0.0f;
  CB_NO_UNROLL  // or NVVM unrolls it for some architectures, which then share no PTX with the others
  for (i64 k = 0; k < product.k; ++k) {
    sum = fmaf(to_float(a[m * a_row + k * a_step]), to_float(b[n * b_column + k * b_step]), sum);
  }
  out[index] = from_float<CB_ELEMENT>(product.relu && sum < 0.0f ? 0.0f : sum);
}

CB_KERNEL(THREADS, 1)
gemm_nn(const CB_ELEMENT* a, const CB_ELEMENT* b, const CB_ELEMENT* bias, CB_ELEMENT* out, const Product product) {
  cb_dependent_launch();
  multiply(a, product.k, 1, b, 1, product.n, bias, out, product);
}

CB_KERNEL(THREADS, 1)
gemm_nt(const CB_ELEMENT* a, const CB_ELEMENT* b, const CB_ELEMENT* bias, CB_ELEMENT* out, const Product product) {
  cb_dependent_launch();
  multiply(a, product.k, 1, b, product.k, 1, bias, out, product);
}

CB_KERNEL(THREADS, 1)
gemm_tn(const CB_ELEMENT* a, const CB_ELEMENT* b, const CB_ELEMENT* bias, CB_ELEMENT* out, const Product product) {
  cb_dependent_launch();
  multiply(a, 1, product.m, b, 1, product.n, bias, out, product);
}
