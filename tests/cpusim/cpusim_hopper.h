// SPDX-License-Identifier: MIT
//
// The CPU twin of every name in the GPU branch of common/device_hopper.cuh, which includes this file.
//
// A tensor map is the plain record that tests/cpusim/simulator.py makes of a cubatch.tensor_map.TensorMap.  Shared
// memory has addresses as on a GPU, from which descriptors are made and which the swizzle looks at.  What moves bytes
// and multiplies is here, in the unit the sanitizers instrument; when it happens is the runtime's.
#pragma once

#include "runtime_hopper.h"

// Mirrored by tests/cpusim/simulator.py.
struct TensorMap {
  u64 address;
  u32 is_im2col, rank, element_bytes, rounds_to_tf32;
  u32 dims[4];     // innermost first
  u64 strides[3];  // bytes, of dims 1, 2, 3
  u32 box[4];      // elements; of im2col channels and pixels
  u32 steps[4];    // of im2col: pixels between neighbours
  int32_t lower_w, lower_h, upper_w, upper_h;
  u64 unused[2];
};
static_assert(sizeof(TensorMap) == 128);

#define CB_GRID_CONSTANT const
#define CB_TENSOR_MAP CB_GRID_CONSTANT TensorMap
// One in a source: all kernels of a source have its cluster here.
#define CB_CLUSTER_KERNEL(threads, cluster)        \
  constexpr uint32_t cpusim_cluster = (cluster); \
  CB_KERNEL(threads, 1)

#define CPUSIM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Shared memory starts at 1024: there is no address 0.
constexpr u32 CPUSIM_SHARED_START = 1024;
CB_DEVICE u32 cb_shared_address(const void* shared) {
  return (u32)(static_cast<const unsigned char*>(shared) - cpusim_dynamic_shared()) + CPUSIM_SHARED_START;
}
CB_DEVICE unsigned char* cpusim_at_address(u32 address) {
  return cpusim_dynamic_shared() + (address - CPUSIM_SHARED_START);
}
// The 128-byte swizzle: bits 4 to 6 of an address are crossed with bits 7 to 9.
CB_DEVICE u32 cpusim_swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

CB_DEVICE void cb_barrier_init(u64* barrier, u32 arrivals, CPUSIM_HERE) {
  cpusim_barrier_init((uint64_t*)barrier, arrivals, cpusim_place(file, line));
}
CB_DEVICE void cb_barrier_init_fence() { cpusim_fence_barriers(); }
CB_DEVICE void cb_barrier_arrive(u64* barrier, CPUSIM_HERE) {
  cpusim_barrier_arrive((uint64_t*)barrier, 0, cpusim_place(file, line));
}
CB_DEVICE void cb_barrier_arrive_remote(u64* barrier, u32 rank, CPUSIM_HERE) {
  cpusim_barrier_arrive_remote((uint64_t*)barrier, rank, cpusim_place(file, line));
}
CB_DEVICE void cb_barrier_expect(u64* barrier, u32 bytes, CPUSIM_HERE) {
  cpusim_barrier_arrive((uint64_t*)barrier, bytes, cpusim_place(file, line));
}
CB_DEVICE void cb_barrier_wait(u64* barrier, u32 parity, CPUSIM_HERE) {
  cpusim_barrier_wait((uint64_t*)barrier, parity, cpusim_place(file, line));
}
CB_DEVICE void cb_proxy_fence() { cpusim_fence_writes(); }

CB_DEVICE u32 cb_cluster_rank() { return cpusim_cluster_rank(); }
#define cb_cluster_sync() cpusim_cluster_sync(CPUSIM_PLACE)

CB_DEVICE void cb_tma_prefetch(const TensorMap*) {}

