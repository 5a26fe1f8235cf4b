// SPDX-License-Identifier: MIT
//
// The CPU twin of every name in the GPU branch of common/device_mma.cuh, which includes this file.
//
// An operation of the warp is a rendezvous: each lane brings its registers, the last to come computes for all.  Rows of
// shared memory are read by the lane that names them, so that a sanitizer sees who reads what.  Where an element lies
// is written here as the PTX ISA has it, element by element; sums are float32, in the order of K.
#pragma once

#include "runtime.h"

#if defined(__SANITIZE_THREAD__)  // what lanes bring was copied by the runtime: no access of the kernel's
#define CPUSIM_WARP_WORK __attribute__((no_sanitize("thread")))
#else
#define CPUSIM_WARP_WORK
#endif

CPUSIM_WARP_WORK inline float cpusim_f16(u16 bits) {
  _Float16 value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return (float)value;
}
CPUSIM_WARP_WORK inline float cpusim_f32(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
CPUSIM_WARP_WORK inline u32 cpusim_bits(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// What 16 bits mean to an instruction.
struct CpusimF16 {
  CPUSIM_WARP_WORK static float value(u16 bits) { return cpusim_f16(bits); }
};
struct CpusimBf16 {
  CPUSIM_WARP_WORK static float value(u16 bits) { return cpusim_f32((u32)bits << 16); }
};

// --- ldmatrix ---

template <bool TRANSPOSED>
CPUSIM_WARP_WORK void cpusim_deal_matrices(const CpusimWords* rows, CpusimWords* out) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      if constexpr (TRANSPOSED) {
        const int column = lane / 4, row = lane % 4 * 2;
        u32 pair = 0;
        for (int i = 0; i < 2; ++i) {
          const u32 word = rows[8 * matrix + row + i].word[column / 2];
          pair |= (u32)(u16)(word >> (16 * (column % 2))) << (16 * i);
        }
        out[lane].word[matrix] = pair;
      } else {
        out[lane].word[matrix] = rows[8 * matrix + lane / 4].word[lane % 4];
      }
    }
  }
}

CB_DEVICE void cpusim_load_matrices(const char* place, CpusimWork work, u32 (&value)[4], const void* row,
                                    const char* file, int line) {
  cpusim_check_aligned(row, 16, "a matrix's row at a misaligned place", file, line);
  if (!cpusim_in_shared(row, 16)) cpusim_fail(file, line, "a matrix's row outside of shared memory");
  CpusimWords words;
  for (int i = 0; i < 4; ++i) words.word[i] = static_cast<const u32*>(row)[i];
  cpusim_collective(&words, work, place);
  for (int i = 0; i < 4; ++i) value[i] = words.word[i];
}

#if CB_ARCH >= 75
#define cb_load_matrices(value, row) \
  cpusim_load_matrices(CPUSIM_PLACE, cpusim_deal_matrices<false>, value, row, __FILE__, __LINE__)
#define cb_load_matrices_transposed(value, row) \
  cpusim_load_matrices(CPUSIM_PLACE, cpusim_deal_matrices<true>, value, row, __FILE__, __LINE__)
#endif

// --- mma: words are A, then B, then the sums; the place is told by the instruction's name, for atoms call them ---

// sum[16][8] += a[16][K] * b[K][8] where the sums of a lane are those of m16n8.
template <int K>
CPUSIM_WARP_WORK void cpusim_multiply_m16n8(const float (&a)[16][K], const float (&b)[K][8], const CpusimWords* in,
                                            int first_sum, CpusimWords* out) {
  float sum[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = cpusim_f32(in[lane].word[first_sum + i]);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) out[lane].word[i] = cpusim_bits(sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  }
}

// m16n8k8 and m16n8k16 of 16 bits: K / 4 registers of A, K / 8 of B.
template <class T, int K>
CPUSIM_WARP_WORK void cpusim_mma_16_bits(const CpusimWords* in, CpusimWords* out) {
  constexpr int A = K / 4, B = K / 8;
  float a[16][K], b[K][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, within = lane % 4;
    for (int i = 0; i < 2 * A; ++i) {  // a_i: row group, or group + 8 for i in 2, 3, 6, 7; 8 further along K from 4 on
      const u16 bits = (u16)(in[lane].word[i / 2] >> (16 * (i % 2)));
      a[group + i / 2 % 2 * 8][within * 2 + i % 2 + i / 4 * 8] = T::value(bits);
    }
    for (int i = 0; i < 2 * B; ++i) {  // b_i: column group
      const u16 bits = (u16)(in[lane].word[A + i / 2] >> (16 * (i % 2)));
      b[within * 2 + i % 2 + i / 2 * 8][group] = T::value(bits);
    }
  }
  cpusim_multiply_m16n8(a, b, in, A + B, out);
}

