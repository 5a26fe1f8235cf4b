// SPDX-License-Identifier: MIT
//
// What the host hands to tiled kernels by value.  Mirrored by cubatch/kernels/structs.py, field by field: integers
// only, no padding.  `python -m benchmarks.kernel_budget` compares sizes and places.
#pragma once

#include "common/device.cuh"

// Extents of a product and its tiles.
struct Product {
  i64 m, k;              // of a group; of a gradient's phases the largest m, and k is not used
  int n;
  int groups;
  int tiles_m, tiles_n;  // of one phase
  int band;              // see tile_order.cuh
  int batch;             // images
};

// The output as numbers.
struct Output {
  i64 elements;    // rows * columns, of all groups
  int columns;     // of all groups
  int activation;  // enum Activation
  int wide;        // columns are a multiple of 4, and all pointers allow 4 elements at once
  int slices;      // of gemm_k
};

// A divisor known at the launch, see divide() in conv_geometry.cuh.
struct Divisor {
  u32 divisor, multiplier, shift;
};

// A convolution without its batch.
struct Conv {
  int h, w, c;                        // x: rows, columns, channels of a pixel
  int p, q, k;                        // y: rows, columns, channels of a pixel
  int r, s;                           // filter: rows, columns
  int stride_h, stride_w;
  int step_h, step_w;                 // the dilation
  int top, left;                      // zeros above and left of x
  int group_c, group_k;               // channels of one group
  int tap_step_h, tap_step_w;         // of a phase: stride / g, g being the greatest common divisor of stride and step
  int source_step_h, source_step_w;   // step / g
  Divisor rows, columns;              // of what gemm_m counts: p and q; of a gradient phase the ceil(h / stride_h) ...
  Divisor short_rows, short_columns;  // ... and for phases beyond the remainder the floor, or 1 where that is 0
};

// Tiles of results that a launch of kernels/winograd has: a run of those of the batch, numbered image by image and row
// by row.
struct Tiles {
  i64 image;          // that the first tile lies in
  int first;          // its number there
  int count;          // of this launch
  int rows, columns;  // of an image
};
