// SPDX-License-Identifier: MIT
//
// Winograd's F(OUTPUTS, 3) along one axis: OUTPUTS neighbouring results of a filter of three taps from OUTPUTS + 2
// products instead of 3 * OUTPUTS.  Along both axes: 16 products for 2 x 2 results, 36 for 4 x 4 (direct: 36, 144).
//
//   y = A^T [ (G w) * (B^T d) ]         d: OUTPUTS + 2 neighbours of the source; *: element by element
//
// The polynomials d and w are multiplied at points (Cook and Toom): 0, 1, -1 and infinity for F(2, 3), for F(4, 3)
// 0, P, -P, Q, -Q and infinity.  Row i of B^T is the product of (x - point) over all points but the i-th, that of G
// the powers of the i-th point over its distances to the others, that of A the powers again.
//
// Why P = 11/16 and Q = 3/2, not 1 and 2 (Lavin and Gray, arXiv:1509.09308): rounding errors grow with
//
//   max over results i, taps k of  sum over j of |A_ij| |G_jk| sum over l of |B_jl|
//
// along each axis, which is 4 for F(2, 3), 29.3 for F(4, 3) at 1 and 2, and 12.8 at 11/16 and 3/2; no other pair of
// sixteenths below 2 1/2 with so short a denominator has less than 12.5.  Both points, their squares and cubes are
// float32 numbers, so that G alone has rounded coefficients.
//
// Roundings on the way to a result along one axis, at most (both axes: twice as many):
//
//                  B^T d   G w   A^T m
//   F(2, 3)          1      2      2
//   F(4, 3)          2      4      3       G: one of a coefficient among them
//
// An element of the sums over C channels takes C more.  A result is then off by at most, with u = 2^-24,
//
//   n u / (1 - n u)  *  |A^T| [ sum over c of (|G| |w| |G^T|) * (|B^T| |d| |B|) ] |A|,   n = C + 10 or C + 18
//
// which is at most 16 or 163.3 times  max |d| * sum |w|,  where the direct sum has 9 C roundings on once that.
// cubatch/kernels/winograd_plan.py has the same in numbers, and the limit.
#pragma once

#include "common/device.cuh"

static_assert(OUTPUTS == 2 || OUTPUTS == 4, "there are F(2, 3) and F(4, 3)");
constexpr int SIZE = OUTPUTS + 2;  // points, and neighbours of the source

constexpr float P = 11.0f / 16, Q = 3.0f / 2, PP = P * P, QQ = Q * Q;
// 1 over the product of a point's distances to the others: of 0, of P and -P, of Q and -Q.
constexpr float AT_ZERO = 1 / (PP * QQ), AT_P = 1 / (2 * PP * (PP - QQ)), AT_Q = 1 / (2 * QQ * (QQ - PP));

// B^T d.
CB_DEVICE void transform_source(float (&d)[SIZE]) {
  if constexpr (OUTPUTS == 2) {
    const float zero = d[2] - d[0], plus = d[2] + d[1], minus = d[2] - d[1], infinite = d[3] - d[1];
    d[0] = zero, d[1] = plus, d[2] = minus, d[3] = infinite;
  } else {
    const float zero = fmaf(PP * QQ, d[0], fmaf(-(PP + QQ), d[2], d[4]));
    const float infinite = fmaf(PP * QQ, d[1], fmaf(-(PP + QQ), d[3], d[5]));
    const float even_p = fmaf(-QQ, d[2], d[4]), odd_p = fmaf(-QQ, d[1], d[3]);
    const float even_q = fmaf(-PP, d[2], d[4]), odd_q = fmaf(-PP, d[1], d[3]);
    d[0] = zero, d[1] = fmaf(P, odd_p, even_p), d[2] = fmaf(-P, odd_p, even_p);
    d[3] = fmaf(Q, odd_q, even_q), d[4] = fmaf(-Q, odd_q, even_q), d[5] = infinite;
  }
}

// G w.
CB_DEVICE void transform_filter(const float (&w)[3], float (&g)[SIZE]) {
  if constexpr (OUTPUTS == 2) {
    const float even = fmaf(0.5f, w[2], 0.5f * w[0]);
    g[0] = -w[0], g[1] = fmaf(0.5f, w[1], even), g[2] = fmaf(-0.5f, w[1], even), g[3] = w[2];
  } else {
    const float even_p = fmaf(AT_P * PP, w[2], AT_P * w[0]), even_q = fmaf(AT_Q * QQ, w[2], AT_Q * w[0]);
    g[0] = AT_ZERO * w[0], g[1] = fmaf(AT_P * P, w[1], even_p), g[2] = fmaf(-AT_P * P, w[1], even_p);
    g[3] = fmaf(AT_Q * Q, w[1], even_q), g[4] = fmaf(-AT_Q * Q, w[1], even_q), g[5] = w[2];
  }
}

// A^T m.
CB_DEVICE void transform_sums(const float (&m)[SIZE], float (&y)[OUTPUTS]) {
  if constexpr (OUTPUTS == 2) {
    y[0] = m[0] + (m[1] + m[2]), y[1] = (m[1] - m[2]) + m[3];
  } else {
    const float sum_p = m[1] + m[2], sum_q = m[3] + m[4], odd_p = m[1] - m[2], odd_q = m[3] - m[4];
    y[0] = m[0] + (sum_p + sum_q);
    y[1] = fmaf(P, odd_p, Q * odd_q);
    y[2] = fmaf(PP, sum_p, QQ * sum_q);
    y[3] = fmaf(PP * P, odd_p, fmaf(QQ * Q, odd_q, m[5]));
  }
}
