// SPDX-License-Identifier: MIT
//
// Tensor maps: refused by the rules that cuda.h states, then written as the record that tests/cpusim reads.
#include <cstring>

#include "sim.h"

namespace sim {
namespace {

// TensorMap of tests/cpusim/cpusim_hopper.h, in the 128 bytes of CUtensorMap.
struct __attribute__((packed)) Record {
  uint64_t address;
  uint32_t is_im2col, rank, element_bytes, rounds_to_tf32;
  uint32_t extents[4];
  uint64_t strides[3];
  uint32_t box[4], steps[4];
  int32_t lower[2], upper[2];
  uint64_t unused[2];
};
static_assert(sizeof(Record) == 128, "a CUtensorMap has 128 bytes");

int element_bytes(int type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 4;
  }
}

// Collects what is wrong with a map.
struct Check {
  bool ok = true;
  void need(bool holds, const char* what) {
    if (!holds) say("a tensor map is refused: %s", what);
    ok &= holds;
  }
};
#define NEED(condition) check.need(condition, #condition)

struct Wanted {
  CUtensorMap* to;
  int type;
  unsigned rank;
  void* address;
  const cuuint64_t *extents, *strides;
  int interleave, swizzle, promotion, fill;
};

Record describe(const Wanted& wanted, Check& check) {
  const unsigned rank = wanted.rank;
  Record map{};
  map.address = (uint64_t)wanted.address;
  map.rank = rank;
  map.element_bytes = element_bytes(wanted.type);
  map.rounds_to_tf32 = wanted.type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  NEED((uintptr_t)wanted.to % 64 == 0);
  NEED(rank >= 1 && rank <= 4);  // 5 too by cuda.h: nothing here has so many
  NEED((uintptr_t)wanted.address % 16 == 0);
  NEED(wanted.interleave == CU_TENSOR_MAP_INTERLEAVE_NONE);  // nothing here interleaves
  NEED(wanted.swizzle >= 0 && wanted.swizzle <= CU_TENSOR_MAP_SWIZZLE_128B);
  NEED(wanted.promotion >= 0 && wanted.promotion <= CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  NEED(wanted.fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (!check.ok) return map;
  uint64_t bytes = map.element_bytes;
  for (unsigned i = 0; i < 4; ++i) map.extents[i] = map.box[i] = map.steps[i] = 1;
  for (unsigned i = 0; i < rank; ++i) {
    NEED(wanted.extents[i] > 0 && wanted.extents[i] <= 1ull << 32);
    map.extents[i] = (uint32_t)wanted.extents[i];
  }
  for (unsigned i = 0; i + 1 < rank; ++i) {
    map.strides[i] = wanted.strides[i];
    NEED(wanted.strides[i] % 16 == 0 && wanted.strides[i] < 1ull << 40);
    // Pixels may overlap: cuda.h shows strides of arrays with padding, but names no rule against shorter ones.
    if (i) NEED(wanted.strides[i] >= wanted.extents[i] * wanted.strides[i - 1]);
    bytes = wanted.strides[i] * (wanted.extents[i + 1] - 1) + (i ? bytes : wanted.extents[0] * map.element_bytes);
  }
  NEED(holds(wanted.address, bytes));
  return map;
}

CUresult write(const Wanted& wanted, const Record& map, const Check& check) {
  if (!check.ok || planted("tensor-map", map.is_im2col ? "im2col" : "tiled")) return CUDA_ERROR_INVALID_VALUE;
  memcpy(wanted.to, &map, sizeof map);
  return CUDA_SUCCESS;
}

CUresult refused() {
  if (broken(current_device())) return (CUresult)broken(current_device());
  return gpu(current_device()).major < 9 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

}  // namespace
}  // namespace sim

using namespace sim;

API CUresult cuTensorMapEncodeTiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                    const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                                    const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill) {
  Guard guard(lock);
  if (CUresult status = refused()) return status;
  Check check;
  const Wanted wanted{to, type, rank, address, extents, strides, interleave, swizzle, promotion, fill};
  Record map = describe(wanted, check);
  if (check.ok) {
    for (unsigned i = 0; i < rank; ++i) {
      NEED(box[i] >= 1 && box[i] <= 256);
      NEED(steps[i] == 1);  // 1 to 8 by cuda.h: nothing here steps
      map.box[i] = box[i];
    }
    NEED(box[0] * map.element_bytes % 16 == 0);
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) NEED(box[0] * map.element_bytes <= 128);
  }
  return write(wanted, map, check);
}

API CUresult cuTensorMapEncodeIm2col(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                     const cuuint64_t* extents, const cuuint64_t* strides, const int* lower,
                                     const int* upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  Guard guard(lock);
  if (CUresult status = refused()) return status;
  Check check;
  const Wanted wanted{to, type, rank, address, extents, strides, interleave, swizzle, promotion, fill};
  Record map = describe(wanted, check);
  map.is_im2col = 1;
  if (check.ok) {
    NEED(rank == 4);  // 3 and 5 too by cuda.h
    NEED(channels >= 1 && channels <= 256 && pixels >= 1 && pixels <= 1024);
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) NEED(channels * map.element_bytes <= 128);
    map.box[0] = channels, map.box[1] = pixels;
    for (unsigned i = 0; i < rank && i < 4; ++i) {
      NEED(steps[i] >= 1 && steps[i] <= 8);
      map.steps[i] = steps[i];
    }
    for (int i = 0; i < 2; ++i) {
      NEED(lower[i] >= -128 && lower[i] <= 127 && upper[i] >= -128 && upper[i] <= 127);
      map.lower[i] = lower[i], map.upper[i] = upper[i];
    }
  }
  return write(wanted, map, check);
}
