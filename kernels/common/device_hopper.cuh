// SPDX-License-Identifier: MIT
//
// What Hopper (sm_90a) adds to common/device.cuh: barriers in shared memory that count bytes, tensor copies (TMA),
// products of a warpgroup (wgmma).  Inline PTX on the GPU, a twin of the same name in tests/cpusim on the CPU.
//
//   barrier    a u64 in shared memory with a phase bit.  A phase ends when all expected arrivals and all expected bytes
//              have come; waiting for parity p waits for the end of a phase whose bit is p, so that on a new barrier
//              waiting for parity 1 returns at once.
//   tensor map 128 bytes that describe an array to the copy engine (cubatch/kernels/tensor_map.py).  A copy is issued
//              by one thread; its bytes count on a barrier, places outside of the array arrive as zeros and count as
//              well.
//   wgmma      4 warps multiply two tiles in shared memory, by 64-bit descriptors, into registers.  It runs behind
//              the program's back: what it reads may not be overwritten, nor its sums be touched, before it was waited
//              for.
//   cluster    two blocks that run side by side and reach each other's shared memory.  None may return while another may
//              still arrive at its barriers or copy to it.
#pragma once

#include "common/device.cuh"

static_assert(CB_ARCH == 90, "wgmma and setmaxnreg are Hopper's alone: compile for sm_90a");

constexpr int WARPGROUP = 128;

template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<half_t> = true;

// What a tile of a product's operands looks like in shared memory: rows of 128 bytes, 16-byte pieces of row r swapped
// by r % 8 (the 128-byte swizzle).  Rows are 8 to an atom of 1024 bytes, at which tiles are aligned.
constexpr u32 SWIZZLE_ROW = 128, SWIZZLE_ATOM = 1024;

#if defined(__CUDACC__)

struct alignas(64) TensorMap {
  u64 words[16];
};

#define CB_GRID_CONSTANT const __grid_constant__
#define CB_TENSOR_MAP CB_GRID_CONSTANT TensorMap
#define CB_CLUSTER_KERNEL(threads, cluster)                                                                           \
  extern "C" __global__ void __launch_bounds__(threads, 1) __cluster_dims__(cluster, 1, 1)

CB_DEVICE u32 cb_shared_address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// --- barriers ---