// float to the nearest number with 10 bits of fraction, ties to even; infinities and NaN stay what they are.
CB_DEVICE u32 cpusim_tf32(u32 bits) {
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

// One 128-byte row of a tile at `row`, from `channel` on; `from` is the row's first element, null for a row of zeros.
inline void cpusim_load_row(const TensorMap& map, u32 row, const unsigned char* from, int channel) {
  const i64 row_bytes = (i64)map.dims[0] * map.element_bytes;
  for (int piece = 0; piece < 8; ++piece) {
    const i64 begin = (i64)channel * map.element_bytes + 16 * piece;
    u32 words[4] = {};
    if (from != nullptr && begin >= 0 && begin + 16 <= row_bytes) {
      for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const u32*>(from + begin)[i];
    } else if (from != nullptr) {
      for (int i = 0; i < 16; ++i) {
        if (begin + i >= 0 && begin + i < row_bytes) reinterpret_cast<unsigned char*>(words)[i] = from[begin + i];
      }
    }
    u32* to = reinterpret_cast<u32*>(cpusim_at_address(cpusim_swizzled(row + 16 * piece)));
    for (int i = 0; i < 4; ++i) to[i] = map.rounds_to_tf32 ? cpusim_tf32(words[i]) : words[i];
  }
}

inline void cpusim_load_tiled(const CpusimTensorCopy* copy) {
  const TensorMap& map = reinterpret_cast<const TensorMap&>(copy->map);
  u32 row = cb_shared_address(copy->shared);
  for (u32 z = 0; z < map.box[2]; ++z) {
    for (u32 y = 0; y < map.box[1]; ++y, row += 128) {
      const i64 at_y = (i64)copy->at[1] + y, at_z = (i64)copy->at[2] + z;
      const bool exists = at_y >= 0 && at_y < map.dims[1] && at_z >= 0 && at_z < map.dims[2];
      const unsigned char* array = reinterpret_cast<const unsigned char*>(map.address);
      const i64 at = at_y * (i64)map.strides[0] + at_z * (i64)map.strides[1];
      cpusim_load_row(map, row, exists ? array + at : nullptr, copy->at[0]);
    }
  }
}

// Walk over pixels: along w, then h, then n, between the corners; the tap's offsets move what is read alone.
inline void cpusim_load_im2col(const CpusimTensorCopy* copy) {
  const TensorMap& map = reinterpret_cast<const TensorMap&>(copy->map);
  const int end_w = (int)map.dims[1] + map.upper_w, end_h = (int)map.dims[2] + map.upper_h;
  int w = copy->at[1], h = copy->at[2], n = copy->at[3];
  u32 row = cb_shared_address(copy->shared);
  for (u32 pixel = 0; pixel < map.box[1]; ++pixel, row += 128) {
    const int at_w = w + copy->offset[0], at_h = h + copy->offset[1];
    const bool exists = at_w >= 0 && at_w < (int)map.dims[1] && at_h >= 0 && at_h < (int)map.dims[2] && n >= 0 &&
                        n < (int)map.dims[3];
    const unsigned char* array = reinterpret_cast<const unsigned char*>(map.address);
    const i64 at = at_w * (i64)map.strides[0] + at_h * (i64)map.strides[1] + n * (i64)map.strides[2];
    cpusim_load_row(map, row, exists ? array + at : nullptr, copy->at[0]);
    if ((w += (int)map.steps[1]) < end_w) continue;
    w = map.lower_w;
    if ((h += (int)map.steps[2]) < end_h) continue;
    h = map.lower_h;
    ++n;
  }
}

inline void cpusim_store_tiled(const CpusimTensorCopy* copy) {
  const TensorMap& map = reinterpret_cast<const TensorMap&>(copy->map);
  u32 row = cb_shared_address(copy->shared);
  for (u32 y = 0; y < map.box[1]; ++y, row += 128) {
    const i64 at_y = (i64)copy->at[1] + y;
    if (at_y >= map.dims[1]) continue;
    unsigned char* to = reinterpret_cast<unsigned char*>(map.address) + at_y * (i64)map.strides[0];
    for (u32 x = 0; x < map.box[0]; ++x) {
      const i64 at_x = (i64)copy->at[0] + x;
      if (at_x >= map.dims[0]) continue;
      const unsigned char* from = cpusim_at_address(cpusim_swizzled(row + x * map.element_bytes));
      for (u32 i = 0; i < map.element_bytes; ++i) to[at_x * map.element_bytes + i] = from[i];
    }
  }
}

CB_DEVICE void cpusim_copy(void (*run)(const CpusimTensorCopy*), const TensorMap* map, const void* shared, u64* barrier,
                           u32 rank, bool is_im2col, int blocks, int c0, int c1, int c2, int c3, int offset_w,
                           int offset_h, const char* file, int line) {
  if (map->rank != rank || (map->is_im2col != 0) != is_im2col) cpusim_fail(file, line, "a copy of another kind of map");
  const u32 rows = is_im2col ? map->box[1] : map->box[1] * map->box[2];
  if (map->box[0] * map->element_bytes != 128) cpusim_fail(file, line, "a tile whose rows are not 128 bytes");
  if (cb_shared_address(shared) % 128 != 0) cpusim_fail(file, line, "a tile that is not aligned to 128 bytes");
  if ((i64)c0 * map->element_bytes % 16) cpusim_fail(file, line, "a tile that starts between multiples of 16 bytes");
  if (!cpusim_in_shared(shared, rows * 128)) cpusim_fail(file, line, "a tile outside of shared memory");
  const u32 mask = blocks == 1 ? 0 : (1u << blocks) - 1;
  CpusimTensorCopy copy{run, {}, (unsigned char*)const_cast<void*>(shared), (uint64_t*)barrier, rows * 128, mask,
                        {c0, c1, c2, c3}, {offset_w, offset_h}, cpusim_place(file, line)};
  memcpy(copy.map, map, sizeof(copy.map));
  cpusim_start_copy(&copy);
}

template <int BLOCKS>
CB_DEVICE void cb_tma_load_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, CPUSIM_HERE) {
  cpusim_copy(cpusim_load_tiled, map, shared, barrier, 2, false, BLOCKS, c0, c1, 0, 0, 0, 0, file, line);
}
template <int BLOCKS>
CB_DEVICE void cb_tma_load_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2, CPUSIM_HERE) {
  cpusim_copy(cpusim_load_tiled, map, shared, barrier, 3, false, BLOCKS, c0, c1, c2, 0, 0, 0, file, line);
}
template <int BLOCKS>
CB_DEVICE void cb_tma_load_im2col(void* shared, const TensorMap* map, u64* barrier, int c, int w, int h, int n,
                                  u16 offset_w, u16 offset_h, CPUSIM_HERE) {
  if (offset_w > 255 || offset_h > 255) cpusim_fail(file, line, "an offset of more than 8 bits");
  const int end_w = (int)map->dims[1] + map->upper_w, end_h = (int)map->dims[2] + map->upper_h;
  if (w < map->lower_w || w >= end_w || h < map->lower_h || h >= end_h || (w - map->lower_w) % (int)map->steps[1] ||
      (h - map->lower_h) % (int)map->steps[2]) {
    cpusim_fail(file, line, "a first pixel that is none between the map's corners");
  }
  cpusim_copy(cpusim_load_im2col, map, shared, barrier, 4, true, BLOCKS, c, w, h, n, offset_w, offset_h, file, line);
}
CB_DEVICE void cb_tma_store_2d(const TensorMap* map, const void* shared, int c0, int c1, CPUSIM_HERE) {
  if (c0 < 0 || c1 < 0) cpusim_fail(file, line, "a store that starts before the first row or column");
  cpusim_copy(cpusim_store_tiled, map, shared, nullptr, 2, false, 1, c0, c1, 0, 0, 0, 0, file, line);
}
CB_DEVICE void cb_tma_store_commit() { cpusim_commit_stores(); }
template <int PENDING>
CB_DEVICE void cb_tma_store_wait_read() {
  cpusim_wait_stores(PENDING);
}

