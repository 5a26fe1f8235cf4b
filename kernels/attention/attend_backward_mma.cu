// SPDX-License-Identifier: MIT
//
// attend_queries, attend_keys — the gradients of attention from the sums that attend_sums stored, on tensor cores:
// elements of 16 bits, from sm_80 on.  Weights are computed again, tile by tile (Dao et al., 2022, arXiv:2205.14135,
// appendix B.4).  Of each head, with dm the gradient of the mixed values:
//
//   w[i,j]   = exp2(factor * log2(e) * q[i] . k[j] - log_sums[i])
//   mean[i]  = dm[i] . mixed[i]
//   ds[i,j]  = w[i,j] * (dm[i] . v[j] - mean[i])
//
//   attend_queries   dq[i] = factor * sum over j of ds[i,j] * k[j]; also stores the means
//   attend_keys      dk[j] = factor * sum over i of ds[i,j] * q[i], dv[j] = sum over i of w[i,j] * dm[i]; reads the means
//
// A block owns 64 rows of one head, queries or keys, and steps over the others by 64, whose tiles are loaded a step
// ahead.  A warp has 16 of the rows: both products of its rows with 16 others are left factors of the next products.
// Scores are computed in both kernels, so that every sum stays in one block and is added in one order.
//
//   grid      (tiles of 64 rows * samples, heads)
//   threads   128
//   needs     heads of at most 64 channels; queries, keys and values side by side in rows of 3 * channels; sums in
//             float32
#include "attention/tiles.cuh"

struct Extents {
  int tokens, channels, width;
  float factor;

  // The rows of this block's head in one of the parts that lie side by side in an array.
  template <class Element>
  CB_DEVICE Matrix<Element> part(Element* array, u32 sample, int parts, int number) const {
    Element* begin = array + ((i64)sample * tokens * parts + number) * channels + (int)cb_block_y() * width;
    return {begin, parts * channels, tokens, width};
  }
};

// The 16 x 16 results of a warp, rounded, as a left factor.
CB_DEVICE void pack(u32 (&packed_sums)[4], const float (&sum)[8]) {
  CB_UNROLL
  for (int i = 0; i < 4; ++i) packed_sums[i] = packed(sum[2 * i], sum[2 * i + 1]);
}

CB_DEVICE float dot(u32 a, u32 b) {
  const auto left = *reinterpret_cast<const Vec<CB_ELEMENT, 2>*>(&a);
  const auto right = *reinterpret_cast<const Vec<CB_ELEMENT, 2>*>(&b);
  return fmaf(to_float(left.v[0]), to_float(right.v[0]), to_float(left.v[1]) * to_float(right.v[1]));
}

