// SPDX-License-Identifier: MIT
//
// pool2d — the largest value or the mean of each window of (n, h, w, c), and their gradients.
//
//   window (p, q) sees rows p * stride_h - pad_top + [0, r) and columns likewise, cut at the edge of the input
//   max_pool2d            y = largest, argmax = 1 + number of the first tap that has it, one byte; 0 for none
//   max_pool2d_backward   dx = sum of dy over the windows that this input won
//   avg_pool2d            y = sum / count of the window
//   avg_pool2d_backward   dx = sum of dy / count over the windows that see this input
//
// A thread owns V neighbouring channels of one pixel, of y in a forward pass and of dx in a backward one, and
// gathers what belongs to it: nothing is written twice, no order is left to chance.
//
//   grid    images * ceil(pixels * (C / V) / 256) blocks; the image is found by a uniform division, the rest
//           of the index is 32 bits wide
//   V       WIDE where C is a multiple of it and pointers are aligned, otherwise 1
#include "common/elements.cuh"

// Mirrored in cubatch/engine/native/window_pooling.py.
struct PoolShape {
  int h, w, c;
  int p, q;
  int r, s;
  int stride_h, stride_w;
  int pad_top, pad_left;
  int begin_h, end_h;  // rows that count in a mean: of the input, or of the padded input
  int begin_w, end_w;
};

CB_DEVICE int lower(int a, int b) { return a < b ? a : b; }
CB_DEVICE int upper(int a, int b) { return a > b ? a : b; }

// Where a thread works: V channels of pixel (row, column) of image n.
struct Place {
  i64 n;
  int row;
  int column;
  int channel;
  bool inside;
};

template <int V>
CB_DEVICE Place place_of_thread(int rows, int columns, int channels) {
  const int groups = channels / V;
  const int items = rows * columns * groups;
  const u32 blocks = (u32)((items + THREADS - 1) / THREADS);
  const int item = (int)(cb_block_x() % blocks) * THREADS + cb_thread();
  const int pixel = item / groups;
  return {(i64)(cb_block_x() / blocks), pixel / columns, pixel % columns, item % groups * V, item < items};
}

// use(load(i, j)) over the box [i0, i1) x [j0, j1) row by row, LOADS loads at a time.
template <class Load, class Use>
CB_DEVICE void walk_box(int i0, int i1, int j0, int j1, Load load, Use use) {
  int i = i0, j = j0;
  CB_NO_UNROLL
  for (int left = i0 < i1 && j0 < j1 ? (i1 - i0) * (j1 - j0) : 0; left > 0; left -= LOADS) {
    decltype(load(i, j)) loaded[LOADS] = {};
    CB_UNROLL
    for (int k = 0; k < LOADS; ++k) {
      if (k < left) {
        loaded[k] = load(i, j);
        const bool wraps = ++j == j1;
        i += wraps;
        j = wraps ? j0 : j;
      }
    }
    CB_UNROLL
    for (int k = 0; k < LOADS; ++k) {
      if (k < left) use(loaded[k]);
    }
  }
}

// V elements and the code of the tap that they are read by or were won by.
template <int V>
struct Tap {
  Vec<CB_ELEMENT, V> values;
  int code;
};

// use(tap) over the part of a window that lies in the input.
template <int V, class Use>
CB_DEVICE void walk_window(const CB_ELEMENT* x, const PoolShape& shape, const Place& at, Use use) {
  const int top = at.row * shape.stride_h - shape.pad_top, left = at.column * shape.stride_w - shape.pad_left;
  const CB_ELEMENT* image = x + at.n * shape.h * shape.w * shape.c + at.channel;
  walk_box(
      upper(0, -top), lower(shape.r, shape.h - top), upper(0, -left), lower(shape.s, shape.w - left),
      [&](int r, int s) {
        const int pixel = (top + r) * shape.w + left + s;
        return Tap<V>{cb_load<CB_ELEMENT, V>(image + pixel * shape.c), r * shape.s + s + 1};
      },
      use);
}

