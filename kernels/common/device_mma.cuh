// SPDX-License-Identifier: MIT
//
// Tensor cores by mma.sync: inline PTX on the GPU, twins of the same name in tests/cpusim/cpusim_mma.h, and atoms.
//
//   cb_load_matrices    four 8 x 8 matrices of 16 bits from shared memory, the lanes' registers as mma wants them
//   cb_mma_...          the instructions: sum += a * b, in float32
//   Atom...             one product of a warp: sum[16][16] += a[16][K] * b[K][16], made of two or four instructions
//
// All atoms have the same shape for a lane, 4 registers of A, 4 of B and 8 sums, so that one main loop serves them all:
//
//   A       registers 0 and 1 are rows 0-7 and 8-15 in the first half of K, 2 and 3 in the second; the lane holds row
//           lane / 4 and of the half the 32 bits number lane % 4.  Of m8n8k4, see its atom
//   B       registers 0 and 1 are the first and the second half of K in columns 0-7, 2 and 3 in columns 8-15
//   sums    sum[i] is at row(lane, i), column(lane, i); i and i + 1 (i even) are neighbours in a row
//
// Fragments are those of the PTX ISA, sections on mma.m8n8k4, .m16n8k8, .m16n8k16 and on ldmatrix.
#pragma once

#include "common/device.cuh"

#if defined(__CUDACC__)

