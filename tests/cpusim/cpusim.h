// SPDX-License-Identifier: MIT
//
// The CPU twin of every name in the GPU branch of common/device.cuh, which includes this file.
//
// Barriers and warp collectives are macros, for the place in the source that their errors name; functions learn
// their caller's place by default arguments.  All that touches a kernel's memory is here, in the unit the sanitizers
// instrument, and none of it in the runtime.
#pragma once

#include "runtime.h"

#define CB_DEVICE inline __attribute__((always_inline))
#define CB_KERNEL(threads, min_blocks)                                                                        \
  static_assert((threads) % 32 == 0 && (threads) >= 32 && (threads) <= 1024 && (min_blocks) >= 1, "whole warps"); \
  extern "C" __attribute__((used)) void
#define CB_SHARED(type, name, count) static __attribute__((section("cbshared"), aligned(16))) type name[count]
#define CB_DYNAMIC_SHARED(name) unsigned char* const name = cpusim_dynamic_shared()
// Unrolled or not, the numbers are the same; g++ vectorises the loops better when it finds them as they are.
#define CB_UNROLL
#define CB_NO_UNROLL

#define CPUSIM_TEXT_(x) #x
#define CPUSIM_TEXT(x) CPUSIM_TEXT_(x)
#define CPUSIM_PLACE __FILE__ ":" CPUSIM_TEXT(__LINE__)

#define cb_sync() cpusim_sync(CPUSIM_PLACE)
#define cb_sync_warp() cpusim_sync_warp(CPUSIM_PLACE)
#define cb_shuffle_xor(value, bits) cpusim_shuffle((value), cpusim_lane_xor(bits), CPUSIM_PLACE)
#define cb_shuffle_down(value, delta) cpusim_shuffle((value), cpusim_lane_down(delta), CPUSIM_PLACE)

CB_DEVICE int cb_thread() { return cpusim_thread(); }
CB_DEVICE int cb_num_threads() { return cpusim_num_threads(); }
CB_DEVICE int cb_lane() { return cpusim_thread() & 31; }
CB_DEVICE int cb_warp() { return cpusim_thread() >> 5; }
CB_DEVICE u32 cb_block_x() { return cpusim_block(0); }
CB_DEVICE u32 cb_block_y() { return cpusim_block(1); }
CB_DEVICE u32 cb_block_z() { return cpusim_block(2); }
CB_DEVICE u32 cb_num_blocks_x() { return cpusim_num_blocks(0); }
CB_DEVICE u32 cb_num_blocks_y() { return cpusim_num_blocks(1); }

// Launches follow each other here.
CB_DEVICE void cb_dependent_launch() {}

// Lanes outside the warp are given by shfl.sync's wrapping of its operand to five bits; nobody means that.
CB_DEVICE int cpusim_lane_xor(int bits, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (bits < 0 || bits > 31) cpusim_fail(file, line, "cb_shuffle_xor with bits outside 0..31");
  return cb_lane() ^ bits;
}
CB_DEVICE int cpusim_lane_down(int delta, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (delta < 0 || delta > 31) cpusim_fail(file, line, "cb_shuffle_down with a distance outside 0..31");
  return cb_lane() + delta > 31 ? cb_lane() : cb_lane() + delta;
}
template <class T>
CB_DEVICE T cpusim_shuffle(T value, int source, const char* place) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = cpusim_exchange(bits, source, place);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// CUDA has it built in, <cmath> has not.
CB_DEVICE float rsqrtf(float x) { return 1.0f / sqrtf(x); }

CB_DEVICE u32 cb_mul_high(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }

CB_DEVICE float to_float(float x) { return x; }
CB_DEVICE float to_float(half_t x) {
  _Float16 y;
  memcpy(&y, &x, sizeof(y));
  return (float)y;
}
CB_DEVICE float to_float(bfloat16_t x) {
  const u32 bits = (u32)x.bits << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}