CB_DEVICE void cb_barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cb_shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes new barriers known to the copy engine and to the cluster; a barrier of the block (cluster) has to follow.
CB_DEVICE void cb_barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
CB_DEVICE void cb_barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cb_shared_address(barrier)) : "memory");
}
// Arrive at the same barrier of another block of the cluster, or of this one.  Orders nothing between blocks: it shows
// that wgmma, which was waited for, has read, and what a thread wrote for another block it would have to release to the
// cluster, which is a fence of all memory.  CUTLASS's ClusterBarrier arrives so too (include/cutlass/arch/barrier.h).
CB_DEVICE void cb_barrier_arrive_remote(u64* barrier, u32 rank) {
  asm volatile(
      "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(cb_shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Arrive, and expect `bytes` more bytes before this phase ends.
CB_DEVICE void cb_barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cb_shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Wait for the end of a phase of the given parity.  A wait that never ends becomes an error after about ten seconds,
// where a GPU that hangs would take its machine along: a try lasts as long as the GPU likes, so that no number of them is
// a time, but the upper half of %globaltimer's nanoseconds goes on every 4.3 seconds.  It also goes on while the context
// is switched out: if a debugger, a VM or MPS suspends it for longer in the middle of a wait, the kernel fails.
CB_DEVICE void cb_barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n\t.reg .pred done, given_up;\n\t.reg .u32 begin, now;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@done bra ended;\n\t"
      "mov.u32 begin, %%globaltimer_hi;\n\t"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@done bra ended;\n\t"
      "mov.u32 now, %%globaltimer_hi;\n\tsub.u32 now, now, begin;\n\tsetp.ge.u32 given_up, now, 3;\n\t"
      "@given_up trap;\n\tbra again;\n\tended:\n\t}" ::"r"(cb_shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Between writing shared memory and a copy engine's or wgmma's reading of it; and between reading it and a copy that
// overwrites it.
CB_DEVICE void cb_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- clusters ---

CB_DEVICE u32 cb_cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
CB_DEVICE void cb_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- tensor copies; with BLOCKS > 1 a load goes to the same place in every block of the cluster ---
//
// c0 elements must be a multiple of 16 bytes: a copy that starts elsewhere is an illegal instruction.

CB_DEVICE void cb_tma_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

#define CB_TMA_LOAD "cp.async.bulk.tensor."
#define CB_TMA_BYTES ".mbarrier::complete_tx::bytes"

template <int BLOCKS>
CB_DEVICE void cb_tma_load_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1) {
  const u32 to = cb_shared_address(shared), counted = cb_shared_address(barrier);
  if constexpr (BLOCKS == 1) {
    asm volatile(CB_TMA_LOAD "2d.shared::cluster.global.tile" CB_TMA_BYTES " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(counted), "r"(c0), "r"(c1)
                 : "memory");
  } else {
    asm volatile(CB_TMA_LOAD "2d.shared::cluster.global.tile" CB_TMA_BYTES
                             ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(counted), "r"(c0), "r"(c1), "h"((u16)((1 << BLOCKS) - 1))
                 : "memory");
  }
}
template <int BLOCKS>
CB_DEVICE void cb_tma_load_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2) {
  const u32 to = cb_shared_address(shared), counted = cb_shared_address(barrier);
  if constexpr (BLOCKS == 1) {
    asm volatile(CB_TMA_LOAD "3d.shared::cluster.global.tile" CB_TMA_BYTES " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(counted), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
  } else {
    asm volatile(CB_TMA_LOAD "3d.shared::cluster.global.tile" CB_TMA_BYTES
                             ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(counted), "r"(c0), "r"(c1), "r"(c2), "h"((u16)((1 << BLOCKS) - 1))
                 : "memory");
  }
}
// As many pixels as the map has, from (w, h, n) on within the map's corners, each moved by the offsets of a tap.
template <int BLOCKS>
CB_DEVICE void cb_tma_load_im2col(void* shared, const TensorMap* map, u64* barrier, int c, int w, int h, int n,
                                  u16 offset_w, u16 offset_h) {
  const u32 to = cb_shared_address(shared), counted = cb_shared_address(barrier);
  if constexpr (BLOCKS == 1) {
    asm volatile(CB_TMA_LOAD "4d.shared::cluster.global.im2col" CB_TMA_BYTES
                             " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
                 "l"(map), "r"(counted), "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h)
                 : "memory");
  } else {
    asm volatile(CB_TMA_LOAD "4d.shared::cluster.global.im2col" CB_TMA_BYTES
                             ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
                 "l"(map), "r"(counted), "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h),
                 "h"((u16)((1 << BLOCKS) - 1))
                 : "memory");
  }
}
// From shared memory to a matrix; what lies outside of it is not written.  c0 and c1 must not be negative, as they
// may be for loads: to an H200 such a store is an illegal instruction.
CB_DEVICE void cb_tma_store_2d(const TensorMap* map, const void* shared, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(cb_shared_address(shared)), "r"(c0), "r"(c1)
               : "memory");
}
// Close the group of this thread's stores since the last commit.
CB_DEVICE void cb_tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but PENDING of this thread's groups of stores have read their shared memory.
template <int PENDING>
CB_DEVICE void cb_tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Store four 8 x 8 matrices of 16 bits, as cb_load_matrices of device_mma.cuh loads them: lanes 8 i to 8 i + 7 give the
// places of matrix i's rows, 16 bytes each; register i of a lane is row lane / 4, 32 bits number lane % 4.
CB_DEVICE void cb_store_matrices(void* row, const u32 (&value)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(cb_shared_address(row)),
               "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}
// The same of the transposed matrices: register i of a lane is column lane / 4, rows 2 (lane % 4) and the next.
CB_DEVICE void cb_store_matrices_transposed(void* row, const u32 (&value)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(cb_shared_address(row)),
               "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

// --- registers: a warpgroup gives back what it does not need, another takes it ---

template <int COUNT>
CB_DEVICE void cb_registers_release() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg counts by 8, from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
CB_DEVICE void cb_registers_request() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg counts by 8, from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- wgmma ---

// Describe a tile in shared memory, in rows of 128 swizzled bytes: bits 0-13 its address, 16-29 the leading and 32-45
// the stride offset, all in units of 16 bytes; 62-63 which swizzle.  Eight rows are `stride` bytes from the next eight;
// `leading` bytes lie between boxes of 128 bytes along m or n, where that is the contiguous axis.
CB_DEVICE u64 cb_matrix_descriptor(const void* shared, u32 leading, u32 stride) {
  const u64 address = cb_shared_address(shared);
  return (address & 0x3ffff) >> 4 | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)1 << 62;
}
// Before the first product, and where this thread wrote sums: orders registers and the products that follow.
CB_DEVICE void cb_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Close the group of products since the last commit.
CB_DEVICE void cb_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most PENDING groups are under way.
template <int PENDING>
CB_DEVICE void cb_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keep the compiler from moving sums across: put it where products begin, and where they have been waited for.
template <int COUNT>
CB_DEVICE void cb_wgmma_hold(float (&d)[COUNT]) {
  CB_UNROLL
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The registers of a warpgroup's sums, as the instruction lists them.
#define CB_REGISTERS_0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                            \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CB_REGISTERS_32 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CB_REGISTERS_64 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                  \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CB_REGISTERS_96 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                      \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CB_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CB_SUMS_16(d, i) CB_SUMS_4(d, i), CB_SUMS_4(d, i + 4), CB_SUMS_4(d, i + 8), CB_SUMS_4(d, i + 12)
#define CB_SUMS_32(d, i) CB_SUMS_16(d, i), CB_SUMS_16(d, i + 16)
#define CB_SUMS_64(d, i) CB_SUMS_32(d, i), CB_SUMS_32(d, i + 32)
#define CB_SUMS_96(d, i) CB_SUMS_64(d, i), CB_SUMS_32(d, i + 64)
#define CB_SUMS_128(d, i) CB_SUMS_64(d, i), CB_SUMS_64(d, i + 64)
#define CB_REGISTERS_64_FROM_0 CB_REGISTERS_0 ", " CB_REGISTERS_32
#define CB_REGISTERS_96_FROM_0 CB_REGISTERS_64_FROM_0 ", " CB_REGISTERS_64
#define CB_REGISTERS_128_FROM_0 CB_REGISTERS_96_FROM_0 ", " CB_REGISTERS_96

// COUNT sums of a thread, and the number of the operand that follows them.
#define CB_WGMMA(SHAPE, TYPES, LIST, COUNT, A, B, C, D)                                                               \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE TYPES " {" LIST "}, %" A ", %" B ", 1, 1, 1, %" C ", %" D ";"    \
               : CB_SUMS_##COUNT(d, 0)                                                                                \
               : "l"(a), "l"(b), "n"(A_TURNED), "n"(B_TURNED))
#define CB_WGMMA_TF32(SHAPE, LIST, COUNT, A, B)                                                                       \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32.tf32.tf32 {" LIST "}, %" A ", %" B ", 1, 1, 1;"            \
               : CB_SUMS_##COUNT(d, 0)                                                                                \
               : "l"(a), "l"(b))

// d += a * b: 64 x N sums over 32 bytes of gemm_k (16 elements; 8 of tf32).  Thread t of the warpgroup holds rows
// t / 32 * 16 + t % 32 / 4 + {0, 8}, columns 8 * i + t % 4 * 2 + {0, 1}: d[4 * i + 2 * row + column].  A_TURNED,
// B_TURNED: the contiguous axis of the tile is m or n, not k; 16-bit elements only.
template <class T, int N, bool A_TURNED, bool B_TURNED>
CB_DEVICE void cb_wgmma(float (&d)[N / 2], u64 a, u64 b) {
  static_assert(N == 64 || N == 128 || (N == 192 && sizeof(T) == 2) || N == 256, "the shapes that tiles use");
  static_assert(sizeof(T) == 2 || (!A_TURNED && !B_TURNED), "tf32 is multiplied along its contiguous axis");
  if constexpr (sizeof(T) == 4) {
    if constexpr (N == 64) {
      CB_WGMMA_TF32("m64n64k8", CB_REGISTERS_0, 32, "32", "33");
    } else if constexpr (N == 128) {
      CB_WGMMA_TF32("m64n128k8", CB_REGISTERS_64_FROM_0, 64, "64", "65");
    } else {
      CB_WGMMA_TF32("m64n256k8", CB_REGISTERS_128_FROM_0, 128, "128", "129");
    }
  } else if constexpr (is_half<T>) {
    if constexpr (N == 64) {
      CB_WGMMA("m64n64k16", ".f32.f16.f16", CB_REGISTERS_0, 32, "32", "33", "34", "35");
    } else if constexpr (N == 128) {
      CB_WGMMA("m64n128k16", ".f32.f16.f16", CB_REGISTERS_64_FROM_0, 64, "64", "65", "66", "67");
    } else if constexpr (N == 192) {
      CB_WGMMA("m64n192k16", ".f32.f16.f16", CB_REGISTERS_96_FROM_0, 96, "96", "97", "98", "99");
    } else {
      CB_WGMMA("m64n256k16", ".f32.f16.f16", CB_REGISTERS_128_FROM_0, 128, "128", "129", "130", "131");
    }
  } else {
    if constexpr (N == 64) {
      CB_WGMMA("m64n64k16", ".f32.bf16.bf16", CB_REGISTERS_0, 32, "32", "33", "34", "35");
    } else if constexpr (N == 128) {
      CB_WGMMA("m64n128k16", ".f32.bf16.bf16", CB_REGISTERS_64_FROM_0, 64, "64", "65", "66", "67");
    } else if constexpr (N == 192) {
      CB_WGMMA("m64n192k16", ".f32.bf16.bf16", CB_REGISTERS_96_FROM_0, 96, "96", "97", "98", "99");
    } else {
      CB_WGMMA("m64n256k16", ".f32.bf16.bf16", CB_REGISTERS_128_FROM_0, 128, "128", "129", "130", "131");
    }
  }
}

// 2^x and 1 / x within 2 units in the last place, in an instruction each: denormal numbers are zeros.
CB_DEVICE float cb_short_exp2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
CB_DEVICE float cb_short_reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

#else

// The CPU: barriers that count in shared memory, deferred copies and products.
#include "cpusim_hopper.h"

#endif
