// SPDX-License-Identifier: MIT
//
// heads_{nt,nn,tn} — as heads.cu, on tensor cores: elements of 16 bits, from sm_80 on.
//
// A block owns 64 x 64 results of one head and steps over k by 64, whose tiles are loaded a step ahead; a warp has 16
// rows of them.
//
//   grid      (tiles of rows * tiles of columns * samples, heads)
//   threads   128
//   needs     nothing of extents and addresses; sums in float32
#include "attention/product.cuh"
#include "attention/tiles.cuh"

// A_ALONG_K, B_ALONG_K: whether neighbours in a row of the factor are neighbours along k.
template <bool A_ALONG_K, bool B_ALONG_K>
CB_DEVICE void multiply_heads(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct& product,
                              u8* arena) {
  const HeadsTile<TILE> place(product);
  const int m = place.m, n = place.n, steps = (product.k + TILE - 1) / TILE;
  const auto matrix = [&](const CB_ELEMENT* first, const Heads& heads, bool along_k, int outer) {
    const int rows = along_k ? outer : product.k, columns = along_k ? product.k : outer;
    return Matrix<const CB_ELEMENT>{first + begin_of(heads, place.sample), heads.stride, rows, columns};
  };
  const auto left = matrix(a, product.a, A_ALONG_K, product.m), right = matrix(b, product.b, B_ALONG_K, product.n);
  const auto load_step = [&](int step) {
    u8* to = arena + step % 2 * 2 * TILE_BYTES;
    load_tile(left, A_ALONG_K ? m : step * TILE, A_ALONG_K ? step * TILE : m, to);
    load_tile(right, B_ALONG_K ? n : step * TILE, B_ALONG_K ? step * TILE : n, to + TILE_BYTES);
    cb_copy_commit();
  };
  load_step(0);
  float sum[GROUPS][8] = {};
  const int own = cb_warp() * GROUP;
  CB_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) {
      load_step(step + 1);
      cb_copy_wait<1>();
    } else {
      cb_copy_wait<0>();
    }
    cb_sync();
    u8* from = arena + step % 2 * 2 * TILE_BYTES;
    CB_UNROLL
    for (int k = 0; k < GROUPS; ++k) {
      u32 rows[4];
      read_group<true, A_ALONG_K>(rows, from, own, k * GROUP);
      CB_UNROLL
      for (int group = 0; group < GROUPS; ++group) {
        u32 columns[4];
        read_group<false, B_ALONG_K>(columns, from + TILE_BYTES, group * GROUP, k * GROUP);
        Atom<CB_ELEMENT>::multiply(sum[group], rows, columns);
      }
    }
    cb_sync();
  }
  put_sums(sum, {product.factor, product.factor}, own, arena);
  cb_sync();
  const Matrix<CB_ELEMENT> out{c + begin_of(product.c, place.sample), product.c.stride, product.m, product.n};
  store_tile(arena, out, m, n);
}

CB_KERNEL(NUM_THREADS, 4)
heads_nt(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct product) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, 4 * TILE_BYTES);
  multiply_heads<true, true>(a, b, c, product, arena);
}

CB_KERNEL(NUM_THREADS, 4)
heads_nn(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct product) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, 4 * TILE_BYTES);
  multiply_heads<true, false>(a, b, c, product, arena);
}

CB_KERNEL(NUM_THREADS, 4)
heads_tn(const CB_ELEMENT* a, const CB_ELEMENT* b, CB_ELEMENT* c, const HeadsProduct product) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, 4 * TILE_BYTES);
  multiply_heads<false, false>(a, b, c, product, arena);
}
