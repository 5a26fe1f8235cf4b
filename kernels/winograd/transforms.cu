// SPDX-License-Identifier: MIT
//
// winograd_filter, winograd_source, winograd_result - a 3x3 convolution of stride 1 from products of its tiles and its
// filter at the points of cook_toom.cuh, which has their values and the error bound of the results
//
//   winograd_filter      U[point][k][c]      = (G w[k, c] G^T)[point]
//   winograd_source      V[point][tile][c]   = (B^T d[tile, c] B)[point]
//   gemm_nt, gemm_nn     M[point][tile][k]   = sum over c of V[point][tile][c] * U[point][k][c]      (simt/, grid z)
//   winograd_result      y[tile's pixels, k] = epilogue(A^T M[.., tile, k] A)
//
// A tile is OUTPUTS x OUTPUTS pixels of the result, and reads SIZE x SIZE of the source: neighbours share two rows or
// columns of it, by way of the caches.  What lies outside the source is zero, what lies outside the result is not
// stored.  The gradient of an input is the same convolution of dy with the taps turned around, and channels and filters
// in each other's place: U stays as it is, and is multiplied as stored (gemm_nn).
//
// Channels of U, V and M are padded with zeros to multiples of 4, so that the products' loads are always whole vectors,
// for any channels and addresses of the arrays.  Source and filter are read one element at a time, channels along
// the lanes; the result is stored 4 at a time where its epilogue is wide.
//
//   threads   256, one for each tile and channel, the channel fastest;  winograd_filter: one for each filter and channel
//   grid      ceil(tiles * padded channels / 256);  winograd_filter: ceil(padded filters * padded channels / 256)
//   needs     an image of the source and of the result below 2^31 elements each; offsets of the batch are 64-bit
#ifndef OUTPUTS
#define OUTPUTS 4
#endif
#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif

#include "common/epilogue.cuh"
#include "winograd/cook_toom.cuh"

constexpr int THREADS = 256;
constexpr int PIXELS = OUTPUTS * OUTPUTS;
constexpr int PIECE = 4;  // neighbouring channels that the epilogue handles at once
constexpr int QUADS = THREADS / PIECE;

CB_DEVICE int padded(int channels) { return (channels + PIECE - 1) / PIECE * PIECE; }

// A tile and a channel of this launch, and where its pixels begin.
struct Item {
  i64 image;
  int top, left;  // of the tile's pixels, in the result
  int channel;

  // The item-th of tiles with `channels` channels.
  CB_DEVICE Item(const Tiles& tiles, u32 item, int channels) {
    const u32 width = (u32)padded(channels), tile = item / width;
    const int of_image = tiles.rows * tiles.columns, number = tiles.first + (int)tile, ahead = number / of_image;
    const int within = number - ahead * of_image, row = within / tiles.columns;
    image = tiles.image + ahead;
    top = row * OUTPUTS;
    left = (within - row * tiles.columns) * OUTPUTS;
    channel = (int)(item - tile * width);
  }
};

CB_KERNEL(THREADS, 2)
winograd_filter(const CB_ELEMENT* filter, float* transformed, int k, int c, int turned) {
  cb_dependent_launch();
  const u32 width = (u32)padded(c), item = cb_block_x() * THREADS + (u32)cb_thread();
  const int row = (int)(item / width), column = (int)(item - (u32)row * width);
  if (row >= padded(k)) return;
  const bool exists = row < k && column < c;
  const CB_ELEMENT* taps = filter + (i64)row * 9 * c + column;
  float half[3][SIZE];  // G along the filter's rows
  CB_UNROLL
  for (int s = 0; s < 3; ++s) {
    float line[3];
    CB_UNROLL
    for (int r = 0; r < 3; ++r) {
      const int tap = r * 3 + s;
      line[r] = exists ? to_float(taps[(turned ? 8 - tap : tap) * (i64)c]) : 0.0f;
    }
    transform_filter(line, half[s]);
  }
  const i64 stride = (i64)padded(k) * width;
  CB_UNROLL
  for (int i = 0; i < SIZE; ++i) {
    const float line[3] = {half[0][i], half[1][i], half[2][i]};
    float points[SIZE];
    transform_filter(line, points);
    CB_UNROLL
    for (int j = 0; j < SIZE; ++j) transformed[(i * SIZE + j) * stride + item] = points[j];
  }
}

