// SPDX-License-Identifier: MIT
//
// Tiles of 64 x 64 elements of 16 bits in shared memory, which 4 warps multiply on tensor cores, 16 rows each.
//
//   a row     128 bytes, its pieces of 16 bytes swapped by row % 8, so that 8 neighbouring rows are read at once
//   loaded    by asynchronous copies of 16 bytes where every row begins at a multiple of them, else element by element.
//             The last copy of a row ends with the matrix and fills up with zeros: what lies behind a row's columns,
//             padding or another head, is neither read nor written
//   read      16 places of a factor by 16 along k, by cb_load_matrices: as they lie, or transposed
#pragma once

#include "common/device_mma.cuh"
#include "common/elements.cuh"

constexpr int TILE = 64;
constexpr int GROUP = 16;  // rows, columns or places along k of one product of a warp
constexpr int GROUPS = TILE / GROUP;
constexpr int NUM_THREADS = 32 * GROUPS;
constexpr int PIECE = 8, PIECES = TILE / PIECE;
constexpr int ROW_BYTES = TILE * 2, TILE_BYTES = TILE * ROW_BYTES;
constexpr float LOG2_E = 1.44269504f;
static_assert(sizeof(CB_ELEMENT) == 2, "of 16 bits");

// A matrix in global memory, from its first element on.
template <class Element>
struct Matrix {
  Element* first;
  int stride, rows, columns;

  CB_DEVICE bool has_aligned_rows() const { return reinterpret_cast<u64>(first) % 16 == 0 && stride % PIECE == 0; }
};

CB_DEVICE u8* piece_of(u8* tile, int row, int piece) { return tile + row * ROW_BYTES + (piece ^ row % 8) * 16; }

// Load what a matrix has from (row, column) on; zeros where it ends.  It has arrived after a commit, a wait and a sync.
CB_DEVICE void load_tile(const Matrix<const CB_ELEMENT>& matrix, int row, int column, u8* tile) {
  const int rows = matrix.rows - row, columns = matrix.columns - column;
  const CB_ELEMENT* first = matrix.first + (i64)row * matrix.stride + column;
  if (matrix.has_aligned_rows()) {
    CB_UNROLL
    for (int i = 0; i < TILE * PIECES / NUM_THREADS; ++i) {
      const int at = cb_thread() + i * NUM_THREADS, to = at / PIECES, piece = at % PIECES;
      const bool inside = to < rows && piece * PIECE < columns;
      const CB_ELEMENT* from = inside ? first + (i64)to * matrix.stride + piece * PIECE : matrix.first;
      const int left = columns - piece * PIECE;
      cb_copy_async<16>(piece_of(tile, to, piece), from, !inside ? 0 : left < PIECE ? left * 2 : 16);
    }
    return;
  }
  CB_NO_UNROLL
  for (int i = 0; i < TILE * TILE / NUM_THREADS; i += 8) {
    CB_ELEMENT loaded[8];
    CB_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int at = cb_thread() + (i + j) * NUM_THREADS, to = at / TILE, place = at % TILE;
      const bool inside = to < rows && place < columns;
      loaded[j] = inside ? cb_load<CB_ELEMENT, 1>(first + (i64)to * matrix.stride + place).v[0] : CB_ELEMENT{};
    }
    CB_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int at = cb_thread() + (i + j) * NUM_THREADS, to = at / TILE, place = at % TILE;
      reinterpret_cast<CB_ELEMENT*>(piece_of(tile, to, place / PIECE))[place % PIECE] = loaded[j];
    }
  }
}

// Store a tile, as far as the matrix goes from (row, column) on.
CB_DEVICE void store_tile(u8* tile, const Matrix<CB_ELEMENT>& matrix, int row, int column) {
  const int rows = matrix.rows - row, columns = matrix.columns - column;
  CB_ELEMENT* first = matrix.first + (i64)row * matrix.stride + column;
  if (matrix.has_aligned_rows()) {
    CB_UNROLL
    for (int i = 0; i < TILE * PIECES / NUM_THREADS; ++i) {
      const int at = cb_thread() + i * NUM_THREADS, from = at / PIECES, piece = at % PIECES;
      if (from >= rows || piece * PIECE >= columns) continue;
      const CB_ELEMENT* values = reinterpret_cast<const CB_ELEMENT*>(piece_of(tile, from, piece));
      CB_ELEMENT* to = first + (i64)from * matrix.stride + piece * PIECE;
      if ((piece + 1) * PIECE <= columns) {
        cb_write<CB_ELEMENT, PIECE>(to, cb_read<CB_ELEMENT, PIECE>(values));
      } else {
        CB_NO_UNROLL
        for (int j = 0; j < columns - piece * PIECE; ++j) to[j] = values[j];
      }
    }
    return;
  }
  CB_NO_UNROLL
  for (int i = 0; i < TILE * TILE / NUM_THREADS; ++i) {
    const int at = cb_thread() + i * NUM_THREADS, from = at / TILE, place = at % TILE;
    if (from >= rows || place >= columns) continue;
    const CB_ELEMENT* values = reinterpret_cast<const CB_ELEMENT*>(piece_of(tile, from, place / PIECE));
    first[(i64)from * matrix.stride + place] = values[place % PIECE];
  }
}

// Read 16 places of a factor, by 16 along k.  IS_A: of A; ALONG_K: whether neighbours in a row are neighbours along k.
template <bool IS_A, bool ALONG_K>
CB_DEVICE void read_group(u32 (&value)[4], u8* tile, int place, int k) {
  const int matrix = cb_lane() / 8, row = cb_lane() % 8;
  place += (IS_A ? matrix % 2 : matrix / 2) * 8;
  k += (IS_A ? matrix / 2 : matrix % 2) * 8;
  if constexpr (ALONG_K) {
    cb_load_matrices(value, piece_of(tile, place + row, k / PIECE));
  } else {
    cb_load_matrices_transposed(value, piece_of(tile, k + row, place / PIECE));
  }
}

// Two neighbours in a row, as they are stored.
CB_DEVICE u32 packed(float first, float second) {
  const Vec<CB_ELEMENT, 2> pair{{from_float<CB_ELEMENT>(first), from_float<CB_ELEMENT>(second)}};
  return *reinterpret_cast<const u32*>(&pair);
}

// Put a warp's sums of 16 rows into a tile, rows 0 to 7 of them times one factor, the others times another.
CB_DEVICE void put_sums(const float (&sum)[GROUPS][8], const float (&factor)[2], int first, u8* tile) {
  using Sums = Atom<CB_ELEMENT>;
  CB_UNROLL
  for (int group = 0; group < GROUPS; ++group) {
    CB_UNROLL
    for (int i = 0; i < 8; i += 2) {
      const int row = first + Sums::row(cb_lane(), i), column = group * GROUP + Sums::column(cb_lane(), i);
      const float by = factor[i / 2 % 2];
      *reinterpret_cast<u32*>(piece_of(tile, row, column / PIECE) + column % PIECE * 2) =
          packed(sum[group][i] * by, sum[group][i + 1] * by);
    }
  }
}
