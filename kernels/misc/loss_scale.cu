// SPDX-License-Identifier: MIT
//
// loss_scale — the scale of the loss in float16: halved where a gradient is not finite, doubled after many that were.
//
//   find_overflow       flags[block] = 1 where an element of the block's run is infinite or NaN, else 0
//   update_loss_scale   the state of common/loss_scale.cuh, from those flags:
//                         overflow   unscale = 0, which skips the step;  scale = scale / 2;  good = 0;  skipped += 1
//                         else       unscale = 1 / scale;  good += 1;  at good = interval: scale = 2 * scale, good = 0
//
// Two stages and no atomics, so that the device alone decides and no step waits for the host.  The scale stays
// within 2^-126 and 2^126: a power of two whose inverse is a normal number too.
//
//   grid    find_overflow: ceil(count / ELEMENTS);  update_loss_scale: one block
#include "common/elements.cuh"
#include "common/loss_scale.cuh"

constexpr float LEAST = 1.17549435e-38f;  // 2^-126
constexpr float MOST = 8.50705917e37f;    // 2^126

// Whether any thread's value is 1.  All threads call it.
CB_DEVICE bool any_of_block(int value, int* shared) {
  CB_UNROLL
  for (int bits = 16; bits > 0; bits /= 2) value |= cb_shuffle_xor(value, bits);
  if (cb_lane() == 0) shared[cb_warp()] = value;
  cb_sync();
  value = shared[0];
  CB_UNROLL
  for (int warp = 1; warp < WARPS; ++warp) value |= shared[warp];
  return value != 0;
}

struct FiniteWork {
  const CB_ELEMENT* gradient;
  int& overflow;

  template <int V>
  CB_DEVICE Vec<CB_ELEMENT, V> load(i64 i) const {
    return cb_load<CB_ELEMENT, V>(gradient + i);
  }
  template <int V>
  CB_DEVICE void use(i64, const Vec<CB_ELEMENT, V>& loaded) const {
    CB_UNROLL
    for (int v = 0; v < V; ++v) overflow |= fabsf(to_float(loaded.v[v])) < infinity() ? 0 : 1;
  }
};

CB_KERNEL(THREADS, 4)
find_overflow(const CB_ELEMENT* gradient, i64 count, int* flags) {
  cb_dependent_launch();
  CB_SHARED(int, shared, WARPS);
  int overflow = 0;
  for_elements<LOADS>(count, is_aligned(gradient), FiniteWork{gradient, overflow});
  const bool found = any_of_block(overflow, shared);
  if (cb_thread() == 0) flags[cb_block_x()] = found;
}

CB_KERNEL(THREADS, 1)
update_loss_scale(const int* flags, i64 blocks, float* state, float interval) {
  cb_dependent_launch();
  CB_SHARED(int, shared, WARPS);
  int overflow = 0;
  for (i64 block = cb_thread(); block < blocks; block += THREADS) overflow |= flags[block];
  const bool found = any_of_block(overflow, shared);
  if (cb_thread() != 0) return;
  const float scale = state[SCALE], good = state[GOOD] + 1.0f;
  const bool grows = good >= interval;
  state[UNSCALE] = found ? 0.0f : 1.0f / scale;
  state[GOOD] = found || grows ? 0.0f : good;
  if (found) {
    state[SCALE] = fmaxf(scale / 2.0f, LEAST);
    state[SKIPPED] += 1.0f;
  } else if (grows) {
    state[SCALE] = fminf(2.0f * scale, MOST);
  }
}
