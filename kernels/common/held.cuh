// SPDX-License-Identifier: MIT
//
// What was loaded, as words: a compiler that sees the 16-bit elements in a register takes them apart and puts them
// together again wherever they are moved.
#pragma once

#include "common/device.cuh"

template <class T, bool AS_WORDS = sizeof(T) % 4 == 0 && alignof(T) % 4 == 0>
struct Held {
  u32 word[sizeof(T) / 4];

  CB_DEVICE void put(const T& value) {
    const Held& words = reinterpret_cast<const Held&>(value);
    CB_UNROLL
    for (int i = 0; i < (int)(sizeof(T) / 4); ++i) word[i] = words.word[i];
  }
  CB_DEVICE T get() const {
    T value;
    Held& words = reinterpret_cast<Held&>(value);
    CB_UNROLL
    for (int i = 0; i < (int)(sizeof(T) / 4); ++i) words.word[i] = word[i];
    return value;
  }
};
template <class T>
struct Held<T, false> {
  T value;

  CB_DEVICE void put(const T& loaded) { value = loaded; }
  CB_DEVICE T get() const { return value; }
};