// Each lane writes its own words, to the rows that others name.
CB_DEVICE void cpusim_store_matrices(const char* place, void* row, const u32 (&value)[4], const char* file, int line) {
  cpusim_check_aligned(row, 16, "cb_store_matrices to a misaligned row", file, line);
  if (!cpusim_in_shared(row, 16)) cpusim_fail(file, line, "cb_store_matrices to what is not shared memory");
  for (int i = 0; i < 4; ++i) {
    const u64 at = cpusim_exchange(reinterpret_cast<uintptr_t>(row), 8 * i + cb_lane() / 4, place);
    cb_write<u32, 1>(reinterpret_cast<u32*>(at) + cb_lane() % 4, Vec<u32, 1>{{value[i]}}, file, line);
  }
}
#define cb_store_matrices(row, value) cpusim_store_matrices(CPUSIM_PLACE, row, value, __FILE__, __LINE__)

// Each lane writes two elements of a column, to two of the rows that others name.
CB_DEVICE void cpusim_store_matrices_transposed(const char* place, void* row, const u32 (&value)[4], const char* file,
                                                int line) {
  cpusim_check_aligned(row, 16, "cb_store_matrices_transposed to a misaligned row", file, line);
  if (!cpusim_in_shared(row, 16)) cpusim_fail(file, line, "cb_store_matrices_transposed to what is not shared memory");
  for (int i = 0; i < 8; ++i) {
    const u64 at = cpusim_exchange(reinterpret_cast<uintptr_t>(row), 8 * (i / 2) + cb_lane() % 4 * 2 + i % 2, place);
    const u16 element = (u16)(value[i / 2] >> (16 * (i % 2)));
    cb_write<u16, 1>(reinterpret_cast<u16*>(at) + cb_lane() / 4, Vec<u16, 1>{{element}}, file, line);
  }
}
#define cb_store_matrices_transposed(row, value) \
  cpusim_store_matrices_transposed(CPUSIM_PLACE, row, value, __FILE__, __LINE__)