CB_DEVICE i64 output_offset(const PoolShape& shape, const Place& at) {
  return ((at.n * shape.p + at.row) * shape.q + at.column) * shape.c + at.channel;
}

// Codes start at `code`: 1 where the first tap of every window has no rival, otherwise 0.  A NaN stays, and
// wins nothing.
template <int V>
CB_DEVICE void largest(const CB_ELEMENT* x, CB_ELEMENT* y, u8* argmax, const PoolShape& shape, int code, int relu) {
  const Place at = place_of_thread<V>(shape.p, shape.q, shape.c);
  if (!at.inside) return;
  float best[V];
  Vec<u8, V> codes;
  CB_UNROLL
  for (int v = 0; v < V; ++v) {
    best[v] = relu ? 0.0f : -infinity();
    codes.v[v] = (u8)code;
  }
  walk_window<V>(x, shape, at, [&](const Tap<V>& tap) {
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      const float value = to_float(tap.values.v[v]);
      codes.v[v] = value > best[v] ? (u8)tap.code : codes.v[v];
      best[v] = value > best[v] || value != value ? value : best[v];
    }
  });
  Vec<CB_ELEMENT, V> result;
  CB_UNROLL
  for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(best[v]);
  const i64 offset = output_offset(shape, at);
  cb_write<CB_ELEMENT, V>(y + offset, result);
  if (argmax != nullptr) cb_write<u8, V>(argmax + offset, codes);
}

CB_KERNEL(THREADS, 3)
max_pool2d(const CB_ELEMENT* x, CB_ELEMENT* y, u8* argmax, PoolShape shape, int code, int relu, int vector) {
  cb_dependent_launch();
  if (vector > 1) {
    largest<WIDE>(x, y, argmax, shape, code, relu);
  } else {
    largest<1>(x, y, argmax, shape, code, relu);
  }
}

// Positions that window (p, q) takes the mean of.
CB_DEVICE int positions(const PoolShape& shape, int p, int q) {
  const int top = p * shape.stride_h - shape.pad_top, left = q * shape.stride_w - shape.pad_left;
  return (lower(top + shape.r, shape.end_h) - upper(top, shape.begin_h)) *
         (lower(left + shape.s, shape.end_w) - upper(left, shape.begin_w));
}

template <int V>
CB_DEVICE void mean(const CB_ELEMENT* x, CB_ELEMENT* y, const PoolShape& shape) {
  const Place at = place_of_thread<V>(shape.p, shape.q, shape.c);
  if (!at.inside) return;
  float sums[V] = {};
  walk_window<V>(x, shape, at, [&](const Tap<V>& tap) {
    CB_UNROLL
    for (int v = 0; v < V; ++v) sums[v] += to_float(tap.values.v[v]);
  });
  const float count = (float)positions(shape, at.row, at.column);
  Vec<CB_ELEMENT, V> result;
  CB_UNROLL
  for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(sums[v] / count);
  cb_write<CB_ELEMENT, V>(y + output_offset(shape, at), result);
}

CB_KERNEL(THREADS, 3)
avg_pool2d(const CB_ELEMENT* x, CB_ELEMENT* y, PoolShape shape, int vector) {
  cb_dependent_launch();
  if (vector > 1) {
    mean<WIDE>(x, y, shape);
  } else {
    mean<1>(x, y, shape);
  }
}

// The windows along one axis that see input position i: [first, last], empty if last < first.
struct Seen {
  int first;
  int last;
};

CB_DEVICE Seen windows_of(int i, int pad, int stride, int taps, int windows) {
  const int end = i + pad, begin = end - taps + 1;  // where a window may start, in the padded input
  return {begin > 0 ? (begin + stride - 1) / stride : 0, lower(end / stride, windows - 1)};
}

