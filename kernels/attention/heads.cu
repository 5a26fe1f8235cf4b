// SPDX-License-Identifier: MIT
//
// heads_{nt,nn,tn} — the matrix product of each head of each sample, its factors lying between those of other heads.
//
//   nt   C[i,j] = factor * sum over k of A[i,k] * B[j,k]     scores of queries and keys; gradient of the weights
//   nn   C[i,j] = factor * sum over k of A[i,k] * B[k,j]     weights times values; gradient of the queries
//   tn   C[i,j] = factor * sum over k of A[k,i] * B[k,j]     gradients of the keys and the values
//
// A block owns 64 x 64 results of one head and steps over k by 16: both tiles go through shared memory as floats, k by
// k, and a thread adds up 4 x 4 results.
//
//   grid      (tiles of rows * tiles of columns * samples, heads)
//   threads   256
//   needs     nothing of extents and addresses; sums in float32
#include "attention/product.cuh"
#include "common/elements.cuh"

constexpr int TILE = 64;
constexpr int TILE_K = 16;
constexpr int PIECE = 4;              // results of a thread along either axis
constexpr int PITCH = TILE + 4;       // floats of a row of a tile in shared memory: whole vectors

// Load a tile of TILE outer places by TILE_K along k to tile[k][outer]; zeros where there is nothing.
template <bool ALONG_K>
CB_DEVICE void load_tile(const CB_ELEMENT* matrix, int stride, int outer_first, int outers, int k_first, int ks,
                         float* tile) {
  CB_UNROLL
  for (int i = 0; i < TILE * TILE_K / THREADS; ++i) {
    const int at = cb_thread() + i * THREADS;
    const int outer = ALONG_K ? at / TILE_K : at % TILE;
    const int k = ALONG_K ? at % TILE_K : at / TILE;
    const int row = ALONG_K ? outer_first + outer : k_first + k;
    const int column = ALONG_K ? k_first + k : outer_first + outer;
    const bool inside = outer_first + outer < outers && k_first + k < ks;
    tile[k * PITCH + outer] = inside ? to_float(cb_load<CB_ELEMENT, 1>(matrix + (i64)row * stride + column).v[0]) : 0.0f;
  }
}

// A_ALONG_K, B_ALONG_K: whether neighbours in a row of the factor are neighbours along k.
template <bool A_ALONG_K, bool B_ALONG_K>
CB_DEVICE void multiply_heads(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct& product,
                              float* a_tile, float* b_tile) {
  const HeadsTile<TILE> tile(product);
  const int first_m = tile.m, first_n = tile.n;
  a += begin_of(product.a, tile.sample);
  b += begin_of(product.b, tile.sample);
  c += begin_of(product.c, tile.sample);
  const int row = cb_thread() / (TILE / PIECE) * PIECE, column = cb_thread() % (TILE / PIECE) * PIECE;
  float sums[PIECE][PIECE] = {};
  CB_NO_UNROLL
  for (int k = 0; k < product.k; k += TILE_K) {
    load_tile<A_ALONG_K>(a, product.a.stride, first_m, product.m, k, product.k, a_tile);
    load_tile<B_ALONG_K>(b, product.b.stride, first_n, product.n, k, product.k, b_tile);
    cb_sync();
    CB_UNROLL
    for (int step = 0; step < TILE_K; ++step) {
      const Vec<float, PIECE> left = cb_read<float, PIECE>(a_tile + step * PITCH + row);
      const Vec<float, PIECE> right = cb_read<float, PIECE>(b_tile + step * PITCH + column);
      CB_UNROLL
      for (int i = 0; i < PIECE; ++i) {
        CB_UNROLL
        for (int j = 0; j < PIECE; ++j) sums[i][j] = fmaf(left.v[i], right.v[j], sums[i][j]);
      }
    }
    cb_sync();
  }
  CB_UNROLL
  for (int i = 0; i < PIECE; ++i) {
    CB_UNROLL
    for (int j = 0; j < PIECE; ++j) {
      const int m = first_m + row + i, n = first_n + column + j;
      if (m < product.m && n < product.n) {
        c[(i64)m * product.c.stride + n] = from_float<CB_ELEMENT>(sums[i][j] * product.factor);
      }
    }
  }
}

CB_KERNEL(THREADS, 2)
heads_nt(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct product) {
  cb_dependent_launch();
  CB_SHARED(float, a_tile, TILE_K * PITCH);
  CB_SHARED(float, b_tile, TILE_K * PITCH);
  multiply_heads<true, true>(a, b, c, product, a_tile, b_tile);
}

CB_KERNEL(THREADS, 2)
heads_nn(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct product) {
  cb_dependent_launch();
  CB_SHARED(float, a_tile, TILE_K * PITCH);
  CB_SHARED(float, b_tile, TILE_K * PITCH);
  multiply_heads<true, false>(a, b, c, product, a_tile, b_tile);
}

CB_KERNEL(THREADS, 2)
heads_tn(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct product) {
  cb_dependent_launch();
  CB_SHARED(float, a_tile, TILE_K * PITCH);
  CB_SHARED(float, b_tile, TILE_K * PITCH);
  multiply_heads<false, false>(a, b, c, product, a_tile, b_tile);
}