CB_KERNEL(THREADS, 2)
winograd_source(const CB_ELEMENT* source, float* transformed, const Tiles tiles, int h, int w, int c, int above,
                int before) {
  cb_dependent_launch();
  const i64 stride = (i64)tiles.count * padded(c);
  const i64 number = (i64)cb_block_x() * THREADS + cb_thread();
  if (number >= stride) return;
  const Item item(tiles, (u32)number, c);
  const CB_ELEMENT* image = source + item.image * h * w * c + item.channel;
  float points[SIZE][SIZE];
  CB_UNROLL
  for (int j = 0; j < SIZE; ++j) {
    const int x = item.left + j - before;
    float line[SIZE];
    CB_UNROLL
    for (int i = 0; i < SIZE; ++i) {
      const int y = item.top + i - above;
      const bool exists = (u32)y < (u32)h && (u32)x < (u32)w && item.channel < c;
      line[i] = exists ? cb_load<CB_ELEMENT, 1>(image + (y * w + x) * c).v[0] : 0.0f;
    }
    transform_source(line);
    CB_UNROLL
    for (int i = 0; i < SIZE; ++i) points[i][j] = line[i];
  }
  CB_UNROLL
  for (int i = 0; i < SIZE; ++i) {
    transform_source(points[i]);
    CB_UNROLL
    for (int j = 0; j < SIZE; ++j) transformed[(i * SIZE + j) * stride + number] = points[i][j];
  }
}

// Sums come one to a thread, whose channels lie along the lanes; results go by shared memory to threads that have 4
// channels of a tile's row of pixels each, so that what an epilogue reads and writes comes in vectors.
CB_KERNEL(THREADS, 2)
winograd_result(const float* sums, CB_ELEMENT* out, const CB_ELEMENT* bias, const float* scale, const float* shift,
                const CB_ELEMENT* residual, const CB_ELEMENT* mask, const Tiles tiles, int h, int w,
                const Output output) {
  cb_dependent_launch();
  const Epilogue epilogue{output, out, bias, scale, shift, residual, mask, nullptr, nullptr};
  CB_SHARED(float, shared, PIXELS * THREADS);
  const int channels = output.columns;
  const i64 stride = (i64)tiles.count * padded(channels);
  const i64 first = (i64)cb_block_x() * THREADS, number = first + cb_thread();
  if (number < stride) {
    float half[SIZE][OUTPUTS];  // A^T down the tile
    CB_UNROLL
    for (int j = 0; j < SIZE; ++j) {
      float line[SIZE];
      CB_UNROLL
      for (int i = 0; i < SIZE; ++i) line[i] = cb_load<float, 1>(sums + (i * SIZE + j) * stride + number).v[0];
      transform_sums(line, half[j]);
    }
    CB_UNROLL
    for (int i = 0; i < OUTPUTS; ++i) {
      float line[SIZE], row[OUTPUTS];
      CB_UNROLL
      for (int j = 0; j < SIZE; ++j) line[j] = half[j][i];
      transform_sums(line, row);
      CB_UNROLL
      for (int j = 0; j < OUTPUTS; ++j) shared[(i * OUTPUTS + j) * THREADS + cb_thread()] = row[j];
    }
  }
  cb_sync();
  if (epilogue.is_wide()) {
    const int quad = cb_thread() % QUADS * PIECE, row = cb_thread() / QUADS;
    if (row >= OUTPUTS || first + quad >= stride) return;
    const Item item(tiles, (u32)(first + quad), channels);
    const int y = item.top + row;
    i64 place[OUTPUTS];
    float sum[OUTPUTS][PIECE];
    CB_UNROLL
    for (int j = 0; j < OUTPUTS; ++j) {
      const int x = item.left + j;
      place[j] = y < h && x < w ? ((item.image * h + y) * w + x) * channels + item.channel : -1;
      const Vec<float, PIECE> four = cb_read<float, PIECE>(shared + (row * OUTPUTS + j) * THREADS + quad);
      CB_UNROLL
      for (int i = 0; i < PIECE; ++i) sum[j][i] = four.v[i];
    }
    finish_wide<OUTPUTS>(epilogue, place, item.channel, sum);
    return;
  }
  if (number >= stride) return;
  const Item item(tiles, (u32)number, channels);
  if (item.channel >= channels) return;
  CB_NO_UNROLL
  for (int pixel = 0; pixel < PIXELS; ++pixel) {
    const int y = item.top + pixel / OUTPUTS, x = item.left + pixel % OUTPUTS;
    if (y >= h || x >= w) continue;
    const i64 place = ((item.image * h + y) * w + x) * channels + item.channel;
    finish_one(epilogue, place, item.channel, shared[pixel * THREADS + cb_thread()]);
  }
}
