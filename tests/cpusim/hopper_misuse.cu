// SPDX-License-Identifier: MIT
//
// Misuse of common/device_hopper.cuh, for test_hopper_twins.py: on the CPU alone.
#include "common/device_hopper.cuh"

// One misuse each, for what a GPU would do of it is undefined, or to wait for ever.
constexpr int TILE = 8192;

CB_KERNEL(128, 1) misuse(CB_TENSOR_MAP map, float* y, int which) {
  CB_DYNAMIC_SHARED(arena);
  u64* barrier = reinterpret_cast<u64*>(arena + TILE);
  float sum[32] = {};
  const u64 tile = cb_matrix_descriptor(arena, 0, 1024);
  if (which != 0 && cb_thread() == 0) {
    cb_barrier_init(barrier, 1);
    if (which != 15) cb_barrier_init_fence();
  }
  for (int i = 4 * cb_thread(); which != 16 && i < TILE; i += 512) cb_write<u32, 1>((u32*)(arena + i), Vec<u32, 1>{});
  if (which != 17 && which != 18) cb_proxy_fence();
  cb_sync();
  if (cb_thread() == 0) {
    if (which == 0) cb_barrier_arrive(barrier);
    if (which == 1) {
      cb_barrier_expect(barrier, 64);
      cb_barrier_arrive(barrier);
    }
    if (which == 2) cb_barrier_wait(barrier, 0);
    if (which == 3) {
      cb_barrier_expect(barrier, 8192 - 128);
      cb_tma_load_2d<1>(arena, &map, barrier, 0, 0);
      cb_barrier_wait(barrier, 0);
    }
    if (which == 4 || which == 15) {
      cb_barrier_expect(barrier, 8192);
      cb_tma_load_2d<1>(arena, &map, barrier, 0, 0);
    }
    if (which == 5) cb_tma_load_2d<1>(arena + 64, &map, barrier, 0, 0);
    if (which == 6) cb_tma_load_2d<1>(arena + 1024, &map, barrier, 0, 0);
    if (which == 7) cb_tma_load_3d<1>(arena, &map, barrier, 0, 0, 0);
    if (which == 8 || which == 17) {
      cb_tma_store_2d(&map, arena, 0, 0);
      cb_tma_store_commit();
    }
    if (which == 9) cb_barrier_init(reinterpret_cast<u64*>(y), 1);
    if (which == 25) cb_tma_store_2d(&map, arena, -8, 0);
    if (which == 26) cb_tma_store_2d(&map, arena, 0, -1);
    if (which == 27) cb_tma_store_2d(&map, arena, 4, 0);
    if (which == 28) cb_tma_load_2d<1>(arena, &map, barrier, -4, 0);
  }
  if (which != 19) cb_wgmma_fence();
  if (which == 10) cb_wgmma<half_t, 64, false, false>(sum, tile, tile & 0x3fffffffffffffff);
  if (which == 11) cb_wgmma<half_t, 64, false, false>(sum, tile + (u64)(cb_warp() & 2), tile);
  if (which == 12) cb_wgmma<half_t, 64, false, false>(sum, tile, tile);
  if (which == 13 && cb_warp() != 2) cb_wgmma<half_t, 64, false, false>(sum, tile, tile);
  if (which == 14) cb_barrier_arrive_remote(barrier, 1);
  if (which == 16 || which == 18 || which == 19) cb_wgmma<half_t, 64, false, false>(sum, tile, tile);
  if (which == 20) {
    cb_wgmma<half_t, 64, false, false>(sum, tile, tile);
    sum[5] = 0.0f;
    cb_wgmma_commit();
    cb_wgmma_wait<0>();
  }
  if (which == 21 || which == 22 || which == 24) {
    float other[32] = {}, third[48] = {};
    cb_wgmma<half_t, 64, false, false>(sum, tile, tile);
    cb_wgmma<half_t, 64, false, false>(other, tile, tile);
    if (which == 24) cb_wgmma<half_t, 64, false, false>(*reinterpret_cast<float(*)[32]>(third), tile, tile);
    cb_wgmma_commit();
    if (which == 21) {
      cb_wgmma_wait<0>();
      cb_wgmma_fence();
      cb_wgmma<half_t, 64, false, false>(*reinterpret_cast<float(*)[32]>(third), tile, tile);
      cb_wgmma<half_t, 64, false, false>(*reinterpret_cast<float(*)[32]>(third + 16), tile, tile);
    }
    cb_wgmma_wait<0>();
    cb_wgmma<half_t, 64, false, false>(sum, tile, tile);
  }
  if (which == 23) cb_wgmma<half_t, 64, false, false>(sum, cb_matrix_descriptor(arena + TILE + 1024, 0, 1024), tile);
  y[cb_thread()] = sum[0];
}
