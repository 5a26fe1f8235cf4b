// SPDX-License-Identifier: MIT
//
// optimizer — one step over flat arrays, in place.  g is the gradient with the penalty: g + weight_decay * w.
//
//   sgd        w -= lr * g
//   momentum   v = factor * v + g;  w -= lr * v
//   adam       m = b1 * m + (1 - b1) * g;  u = b2 * u + (1 - b2) * g^2;
//              w -= size * m / (sqrt(u) / root + eps), with size = lr / (1 - b1^t) and root = sqrt(1 - b2^t)
//
// Where elements have 16 bits the step is taken on a float32 master copy of w, since w plus a small step would
// round back to w; w gets the rounded result.  master is null where w itself is kept in float32.  The state is
// as wide as the master.
//
// What changes from step to step is read from memory, so that a launch can be repeated as it is, in a CUDA graph: the
// learning rate `rate` and, for adam, the number t of the step, from 1.
//
// Where the loss is scaled, `scaling` is its state (common/loss_scale.cuh): the gradient is multiplied by UNSCALE,
// nothing at all is done where that is 0, and skipped steps do not count in t.  The host knows none of this, so
// 1 - b^t is worked out here, as -expm1(t log b).
//
//   grid    ceil(count / ELEMENTS)
#include "common/elements.cuh"
#include "common/loss_scale.cuh"

// What gradients are multiplied by: 0 for a step that is skipped.
CB_DEVICE float unscale_of(const float* scaling) { return scaling == nullptr ? 1.0f : scaling[UNSCALE]; }

template <int V>
CB_DEVICE void load_floats(const float* pointer, float (&values)[V]) {
  constexpr int WIDTH = V < 4 ? V : 4;
  CB_UNROLL
  for (int i = 0; i < V; i += WIDTH) {
    const Vec<float, WIDTH> loaded = cb_read<float, WIDTH>(pointer + i);
    CB_UNROLL
    for (int j = 0; j < WIDTH; ++j) values[i + j] = loaded.v[j];
  }
}

template <int V>
CB_DEVICE void store_floats(float* pointer, const float (&values)[V]) {
  constexpr int WIDTH = V < 4 ? V : 4;
  CB_UNROLL
  for (int i = 0; i < V; i += WIDTH) {
    Vec<float, WIDTH> stored;
    CB_UNROLL
    for (int j = 0; j < WIDTH; ++j) stored.v[j] = values[i + j];
    cb_write<float, WIDTH>(pointer + i, stored);
  }
}

template <int V>
struct Weights {
  float w[V];
  float g[V];
};

// Parameters and their gradient, which every rule loads and stores in the same way.
struct Parameters {
  CB_ELEMENT* parameters;
  float* master;
  const CB_ELEMENT* gradient;
  float unscale;
  float weight_decay;

  CB_DEVICE bool aligned() const { return is_aligned(parameters) && is_aligned(master) && is_aligned(gradient); }

  template <int V>
  CB_DEVICE Weights<V> load(i64 i) const {
    Weights<V> loaded;
    if (master != nullptr) {
      load_floats<V>(master + i, loaded.w);
    } else {
      const Vec<CB_ELEMENT, V> raw = cb_read<CB_ELEMENT, V>(parameters + i);
      CB_UNROLL
      for (int v = 0; v < V; ++v) loaded.w[v] = to_float(raw.v[v]);
    }
    const Vec<CB_ELEMENT, V> raw = cb_load<CB_ELEMENT, V>(gradient + i);
    CB_UNROLL
    for (int v = 0; v < V; ++v) loaded.g[v] = fmaf(weight_decay, loaded.w[v], unscale * to_float(raw.v[v]));
    return loaded;
  }

  template <int V>
  CB_DEVICE void store(i64 i, const float (&w)[V]) const {
    if (master != nullptr) store_floats<V>(master + i, w);
    Vec<CB_ELEMENT, V> rounded;
    CB_UNROLL
    for (int v = 0; v < V; ++v) rounded.v[v] = from_float<CB_ELEMENT>(w[v]);
    cb_write<CB_ELEMENT, V>(parameters + i, rounded);
  }
};

struct SgdWork {
  Parameters of;
  float lr;

