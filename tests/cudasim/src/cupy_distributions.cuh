// SPDX-License-Identifier: MIT
//
// In the place of CuPy's header of the same name: what its random generator calls, drawn on the host.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <random>

extern "C" void cudasim_enqueue(void* stream, void (*run)(void*), void* data, void (*drop)(void*));

struct rk_binomial_state {
  int unused[24];
};

namespace cudasim {

// A generator's state on the device: its seed, and how often it was asked.
struct State {
  uint64_t seed, count;
};

template <class F>
void enqueue(intptr_t stream, F work) {
  cudasim_enqueue(
      (void*)stream, [](void* data) { (*(F*)data)(); }, new F(work), [](void* data) { delete (F*)data; });
}

template <class T>
void uniform(intptr_t state, intptr_t out, ssize_t count, intptr_t stream) {
  enqueue(stream, [=] {
    State& own = *(State*)state;
    std::mt19937_64 bits(own.seed * 1000003 + own.count++);
    for (ssize_t i = 0; i < count; ++i) ((T*)out)[i] = (T)((bits() >> 40) * 0x1p-24);
  });
}

template <class T>
void normal(intptr_t state, intptr_t out, ssize_t count, intptr_t stream) {
  enqueue(stream, [=] {
    State& own = *(State*)state;
    std::mt19937_64 bits(own.seed * 1000003 + own.count++);
    std::normal_distribution<double> draw;
    for (ssize_t i = 0; i < count; ++i) ((T*)out)[i] = (T)draw(bits);
  });
}

}  // namespace cudasim

static void init_curand_generator(int, intptr_t state, uint64_t seed, ssize_t, intptr_t stream) {
  cudasim::enqueue(stream, [=] { *(cudasim::State*)state = {seed, 0}; });
}
static void random_uniform(int, intptr_t state, ssize_t, intptr_t out, ssize_t count, intptr_t stream) {
  cudasim::uniform<double>(state, out, count, stream);
}
static void random_uniform_float(int, intptr_t state, ssize_t, intptr_t out, ssize_t count, intptr_t stream) {
  cudasim::uniform<float>(state, out, count, stream);
}
static void standard_normal(int, intptr_t state, ssize_t, intptr_t out, ssize_t count, intptr_t stream) {
  cudasim::normal<double>(state, out, count, stream);
}
static void standard_normal_float(int, intptr_t state, ssize_t, intptr_t out, ssize_t count, intptr_t stream) {
  cudasim::normal<float>(state, out, count, stream);
}

#define CUDASIM_NONE(name, ...) \
  static void name(int, intptr_t, ssize_t, intptr_t, ssize_t, intptr_t, ##__VA_ARGS__) { __builtin_trap(); }
CUDASIM_NONE(raw)
CUDASIM_NONE(interval_32, uint32_t, uint32_t)
CUDASIM_NONE(interval_64, uint64_t, uint64_t)
CUDASIM_NONE(beta, intptr_t, intptr_t)
CUDASIM_NONE(exponential)
CUDASIM_NONE(geometric, intptr_t)
CUDASIM_NONE(hypergeometric, intptr_t, intptr_t, intptr_t)
CUDASIM_NONE(logseries, intptr_t)
CUDASIM_NONE(poisson, intptr_t)
CUDASIM_NONE(standard_gamma, intptr_t)
CUDASIM_NONE(binomial, intptr_t, intptr_t, intptr_t)