// use(load(p, q, offset in dy)) over the windows that see the thread's pixel, last window (first tap) first.
template <class Load, class Use>
CB_DEVICE void walk_windows(const PoolShape& shape, const Place& at, Load load, Use use) {
  const Seen p = windows_of(at.row, shape.pad_top, shape.stride_h, shape.r, shape.p);
  const Seen q = windows_of(at.column, shape.pad_left, shape.stride_w, shape.s, shape.q);
  const i64 image = at.n * shape.p * shape.q * shape.c + at.channel;
  walk_box(
      0, p.last - p.first + 1, 0, q.last - q.first + 1,
      [&](int i, int j) {
        return load(p.last - i, q.last - j, image + ((p.last - i) * shape.q + q.last - j) * shape.c);
      },
      use);
}

template <int V>
struct Won {
  Vec<CB_ELEMENT, V> dy;
  Vec<u8, V> codes;
  int code;
};

template <int V>
CB_DEVICE void store_gradient(CB_ELEMENT* dx, const PoolShape& shape, const Place& at, const float (&sums)[V]) {
  Vec<CB_ELEMENT, V> result;
  CB_UNROLL
  for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(sums[v]);
  cb_write<CB_ELEMENT, V>(dx + ((at.n * shape.h + at.row) * shape.w + at.column) * shape.c + at.channel, result);
}

template <int V>
CB_DEVICE void largest_gradient(const CB_ELEMENT* dy, const u8* argmax, CB_ELEMENT* dx, const PoolShape& shape) {
  const Place at = place_of_thread<V>(shape.h, shape.w, shape.c);
  if (!at.inside) return;
  float sums[V] = {};
  walk_windows(
      shape, at,
      [&](int p, int q, i64 offset) {
        const int r = at.row + shape.pad_top - p * shape.stride_h, s = at.column + shape.pad_left - q * shape.stride_w;
        return Won<V>{cb_load<CB_ELEMENT, V>(dy + offset), cb_read<u8, V>(argmax + offset), r * shape.s + s + 1};
      },
      [&](const Won<V>& won) {
        CB_UNROLL
        for (int v = 0; v < V; ++v) sums[v] += won.codes.v[v] == won.code ? to_float(won.dy.v[v]) : 0.0f;
      });
  store_gradient<V>(dx, shape, at, sums);
}

CB_KERNEL(THREADS, 2)
max_pool2d_backward(const CB_ELEMENT* dy, const u8* argmax, CB_ELEMENT* dx, PoolShape shape, int vector) {
  cb_dependent_launch();
  if (vector > 1) {
    largest_gradient<WIDE>(dy, argmax, dx, shape);
  } else {
    largest_gradient<1>(dy, argmax, dx, shape);
  }
}

template <int V>
struct Spread {
  Vec<CB_ELEMENT, V> dy;
  float share;
};

template <int V>
CB_DEVICE void mean_gradient(const CB_ELEMENT* dy, CB_ELEMENT* dx, const PoolShape& shape) {
  const Place at = place_of_thread<V>(shape.h, shape.w, shape.c);
  if (!at.inside) return;
  float sums[V] = {};
  walk_windows(
      shape, at,
      [&](int p, int q, i64 offset) {
        return Spread<V>{cb_load<CB_ELEMENT, V>(dy + offset), 1.0f / (float)positions(shape, p, q)};
      },
      [&](const Spread<V>& spread) {
        CB_UNROLL
        for (int v = 0; v < V; ++v) sums[v] = fmaf(to_float(spread.dy.v[v]), spread.share, sums[v]);
      });
  store_gradient<V>(dx, shape, at, sums);
}

CB_KERNEL(THREADS, 3)
avg_pool2d_backward(const CB_ELEMENT* dy, CB_ELEMENT* dx, PoolShape shape, int vector) {
  cb_dependent_launch();
  if (vector > 1) {
    mean_gradient<WIDE>(dy, dx, shape);
  } else {
    mean_gradient<1>(dy, dx, shape);
  }
}
