// SPDX-License-Identifier: MIT
//
// From global to shared memory: how the threads of a block divide a tile, and where its elements lie.
//
// A tile lies in shared memory as it does in global memory, in chunks of 16 bytes whose number within a row is xored
// with a function of the row, so that neither copying nor reading fragments meets a bank twice:
//
//   AlongK      [EXTENT][64 bytes]: a row is a place of gemm_m or gemm_n.  Two rows fill the 32 banks; 8 rows that are
//               read together, at one place along gemm_k, lie in 8 chunks:  chunk ^ row / 2 % 4
//   AlongOuter  [TILE_K][EXTENT]: a row is a place of gemm_k, and every row begins at bank 0.
//               16 bits: 1 chunk of 8 rows is read together, 8 of 1, 4 of 2 or 2 of 4 are written:  chunk ^ the row's
//               last 3 bits, turned round
//               float:   2 chunks of 4 rows are read together, 8 of 1 are written:  chunk ^ row % 4 * 2
//
//   chunk   0 1 2 3 | 0 1 2 3        a vector never crosses a chunk.  Since all extents are powers of two, going on
//   row 0,1 0 1 2 3   0 1 2 3        by a power of two of rows adds to the place in shared memory, and going on by
//   row 2,3 1 0 3 2   1 0 3 2        chunks xors it
//
// With NUM_STAGES > 2 elements are copied by cp.async; with two buffers they wait in registers.
#pragma once

#include "common/operand_sources.cuh"

constexpr int WARP = 32;
constexpr int NUM_WARPS = TILE_M / WARP_M * (TILE_N / WARP_N);
constexpr int NUM_THREADS = WARP * NUM_WARPS;
constexpr u32 SIZE = sizeof(CB_ELEMENT);
constexpr u32 CHUNK = 16;
constexpr u32 CHUNK_ELEMENTS = CHUNK / SIZE;

static_assert(TILE_K * SIZE == 64, "the swizzle is of rows of 64 bytes along gemm_k");

template <int EXTENT_>
struct AlongK {
  static constexpr bool IS_ALONG_K = true;
  static constexpr int EXTENT = EXTENT_;
  static constexpr int WIDTH = VECTOR;
  static constexpr int K_THREADS = TILE_K / WIDTH;  // threads that share an outer place
  static constexpr int STEP = NUM_THREADS / K_THREADS;
  static constexpr int COUNT = EXTENT / STEP;
  static constexpr u32 PITCH = TILE_K * SIZE;
  static_assert(EXTENT % STEP == 0 && STEP % 8 == 0, "threads cover whole rows, and the swizzle repeats");

  int k, outer;  // this thread's first place

  CB_DEVICE AlongK() : k(cb_thread() % K_THREADS * WIDTH), outer(cb_thread() / K_THREADS) {}

  // Byte of an element in the tile.
  CB_DEVICE static u32 byte_of(int outer, int k) {
    return outer * PITCH + ((k / CHUNK_ELEMENTS) ^ (outer / 2 % 4)) * CHUNK + k % CHUNK_ELEMENTS * SIZE;
  }
  // The thread's i-th vector from its first.
  CB_DEVICE static u32 further(u32 first, int i) { return first + i * STEP * PITCH; }
};

template <int EXTENT_>
struct AlongOuter {
  static constexpr bool IS_ALONG_K = false;
  static constexpr int EXTENT = EXTENT_;
  static constexpr int WIDTH = VECTOR;
  static constexpr int K_THREADS = NUM_THREADS / TILE_K;  // threads that share a place along gemm_k
  static constexpr int STEP = K_THREADS * WIDTH;
  static constexpr int COUNT = EXTENT / STEP;
  static constexpr u32 PITCH = EXTENT * SIZE;
  static_assert(NUM_THREADS % TILE_K == 0 && EXTENT % STEP == 0, "threads cover whole rows");
  static_assert((EXTENT & (EXTENT - 1)) == 0 && PITCH >= 128, "chunks are xored within the 32 banks");

  int k, outer;

  CB_DEVICE AlongOuter() : k(cb_thread() / K_THREADS), outer(cb_thread() % K_THREADS * WIDTH) {}

  CB_DEVICE static u32 byte_of(int outer, int k) {
    const u32 turn = SIZE == 4 ? k % 4 * 2 : k % 2 * 4 + k / 2 % 2 * 2 + k / 4 % 2;
    return k * PITCH + ((outer / CHUNK_ELEMENTS) ^ turn) * CHUNK + outer % CHUNK_ELEMENTS * SIZE;
  }
  CB_DEVICE static u32 further(u32 first, int i) { return first ^ (i * STEP * SIZE); }
};

// One operand of the product: a source, the threads' share of it, and the way into shared memory.
template <class Source, class Map_>
struct Operand {
  using Map = Map_;
  static constexpr u32 BYTES = Map::EXTENT * TILE_K * SIZE;  // of a tile in shared memory
  static constexpr bool IS_COPIED = NUM_STAGES > 2;
  static constexpr int WIDTH_BYTES = Map::WIDTH * SIZE, WORDS = WIDTH_BYTES / 4;
  Map map;
  Source source;
  Vec<u32, WORDS> held[IS_COPIED ? 1 : Map::COUNT];  // as words: a register holds two elements

  template <class Description>
  CB_DEVICE explicit Operand(const Description& description) : source(map, description) {}
  CB_DEVICE Operand(const CB_ELEMENT* matrix, i64 first, i64 extent, int stride)
      : source(map, matrix, first, extent, stride) {}

  CB_DEVICE u32 shared_place() const { return Map::byte_of(map.outer, map.k); }

  // Set a tile on its way to byte `target` of shared memory: a WHOLE one, or one of which the first `count` places
  // along gemm_k exist and the others are zeros.
  template <bool WHOLE>
  CB_DEVICE void fetch([[maybe_unused]] unsigned char* shared, [[maybe_unused]] u32 target, int count) {
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) {
      const bool exists = source.valid(i) && (WHOLE || map.k < count);
      if constexpr (IS_COPIED) {
#if CB_ARCH >= 80
        cb_copy_async<WIDTH_BYTES>(shared + Map::further(target, i), source.pointer(i), exists ? WIDTH_BYTES : 0);
#endif
      } else if (exists) {
        held[i] = cb_load<u32, WORDS>(reinterpret_cast<const u32*>(source.pointer(i)));
      } else {
        held[i] = {};
      }
    }
  }

  // Put what waits in registers into shared memory.
  CB_DEVICE void put([[maybe_unused]] unsigned char* shared, [[maybe_unused]] u32 target) const {
    if constexpr (!IS_COPIED) {
      CB_UNROLL
      for (int i = 0; i < Map::COUNT; ++i) {
        cb_write<u32, WORDS>(reinterpret_cast<u32*>(shared + Map::further(target, i)), held[i]);
      }
    }
  }
};