// m16n8k8 of tf32: what lies below a number's 10 bits after the point is not seen.
CPUSIM_WARP_WORK inline void cpusim_mma_tf32(const CpusimWords* in, CpusimWords* out) {
  constexpr u32 SEEN = ~0x1fffu;
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, within = lane % 4;
    for (int i = 0; i < 4; ++i) a[group + i % 2 * 8][within + i / 2 * 4] = cpusim_f32(in[lane].word[i] & SEEN);
    for (int i = 0; i < 2; ++i) b[within + i * 4][group] = cpusim_f32(in[lane].word[4 + i] & SEEN);
  }
  cpusim_multiply_m16n8(a, b, in, 6, out);
}

// m8n8k4: four products, each of lanes 4 q to 4 q + 3 and those 16 above.
template <bool A_COLUMNS, bool B_ROWS>
CPUSIM_WARP_WORK void cpusim_mma_m8n8k4(const CpusimWords* in, CpusimWords* out) {
  for (int q = 0; q < 4; ++q) {
    float a[8][4], b[8][4];
    for (int half = 0; half < 2; ++half) {
      for (int within = 0; within < 4; ++within) {
        const u32* word = in[16 * half + 4 * q + within].word;
        for (int i = 0; i < 4; ++i) {
          const float left = cpusim_f16((u16)(word[i / 2] >> (16 * (i % 2))));
          const float right = cpusim_f16((u16)(word[2 + i / 2] >> (16 * (i % 2))));
          (A_COLUMNS ? a[i + 4 * half][within] : a[within + 4 * half][i]) = left;
          (B_ROWS ? b[i + 4 * half][within] : b[within + 4 * half][i]) = right;
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      for (int within = 0; within < 4; ++within) {
        const int lane = 16 * half + 4 * q + within;
        for (int i = 0; i < 8; ++i) {
          const int row = (lane & 1) + (i & 2) + 4 * half, column = (i & 4) + (lane & 2) + (i & 1);
          float sum = cpusim_f32(in[lane].word[4 + i]);
          for (int k = 0; k < 4; ++k) sum += a[row][k] * b[column][k];
          out[lane].word[i] = cpusim_bits(sum);
        }
      }
    }
  }
}

template <int SUMS, int REGISTERS>
CB_DEVICE void cpusim_mma(CpusimWork work, float* sum, const u32 (&registers)[REGISTERS], const char* place) {
  CpusimWords words;
  for (int i = 0; i < REGISTERS; ++i) words.word[i] = registers[i];
  for (int i = 0; i < SUMS; ++i) memcpy(&words.word[REGISTERS + i], &sum[i], sizeof(u32));
  cpusim_collective(&words, work, place);
  for (int i = 0; i < SUMS; ++i) memcpy(&sum[i], &words.word[i], sizeof(u32));
}

#if CB_ARCH >= 75
CB_DEVICE void cb_mma_m16n8k8_f16(float* sum, u32 a0, u32 a1, u32 b0) {
  cpusim_mma<4>(cpusim_mma_16_bits<CpusimF16, 8>, sum, {a0, a1, b0}, "cb_mma_m16n8k8_f16");
}
#else
template <bool A_COLUMNS, bool B_ROWS>
CB_DEVICE void cb_mma_m8n8k4_f16(float* sum, u32 a0, u32 a1, u32 b0, u32 b1) {
  cpusim_mma<8>(cpusim_mma_m8n8k4<A_COLUMNS, B_ROWS>, sum, {a0, a1, b0, b1}, "cb_mma_m8n8k4_f16");
}
#endif

#if CB_ARCH >= 80
CB_DEVICE void cb_mma_m16n8k16_f16(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpusim_mma<4>(cpusim_mma_16_bits<CpusimF16, 16>, sum, {a0, a1, a2, a3, b0, b1}, "cb_mma_m16n8k16_f16");
}
CB_DEVICE void cb_mma_m16n8k16_bf16(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpusim_mma<4>(cpusim_mma_16_bits<CpusimBf16, 16>, sum, {a0, a1, a2, a3, b0, b1}, "cb_mma_m16n8k16_bf16");
}
CB_DEVICE void cb_mma_m16n8k8_tf32(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpusim_mma<4>(cpusim_mma_tf32, sum, {a0, a1, a2, a3, b0, b1}, "cb_mma_m16n8k8_tf32");
}
// To nearest, ties away from zero; infinities stay, of a NaN the low bits are cut off, as an H200 does it: one that
// has no others becomes an infinity.
CB_DEVICE u32 cb_tf32(u32 bits) {
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits & ~0x1fffu;
  return (bits + 0x1000u) & ~0x1fffu;
}
#endif
