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
// A row is read once from memory and again from the cache (who owns which row: common/rows.cuh).  A thread reads and
// writes its own elements only, so the result may go where the input is.  Softmax and its gradient take rows that begin
// every `stride` elements; elements behind a row's classes are neither read nor written.
//
//   grid    at most some blocks for each SM, for any rows; the finish: one block
#include "common/rows.cuh"

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

// use(j, scores[j]) over this thread's classes of a row.
template <class Use>
CB_DEVICE void for_classes(const CB_ELEMENT* scores, const RowWalk& at, Use use) {
  if (!at.active) return;
  walk<LOADS>(
      at.lane, at.columns, at.lanes, [&](i64 j) { return cb_read<CB_ELEMENT, 1>(scores + j); },
      [&](i64 j, const Vec<CB_ELEMENT, 1>& loaded) { use((int)j, to_float(loaded.v[0])); });
}

CB_DEVICE float row_maximum(const CB_ELEMENT* scores, const RowWalk& at, float* shared) {
  float top = -infinity();
  for_classes(scores, at, [&](int, float score) { top = Maximum()(top, score); });
  return combine_row(top, at.lanes, shared, Maximum());
}

// y may be x.
CB_KERNEL(THREADS, 4)
softmax(const CB_ELEMENT* x, CB_ELEMENT* y, i64 num_rows, int classes, int lanes, int stride) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS);
  for_rows(num_rows, classes, lanes, [&](const RowWalk& at) {
    const CB_ELEMENT* scores = x + at.row * stride;
    const float top = row_maximum(scores, at, shared);
    float sum = 0.0f;
    for_classes(scores, at, [&](int, float score) { sum += expf(score - top); });
    sum = combine_row(sum, lanes, shared, Sum());
    CB_ELEMENT* results = y + at.row * stride;
    for_classes(scores, at, [&](int j, float score) { results[j] = from_float<CB_ELEMENT>(expf(score - top) / sum); });
  });
}

// dx may be dy.
CB_KERNEL(THREADS, 4)
softmax_backward(const CB_ELEMENT* dy, const CB_ELEMENT* y, CB_ELEMENT* dx, i64 num_rows, int classes, int lanes,
                 int stride) {
  cb_dependent_launch();
  CB_SHARED(float, shared, WARPS);
  for_rows(num_rows, classes, lanes, [&](const RowWalk& at) {
    const CB_ELEMENT* errors = dy + at.row * stride;
    const CB_ELEMENT* results = y + at.row * stride;
    float sum = 0.0f;
    for_classes(errors, at, [&](int j, float error) { sum = fmaf(error, to_float(results[j]), sum); });
    sum = combine_row(sum, lanes, shared, Sum());
    CB_ELEMENT* target = dx + at.row * stride;
    for_classes(errors, at, [&](int j, float error) {
      target[j] = from_float<CB_ELEMENT>(to_float(results[j]) * (error - sum));
    });
  });
}

// dlogits may be logits.  A label outside of [0, classes) is no class at all: its score counts as the row's largest.
CB_KERNEL(THREADS, 4)
softmax_cross_entropy(const CB_ELEMENT* logits, const int* labels, CB_ELEMENT* dlogits, double* losses, i64 num_rows,
                      int classes, int lanes, float inv_count, const float* scale) {
  cb_dependent_launch();
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
  cb_dependent_launch();
  CB_SHARED(double, shared, THREADS);
  double sum = 0.0;
  CB_NO_UNROLL
  for (int block = cb_thread(); block < blocks; block += THREADS) sum += losses[block];
  sum = sum_block(sum, shared);
  if (cb_thread() == 0) *loss = sum * inv_count;
}