template <class T>
CB_DEVICE T from_float(float x);
template <>
CB_DEVICE float from_float<float>(float x) { return x; }
// cvt.rn.f16.f32: to nearest even; every NaN becomes the canonical one.
template <>
CB_DEVICE half_t from_float<half_t>(float x) {
  half_t y{0x7fff};
  if (x != x) return y;
  const _Float16 rounded = (_Float16)x;
  memcpy(&y, &rounded, sizeof(y));
  return y;
}
template <>
CB_DEVICE bfloat16_t from_float<bfloat16_t>(float x) {
  u32 bits;
  memcpy(&bits, &x, sizeof(bits));
  if (x != x) return bfloat16_t{0x7fff};
  return bfloat16_t{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

CB_DEVICE void cpusim_check_aligned(const void* pointer, size_t bytes, const char* what, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) cpusim_fail(file, line, what);
}

template <class T, int N>
CB_DEVICE Vec<T, N> cb_read(const T* pointer, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(Vec<T, N>) <= 16, "an access is of at most 16 bytes");
  cpusim_check_aligned(pointer, sizeof(Vec<T, N>), "misaligned vector load", file, line);
  return *reinterpret_cast<const Vec<T, N>*>(pointer);
}
template <class T, int N>
CB_DEVICE void cb_write(T* pointer, const Vec<T, N>& value, const char* file = __builtin_FILE(),
                        int line = __builtin_LINE()) {
  static_assert(sizeof(Vec<T, N>) <= 16, "an access is of at most 16 bytes");
  cpusim_check_aligned(pointer, sizeof(Vec<T, N>), "misaligned vector store", file, line);
#if CB_ARCH == 90
  cpusim_note_write(pointer, sizeof(Vec<T, N>));
#endif
  *reinterpret_cast<Vec<T, N>*>(pointer) = value;
}
// The read-only path: of global memory alone.
template <class T, int N>
CB_DEVICE Vec<T, N> cb_load(const T* pointer, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(Vec<T, N>) >= 2, "a load is of 2, 4, 8 or 16 bytes");
  if (cpusim_in_shared(pointer, 1)) cpusim_fail(file, line, "cb_load of shared memory");
  return cb_read<T, N>(pointer, file, line);
}

#if CB_ARCH >= 80
CB_DEVICE void cpusim_run_copy(const CpusimCopy& copy) {
  unsigned char* shared = static_cast<unsigned char*>(copy.shared);
  const unsigned char* global = static_cast<const unsigned char*>(copy.global);
  if (copy.valid == copy.bytes) {  // words, so that a sanitizer sees few accesses
    for (int i = 0; i < copy.bytes; i += 4) *(u32*)(shared + i) = *(const u32*)(global + i);
  } else {
    for (int i = 0; i < copy.bytes; ++i) shared[i] = i < copy.valid ? global[i] : (unsigned char)0;
  }
}
template <int BYTES>
CB_DEVICE void cb_copy_async(void* shared, const void* global, int valid, const char* file = __builtin_FILE(),
                             int line = __builtin_LINE()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  cpusim_check_aligned(shared, BYTES, "cb_copy_async to a misaligned place", file, line);
  cpusim_check_aligned(global, BYTES, "cb_copy_async from a misaligned place", file, line);
  if (!cpusim_in_shared(shared, BYTES)) cpusim_fail(file, line, "cb_copy_async to what is not shared memory");
  if (valid < 0 || valid > BYTES) cpusim_fail(file, line, "cb_copy_async with valid outside 0..BYTES");
  if (global == nullptr) cpusim_fail(file, line, "cb_copy_async from a null pointer");
  CpusimCopy copy{shared, global, file, line, BYTES, valid, 0};
  if (cpusim_copies_early()) cpusim_run_copy(copy), copy.bytes = 0;
  cpusim_push_copy(&copy);
}
CB_DEVICE void cb_copy_commit() { cpusim_commit_copies(); }
template <int PENDING>
CB_DEVICE void cb_copy_wait() {
  static_assert(PENDING >= 0, "a number of groups");
  CpusimCopy copy;
  while (cpusim_pop_copy(PENDING, &copy)) cpusim_run_copy(copy);
}
#endif
