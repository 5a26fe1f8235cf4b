// SPDX-License-Identifier: MIT
//
// attend — the mixed values of each head of each sample, without its weights ever lying in memory: inference.
//
//   mixed[i] = sum over j of softmax(factor * q[i] . k)[j] * v[j]
//
// A block owns 64 queries of one head and steps over the keys by 32.  A row's scores are exponentiated with the largest
// seen so far; where a step brings a larger one, sum and mixed values so far are scaled down by exp(old - new) (Milakov
// and Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135).  The 16 threads of 4 rows share these by
// shuffles; each has 4 x 2 of the scores, 4 x 4 of the mixed values.
//
//   grid      (tiles of 64 queries * samples, heads)
//   threads   256
//   needs     heads of at most 64 channels; queries, keys and values side by side in rows of 3 * channels; sums in
//             float32
#include "common/elements.cuh"

constexpr int QUERIES = 64;
constexpr int KEYS = 32;
constexpr int WIDTH = 64;               // most channels of a head
constexpr int PIECE = 4;
constexpr int QUERY_PITCH = QUERIES + 4;  // floats of a row of a tile in shared memory: whole vectors
constexpr int KEY_PITCH = KEYS + 4;
constexpr int VALUE_PITCH = WIDTH + 4;
constexpr int GROUP = 16;               // threads that share rows

// Load `count` rows of a head from row `first` on, to tile[channel][row] where TURNED, else to tile[row][channel]; zeros
// where there is nothing.
template <int ROWS, int PITCH, bool TURNED>
CB_DEVICE void load_rows(const CB_ELEMENT* head, int stride, int first, int rows, int width, float* tile) {
  CB_UNROLL
  for (int i = 0; i < ROWS * WIDTH / THREADS; ++i) {
    const int at = cb_thread() + i * THREADS;
    const int row = at / WIDTH, channel = at % WIDTH;
    const bool inside = first + row < rows && channel < width;
    const float value = inside ? to_float(cb_load<CB_ELEMENT, 1>(head + (i64)(first + row) * stride + channel).v[0]) : 0.0f;
    tile[TURNED ? channel * PITCH + row : row * PITCH + channel] = value;
  }
}

// Combine a value over the threads that share its row; all of them get it.
template <class Combine>
CB_DEVICE float combine_group(float value, Combine combine) {
  CB_UNROLL
  for (int bits = 1; bits < GROUP; bits *= 2) value = combine(value, cb_shuffle_xor(value, bits));
  return value;
}

CB_KERNEL(THREADS, 2)
attend(const CB_ELEMENT* qkv, CB_ELEMENT* mixed, int tokens, int channels, int width, float factor) {
  cb_dependent_launch();
  CB_SHARED(float, query_tile, WIDTH * QUERY_PITCH);
  CB_SHARED(float, key_tile, WIDTH * KEY_PITCH);
  CB_SHARED(float, value_tile, KEYS * VALUE_PITCH);
  CB_SHARED(float, power_tile, KEYS * QUERY_PITCH);
  const u32 tiles = (u32)((tokens + QUERIES - 1) / QUERIES);
  const i64 sample = cb_block_x() / tiles;
  const int first = (int)(cb_block_x() % tiles) * QUERIES, stride = 3 * channels;
  const CB_ELEMENT* head = qkv + sample * tokens * stride + (int)cb_block_y() * width;
  const int row = cb_thread() / GROUP * PIECE, lane = cb_thread() % GROUP;
  load_rows<QUERIES, QUERY_PITCH, true>(head, stride, first, tokens, width, query_tile);
  float top[PIECE], sum[PIECE] = {}, results[PIECE][PIECE] = {};
  CB_UNROLL
  for (int i = 0; i < PIECE; ++i) top[i] = -infinity();
  CB_NO_UNROLL
  for (int key = 0; key < tokens; key += KEYS) {
    load_rows<KEYS, KEY_PITCH, true>(head + channels, stride, key, tokens, width, key_tile);
    load_rows<KEYS, VALUE_PITCH, false>(head + 2 * channels, stride, key, tokens, width, value_tile);
    cb_sync();
    float scores[PIECE][2] = {};
    CB_NO_UNROLL
    for (int c = 0; c < width; ++c) {
      const Vec<float, PIECE> query = cb_read<float, PIECE>(query_tile + c * QUERY_PITCH + row);
      const Vec<float, 2> keys = cb_read<float, 2>(key_tile + c * KEY_PITCH + lane * 2);
      CB_UNROLL
      for (int i = 0; i < PIECE; ++i) {
        scores[i][0] = fmaf(query.v[i], keys.v[0], scores[i][0]);
        scores[i][1] = fmaf(query.v[i], keys.v[1], scores[i][1]);
      }
    }
    CB_UNROLL
    for (int i = 0; i < PIECE; ++i) {
      CB_UNROLL
      for (int j = 0; j < 2; ++j) scores[i][j] = key + lane * 2 + j < tokens ? scores[i][j] * factor : -infinity();
      const float here = combine_group(fmaxf(scores[i][0], scores[i][1]), [](float a, float b) { return fmaxf(a, b); });
      const float higher = fmaxf(top[i], here), scale = expf(top[i] - higher);
      top[i] = higher;
      const float powers[2] = {expf(scores[i][0] - higher), expf(scores[i][1] - higher)};
      power_tile[lane * 2 * QUERY_PITCH + row + i] = powers[0];
      power_tile[(lane * 2 + 1) * QUERY_PITCH + row + i] = powers[1];
      sum[i] = fmaf(sum[i], scale, combine_group(powers[0] + powers[1], [](float a, float b) { return a + b; }));
      CB_UNROLL
      for (int j = 0; j < PIECE; ++j) results[i][j] *= scale;
    }
    cb_sync_warp();  // a row's powers are written and read by the 16 threads that share it, in one warp
    CB_NO_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      const Vec<float, PIECE> power = cb_read<float, PIECE>(power_tile + j * QUERY_PITCH + row);
      const Vec<float, PIECE> value = cb_read<float, PIECE>(value_tile + j * VALUE_PITCH + lane * PIECE);
      CB_UNROLL
      for (int i = 0; i < PIECE; ++i) {
        CB_UNROLL
        for (int c = 0; c < PIECE; ++c) results[i][c] = fmaf(power.v[i], value.v[c], results[i][c]);
      }
    }
    cb_sync();
  }
  CB_ELEMENT* target = mixed + sample * tokens * channels + (int)cb_block_y() * width;
  CB_UNROLL
  for (int i = 0; i < PIECE; ++i) {
    CB_UNROLL
    for (int j = 0; j < PIECE; ++j) {
      const int query = first + row + i, channel = lane * PIECE + j;
      if (query < tokens && channel < width) {
        target[(i64)query * channels + channel] = from_float<CB_ELEMENT>(results[i][j] / sum[i]);
      }
    }
  }
}
