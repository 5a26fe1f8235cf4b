// SPDX-License-Identifier: MIT
//
// Numbers of the types that the simulated libraries compute with, read and written as double.
#pragma once

#include <cstdint>
#include <cstring>

namespace numbers {

enum Type { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 14 };  // cudaDataType

inline double read(const void* from, int type, size_t at) {
  if (type == FLOAT32) return ((const float*)from)[at];
  if (type == FLOAT64) return ((const double*)from)[at];
  const uint16_t bits = ((const uint16_t*)from)[at];
  if (type == BFLOAT16) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  _Float16 value;
  memcpy(&value, &bits, sizeof value);
  return (float)value;
}

inline void write(void* to, int type, size_t at, double value) {
  if (type == FLOAT32) ((float*)to)[at] = (float)value;
  if (type == FLOAT64) ((double*)to)[at] = value;
  if (type == FLOAT16) {
    const _Float16 half = (_Float16)value;
    memcpy((uint16_t*)to + at, &half, sizeof half);
  }
  if (type == BFLOAT16) {
    const float wide = (float)value;
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    ((uint16_t*)to)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

inline size_t bytes_of(int type) { return type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2; }

}  // namespace numbers
