// SPDX-License-Identifier: MIT
//
// From global to shared memory: how the threads of a block divide a tile, and where its elements lie.
//
// A tile of an operand has EXTENT places along gemm_m or gemm_n ("outer") and TILE_K along gemm_k.  In shared
// memory it is [TILE_K][EXTENT + 4] floats, so that a thread's outer neighbours come with one 16-byte load.  A
// thread loads COUNT vectors of WIDTH elements that share their place along gemm_k: what depends on gemm_k is worked
// out once for all of them, what depends on the outer place once before the main loop.
//
//   AlongK      neighbours in memory are neighbours along gemm_k: stored transposed.  Lanes cover 2 vectors of 4 (or 8
//               single elements) along gemm_k and 16 (4) rows; with rows of EXTENT + 4 floats they hit 32 banks.
//   AlongOuter  neighbours in memory are outer neighbours: stored as they come
//
// Where elements lie in global memory is common/operand_sources.cuh.
#pragma once

#include "common/operand_sources.cuh"

constexpr int WARP = 32;
constexpr int NUM_THREADS = TILE_M / THREAD_M * (TILE_N / THREAD_N);

CB_DEVICE constexpr int row_floats(int extent) { return extent + 4; }

// Shared memory is addressed by bytes from its start: a 32-bit number that a loop adds to.
CB_DEVICE const float* at_byte(const float* shared, u32 bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(shared) + bytes);
}
CB_DEVICE float* at_byte(float* shared, u32 bytes) {
  return reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + bytes);
}

template <int EXTENT_>
struct AlongK {
  static constexpr bool IS_ALONG_K = true;
  static constexpr int EXTENT = EXTENT_;
  static constexpr int WIDTH = VECTOR;
  static constexpr int K_LANES = WIDTH == 1 ? 8 : 2;
  static constexpr int K_WARPS = TILE_K / (WIDTH * K_LANES);
  static constexpr int STEP = WARP / K_LANES * (NUM_THREADS / WARP / K_WARPS);
  static constexpr int COUNT = (EXTENT + STEP - 1) / STEP;
  static_assert(TILE_K % (WIDTH * K_LANES) == 0, "lanes cover whole vectors along gemm_k");

  int k, outer;  // this thread's first place

  CB_DEVICE AlongK()
      : k((cb_lane() % K_LANES + cb_warp() % K_WARPS * K_LANES) * WIDTH),
        outer(cb_lane() / K_LANES + cb_warp() / K_WARPS * (WARP / K_LANES)) {}
  CB_DEVICE int shared_place() const { return k * row_floats(EXTENT) + outer; }
  CB_DEVICE static constexpr int further(int i, int j) { return i * STEP + j * row_floats(EXTENT); }
};

template <int EXTENT_>
struct AlongOuter {
  static constexpr bool IS_ALONG_K = false;
  static constexpr int EXTENT = EXTENT_;
  static constexpr int WIDTH = VECTOR;
  static constexpr int K_THREADS = NUM_THREADS / TILE_K;  // threads that share a place along gemm_k
  static constexpr int STEP = K_THREADS * WIDTH;
  static constexpr int COUNT = (EXTENT + STEP - 1) / STEP;
  static_assert(NUM_THREADS % TILE_K == 0, "every place along gemm_k has as many threads");

  int k, outer;

  CB_DEVICE AlongOuter() : k(cb_thread() / K_THREADS), outer(cb_thread() % K_THREADS * WIDTH) {}
  CB_DEVICE int shared_place() const { return k * row_floats(EXTENT) + outer; }
  CB_DEVICE static constexpr int further(int i, int j) { return i * STEP + j; }
};

// One operand of the product: a source, the threads' share of it, and the way into shared memory.
template <class Source, class Map_>
struct Operand {
  using Map = Map_;
  static constexpr int FLOATS = TILE_K * row_floats(Map::EXTENT);  // of a tile in shared memory
  Map map;
  Source source;
  // cp.async takes what is stored as it comes; what is turned or converted waits in registers.
  static constexpr bool IS_COPIED = NUM_STAGES > 2 && !Map::IS_ALONG_K;
  Vec<CB_ELEMENT, Map::WIDTH> held[IS_COPIED ? 1 : Map::COUNT];

  template <class Description>
  CB_DEVICE explicit Operand(const Description& description) : source(map, description) {}
  CB_DEVICE Operand(const CB_ELEMENT* matrix, i64 first, i64 extent, int stride)
      : source(map, matrix, first, extent, stride) {}

  // Whether the thread's i-th vector lies in the tile, which may be narrower than the threads reach.
  CB_DEVICE bool in_tile(int i) const {
    return (i + 1) * Map::STEP <= Map::EXTENT || map.outer + i * Map::STEP < Map::EXTENT;
  }

  // Set a tile on its way to byte `target` of shared memory: a WHOLE one, or one of which the first `count` places
  // along gemm_k exist and the others are zeros.
  template <bool WHOLE>
  CB_DEVICE void fetch([[maybe_unused]] float* shared, [[maybe_unused]] u32 target, int count) {
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) {
      const bool exists = in_tile(i) && source.valid(i) && (WHOLE || map.k < count);
      if constexpr (IS_COPIED) {
#if CB_ARCH >= 80
        constexpr int BYTES = Map::WIDTH * (int)sizeof(float);
        float* place = at_byte(shared, target) + Map::further(i, 0);
        if (in_tile(i)) cb_copy_async<BYTES>(place, source.pointer(i), exists ? BYTES : 0);
#endif
      } else if (exists) {
        held[i] = cb_load<CB_ELEMENT, Map::WIDTH>(source.pointer(i));
      } else {
        CB_UNROLL
        for (int j = 0; j < Map::WIDTH; ++j) held[i].v[j] = CB_ELEMENT{};
      }
    }
  }

  // Put what waits in registers into shared memory.
  CB_DEVICE void put([[maybe_unused]] float* shared, [[maybe_unused]] u32 target) const {
    if constexpr (!IS_COPIED) {
      float* tile = at_byte(shared, target);
      CB_UNROLL
      for (int i = 0; i < Map::COUNT; ++i) {
        if (!in_tile(i)) continue;
        Vec<float, Map::WIDTH> value;
        CB_UNROLL
        for (int j = 0; j < Map::WIDTH; ++j) value.v[j] = to_float(held[i].v[j]);
        if constexpr (Map::IS_ALONG_K) {
          CB_UNROLL
          for (int j = 0; j < Map::WIDTH; ++j) tile[Map::further(i, j)] = value.v[j];
        } else {
          cb_write<float, Map::WIDTH>(tile + Map::further(i, 0), value);
        }
      }
    }
  }
};
