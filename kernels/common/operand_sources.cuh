// SPDX-License-Identifier: MIT
//
// Where the operands of a product lie in global memory: a matrix, or a view of a convolution's arrays as one.
//
// A tile of an operand has EXTENT places along gemm_m or gemm_n ("outer") and TILE_K along gemm_k.  A Map (of the
// family: simt/loaders.cuh, mma/loaders.cuh) has those that a thread loads: COUNT vectors of WIDTH elements, STEP
// outer places apart from `outer` on, all at place `k` along gemm_k, so that what depends on gemm_k is worked out once
// for all of them, and what depends on the outer place once before the main loop.  IS_ALONG_K is whether a vector's
// neighbours in memory are neighbours along gemm_k.
//
// A source knows where an outer place's elements lie (`pointer`) and whether they exist (`valid`).  It begins at
// gemm_k = 0, is put elsewhere by `seek` and moved on by TILE_K by `advance`.
#pragma once

#include "common/conv_geometry.cuh"

// A pointer moved on by less than 4 GiB: a 32-bit number of bytes takes half the registers of a 64-bit one.
CB_DEVICE const CB_ELEMENT* ahead(const CB_ELEMENT* pointer, u32 bytes) {
  return reinterpret_cast<const CB_ELEMENT*>(reinterpret_cast<const char*>(pointer) + bytes);
}

// A matrix whose other axis has the given stride.  Outer places beyond the end are read from the last one: what they
// make is never stored.
template <class Map>
struct MatrixSource {
  static constexpr bool IS_ALONG_K = Map::IS_ALONG_K;
  const CB_ELEMENT* at[Map::COUNT];
  int k_stride;
  u32 step_bytes;  // from a tile to the next

  // `first` and `extent` are along the outer axis; the extent is a multiple of WIDTH where that axis is contiguous.
  CB_DEVICE MatrixSource(const Map& map, const CB_ELEMENT* matrix, i64 first, i64 extent, int stride)
      : k_stride(IS_ALONG_K ? 1 : stride), step_bytes(TILE_K * k_stride * sizeof(CB_ELEMENT)) {
    const i64 last = IS_ALONG_K ? extent - 1 : extent - Map::WIDTH;
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) {
      const i64 place = first + map.outer + i * Map::STEP;
      at[i] = matrix + (place < last ? place : last) * (IS_ALONG_K ? stride : 1) + (i64)map.k * k_stride;
    }
  }
  CB_DEVICE void seek(i64 from, i64 to) {
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) at[i] += (to - from) * k_stride;
  }
  CB_DEVICE void advance() {
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) at[i] = ahead(at[i], step_bytes);
  }
  CB_DEVICE bool valid(int) const { return true; }
  CB_DEVICE const CB_ELEMENT* pointer(int i) const { return at[i]; }
};

// Pixels of a source image as a window sees them: outer = output pixels, gemm_k = (tap row, tap column, channel).
// The activation of a forward pass; dy for one phase of the input's gradient.
struct WindowRows {
  const CB_ELEMENT* source;  // of the group
  i64 first, count;          // output pixels: the tile's first, and all there are
  Axis vertical, horizontal;
  int out_rows, out_columns;
  Divisor rows, columns;     // by out_rows, out_columns
  int pixel_stride;          // channels of a source pixel
  int channels;              // of the group
};

template <class Map>
struct WindowSource {
  const CB_ELEMENT* at[Map::COUNT];       // source position of the tap and channel; may lie outside the image
  int row[Map::COUNT], column[Map::COUNT];  // the same position
  int tap_column, channel;
  const WindowRows& window;

  CB_DEVICE WindowSource(const Map& map, const WindowRows& rows) : tap_column(0), channel(map.k), window(rows) {
    const i64 image_pixels = (i64)rows.out_rows * rows.out_columns;
    const i64 image = rows.first / image_pixels;
    const int within = (int)(rows.first - image * image_pixels);
    const i64 image_elements = (i64)rows.vertical.size * rows.horizontal.size * rows.pixel_stride;
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) {
      const int place = map.outer + i * Map::STEP;
      const int line = divide(within + place, rows.columns);
      const int images = divide(line, rows.rows);
      row[i] = (line - images * rows.out_rows) * rows.vertical.stride + rows.vertical.offset;
      column[i] = (within + place - line * rows.out_columns) * rows.horizontal.stride + rows.horizontal.offset;
      at[i] = rows.source + (image + images) * image_elements +
              ((i64)row[i] * rows.horizontal.size + column[i]) * rows.pixel_stride + map.k;
      if (rows.first + place >= rows.count) row[i] = -(1 << 30);  // outside for any tap
    }
    enter_tap();
  }
  CB_DEVICE void seek(i64 from, i64 to) { move((int)(to - from)); }
  CB_DEVICE void advance() { move(TILE_K); }
  CB_DEVICE bool valid(int i) const {
    return inside(row[i], window.vertical.size) && inside(column[i], window.horizontal.size);
  }
  CB_DEVICE const CB_ELEMENT* pointer(int i) const { return at[i]; }

  CB_DEVICE void move(int channels) {
    channel += channels;
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) at[i] += channels;
    enter_tap();
  }

  // Move on to the tap that the channel has reached.
  CB_DEVICE void enter_tap() {
    while (channel >= window.channels) {
      channel -= window.channels;
      int right = window.horizontal.step, down = 0;
      if (++tap_column == window.horizontal.taps) {
        tap_column = 0;
        right -= window.horizontal.taps * window.horizontal.step;
        down = window.vertical.step;
      }
      const int elements = (down * window.horizontal.size + right) * window.pixel_stride - window.channels;
      CB_UNROLL
      for (int i = 0; i < Map::COUNT; ++i) {
        at[i] += elements;
        row[i] += down;
        column[i] += right;
      }
    }
  }
};

