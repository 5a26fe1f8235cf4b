// SPDX-License-Identifier: MIT
//
// layout — copies of operands into the layout that a product needs.
//
//   copy_channels    rows of elements into wider ones, ended with zeros, or into narrower ones, cut (filters: 3 and 4)
//   transpose        (rows, columns) to (columns, rows): operand B of a tf32 product that does not lie along gemm_k
//
// A transposition goes through a tile of 32 x 32 in shared memory, one element wider than that, so that both sides are
// read and written along their contiguous axis without bank conflicts.
//
//   grid    copy_channels: ceil(rows / 256);  transpose: (ceil(columns / 32), ceil(rows / 32))
#include "common/elements.cuh"

constexpr int TILE = 32;

CB_KERNEL(THREADS, 4)
copy_channels(const CB_ELEMENT* x, CB_ELEMENT* y, i64 num_rows, int channels, int wanted) {
  cb_dependent_launch();
  const i64 row = (i64)cb_block_x() * THREADS + cb_thread();
  if (row >= num_rows) return;
  for (int c = 0; c < wanted; ++c) {
    y[row * wanted + c] = c < channels ? x[row * channels + c] : from_float<CB_ELEMENT>(0.0f);
  }
}

CB_KERNEL(THREADS, 4)
transpose(const CB_ELEMENT* x, CB_ELEMENT* y, int rows, int columns) {
  cb_dependent_launch();
  CB_SHARED(CB_ELEMENT, tile, TILE * (TILE + 1));
  const int first_row = (int)cb_block_y() * TILE, first_column = (int)cb_block_x() * TILE;
  const int along = cb_lane(), across = cb_warp();
  CB_UNROLL
  for (int i = 0; i < TILE; i += THREADS / TILE) {
    const int row = first_row + across + i, column = first_column + along;
    if (row < rows && column < columns) tile[(across + i) * (TILE + 1) + along] = x[(i64)row * columns + column];
  }
  cb_sync();
  CB_UNROLL
  for (int i = 0; i < TILE; i += THREADS / TILE) {
    const int column = first_column + across + i, row = first_row + along;
    if (row < rows && column < columns) y[(i64)column * rows + row] = tile[along * (TILE + 1) + across + i];
  }
}
