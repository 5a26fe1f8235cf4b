// SPDX-License-Identifier: MIT
//
// Names of common/device_hopper.cuh by themselves, for test_hopper_twins.py.
#include "common/device_hopper.cuh"

// One tile comes as a tensor copy, and goes out as shared memory holds it.
CB_DEVICE void dump(const unsigned char* tile, unsigned char* y, int bytes) {
  for (int i = cb_thread(); i < bytes; i += cb_num_threads()) y[i] = tile[i];
}

// What the copy engine or wgmma is to read.
CB_DEVICE void put(unsigned char* shared, unsigned char value) {
  cb_write<unsigned char, 1>(shared, Vec<unsigned char, 1>{{value}});
}

CB_KERNEL(128, 1) load_2d(CB_TENSOR_MAP map, unsigned char* y, int rows, int c0, int c1) {
  CB_DYNAMIC_SHARED(arena);
  u64* barrier = reinterpret_cast<u64*>(arena + rows * 128);
  if (cb_thread() == 0) {
    cb_barrier_init(barrier, 1);
    cb_barrier_init_fence();
    cb_tma_prefetch(&map);
    cb_barrier_expect(barrier, (u32)rows * 128);
    cb_tma_load_2d<1>(arena, &map, barrier, c0, c1);
  }
  cb_sync();
  cb_barrier_wait(barrier, 0);
  dump(arena, y, rows * 128);
}

CB_KERNEL(128, 1) load_3d(CB_TENSOR_MAP map, unsigned char* y, int rows, int c0, int c1, int c2) {
  CB_DYNAMIC_SHARED(arena);
  u64* barrier = reinterpret_cast<u64*>(arena + rows * 128);
  if (cb_thread() == 0) {
    cb_barrier_init(barrier, 1);
    cb_barrier_init_fence();
    cb_barrier_expect(barrier, (u32)rows * 128);
    cb_tma_load_3d<1>(arena, &map, barrier, c0, c1, c2);
  }
  cb_sync();
  cb_barrier_wait(barrier, 0);
  dump(arena, y, rows * 128);
}

struct Corner {
  int c, w, h, n, offset_w, offset_h;
};

CB_KERNEL(128, 1) load_im2col(CB_TENSOR_MAP map, unsigned char* y, int rows, const Corner at) {
  CB_DYNAMIC_SHARED(arena);
  u64* barrier = reinterpret_cast<u64*>(arena + rows * 128);
  if (cb_thread() == 0) {
    cb_barrier_init(barrier, 1);
    cb_barrier_init_fence();
    cb_barrier_expect(barrier, (u32)rows * 128);
    cb_tma_load_im2col<1>(arena, &map, barrier, at.c, at.w, at.h, at.n, (u16)at.offset_w, (u16)at.offset_h);
  }
  cb_sync();
  cb_barrier_wait(barrier, 0);
  dump(arena, y, rows * 128);
}

CB_KERNEL(128, 1) store_2d(CB_TENSOR_MAP map, const unsigned char* x, int rows, int c0, int c1) {
  CB_DYNAMIC_SHARED(arena);
  for (int i = cb_thread(); i < rows * 128; i += 128) put(arena + i, x[i]);
  cb_proxy_fence();
  cb_sync();
  if (cb_thread() == 0) {
    cb_tma_store_2d(&map, arena, c0, c1);
    cb_tma_store_commit();
    cb_tma_store_wait_read<0>();
  }
}

// Each warp stores 4 matrices: what lane and register hold of them is x[lane][register], rows lie where `rows` says.
template <bool TRANSPOSED>
CB_DEVICE void store_warps(const u32* x, const u32* rows, unsigned char* y, unsigned char* arena) {
  unsigned char* own = arena + cb_warp() * 1024;
  for (int i = cb_lane(); i < 1024; i += 32) own[i] = 0;
  cb_sync_warp();
  u32 words[4];
  CB_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = x[cb_thread() * 4 + i];
  if constexpr (TRANSPOSED) {
    cb_store_matrices_transposed(own + rows[cb_lane()] * 16, words);
  } else {
    cb_store_matrices(own + rows[cb_lane()] * 16, words);
  }
  cb_sync();
  dump(arena, y, 4096);
}