#if CB_ARCH >= 75
// Lanes 8 i to 8 i + 7 give the places of matrix i's rows, 16 bytes each; register i of a lane is row lane / 4, 32 bits
// number lane % 4.
CB_DEVICE void cb_load_matrices(u32 (&value)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
}
// The same of the transposed matrices: register i holds rows 2 (lane % 4) and the next of column lane / 4.
CB_DEVICE void cb_load_matrices_transposed(u32 (&value)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
}
// sum[4] of 16 x 8 each.
CB_DEVICE void cb_mma_m16n8k8_f16(float* sum, u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
#else
// Four products 8 x 8 x 4, one for lanes 4 q to 4 q + 3 and 16 + 4 q to 19 + 4 q each.  A_COLUMNS, B_ROWS: the lane
// holds four neighbours along m, n instead of along k.
template <bool A_COLUMNS, bool B_ROWS>
CB_DEVICE void cb_mma_m8n8k4_f16(float* sum, u32 a0, u32 a1, u32 b0, u32 b1) {
#define CB_M8N8K4(a_layout, b_layout)                                                                      \
  asm("mma.sync.aligned.m8n8k4." a_layout "." b_layout ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, " \
      "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"                                            \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]),  \
        "+f"(sum[7])                                                                                       \
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
  if constexpr (A_COLUMNS && B_ROWS) {
    CB_M8N8K4("col", "row");
  } else if constexpr (A_COLUMNS) {
    CB_M8N8K4("col", "col");
  } else if constexpr (B_ROWS) {
    CB_M8N8K4("row", "row");
  } else {
    CB_M8N8K4("row", "col");
  }
#undef CB_M8N8K4
}
#endif

#if CB_ARCH >= 80
CB_DEVICE void cb_mma_m16n8k16_f16(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
CB_DEVICE void cb_mma_m16n8k16_bf16(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Of what cb_tf32 gives.
CB_DEVICE void cb_mma_m16n8k8_tf32(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Round a float's bits to tf32, 10 bits after the point: to nearest, ties away from zero.  Of a NaN the low 13 bits are
// cut off, which makes one that has no others an infinity.
CB_DEVICE u32 cb_tf32(u32 bits) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}
#endif

#else

#include "cpusim_mma.h"

#endif

// --- atoms ---

#if CB_ARCH >= 75
// What atoms of m16n8 instructions have in common: two of them side by side.
struct AtomOfM16N8 {
  static constexpr bool READS_MATRICES = true;  // by cb_load_matrices
  CB_DEVICE static int row(int lane, int i) { return lane / 4 + (i & 2) * 4; }
  CB_DEVICE static int column(int lane, int i) { return (i & 4) * 2 + lane % 4 * 2 + (i & 1); }
};
#endif

#if CB_ARCH >= 80
template <class T>
struct Atom;

template <>
struct Atom<half_t> : AtomOfM16N8 {
  static constexpr int K = 16;
  CB_DEVICE static void multiply(float (&sum)[8], const u32 (&a)[4], const u32 (&b)[4]) {
    cb_mma_m16n8k16_f16(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
    cb_mma_m16n8k16_f16(sum + 4, a[0], a[1], a[2], a[3], b[2], b[3]);
  }
};

template <>
struct Atom<bfloat16_t> : AtomOfM16N8 {
  static constexpr int K = 16;
  CB_DEVICE static void multiply(float (&sum)[8], const u32 (&a)[4], const u32 (&b)[4]) {
    cb_mma_m16n8k16_bf16(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
    cb_mma_m16n8k16_bf16(sum + 4, a[0], a[1], a[2], a[3], b[2], b[3]);
  }
};

// float32 in memory, tf32 in registers.
template <>
struct Atom<float> : AtomOfM16N8 {
  static constexpr int K = 8;
  CB_DEVICE static void multiply(float (&sum)[8], const u32 (&a)[4], const u32 (&b)[4]) {
    cb_mma_m16n8k8_tf32(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
    cb_mma_m16n8k8_tf32(sum + 4, a[0], a[1], a[2], a[3], b[2], b[3]);
  }
};
#elif CB_ARCH >= 75
template <class T>
struct Atom : AtomOfM16N8 {
  static_assert(sizeof(T) == sizeof(half_t), "Turing multiplies float16");
  static constexpr int K = 16;
  CB_DEVICE static void multiply(float (&sum)[8], const u32 (&a)[4], const u32 (&b)[4]) {
    cb_mma_m16n8k8_f16(sum, a[0], a[1], b[0]);
    cb_mma_m16n8k8_f16(sum + 4, a[0], a[1], b[2]);
    cb_mma_m16n8k8_f16(sum, a[2], a[3], b[1]);
    cb_mma_m16n8k8_f16(sum + 4, a[2], a[3], b[3]);
  }
};
#else
// Two m8n8k4, each four products by as many groups of 8 lanes: q = lane / 4 % 4 with its upper half, lanes + 16.  Bit 0
// of q is bit 2 of the row, bit 1 of q bit 2 of the column, the upper half bit 3 of either.  Registers 0 and 1 are
// four neighbours at the first 4 of K, 2 and 3 at the last.
template <class T>
struct Atom {
  static_assert(sizeof(T) == sizeof(half_t), "Volta multiplies float16");
  static constexpr int K = 8;
  static constexpr bool READS_MATRICES = false;
  CB_DEVICE static int row(int lane, int i) { return (lane & 16) / 2 + (lane & 4) + (lane & 1) + (i & 2); }
  CB_DEVICE static int column(int lane, int i) { return (i & 4) * 2 + (lane & 8) / 2 + (lane & 2) + (i & 1); }
  // Where the lane's part of A (IS_ROW) or B begins: the four that its group reads.
  template <bool IS_ROW>
  CB_DEVICE static int first(int lane) { return (lane & 16) / 2 + (IS_ROW ? lane & 4 : (lane & 8) / 2); }
  template <bool A_COLUMNS, bool B_ROWS>
  CB_DEVICE static void multiply(float (&sum)[8], const u32 (&a)[4], const u32 (&b)[4]) {
    cb_mma_m8n8k4_f16<A_COLUMNS, B_ROWS>(sum, a[0], a[1], b[0], b[1]);
    cb_mma_m8n8k4_f16<A_COLUMNS, B_ROWS>(sum, a[2], a[3], b[2], b[3]);
  }
};
#endif
