// SPDX-License-Identifier: MIT
//
// pointwise — element by element: activations, sums of branches, and columns joined and taken apart.
//
//   activation            y = f(x)                       kind: enum Activation of common/activation.cuh
//   activation_backward   dx = dy * f'(saved)
//   add                   y = a + b [+ c [+ d]], then max(y, 0) on request
//   copy_columns          target[row, column] = source[row, column], each with its own distance between rows
//   place_columns         target[row, begin + column] = source[row, column], and 0 in the target's other columns
//
//   grid    ceil(count / ELEMENTS); copy_columns, place_columns: (tiles of rows, blocks of the columns written in y, z)
#include "common/activation.cuh"
#include "common/columns.cuh"

struct ActivationWork {
  const CB_ELEMENT* x;
  CB_ELEMENT* y;
  int kind;

  template <int V>
  CB_DEVICE Vec<CB_ELEMENT, V> load(i64 i) const {
    return cb_read<CB_ELEMENT, V>(x + i);
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Vec<CB_ELEMENT, V>& loaded) const {
    Vec<CB_ELEMENT, V> result;
    CB_UNROLL
    for (int v = 0; v < V; ++v) result.v[v] = from_float<CB_ELEMENT>(activate(kind, to_float(loaded.v[v])));
    cb_write<CB_ELEMENT, V>(y + i, result);
  }
};

// y may be x.
CB_KERNEL(THREADS, 4)
activation(const CB_ELEMENT* x, CB_ELEMENT* y, i64 count, int kind) {
  cb_dependent_launch();
  for_elements<2>(count, is_aligned(x) && is_aligned(y), ActivationWork{x, y, kind});
}

struct ActivationBackwardWork {
  const CB_ELEMENT* dy;
  const CB_ELEMENT* saved;
  CB_ELEMENT* dx;
  int kind;

  template <int V>
  CB_DEVICE Pair<V> load(i64 i) const {
    return {cb_read<CB_ELEMENT, V>(dy + i), cb_read<CB_ELEMENT, V>(saved + i)};
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Pair<V>& loaded) const {
    Vec<CB_ELEMENT, V> result;
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      const float gradient = activate_backward(kind, to_float(loaded.dy.v[v]), to_float(loaded.x.v[v]));
      result.v[v] = from_float<CB_ELEMENT>(gradient);
    }
    cb_write<CB_ELEMENT, V>(dx + i, result);
  }
};

// dx may be dy or saved.
CB_KERNEL(THREADS, 3)
activation_backward(const CB_ELEMENT* dy, const CB_ELEMENT* saved, CB_ELEMENT* dx, i64 count, int kind) {
  cb_dependent_launch();
  const bool aligned = is_aligned(dy) && is_aligned(saved) && is_aligned(dx);
  for_elements<2>(count, aligned, ActivationBackwardWork{dy, saved, dx, kind});
}

template <int V>
struct Branches {
  Vec<CB_ELEMENT, V> a, b, c, d;
};

struct AddWork {
  const CB_ELEMENT* a;
  const CB_ELEMENT* b;
  const CB_ELEMENT* c;  // null, as d, where there are fewer branches
  const CB_ELEMENT* d;
  CB_ELEMENT* y;
  int relu;

  template <int V>
  CB_DEVICE Branches<V> load(i64 i) const {
    Branches<V> loaded = {cb_read<CB_ELEMENT, V>(a + i), cb_read<CB_ELEMENT, V>(b + i), {}, {}};
    if (c != nullptr) loaded.c = cb_read<CB_ELEMENT, V>(c + i);
    if (d != nullptr) loaded.d = cb_read<CB_ELEMENT, V>(d + i);
    return loaded;
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Branches<V>& loaded) const {
    Vec<CB_ELEMENT, V> result;
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      float sum = to_float(loaded.a.v[v]) + to_float(loaded.b.v[v]);
      sum = (sum + to_float(loaded.c.v[v])) + to_float(loaded.d.v[v]);
      result.v[v] = from_float<CB_ELEMENT>(relu ? rectify(sum) : sum);
    }
    cb_write<CB_ELEMENT, V>(y + i, result);
  }
};

// y may be any branch.
CB_KERNEL(THREADS, 2)
add(const CB_ELEMENT* a, const CB_ELEMENT* b, const CB_ELEMENT* c, const CB_ELEMENT* d, CB_ELEMENT* y, i64 count,
    int relu) {
  cb_dependent_launch();
  const bool aligned = is_aligned(a) && is_aligned(b) && is_aligned(c) && is_aligned(d) && is_aligned(y);
  for_elements<2>(count, aligned, AddWork{a, b, c, d, y, relu});
}

template <int V>
CB_DEVICE void copy_tile(const CB_ELEMENT* source, CB_ELEMENT* target, Rows rows, int columns, int source_columns,
                         int target_columns, int lanes) {
  const Column at = column_of_thread(lanes);
  const int column = (column_block() * lanes + at.lane) * V;
  if (column >= columns) return;
  walk<LOADS>(
      rows.begin + at.row_lane, rows.end, at.num_row_lanes,
      [&](i64 row) { return cb_load<CB_ELEMENT, V>(source + row * source_columns + column); },
      [&](i64 row, const Vec<CB_ELEMENT, V>& loaded) {
        cb_write<CB_ELEMENT, V>(target + row * target_columns + column, loaded);
      });
}

CB_KERNEL(THREADS, 4)
copy_columns(const CB_ELEMENT* source, CB_ELEMENT* target, i64 num_rows, int rows_per_tile, int columns,
             int source_columns, int target_columns, int lanes, int vector) {
  cb_dependent_launch();
  const Rows rows = rows_of_tile(cb_block_x(), rows_per_tile, num_rows);
  if (vector > 1) {
    copy_tile<WIDE>(source, target, rows, columns, source_columns, target_columns, lanes);
  } else {
    copy_tile<1>(source, target, rows, columns, source_columns, target_columns, lanes);
  }
}

template <int V>
CB_DEVICE void place_tile(const CB_ELEMENT* source, CB_ELEMENT* target, Rows rows, int begin, int columns,
                          int target_columns, int lanes) {
  const Column at = column_of_thread(lanes);
  const int column = (column_block() * lanes + at.lane) * V;
  if (column >= target_columns) return;
  const bool is_placed = begin <= column && column < begin + columns;
  walk<LOADS>(
      rows.begin + at.row_lane, rows.end, at.num_row_lanes,
      [&](i64 row) {
        Vec<CB_ELEMENT, V> zeros;
        CB_UNROLL
        for (int v = 0; v < V; ++v) zeros.v[v] = from_float<CB_ELEMENT>(0.0f);
        return is_placed ? cb_load<CB_ELEMENT, V>(source + row * columns + (column - begin)) : zeros;
      },
      [&](i64 row, const Vec<CB_ELEMENT, V>& loaded) {
        cb_write<CB_ELEMENT, V>(target + row * target_columns + column, loaded);
      });
}

// A vector lies inside the range or outside it: where V is WIDE, it divides begin and columns.
CB_KERNEL(THREADS, 4)
place_columns(const CB_ELEMENT* source, CB_ELEMENT* target, i64 num_rows, int rows_per_tile, int begin, int columns,
              int target_columns, int lanes, int vector) {
  cb_dependent_launch();
  const Rows rows = rows_of_tile(cb_block_x(), rows_per_tile, num_rows);
  if (vector > 1) {
    place_tile<WIDE>(source, target, rows, begin, columns, target_columns, lanes);
  } else {
    place_tile<1>(source, target, rows, begin, columns, target_columns, lanes);
  }
}
