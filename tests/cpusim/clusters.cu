// SPDX-License-Identifier: MIT
//
// What two blocks of a cluster do to each other, for test_clusters.py: each loads half of a tile for both, and each says
// to both that it has read it.  `which` is one misuse, 0 none; a GPU would answer most with a hang or with numbers of chance.
#include "common/device_hopper.cuh"

constexpr int ROWS = 32;  // of 128 bytes that each block loads
constexpr u32 HALF = ROWS * SWIZZLE_ROW;

CB_CLUSTER_KERNEL(128, 2) halves(CB_TENSOR_MAP map, unsigned char* y, int which) {
  CB_DYNAMIC_SHARED(arena);
  u64 *full = reinterpret_cast<u64*>(arena + 2 * HALF), *read = full + 1;
  const u32 rank = cb_cluster_rank();
  if (cb_thread() == 0) {
    cb_barrier_init(full, 1);
    cb_barrier_init(read, which == 6 ? 3 : 2);
    cb_barrier_init_fence();
  }
  if (which == 5 && rank == 1) return;
  if (which == 1) {
    cb_sync();
  } else {
    cb_cluster_sync();
  }
  if (which == 4 && rank == 0) return;
  if (cb_thread() == 0) {
    cb_barrier_expect(full, 2 * HALF);
    if (which == 3) cb_tma_load_2d<4>(arena, &map, full, 0, 0);
    cb_tma_load_2d<2>(arena + rank * HALF, &map, full, 0, (int)(cb_block_x() * ROWS));
  }
  cb_barrier_wait(full, 0);
  for (int i = cb_thread(); i < (int)(2 * HALF); i += 128) y[cb_block_x() * (2 * HALF) + (u32)i] = arena[i];
  cb_sync();
  if (cb_thread() < 2) cb_barrier_arrive_remote(read, which == 2 ? 2 : (u32)cb_thread());
  if (which == 8) cb_cluster_sync();
  if (which != 7 && which != 8) cb_barrier_wait(read, 0);
}