CB_KERNEL(128, 1) store_matrices(const u32* x, const u32* rows, unsigned char* y) {
  CB_DYNAMIC_SHARED(arena);
  store_warps<false>(x, rows, y, arena);
}

CB_KERNEL(128, 1) store_matrices_transposed(const u32* x, const u32* rows, unsigned char* y) {
  CB_DYNAMIC_SHARED(arena);
  store_warps<true>(x, rows, y, arena);
}

// One product of tiles that lie in shared memory as `a` and `b` do in global memory; descriptors are the caller's.
template <class T, int N, bool A_TURNED, bool B_TURNED>
CB_DEVICE void multiply(const unsigned char* a, const unsigned char* b, float* y, const u32* offsets,
                        unsigned char* arena) {
  constexpr int TILE = 32768;
  for (int i = cb_thread(); i < TILE; i += 128) {
    put(arena + i, a[i]);
    put(arena + TILE + i, b[i]);
  }
  cb_proxy_fence();
  cb_sync();
  float sum[N / 2];
  CB_UNROLL
  for (int i = 0; i < N / 2; ++i) sum[i] = 1.0f;
  cb_wgmma_hold(sum);
  cb_wgmma_fence();
  cb_wgmma<T, N, A_TURNED, B_TURNED>(sum, cb_matrix_descriptor(arena + offsets[0], offsets[1], offsets[2]),
                                     cb_matrix_descriptor(arena + TILE + offsets[3], offsets[4], offsets[5]));
  cb_wgmma_commit();
  cb_wgmma_wait<0>();
  cb_wgmma_hold(sum);
  CB_UNROLL
  for (int i = 0; i < N / 2; ++i) y[cb_thread() * (N / 2) + i] = sum[i];
}

#define CB_MULTIPLY(NAME, T, N, A_TURNED, B_TURNED)                                                       \
  CB_KERNEL(128, 1) NAME(const unsigned char* a, const unsigned char* b, float* y, const u32* offsets) { \
    CB_DYNAMIC_SHARED(arena);                                                                             \
    multiply<T, N, A_TURNED, B_TURNED>(a, b, y, offsets, arena);                                          \
  }
CB_MULTIPLY(multiply_f16_nt, half_t, 128, false, false)
CB_MULTIPLY(multiply_f16_nn, half_t, 128, false, true)
CB_MULTIPLY(multiply_f16_tn, half_t, 256, true, true)
CB_MULTIPLY(multiply_f16_tt, half_t, 256, true, false)
CB_MULTIPLY(multiply_bf16_nt, bfloat16_t, 256, false, false)
CB_MULTIPLY(multiply_bf16_nn, bfloat16_t, 192, false, true)
CB_MULTIPLY(multiply_tf32_nt, float, 128, false, false)

// Thread 0 hands numbers to warp 1 through one slot and two barriers, so often that phases turn many times.
CB_KERNEL(64, 1) hand_over(int* y, int count) {
  CB_DYNAMIC_SHARED(arena);
  u64* barriers = reinterpret_cast<u64*>(arena);
  int* slot = reinterpret_cast<int*>(arena + 16);
  if (cb_thread() == 0) {
    cb_barrier_init(barriers, 1);
    cb_barrier_init(barriers + 1, 32);
    cb_barrier_init_fence();
  }
  cb_sync();
  for (int i = 0; i < count; ++i) {
    if (cb_thread() == 0) {
      cb_barrier_wait(barriers + 1, (u32)(i & 1) ^ 1);
      *slot = i * i;
      cb_barrier_arrive(barriers);
    } else if (cb_thread() >= 32) {
      cb_barrier_wait(barriers, (u32)(i & 1));
      y[i * 32 + cb_lane()] = *slot + cb_lane();
      cb_barrier_arrive_remote(barriers + 1, 0);
    }
  }
}