template <int COUNT>
CB_DEVICE void cb_registers_release(CPUSIM_HERE) {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg counts by 8, from 24 to 256");
  cpusim_meet_warpgroup(cpusim_place(file, line));
}
template <int COUNT>
CB_DEVICE void cb_registers_request(CPUSIM_HERE) {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg counts by 8, from 24 to 256");
  cpusim_meet_warpgroup(cpusim_place(file, line));
}

CB_DEVICE u64 cb_matrix_descriptor(const void* shared, u32 leading, u32 stride) {
  const u64 address = cb_shared_address(shared);
  return (address & 0x3ffff) >> 4 | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)1 << 62;
}
CB_DEVICE void cb_wgmma_fence() { cpusim_fence_sums(); }
CB_DEVICE void cb_wgmma_commit(CPUSIM_HERE) { cpusim_commit_products(cpusim_place(file, line)); }
template <int PENDING>
CB_DEVICE void cb_wgmma_wait(CPUSIM_HERE) {
  cpusim_wait_products(PENDING, cpusim_place(file, line));
}
template <int COUNT>
CB_DEVICE void cb_wgmma_hold(float (&)[COUNT]) {}
CB_DEVICE float cb_short_exp2(float x) { return exp2f(x); }
CB_DEVICE float cb_short_reciprocal(float x) { return 1.0f / x; }

