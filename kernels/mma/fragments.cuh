// SPDX-License-Identifier: MIT
//
// From shared memory to registers: a warp's part of an operand, 16 places along gemm_m or gemm_n at a time.
//
// The 4 registers of such a group come
//
//   by one cb_load_matrices   from rows along gemm_k; transposed, from rows along gemm_m or gemm_n of 16-bit elements
//   by 4 loads of 32 bits     from rows along gemm_m or gemm_n of floats, which nothing transposes
//   by 16 or 2 x 8 bytes      on Volta, whose mma takes either direction
#pragma once

#include "common/device_mma.cuh"
#include "mma/loaders.cuh"

using WarpAtom = Atom<CB_ELEMENT>;
constexpr int GROUP = 16;
constexpr int STEPS = TILE_K / WarpAtom::K;  // of a tile along gemm_k

// EXTENT places of the operand, from `first` of the block's tile on; IS_ROW is true for A, false for B.
template <class Map, int EXTENT, bool IS_ROW>
struct Fragments {
  static constexpr int GROUPS = EXTENT / GROUP;
  u32 value[GROUPS][4];

  // Where in the operand's tile the lane reads its part of group 0, step 0.
  CB_DEVICE static u32 place(int first) {
    const int lane = cb_lane();
    if constexpr (!WarpAtom::READS_MATRICES) {
#if CB_ARCH < 75
      const int outer = first + WarpAtom::template first<IS_ROW>(lane);
      return Map::IS_ALONG_K ? Map::byte_of(outer + lane % 4, 0) : Map::byte_of(outer, lane % 4);
#endif
    } else if constexpr (Map::IS_ALONG_K || SIZE == 2) {
      const int matrix = lane / 8, outer = first + half_of_outer(matrix) * 8, half = half_of_k(matrix);
      return Map::IS_ALONG_K ? Map::byte_of(outer + lane % 8, half * CHUNK_ELEMENTS)
                             : Map::byte_of(outer, lane % 8 + half * 8);
    } else {
      return Map::byte_of(first + lane / 4, lane % 4);
    }
  }

  // `place` is that of the tile's stage in shared memory.
  CB_DEVICE void read(const unsigned char* shared, u32 place, int step) {
    CB_UNROLL
    for (int i = 0; i < GROUPS; ++i) {
      if constexpr (!WarpAtom::READS_MATRICES) {
        read_vectors(shared, place, step, i);
      } else if constexpr (Map::IS_ALONG_K) {
        cb_load_matrices(value[i], shared + ((place ^ (step * 2 * CHUNK)) + i * GROUP * Map::PITCH));
        round(i);
      } else if constexpr (SIZE == 2) {
        cb_load_matrices_transposed(value[i], shared + ((place ^ (i * 2 * CHUNK)) + step * WarpAtom::K * Map::PITCH));
      } else {
        CB_UNROLL
        for (int j = 0; j < 4; ++j) {
          const u32 chunk = i * 4 + half_of_outer(j) * 2;
          const u32 at = (place ^ (chunk * CHUNK)) + (step * WarpAtom::K + half_of_k(j) * 4) * Map::PITCH;
          value[i][j] = cb_read<u32, 1>(reinterpret_cast<const u32*>(shared + at)).v[0];
        }
        round(i);
      }
    }
  }

 private:
  // Which 8 of 16 places, and which half of K, register i holds.
  CB_DEVICE static int half_of_outer(int i) { return IS_ROW ? i % 2 : i / 2; }
  CB_DEVICE static int half_of_k(int i) { return IS_ROW ? i / 2 : i % 2; }

  CB_DEVICE void read_vectors(const unsigned char* shared, u32 place, int step, int i) {
    if constexpr (Map::IS_ALONG_K) {
      const u32 at = (place ^ (step * CHUNK)) + i * GROUP * Map::PITCH;
      const Vec<u32, 4> four = cb_read<u32, 4>(reinterpret_cast<const u32*>(shared + at));
      CB_UNROLL
      for (int j = 0; j < 4; ++j) value[i][j] = four.v[j];
    } else {
      CB_UNROLL
      for (int j = 0; j < 2; ++j) {  // 4 rows on, chunks are xored with 1 more
        const u32 at = (place ^ ((i * 2 + j) * CHUNK)) + (step * 8 + j * 4) * Map::PITCH;
        const Vec<u32, 2> two = cb_read<u32, 2>(reinterpret_cast<const u32*>(shared + at));
        value[i][2 * j] = two.v[0];
        value[i][2 * j + 1] = two.v[1];
      }
    }
  }

  CB_DEVICE void round([[maybe_unused]] int i) {
#if CB_ARCH >= 80
    if constexpr (SIZE == 4) {
      CB_UNROLL
      for (int j = 0; j < 4; ++j) value[i][j] = cb_tf32(value[i][j]);
    }
#endif
  }
};
