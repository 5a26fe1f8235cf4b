// SPDX-License-Identifier: MIT
//
// attend — as attend.cu, on tensor cores: elements of 16 bits, from sm_80 on.
// attend_sums — the same, and the logarithm of each query's sum of powers, from which attend_backward_mma.cu computes the
//               weights again: training without stored weights.
//
//   log_sums[i] = log2 of the sum over j of exp(factor * q[i] . k[j])     of each head of each sample
//
// A block owns 64 queries of one head and steps over the keys by 64, whose tiles are loaded a step ahead.  A warp has 16
// of the queries: its scores are the sums of one product and, exponentiated and rounded to 16 bits, where they are the
// left factor of the next, as Dao (2023, arXiv:2307.08691) has it.  Powers are of two, with the factor of the scores
// taken into the exponent.
//
//   grid      (tiles of 64 queries * samples, heads)
//   threads   128
//   needs     heads of at most 64 channels; queries, keys and values side by side in rows of 3 * channels; sums in
//             float32
#include "attention/tiles.cuh"

constexpr int ARENA_BYTES = 5 * TILE_BYTES;  // queries, and twice keys and values

template <bool KEEPS_SUMS>
CB_DEVICE void attend_tile(const CB_ELEMENT* qkv, CB_ELEMENT* mixed, float* log_sums, int tokens, int channels,
                           int width, float factor, u8* arena) {
  const u32 tiles = (u32)((tokens + TILE - 1) / TILE);
  const i64 sample = cb_block_x() / tiles;
  const int first = (int)(cb_block_x() % tiles) * TILE, own = cb_warp() * GROUP;
  const CB_ELEMENT* head = qkv + sample * tokens * 3 * channels + (int)cb_block_y() * width;
  const auto part = [&](int number) {
    return Matrix<const CB_ELEMENT>{head + number * channels, 3 * channels, tokens, width};
  };
  const auto load_step = [&](int step) {
    u8* keys = arena + (1 + step % 2 * 2) * TILE_BYTES;
    load_tile(part(1), step * TILE, 0, keys);
    load_tile(part(2), step * TILE, 0, keys + TILE_BYTES);
    cb_copy_commit();
  };
  load_tile(part(0), first, 0, arena);
  load_step(0);

  u32 queries[GROUPS][4] = {};
  float result[GROUPS][8] = {}, top[2] = {-infinity(), -infinity()}, sum[2] = {};
  const float scale = factor * LOG2_E;
  CB_NO_UNROLL
  for (int step = 0; step < (int)tiles; ++step) {
    if (step + 1 < (int)tiles) {
      load_step(step + 1);
      cb_copy_wait<1>();
    } else {
      cb_copy_wait<0>();
    }
    cb_sync();
    u8* keys = arena + (1 + step % 2 * 2) * TILE_BYTES;
    u8* values = keys + TILE_BYTES;
    if (step == 0) {
      CB_UNROLL
      for (int k = 0; k < GROUPS; ++k) read_group<true, true>(queries[k], arena, own, k * GROUP);
    }
    float score[GROUPS][8] = {};
    CB_UNROLL
    for (int group = 0; group < GROUPS; ++group) {
      CB_UNROLL
      for (int k = 0; k < GROUPS; ++k) {
        u32 of_keys[4];
        read_group<false, true>(of_keys, keys, group * GROUP, k * GROUP);
        Atom<CB_ELEMENT>::multiply(score[group], queries[k], of_keys);
      }
    }
    if ((step + 1) * TILE > tokens) {
      CB_UNROLL
      for (int i = 0; i < GROUPS * 8; ++i) {
        const int key = step * TILE + i / 8 * GROUP + Atom<CB_ELEMENT>::column(cb_lane(), i % 8);
        if (key >= tokens) score[i / 8][i % 8] = -infinity();
      }
    }
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {  // rows lane / 4, and 8 further down
      float higher = top[half];
      CB_UNROLL
      for (int i = 0; i < GROUPS * 4; ++i) higher = fmaxf(higher, score[i / 4][i / 2 % 2 * 4 + half * 2 + i % 2]);
      higher = fmaxf(higher, cb_shuffle_xor(higher, 1));
      higher = fmaxf(higher, cb_shuffle_xor(higher, 2));
      const float shrunk = exp2f((top[half] - higher) * scale), shift = higher * scale;
      top[half] = higher;
      sum[half] *= shrunk;
      CB_UNROLL
      for (int i = 0; i < GROUPS * 4; ++i) {
        float& power = score[i / 4][i / 2 % 2 * 4 + half * 2 + i % 2];
        power = exp2f(fmaf(power, scale, -shift));
        sum[half] += power;
        result[i / 4][i / 2 % 2 * 4 + half * 2 + i % 2] *= shrunk;
      }
    }
    CB_UNROLL
    for (int k = 0; k < GROUPS; ++k) {
      const float(&power)[8] = score[k];
      const u32 powers[4] = {packed(power[0], power[1]), packed(power[2], power[3]), packed(power[4], power[5]),
                             packed(power[6], power[7])};
      CB_UNROLL
      for (int group = 0; group < GROUPS; ++group) {
        u32 of_values[4];
        read_group<false, false>(of_values, values, group * GROUP, k * GROUP);
        Atom<CB_ELEMENT>::multiply(result[group], powers, of_values);
      }
    }
    cb_sync();
  }
  CB_UNROLL
  for (int half = 0; half < 2; ++half) {
    sum[half] += cb_shuffle_xor(sum[half], 1);
    sum[half] += cb_shuffle_xor(sum[half], 2);
    if constexpr (KEEPS_SUMS) {
      const int query = first + own + cb_lane() / 4 + half * 8;
      const i64 row = (sample * (channels / width) + (int)cb_block_y()) * tokens + query;
      if (cb_lane() % 4 == 0 && query < tokens) log_sums[row] = fmaf(top[half], scale, log2f(sum[half]));
    }
    sum[half] = 1.0f / sum[half];
  }
  put_sums(result, sum, own, arena);
  cb_sync();
  CB_ELEMENT* target = mixed + sample * tokens * channels + (int)cb_block_y() * width;
  store_tile(arena, Matrix<CB_ELEMENT>{target, channels, tokens, width}, first, 0);
}

CB_KERNEL(NUM_THREADS, 3)
attend(const CB_ELEMENT* qkv, CB_ELEMENT* mixed, int tokens, int channels, int width, float factor) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, ARENA_BYTES);
  attend_tile<false>(qkv, mixed, nullptr, tokens, channels, width, factor, arena);
}

CB_KERNEL(NUM_THREADS, 3)
attend_sums(const CB_ELEMENT* qkv, CB_ELEMENT* mixed, float* log_sums, int tokens, int channels, int width,
            float factor) {
  cb_dependent_launch();
  CB_SHARED(u8, arena, ARENA_BYTES);
  attend_tile<true>(qkv, mixed, log_sums, tokens, channels, width, factor, arena);
}
