// SPDX-License-Identifier: MIT
//
// softmax — rows of scores to probabilities, its gradient, and the cross-entropy with labels.
//
//   softmax                        y = exp(x - max) / sum of exp(x - max) over the row
//   softmax_backward               dx = y * (dy - sum of dy * y)
//   softmax_cross_entropy          dlogits = (softmax - [class is label]) / count, times *scale where it is given;
//                                  a sum of losses, which are not scaled, for each block
//   softmax_cross_entropy_finish   loss = sum of the blocks' sums / count, in float64
//
// `lanes` threads share a row and step over its classes: a power of two up to a warp, or the whole block where
// rows are long.  A row is read once from memory and again from the cache; blocks step over the rows.  A thread
// reads and writes its own elements only, so the result may go where the input is.
//
//   grid    at most some blocks for each SM, whatever the rows; the finish: one block
#include "common/elements.cuh"

constexpr int WARPS = THREADS / 32;

struct Maximum {
  CB_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }  // a NaN comes back in the row's sum
};
struct Sum {
  CB_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Combine a value over the threads of a row, in one order; all of them get it.  All threads call it.
template <class Combine>
CB_DEVICE float combine_row(float value, int lanes, float* shared, Combine combine) {
  CB_NO_UNROLL
  for (int bits = 1; bits < lanes && bits < 32; bits *= 2) {
    const float other = cb_shuffle_xor(value, bits);
    // The lower lane's value first, so that both lanes get the same bits.
    value = cb_thread() & bits ? combine(other, value) : combine(value, other);
  }
  if (lanes <= 32) return value;
  cb_sync();  // what is shared may still be read from the last time
  if (cb_lane() == 0) shared[cb_warp()] = value;
  cb_sync();
  value = shared[0];
  CB_UNROLL
  for (int warp = 1; warp < WARPS; ++warp) value = combine(value, shared[warp]);
  return value;
}

// Sum of all threads' values, in the first thread.
CB_DEVICE double sum_block(double value, double* shared) {
  shared[cb_thread()] = value;
  cb_sync();
  CB_NO_UNROLL
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (cb_thread() < half) shared[cb_thread()] += shared[cb_thread() + half];
    cb_sync();
  }
  return shared[0];
}

// This thread's place in its row, and whether there is one: at the end some threads only keep the others company.
struct RowWalk {
  i64 row;
  int lane;
  int lanes;
  int classes;
  bool active;
};

// body(at) for each row of this block's; all threads of the block come along.
template <class Body>
CB_DEVICE void for_rows(i64 num_rows, int classes, int lanes, Body body) {
  const int at_once = THREADS / lanes;
  CB_NO_UNROLL
  for (i64 first = (i64)cb_block_x() * at_once; first < num_rows; first += (i64)cb_num_blocks_x() * at_once) {
    const i64 row = first + cb_thread() / lanes;
    body(RowWalk{row, cb_thread() & (lanes - 1), lanes, classes, row < num_rows});
  }
}

// use(j, scores[j]) over this thread's classes of a row.
template <class Use>
CB_DEVICE void for_classes(const CB_ELEMENT* scores, const RowWalk& at, Use use) {
  if (!at.active) return;
  walk<LOADS>(
      at.lane, at.classes, at.lanes, [&](i64 j) { return cb_read<CB_ELEMENT, 1>(scores + j); },
      [&](i64 j, const Vec<CB_ELEMENT, 1>& loaded) { use((int)j, to_float(loaded.v[0])); });
}

CB_DEVICE float row_maximum(const CB_ELEMENT* scores, const RowWalk& at, float* shared) {
  float top = -infinity();
  for_classes(scores, at, [&](int, float score) { top = Maximum()(top, score); });
  return combine_row(top, at.lanes, shared, Maximum());
}

// y may be x.
CB_KERNEL(THREADS, 4)
softmax(const CB_ELEMENT* x, CB_ELEMENT* y, i64 num_rows, int classes, int lanes) {
  CB_SHARED(float, shared, WARPS);
  for_rows(num_rows, classes, lanes, [&](const RowWalk& at) {
    const CB_ELEMENT* scores = x + at.row * classes;
    const float top = row_maximum(scores, at, shared);
    float sum = 0.0f;
    for_classes(scores, at, [&](int, float score) { sum += expf(score - top); });
    sum = combine_row(sum, lanes, shared, Sum());
    CB_ELEMENT* results = y + at.row * classes;
    for_classes(scores, at, [&](int j, float score) { results[j] = from_float<CB_ELEMENT>(expf(score - top) / sum); });
  });
}

// dx may be dy.
CB_KERNEL(THREADS, 4)
softmax_backward(const CB_ELEMENT* dy, const CB_ELEMENT* y, CB_ELEMENT* dx, i64 num_rows, int classes, int lanes) {
  CB_SHARED(float, shared, WARPS);
  for_rows(num_rows, classes, lanes, [&](const RowWalk& at) {
    const CB_ELEMENT* errors = dy + at.row * classes;
    const CB_ELEMENT* results = y + at.row * classes;
    float sum = 0.0f;
    for_classes(errors, at, [&](int j, float error) { sum = fmaf(error, to_float(results[j]), sum); });
    sum = combine_row(sum, lanes, shared, Sum());
    CB_ELEMENT* target = dx + at.row * classes;
    for_classes(errors, at, [&](int j, float error) {
      target[j] = from_float<CB_ELEMENT>(to_float(results[j]) * (error - sum));
    });
  });
}

// dlogits may be logits.  A label outside of [0, classes) is no class at all: its score counts as the row's largest.
CB_KERNEL(THREADS, 4)
softmax_cross_entropy(const CB_ELEMENT* logits, const int* labels, CB_ELEMENT* dlogits, double* losses, i64 num_rows,
                      int classes, int lanes, float inv_count, const float* scale) {
  CB_SHARED(float, shared, WARPS);
  CB_SHARED(double, block_losses, THREADS);
  const float factor = scale == nullptr ? inv_count : inv_count * *scale;
  double loss = 0.0;  // of this thread's rows; the first lane of each keeps it
  for_rows(num_rows, classes, lanes, [&](const RowWalk& at) {
    const CB_ELEMENT* scores = logits + at.row * classes;
    const int label = at.active ? labels[at.row] : -1;
    const float top = row_maximum(scores, at, shared);
    float sum = 0.0f, right = 0.0f;
    for_classes(scores, at, [&](int j, float score) {
      sum += expf(score - top);
      right += j == label ? score - top : 0.0f;
    });
    sum = combine_row(sum, lanes, shared, Sum());
    right = combine_row(right, lanes, shared, Sum());
    if (at.active && at.lane == 0) loss += (double)(logf(sum) - right);
    CB_ELEMENT* target = dlogits + at.row * classes;
    for_classes(scores, at, [&](int j, float score) {
      const float probability = expf(score - top) / sum;
      target[j] = from_float<CB_ELEMENT>((probability - (j == label ? 1.0f : 0.0f)) * factor);
    });
  });
  const double sum = sum_block(loss, block_losses);
  if (cb_thread() == 0) losses[cb_block_x()] = sum;
}

CB_KERNEL(THREADS, 4)
softmax_cross_entropy_finish(const double* losses, int blocks, double* loss, double inv_count) {
  CB_SHARED(double, shared, THREADS);
  double sum = 0.0;
  CB_NO_UNROLL
  for (int block = cb_thread(); block < blocks; block += THREADS) sum += losses[block];
  sum = sum_block(sum, shared);
  if (cb_thread() == 0) *loss = sum * inv_count;
}