// The filter as the input's gradient reads it: outer = channels c, gemm_k = (tap row, tap column, output channel), the
// taps being those of one phase.
struct FilterTaps {
  const CB_ELEMENT* filter;
  int group_first;    // element of the group's first
  int first, extent;  // of the tile, along c
  int tap_stride;     // channels c of a tap
  int columns;        // taps in a row of the filter
  int filter_stride;  // elements of one output channel
  PhaseAxis vertical, horizontal;
  int channels;       // output channels of the group
};

template <class Map>
struct FilterSource {
  int at[Map::COUNT];  // number of the element in the filter, which has fewer than 2^31
  int tap_column, channel;
  const FilterTaps& taps;

  CB_DEVICE FilterSource(const Map& map, const FilterTaps& filter) : tap_column(0), channel(map.k), taps(filter) {
    const int last = filter.extent - Map::WIDTH;
    const int first_tap = filter.vertical.first_tap * filter.columns + filter.horizontal.first_tap;
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) {
      const int place = filter.first + map.outer + i * Map::STEP;
      at[i] = filter.group_first + first_tap * filter.tap_stride + (place < last ? place : last) +
              map.k * filter.filter_stride;
    }
    enter_tap();
  }
  CB_DEVICE void seek(i64 from, i64 to) { move((int)(to - from)); }
  CB_DEVICE void advance() { move(TILE_K); }
  CB_DEVICE bool valid(int) const { return true; }
  CB_DEVICE const CB_ELEMENT* pointer(int i) const { return taps.filter + at[i]; }

  CB_DEVICE void move(int channels) {
    channel += channels;
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) at[i] += channels * taps.filter_stride;
    enter_tap();
  }

  CB_DEVICE void enter_tap() {
    while (channel >= taps.channels) {
      channel -= taps.channels;
      int further = taps.horizontal.tap_step;
      if (++tap_column == taps.horizontal.axis.taps) {
        tap_column = 0;
        further += taps.vertical.tap_step * taps.columns - taps.horizontal.axis.taps * taps.horizontal.tap_step;
      }
      const int elements = further * taps.tap_stride - taps.channels * taps.filter_stride;
      CB_UNROLL
      for (int i = 0; i < Map::COUNT; ++i) at[i] += elements;
    }
  }
};

// The activation as the filter's gradient reads it: outer = (tap row, tap column, channel), gemm_k = output pixels.
struct WindowTaps {
  const CB_ELEMENT* source;  // of the group
  int first, extent;         // of the tile, along (r, s, c)
  Axis vertical, horizontal;
  int out_rows, out_columns;
  int pixel_stride;          // channels of a source pixel
  int channels;              // of the group
};

template <class Map>
struct TapSource {
  int down[Map::COUNT], right[Map::COUNT], offset[Map::COUNT];  // of the tap; the offset with its channel
  const CB_ELEMENT* pixel;  // source position of the output pixel and tap 0; may lie outside the image
  int row, column;          // the same position
  const WindowTaps& window;
  int k;

  CB_DEVICE TapSource(const Map& map, const WindowTaps& taps) : window(taps), k(map.k) {
    const int last = taps.extent - Map::WIDTH;
    CB_UNROLL
    for (int i = 0; i < Map::COUNT; ++i) {
      const int wanted = taps.first + map.outer + i * Map::STEP;
      const int place = wanted < last ? wanted : last;
      const int tap = place / taps.channels;
      down[i] = tap / taps.horizontal.taps * taps.vertical.step;
      right[i] = tap % taps.horizontal.taps * taps.horizontal.step;
      offset[i] = (down[i] * taps.horizontal.size + right[i]) * taps.pixel_stride + place - tap * taps.channels;
    }
  }
  CB_DEVICE void seek(i64, i64 to) {
    const i64 place = to + k, line = place / window.out_columns, image = line / window.out_rows;
    row = (int)(line - image * window.out_rows) * window.vertical.stride + window.vertical.offset;
    column = (int)(place - line * window.out_columns) * window.horizontal.stride + window.horizontal.offset;
    const i64 source_row = image * window.vertical.size + row;
    pixel = window.source + (source_row * window.horizontal.size + column) * window.pixel_stride;
  }
  CB_DEVICE void advance() {
    const int width = window.out_columns * window.horizontal.stride;
    column += TILE_K * window.horizontal.stride;
    pixel = ahead(pixel, TILE_K * window.horizontal.stride * window.pixel_stride * sizeof(CB_ELEMENT));
    while (column >= width + window.horizontal.offset) {
      column -= width;
      row += window.vertical.stride;
      pixel += (window.vertical.stride * window.horizontal.size - width) * window.pixel_stride;
      const int height = window.out_rows * window.vertical.stride;
      if (row == height + window.vertical.offset) {
        row -= height;
        pixel += (window.vertical.size - height) * window.horizontal.size * window.pixel_stride;
      }
    }
  }
  CB_DEVICE bool valid(int i) const {
    return inside(row + down[i], window.vertical.size) && inside(column + right[i], window.horizontal.size);
  }
  CB_DEVICE const CB_ELEMENT* pointer(int i) const { return pixel + offset[i]; }
};