  template <int V>
  CB_DEVICE Weights<V> load(i64 i) const {
    return of.load<V>(i);
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Weights<V>& loaded) const {
    float w[V];
    CB_UNROLL
    for (int v = 0; v < V; ++v) w[v] = fmaf(-lr, loaded.g[v], loaded.w[v]);
    of.store<V>(i, w);
  }
};

CB_KERNEL(THREADS, 2)
sgd(CB_ELEMENT* parameters, float* master, const CB_ELEMENT* gradient, const float* scaling, i64 count,
    const float* rate, float weight_decay) {
  cb_dependent_launch();
  const float unscale = unscale_of(scaling);
  if (unscale == 0.0f) return;
  const Parameters of = {parameters, master, gradient, unscale, weight_decay};
  for_elements<2>(count, of.aligned(), SgdWork{of, *rate});
}

struct MomentumWork {
  Parameters of;
  float* velocity;
  float lr;
  float factor;

  template <int V>
  struct Loaded {
    Weights<V> weights;
    float speed[V];
  };

  template <int V>
  CB_DEVICE Loaded<V> load(i64 i) const {
    Loaded<V> loaded;
    load_floats<V>(velocity + i, loaded.speed);
    loaded.weights = of.load<V>(i);
    return loaded;
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Loaded<V>& loaded) const {
    float w[V], speed[V];
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      speed[v] = fmaf(factor, loaded.speed[v], loaded.weights.g[v]);
      w[v] = fmaf(-lr, speed[v], loaded.weights.w[v]);
    }
    store_floats<V>(velocity + i, speed);
    of.store<V>(i, w);
  }
};

CB_KERNEL(THREADS, 2)
momentum(CB_ELEMENT* parameters, float* master, const CB_ELEMENT* gradient, const float* scaling, float* velocity,
         i64 count, const float* rate, float factor, float weight_decay) {
  cb_dependent_launch();
  const float unscale = unscale_of(scaling);
  if (unscale == 0.0f) return;
  const Parameters of = {parameters, master, gradient, unscale, weight_decay};
  for_elements<2>(count, of.aligned() && is_aligned(velocity), MomentumWork{of, velocity, *rate, factor});
}

struct AdamWork {
  Parameters of;
  float* mean;
  float* square;
  float size;
  float root;
  float beta1;
  float rest1;  // 1 - beta1, which the host subtracts in double precision
  float beta2;
  float rest2;
  float eps;

  template <int V>
  struct Loaded {
    Weights<V> weights;
    float m[V];
    float u[V];
  };

  template <int V>
  CB_DEVICE Loaded<V> load(i64 i) const {
    Loaded<V> loaded;
    load_floats<V>(mean + i, loaded.m);
    load_floats<V>(square + i, loaded.u);
    loaded.weights = of.load<V>(i);
    return loaded;
  }
  template <int V>
  CB_DEVICE void use(i64 i, const Loaded<V>& loaded) const {
    float w[V], m[V], u[V];
    CB_UNROLL
    for (int v = 0; v < V; ++v) {
      const float g = loaded.weights.g[v];
      m[v] = fmaf(beta1, loaded.m[v], rest1 * g);
      u[v] = fmaf(beta2, loaded.u[v], rest2 * (g * g));
      w[v] = loaded.weights.w[v] - size * (m[v] / (sqrtf(u[v]) / root + eps));
    }
    store_floats<V>(mean + i, m);
    store_floats<V>(square + i, u);
    of.store<V>(i, w);
  }
};

CB_KERNEL(THREADS, 2)
adam(CB_ELEMENT* parameters, float* master, const CB_ELEMENT* gradient, const float* scaling, float* mean,
     float* square, i64 count, const int* step, const float* rate, float beta1, float rest1, float log1, float beta2,
     float rest2, float log2, float eps, float weight_decay) {
  cb_dependent_launch();
  const float unscale = unscale_of(scaling);
  if (unscale == 0.0f) return;
  const float t = (float)*step - (scaling == nullptr ? 0.0f : scaling[SKIPPED]);
  const float size = *rate / -expm1f(t * log1), root = sqrtf(-expm1f(t * log2));
  const Parameters of = {parameters, master, gradient, unscale, weight_decay};
  const bool aligned = of.aligned() && is_aligned(mean) && is_aligned(square);
  for_elements<1>(count, aligned, AdamWork{of, mean, square, size, root, beta1, rest1, beta2, rest2, eps});
}
