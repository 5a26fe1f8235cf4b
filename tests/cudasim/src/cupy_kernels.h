// SPDX-License-Identifier: MIT
//
// CUDA's words for the kernels that CuPy writes, compiled by g++: see nvrtc.cpp and kernels.cpp.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include <vector_types.h>

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static  // blocks run one after another
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __CUDA_ARCH__ 900

extern "C" uint32_t* cudasim_cell();
extern "C" void cudasim_syncthreads();

struct CudasimAxis {
  int at;
  operator unsigned() const { return cudasim_cell()[at]; }
};
struct CudasimShape {
  CudasimAxis x, y, z;
};
static const CudasimShape threadIdx{{0}, {1}, {2}}, blockIdx{{3}, {4}, {5}}, blockDim{{6}, {7}, {8}}, gridDim{{9}, {10}, {11}};

static inline void __syncthreads() { cudasim_syncthreads(); }
static inline void __syncwarp(unsigned = 0) { cudasim_syncthreads(); }

// Calls a kernel with pointers to its arguments, and tells their sizes.
template <class K>
struct CudasimCall;
template <class... A>
struct CudasimCall<void (*)(A...)> {
  static constexpr std::array<uint32_t, sizeof...(A) + 1> SIZES = {(uint32_t)sizeof(std::remove_reference_t<A>)..., 0u};
  template <size_t... I>
  static void go(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<std::remove_reference_t<A>>*>(a[I])...);
  }
  static void call(void (*kernel)(A...), void** a) { go(kernel, a, std::index_sequence_for<A...>()); }
};

template <class To, class From>
static inline To cudasim_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __int_as_float(int x) { return cudasim_bits<float>(x); }
static inline int __float_as_int(float x) { return cudasim_bits<int>(x); }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
template <class T>
static inline T __ldg(const T* p) { return *p; }
#define min cudasim_min
#define max cudasim_max
template <class T, class U>
static inline auto cudasim_min(T a, U b) { return a < b ? a : b; }
template <class T, class U>
static inline auto cudasim_max(T a, U b) { return a < b ? b : a; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
template <class T>
static inline T atomicAdd(T* p, T v) {
  const T old = *p;
  *p = old + v;
  return old;
}
static inline unsigned short __float2half_rn(float x) { return x != x ? 0x7e00 : cudasim_bits<unsigned short>((_Float16)x); }
static inline float __half2float(unsigned short bits) { return (float)cudasim_bits<_Float16>(bits); }
struct half;
struct __half_raw;
template <class H>
static inline unsigned short __half_as_ushort(const H& h) { return cudasim_bits<unsigned short>(h); }
#define __ushort_as_half(v) (__half_raw{(unsigned short)(v)})
