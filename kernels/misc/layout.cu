// SPDX-License-Identifier: MIT
//
// layout — between float32 arrays of the world outside and (n, pixels, c) arrays of elements.
//
//   encode, decode   float32 to elements and back, one after the other
//   pack             a few channels of each pixel, from any strides, side by side and padded with zeros (3 -> 4)
//   copy_channels    rows of elements into wider ones, ended with zeros, or into narrower ones, cut (filters: 3 and 4)
//   nchw_to_nhwc     (n, c, pixels) float32 to (n, pixels, padded) elements, zeros from channel c on
//   nhwc_to_nchw     (n, pixels, padded) elements to (n, c, pixels) float32
//
// The two transpositions go through a tile of 32 channels x 32 pixels in shared memory, one float wider than
// that, so that both sides are read and written along their contiguous axis without bank conflicts.
//
//   grid    encode, decode: ceil(count / ELEMENTS);  pack: ceil(n * pixels / 256);  copy_channels: ceil(rows / 256)
//           transpositions: (n * ceil(pixels / 32), ceil(padded / 32))
#include "common/elements.cuh"

constexpr int TILE = 32;

template <int V>
struct Floats {
  float v[V];
};

struct EncodeWork {
  const float* x;
  CB_ELEMENT* y;

  template <int V>
  CB_DEVICE Floats<V> load(i64 i) const {
    Floats<V> loaded;
    constexpr int WIDTH = V < 4 ? V : 4;
    CB_UNROLL
    for (int k = 0; k < V; k += WIDTH) {
      const Vec<float, WIDTH> part = cb_load<float, WIDTH>(x + i + k);
      CB_UNROLL
      for (int v = 0; v < WIDTH; ++v) loaded.v[k + v] = part.v[v];
    }
    return loaded;
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Floats<V>& loaded) const {
    Vec<CB_ELEMENT, V> result;
    CB_UNROLL
    for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(loaded.v[v]);
    cb_write<CB_ELEMENT, V>(y + i, result);
  }
};

CB_KERNEL(THREADS, 3)
encode(const float* x, CB_ELEMENT* y, i64 count) {
  cb_dependent_launch();
  for_elements<LOADS>(count, is_aligned(x) && is_aligned(y), EncodeWork{x, y});
}

struct DecodeWork {
  const CB_ELEMENT* x;
  float* y;

  template <int V>
  CB_DEVICE Vec<CB_ELEMENT, V> load(i64 i) const {
    return cb_load<CB_ELEMENT, V>(x + i);
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Vec<CB_ELEMENT, V>& loaded) const {
    constexpr int WIDTH = V < 4 ? V : 4;
    CB_UNROLL
    for (int k = 0; k < V; k += WIDTH) {
      Vec<float, WIDTH> part;
      CB_UNROLL
      for (int v = 0; v < WIDTH; ++v) part.v[v] = to_float(loaded.v[k + v]);
      cb_write<float, WIDTH>(y + i + k, part);
    }
  }
};

CB_KERNEL(THREADS, 3)
decode(const CB_ELEMENT* x, float* y, i64 count) {
  cb_dependent_launch();
  for_elements<LOADS>(count, is_aligned(x) && is_aligned(y), DecodeWork{x, y});
}

// The source's element (n, pixel, channel) lies at n * sample_stride + pixel * pixel_stride + channel * channel_stride.
CB_KERNEL(THREADS, 4)
pack(const float* x, CB_ELEMENT* y, i64 num_pixels, int pixels, int channels, int padded, i64 sample_stride,
     int pixel_stride, int channel_stride) {
  cb_dependent_launch();
  const i64 at = (i64)cb_block_x() * THREADS + cb_thread();
  if (at >= num_pixels) return;
  const float* source = x + at / pixels * sample_stride + at % pixels * pixel_stride;
  CB_ELEMENT* target = y + at * padded;
  const bool fours = padded % 4 == 0 && is_aligned(y);
  for (int first = 0; first < padded; first += 4) {
    Vec<CB_ELEMENT, 4> values;
    CB_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int c = first + v;
      values.v[v] = from_float<CB_ELEMENT>(c < channels ? source[(i64)c * channel_stride] : 0.0f);
    }
    if (fours) {
      cb_write<CB_ELEMENT, 4>(target + first, values);
    } else {
      CB_UNROLL
      for (int v = 0; v < 4; ++v) {
        if (first + v < padded) target[first + v] = values.v[v];
      }
    }
  }
}

CB_KERNEL(THREADS, 4)
copy_channels(const CB_ELEMENT* x, CB_ELEMENT* y, i64 num_rows, int channels, int wanted) {
  cb_dependent_launch();
  const i64 row = (i64)cb_block_x() * THREADS + cb_thread();
  if (row >= num_rows) return;
  for (int c = 0; c < wanted; ++c) {
    y[row * wanted + c] = c < channels ? x[row * channels + c] : from_float<CB_ELEMENT>(0.0f);
  }
}

// A block's tile: 32 pixels of sample n by 32 channels.
struct TilePlace {
  i64 n;
  int pixel;
  int channel;
};

CB_DEVICE TilePlace tile_of_block(int pixels) {
  const u32 tiles = (u32)((pixels + TILE - 1) / TILE);
  return {(i64)(cb_block_x() / tiles), (int)(cb_block_x() % tiles) * TILE, (int)cb_block_y() * TILE};
}

CB_KERNEL(THREADS, 4)
nchw_to_nhwc(const float* x, CB_ELEMENT* y, int pixels, int channels, int padded) {
  cb_dependent_launch();
  CB_SHARED(float, tile, TILE * (TILE + 1));
  const TilePlace at = tile_of_block(pixels);
  const int along = cb_lane(), across = cb_warp();
  CB_UNROLL
  for (int i = 0; i < TILE; i += THREADS / TILE) {
    const int c = at.channel + across + i, pixel = at.pixel + along;
    const bool inside = c < channels && pixel < pixels;
    tile[(across + i) * (TILE + 1) + along] = inside ? x[(at.n * channels + c) * pixels + pixel] : 0.0f;
  }
  cb_sync();
  CB_UNROLL
  for (int i = 0; i < TILE; i += THREADS / TILE) {
    const int pixel = at.pixel + across + i, c = at.channel + along;
    if (pixel < pixels && c < padded) {
      y[(at.n * pixels + pixel) * padded + c] = from_float<CB_ELEMENT>(tile[along * (TILE + 1) + across + i]);
    }
  }
}

CB_KERNEL(THREADS, 4)
nhwc_to_nchw(const CB_ELEMENT* x, float* y, int pixels, int channels, int padded) {
  cb_dependent_launch();
  CB_SHARED(float, tile, TILE * (TILE + 1));
  const TilePlace at = tile_of_block(pixels);
  const int along = cb_lane(), across = cb_warp();
  CB_UNROLL
  for (int i = 0; i < TILE; i += THREADS / TILE) {
    const int pixel = at.pixel + across + i, c = at.channel + along;
    const bool inside = pixel < pixels && c < channels;
    tile[(across + i) * (TILE + 1) + along] = inside ? to_float(x[(at.n * pixels + pixel) * padded + c]) : 0.0f;
  }
  cb_sync();
  CB_UNROLL
  for (int i = 0; i < TILE; i += THREADS / TILE) {
    const int c = at.channel + across + i, pixel = at.pixel + along;
    if (c < channels && pixel < pixels) {
      y[(at.n * channels + c) * pixels + pixel] = tile[along * (TILE + 1) + across + i];
    }
  }
}
