// SPDX-License-Identifier: MIT
//
// layout — copies of operands into the layout that a product needs.
//
//   copy_filter      filters (k, r, s, c) into those over patches of pixels with wider channels, or back (3 and 4, 3 and 16)
//   transpose        (rows, columns) to (columns, rows): operands of a tf32 product that do not lie along gemm_k
//
// A transposition goes through a tile of 32 x 32 in shared memory, one element wider than that, so that both sides are
// read and written along their contiguous axis without bank conflicts.
//
//   grid    copy_filter: ceil(taps of all patches / 256);  transpose: (ceil(columns / 32), ceil(rows / 32))
#include "common/elements.cuh"

constexpr int TILE = 32;

CB_KERNEL(THREADS, 4)
copy_filter(const CB_ELEMENT* from, CB_ELEMENT* to, i64 num_taps, int r, int s, int c, int high, int wide, int share,
            int back) {
  cb_dependent_launch();
  const i64 tap = (i64)cb_block_x() * THREADS + cb_thread();  // k, patch, and place in the patch of high x wide taps
  if (tap >= num_taps) return;
  const int rows = (r + high - 1) / high, columns = (s + wide - 1) / wide;
  const i64 patch = tap / (high * wide);
  const int place = (int)(tap % (high * wide));
  const int row = (int)(patch / columns % rows) * high + place / wide;
  const int column = (int)(patch % columns) * wide + place % wide;
  const bool exists = row < r && column < s;
  const i64 of_filter = ((patch / columns / rows * r + row) * s + column) * c, of_patch = tap * share;
  for (int i = 0; i < (back ? c : share); ++i) {
    if (!back) {
      to[of_patch + i] = exists && i < c ? from[of_filter + i] : from_float<CB_ELEMENT>(0.0f);
    } else if (exists) {
      to[of_filter + i] = from[of_patch + i];
    }
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