// Where the element at place `outer` along m or n and `k` lies of a tile that a descriptor tells.
template <class T, bool TURNED>
CB_DEVICE const unsigned char* cpusim_place_of(u64 descriptor, int outer, int k) {
  const u32 start = (u32)(descriptor & 0x3fff) << 4, leading = (u32)(descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = (u32)(descriptor >> 32 & 0x3fff) << 4;
  u32 offset;
  if constexpr (TURNED) {
    offset = (u32)outer / 64 * leading + (u32)k / 8 * stride + (u32)k % 8 * 128 + (u32)outer % 64 * sizeof(T);
  } else {
    offset = (u32)outer / 8 * stride + (u32)outer % 8 * 128 + (u32)k * sizeof(T);
  }
  return cpusim_at_address(cpusim_swizzled(start + offset));
}

template <class T, bool TURNED>
CB_DEVICE float cpusim_element(u64 descriptor, int outer, int k) {
  const unsigned char* at = cpusim_place_of<T, TURNED>(descriptor, outer, k);
  if constexpr (sizeof(T) == 4) {  // the last 13 bits of a tf32 are not looked at
    const u32 bits = *reinterpret_cast<const u32*>(at) & ~0x1fffu;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  } else {
    return to_float(*reinterpret_cast<const T*>(at));
  }
}

// All 16-byte pieces of a tile, which has OUTER places of 32 bytes along gemm_k.
template <class T, bool TURNED, int OUTER>
CB_DEVICE void cpusim_check_tile(u64 descriptor, const char* place) {
  constexpr int PIECE = 16 / sizeof(T);
  for (int outer = 0; outer < OUTER; outer += TURNED ? PIECE : 1) {
    for (int k = 0; k < (int)(32 / sizeof(T)); k += TURNED ? 1 : PIECE) {
      cpusim_check_seen(cpusim_place_of<T, TURNED>(descriptor, outer, k), 16, place);
    }
  }
}

template <class T, int N, bool A_TURNED, bool B_TURNED>
void cpusim_check_tiles(const CpusimProduct* product) {
  cpusim_check_tile<T, A_TURNED, 64>(product->a, product->place);
  cpusim_check_tile<T, B_TURNED, N>(product->b, product->place);
}

template <class T, int N, bool A_TURNED, bool B_TURNED>
__attribute__((optimize("O3"))) void cpusim_multiply(const CpusimProduct* product, float* const* sums) {
  constexpr int K = 32 / sizeof(T);
  static float a[64][K], b[K][N];
  for (int k = 0; k < K; ++k) {
    for (int m = 0; m < 64; ++m) a[m][k] = cpusim_element<T, A_TURNED>(product->a, m, k);
    for (int n = 0; n < N; ++n) b[k][n] = cpusim_element<T, B_TURNED>(product->b, n, k);
  }
  for (int m = 0; m < 64; ++m) {
    float row[N] = {};
    for (int k = 0; k < K; ++k) {
      for (int n = 0; n < N; ++n) row[n] += a[m][k] * b[k][n];
    }
    for (int n = 0; n < N; ++n) {
      sums[m / 16 * 32 + m % 8 * 4 + n % 8 / 2][n / 8 * 4 + m % 16 / 8 * 2 + n % 2] += row[n];
    }
  }
}

template <class T, int N, bool A_TURNED, bool B_TURNED>
CB_DEVICE void cb_wgmma(float (&d)[N / 2], u64 a, u64 b, CPUSIM_HERE) {
  static_assert(N == 64 || N == 128 || (N == 192 && sizeof(T) == 2) || N == 256, "the shapes that tiles use");
  static_assert(sizeof(T) == 2 || (!A_TURNED && !B_TURNED), "tf32 is multiplied along its contiguous axis");
  if (a >> 62 != 1 || b >> 62 != 1 || (a >> 49 & 7) != 0 || (b >> 49 & 7) != 0) {
    cpusim_fail(file, line, "a descriptor of another swizzle than that of 128 bytes");
  }
  const CpusimProduct product{cpusim_multiply<T, N, A_TURNED, B_TURNED>, cpusim_check_tiles<T, N, A_TURNED, B_TURNED>,
                              a, b, N / 2, cpusim_place(file, line)};
  cpusim_start_product(&product, d);
}
