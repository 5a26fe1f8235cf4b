// SPDX-License-Identifier: MIT
//
// Where the threads of kernels/mma read and write shared memory, for test_mma.py to look for bank conflicts.
#include "mma/fragments.cuh"

template <class Map, int EXTENT, bool IS_ROW>
CB_DEVICE void tell(u32* y) {
  const Map map;
  y[2 * cb_thread()] = Map::byte_of(map.outer, map.k);
  y[2 * cb_thread() + 1] = Fragments<Map, EXTENT, IS_ROW>::place(0);
}

// y[operand and layout][thread][written, read].
CB_KERNEL(NUM_THREADS, 1) places(u32* y) {
  tell<AlongK<TILE_M>, WARP_M, true>(y);
  tell<AlongOuter<TILE_M>, WARP_M, true>(y + 2 * NUM_THREADS);
  tell<AlongK<TILE_N>, WARP_N, false>(y + 4 * NUM_THREADS);
  tell<AlongOuter<TILE_N>, WARP_N, false>(y + 6 * NUM_THREADS);
}
