// SPDX-License-Identifier: MIT
//
// The only header with intrinsics: inline PTX on the GPU, a twin of the same name on the CPU.
//
// A kernel includes this and nothing of CUDA.  Compiled by NVRTC, every function below is one or two
// machine instructions; compiled by g++ (tests/cpusim), every CUDA thread is a fiber and the function's
// meaning is spelt out in C++, so that the same kernel file runs, and is checked, where there is no GPU.
//
//   CB_ARCH            compute capability times ten: 52, 61, ... 120; on the CPU given as -DCB_ARCH=80
//   CB_ELEMENT         type of stored elements: float, half_t or bfloat16_t (-DCB_ELEMENT=...); arithmetic is float
//   CB_KERNEL(t, b)    declares a kernel of t threads per block, registers bounded so that b blocks fit on an SM
//   CB_SHARED          an array in shared memory, aligned for 16-byte access
//   cb_sync()          barrier of the block; cb_sync_warp(): of the warp.  All threads must reach it
//   cb_dependent_launch()  what a kernel does before it reads or writes anything of the GPU's memory
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// 16-bit storage: bits only, so that no CUDA header is needed; see to_float and from_float.
struct half_t { u16 bits; };
struct bfloat16_t { u16 bits; };

// N elements that are loaded and stored by one instruction.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

#if defined(__CUDACC__)

#define CB_ARCH (__CUDA_ARCH__ / 10)
#define CB_DEVICE __device__ __forceinline__
#define CB_KERNEL(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
#define CB_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define CB_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define CB_UNROLL _Pragma("unroll")
#define CB_NO_UNROLL _Pragma("unroll 1")

#define cb_sync() __syncthreads()
#define cb_sync_warp() __syncwarp(0xffffffffu)
// Value of the lane whose number differs in the given bits; all 32 lanes take part.
#define cb_shuffle_xor(value, bits) __shfl_xor_sync(0xffffffffu, (value), (bits))
// Value of lane + delta, the lane's own where that is beyond the warp; all 32 lanes take part.
#define cb_shuffle_down(value, delta) __shfl_down_sync(0xffffffffu, (value), (delta))

CB_DEVICE int cb_thread() { return (int)threadIdx.x; }
CB_DEVICE int cb_num_threads() { return (int)blockDim.x; }
CB_DEVICE int cb_lane() { return (int)(threadIdx.x & 31u); }
CB_DEVICE int cb_warp() { return (int)(threadIdx.x >> 5); }
CB_DEVICE u32 cb_block_x() { return blockIdx.x; }
CB_DEVICE u32 cb_block_y() { return blockIdx.y; }
CB_DEVICE u32 cb_block_z() { return blockIdx.z; }
CB_DEVICE u32 cb_num_blocks_x() { return gridDim.x; }
CB_DEVICE u32 cb_num_blocks_y() { return gridDim.y; }

// Programmatic dependent launch, from sm_90 on: blocks of the next launch may come in as soon as this one's have all
// begun, and these wait until the writes of the launch before are visible.  Requested at the launch
// (cubatch/kernels/launch.py); without that both instructions do nothing.  A kernel that did not wait might run before
// its operands are there.
CB_DEVICE void cb_dependent_launch() {
#if CB_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// High 32 bits of the product: division by a constant, see conv_geometry.cuh.
CB_DEVICE u32 cb_mul_high(u32 a, u32 b) { return __umulhi(a, b); }

CB_DEVICE float to_float(float x) { return x; }
CB_DEVICE float to_float(half_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
CB_DEVICE float to_float(bfloat16_t x) { return __uint_as_float((u32)x.bits << 16); }

template <class T>
CB_DEVICE T from_float(float x);
template <>
CB_DEVICE float from_float<float>(float x) { return x; }
template <>
CB_DEVICE half_t from_float<half_t>(float x) {
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
CB_DEVICE bfloat16_t from_float<bfloat16_t>(float x) {
  bfloat16_t y;
#if CB_ARCH >= 80
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else  // round to nearest even by hand; a NaN stays one
  const u32 bits = __float_as_uint(x);
  y.bits = (bits & 0x7fffffffu) > 0x7f800000u ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  return y;
}

// Load through the read-only path (the texture cache on Maxwell and Pascal).  Not for what the kernel writes.
template <class T, int N>
CB_DEVICE Vec<T, N> cb_load(const T* pointer) {
  Vec<T, N> value;
  if constexpr (sizeof(value) == 16) {
    uint4 raw = __ldg(reinterpret_cast<const uint4*>(pointer));
    value = *reinterpret_cast<Vec<T, N>*>(&raw);
  } else if constexpr (sizeof(value) == 8) {
    uint2 raw = __ldg(reinterpret_cast<const uint2*>(pointer));
    value = *reinterpret_cast<Vec<T, N>*>(&raw);
  } else if constexpr (sizeof(value) == 4) {
    u32 raw = __ldg(reinterpret_cast<const u32*>(pointer));
    value = *reinterpret_cast<Vec<T, N>*>(&raw);
  } else {
    static_assert(sizeof(value) == 2, "a load is of 2, 4, 8 or 16 bytes");
    u16 raw = __ldg(reinterpret_cast<const u16*>(pointer));
    value = *reinterpret_cast<Vec<T, N>*>(&raw);
  }
  return value;
}

// Load or store what this kernel may also write, in place, or shared memory.
template <class T, int N>
CB_DEVICE Vec<T, N> cb_read(const T* pointer) { return *reinterpret_cast<const Vec<T, N>*>(pointer); }
template <class T, int N>
CB_DEVICE void cb_write(T* pointer, const Vec<T, N>& value) { *reinterpret_cast<Vec<T, N>*>(pointer) = value; }

#if CB_ARCH >= 80
// Copy BYTES (4, 8 or 16) from global to shared memory behind the program's back; the last BYTES - valid are zeros.
// Nothing is read where valid is 0, but the pointer must be a valid one.  With 16 bytes the L2 fetches the 128 in which
// they lie: a tile's rows are often 64, and the next step along gemm_k needs the rest.
template <int BYTES>
CB_DEVICE void cb_copy_async(void* shared, const void* global, int valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const u32 target = (u32)__cvta_generic_to_shared(shared);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global), "n"(BYTES), "r"(valid)
                 : "memory");
  }
}
// Close the group of this thread's copies since the last commit.
CB_DEVICE void cb_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of this thread's groups are under way; others' copies are seen after cb_sync() only.
template <int PENDING>
CB_DEVICE void cb_copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#endif

#else

// The CPU: fibers, barriers with their place in the source, late and early copies.
#include "cpusim.h"

#endif
