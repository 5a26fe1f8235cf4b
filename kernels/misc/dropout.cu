// SPDX-License-Identifier: MIT
//
// dropout — zero each element with probability p, scale the others by 1 / (1 - p).
//
// What it zeroes is multiplied by 0, so that NaN stays and infinity becomes NaN, as in PyTorch.
//
// Element i draws word i % 4 of Philox4x32-10 at counter i / 4 (Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", 2011): the mask depends on key, step and element alone, not on grid or vector.  The step
// is the counter's third word and read from memory, so that a launch can be repeated as it is, in a CUDA graph.
//
//   grid    ceil(count / ELEMENTS)
#include "common/elements.cuh"

struct Words {
  u32 w[4];
};

// Ten rounds over the counter (low, high, step, 0); the key is raised by the Weyl constants between rounds.
CB_DEVICE Words philox(u64 counter, u32 step, u32 key0, u32 key1) {
  u32 a = (u32)counter, b = (u32)(counter >> 32), c = step, d = 0;
  CB_UNROLL
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = cb_mul_high(0xd2511f53u, a), low0 = 0xd2511f53u * a;
    const u32 high1 = cb_mul_high(0xcd9e8d57u, c), low1 = 0xcd9e8d57u * c;
    a = high1 ^ b ^ key0;
    b = low1;
    c = high0 ^ d ^ key1;
    d = low0;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{a, b, c, d}};
}

// Uniform in [0, 1): 24 bits are what a float holds.
CB_DEVICE float uniform(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

struct DropoutWork {
  const CB_ELEMENT* x;
  CB_ELEMENT* y;
  u8* mask;
  float p;
  float factor;
  u32 step;
  u32 key0;
  u32 key1;

  template <int V>
  CB_DEVICE Vec<CB_ELEMENT, V> load(i64 i) const {
    return cb_read<CB_ELEMENT, V>(x + i);
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Vec<CB_ELEMENT, V>& loaded) const {
    Vec<CB_ELEMENT, V> result;
    Vec<u8, V> kept;
    Words words;
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      if (v % 4 == 0) words = philox((u64)(i + v) / 4, step, key0, key1);
      const int k = (int)((i + v) % 4);
      const u32 word = V > 1 ? words.w[v % 4] : k == 0 ? words.w[0] : k == 1 ? words.w[1] : k == 2 ? words.w[2] : words.w[3];
      const bool keeps = uniform(word) >= p;
      kept.v[v] = keeps;
      result.v[v] = from_float<CB_ELEMENT>(to_float(loaded.v[v]) * (keeps ? factor : 0.0f));
    }
    cb_write<CB_ELEMENT, V>(y + i, result);
    cb_write<u8, V>(mask + i, kept);
  }
};

// y may be x.
CB_KERNEL(THREADS, 3)
dropout(const CB_ELEMENT* x, CB_ELEMENT* y, u8* mask, i64 count, float p, float factor, const int* step, u32 key0,
        u32 key1) {
  cb_dependent_launch();
  const bool aligned = is_aligned(x) && is_aligned(y) && is_aligned(mask);
  for_elements<2>(count, aligned, DropoutWork{x, y, mask, p, factor, (u32)*step, key0, key1});
}

template <int V>
struct Masked {
  Vec<CB_ELEMENT, V> dy;
  Vec<u8, V> kept;
};

struct DropoutBackwardWork {
  const CB_ELEMENT* dy;
  const u8* mask;
  CB_ELEMENT* dx;
  float factor;

  template <int V>
  CB_DEVICE Masked<V> load(i64 i) const {
    return {cb_read<CB_ELEMENT, V>(dy + i), cb_read<u8, V>(mask + i)};
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Masked<V>& loaded) const {
    Vec<CB_ELEMENT, V> result;
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      result.v[v] = from_float<CB_ELEMENT>(to_float(loaded.dy.v[v]) * (loaded.kept.v[v] ? factor : 0.0f));
    }
    cb_write<CB_ELEMENT, V>(dx + i, result);
  }
};

// dx may be dy.
CB_KERNEL(THREADS, 3)
dropout_backward(const CB_ELEMENT* dy, const u8* mask, CB_ELEMENT* dx, i64 count, float factor) {
  cb_dependent_launch();
  const bool aligned = is_aligned(dy) && is_aligned(mask) && is_aligned(dx);
  for_elements<LOADS>(count, aligned, DropoutBackwardWork{dy, mask, dx, factor});
}