// OF_KEYS: whether the block owns keys and steps over queries; else the reverse.
template <bool OF_KEYS>
CB_DEVICE void undo_tile(const CB_ELEMENT* qkv, const CB_ELEMENT* mixed, const CB_ELEMENT* dmixed,
                         const float* log_sums, float* means, CB_ELEMENT* dqkv, const Extents& at, u8* arena) {
  const int tokens = at.tokens, heads = at.channels / at.width;
  const u32 tiles = (u32)((tokens + TILE - 1) / TILE);
  const u32 sample = cb_block_x() / tiles;
  const int first = (int)(cb_block_x() % tiles) * TILE, own = cb_warp() * GROUP;
  const auto queries = at.part(qkv, sample, 3, 0), keys = at.part(qkv, sample, 3, 1);
  const auto values = at.part(qkv, sample, 3, 2), owed = at.part(dmixed, sample, 1, 0);
  const i64 before = ((i64)sample * heads + (int)cb_block_y()) * tokens;
  log_sums += before;
  means += before;

  float* of_step = reinterpret_cast<float*>(arena + 4 * TILE_BYTES);  // twice the sums and means of a step's queries
  const auto load_step = [&](int step) {
    u8* to = arena + step % 2 * 2 * TILE_BYTES;
    load_tile(OF_KEYS ? queries : keys, step * TILE, 0, to);
    load_tile(OF_KEYS ? owed : values, step * TILE, 0, to + TILE_BYTES);
    if constexpr (OF_KEYS) {
      const float* from = cb_thread() < TILE ? log_sums : means;
      const int query = step * TILE + cb_thread() % TILE, bytes = query < tokens ? 4 : 0;
      cb_copy_async<4>(of_step + step % 2 * 2 * TILE + cb_thread(), from + (bytes ? query : 0), bytes);
    }
    cb_copy_commit();
  };
  load_tile(OF_KEYS ? keys : queries, first, 0, arena + 2 * TILE_BYTES);
  load_tile(OF_KEYS ? values : owed, first, 0, arena + 3 * TILE_BYTES);
  if constexpr (!OF_KEYS) load_tile(at.part(mixed, sample, 1, 0), first, 0, arena + 4 * TILE_BYTES);
  load_step(0);
  cb_copy_wait<0>();
  cb_sync();
  u32 left[GROUPS][4], right[GROUPS][4];  // factors of the scores, and of the gradients of the weights
  float log_sum[2] = {}, mean[2] = {};
  CB_UNROLL
  for (int k = 0; k < GROUPS; ++k) {
    read_group<true, true>(left[k], arena + 2 * TILE_BYTES, own, k * GROUP);
    read_group<true, true>(right[k], arena + 3 * TILE_BYTES, own, k * GROUP);
    if constexpr (!OF_KEYS) {
      u32 of_mixed[4];
      read_group<true, true>(of_mixed, arena + 4 * TILE_BYTES, own, k * GROUP);
      CB_UNROLL
      for (int i = 0; i < 4; ++i) mean[i % 2] += dot(right[k][i], of_mixed[i]);
    }
  }
  if constexpr (!OF_KEYS) {
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {  // rows lane / 4, and 8 further down
      mean[half] += cb_shuffle_xor(mean[half], 1);
      mean[half] += cb_shuffle_xor(mean[half], 2);
      const int query = first + own + cb_lane() / 4 + half * 8;
      if (query < tokens) log_sum[half] = cb_read<float, 1>(log_sums + query).v[0];
      if (query < tokens && cb_lane() % 4 == 0) means[query] = mean[half];
    }
  }
  cb_sync();  // what was read is overwritten by step 1

  float result[GROUPS][8] = {}, of_values[GROUPS][8] = {};
  const float scale = at.factor * LOG2_E;
  CB_NO_UNROLL
  for (int step = 0; step < (int)tiles; ++step) {
    if (step + 1 < (int)tiles) {
      load_step(step + 1);
      cb_copy_wait<1>();
    } else {
      cb_copy_wait<0>();
    }
    cb_sync();
    u8* tile = arena + step % 2 * 2 * TILE_BYTES;
    const float* numbers = of_step + step % 2 * 2 * TILE;
    const int rest = first + own < tokens ? tokens - step * TILE : 0;  // others of this warp's rows, if it has any
    CB_UNROLL
    for (int begin = 0; begin < TILE; begin += GROUP) {
      if (begin >= rest) break;
      float weight[8] = {}, slope[8] = {};
      CB_UNROLL
      for (int k = 0; k < GROUPS; ++k) {
        u32 others[4];
        read_group<false, true>(others, tile, begin, k * GROUP);
        Atom<CB_ELEMENT>::multiply(weight, left[k], others);
        read_group<false, true>(others, tile + TILE_BYTES, begin, k * GROUP);
        Atom<CB_ELEMENT>::multiply(slope, right[k], others);
      }
      CB_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int other = begin + Atom<CB_ELEMENT>::column(cb_lane(), i), half = i / 2 % 2;
        const float shift = OF_KEYS ? numbers[other] : log_sum[half];
        weight[i] = OF_KEYS || other < rest ? exp2f(fmaf(weight[i], scale, -shift)) : 0.0f;
        slope[i] = weight[i] * (slope[i] - (OF_KEYS ? numbers[TILE + other] : mean[half]));
      }
      u32 weights[4], slopes[4];
      pack(weights, weight);
      pack(slopes, slope);
      CB_UNROLL
      for (int group = 0; group < GROUPS; ++group) {
        u32 others[4];
        read_group<false, false>(others, tile, group * GROUP, begin);
        Atom<CB_ELEMENT>::multiply(result[group], slopes, others);
        if constexpr (OF_KEYS) {
          read_group<false, false>(others, tile + TILE_BYTES, group * GROUP, begin);
          Atom<CB_ELEMENT>::multiply(of_values[group], weights, others);
        }
      }
    }
    cb_sync();
  }
  put_sums(result, {at.factor, at.factor}, own, arena);
  if constexpr (OF_KEYS) put_sums(of_values, {1.0f, 1.0f}, own, arena + TILE_BYTES);
  cb_sync();
  store_tile(arena, at.part(dqkv, sample, 3, OF_KEYS ? 1 : 0), first, 0);
  if constexpr (OF_KEYS) store_tile(arena + TILE_BYTES, at.part(dqkv, sample, 3, 2), first, 0);
}

CB_KERNEL(NUM_THREADS, 3)
attend_queries(const CB_ELEMENT* qkv, const CB_ELEMENT* mixed, const CB_ELEMENT* dmixed, const float* log_sums,
               float* means, CB_ELEMENT* dqkv, int tokens, int channels, int width, float factor) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, 5 * TILE_BYTES);
  undo_tile<false>(qkv, mixed, dmixed, log_sums, means, dqkv, {tokens, channels, width, factor}, arena);
}

CB_KERNEL(NUM_THREADS, 3)
attend_keys(const CB_ELEMENT* qkv, const CB_ELEMENT* mixed, const CB_ELEMENT* dmixed, const float* log_sums,
            float* means, CB_ELEMENT* dqkv, int tokens, int channels, int width, float factor) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, 4 * TILE_BYTES + 4 * TILE * 4);
  undo_tile<true>(qkv, mixed, dmixed, log_sums, means, dqkv, {tokens, channels, width, factor}, arena);
}
