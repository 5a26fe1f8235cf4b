// SPDX-License-Identifier: MIT
//
// Producer and consumers around the ring of stages:
//
//   producer, one thread             consumers, two warpgroups of half the rows each, 64 at a time
//   wait until `empty`               wait until `full`
//   expect STAGE_BYTES on `full`     start the products of this stage
//   start its copies                 wait for those of the stage before; one thread a warpgroup arrives on its `empty`
//
// `full` counts one arrival and the bytes of all copies, `empty` one arrival of each consumer of each block of the cluster, since the
// copies of B go to all of them.
//
// SWAPPED: consumers take turns, a tile each, so that one multiplies while the other stores.  A stage's barriers tell
// two of its uses apart and no more, so that a consumer has to know that the other's tile is through before it waits
// for `full`: `turn` of a consumer counts the threads of the other that have seen the last stage of their tile, terms
// included.
//
// adds_tiles, masks_tiles: what is added to a tile, and the mask of a ReLU, come through the ring too, behind the last
// products: 128 bytes of each of its rows in a stage, where A lies otherwise, which every thread applies to its sums.  So
// as much of it is under way as of the operands; loaded by the storing warps, a strip at a time, it kept an H200 waiting.
// Scale and shift come before it, a bias behind it.
#pragma once

#include "common/device_mma.cuh"
#include "common/epilogue.cuh"
#include "hopper/operands.cuh"

// Whether the input of a norm comes through the ring too, the last term of an input's gradient (sums.cuh).
constexpr bool READS_NORM = NORM_SUMS && HAS_MASK;

// Wait until all blocks of the cluster have read what lies in a stage; a new stage's barrier lets all pass.
CB_DEVICE void wait_empty(const Shared& shared, const Ring& ring) {
  cb_barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
}

CB_DEVICE void release(const Shared& shared, int stage) {
  const int thread = cb_thread() % WARPGROUP;
  if constexpr (CLUSTER == 1) {
    if (thread == 0) cb_barrier_arrive(shared.empty(stage));
  } else {
    if (thread < CLUSTER) cb_barrier_arrive_remote(shared.empty(stage), (u32)thread);
  }
}

CB_DEVICE void produce(Loader loader, int count, const Shared& shared, Ring& ring) {
  CB_NO_UNROLL
  for (int step = 0; step < count; ++step) {
    wait_empty(shared, ring);
    u64* full = shared.full(ring.stage);
    cb_barrier_expect(full, STAGE_BYTES);
    loader.load_a(shared.a(ring.stage), full);
    loader.load_b(shared.b(ring.stage), full);
    loader.advance();
    ring.advance();
  }
}

// Whether the output has columns of this number of a tile: ROW_ELEMENTS of them take a stage.
CB_DEVICE bool has_columns(const Walk& walk, const Task& task, int number) {
  return number * ROW_ELEMENTS < walk.n - task.n;
}

// Number of stages behind the products of a swapped tile, whose columns take one stage for each term.
CB_DEVICE int num_terms(const Walk& walk) {
  if constexpr (!SWAPPED || !ADDS_TILES) return 0;
  return (walk.adds_tiles ? 1 : 0) + (HAS_MASK && walk.masks_tiles ? 1 : 0) + (READS_NORM ? 1 : 0);
}

// Load what is added to a tile (`added`), its mask, and a norm's input, a stage each for the same columns.
CB_DEVICE void produce_terms(const TensorMap* added, const TensorMap* mask, const TensorMap* normed, const Walk& walk,
                             const Task& task, const Shared& shared, Ring& ring) {
  constexpr int TERMS = READS_NORM ? 3 : 2;
  CB_NO_UNROLL
  for (int term = 0; term < TERMS * (TILE_N / ROW_ELEMENTS) && has_columns(walk, task, term / TERMS); ++term) {
    const bool is_mask = term % TERMS == 1, is_norm = term % TERMS == 2;
    if (!(is_norm || (is_mask ? HAS_MASK && walk.masks_tiles : walk.adds_tiles))) continue;
    wait_empty(shared, ring);
    u64* full = shared.full(ring.stage);
    cb_barrier_expect(full, A_BYTES);
    const TensorMap* map = is_norm ? normed : is_mask ? mask : added;
    const int column = task.n + term / TERMS * ROW_ELEMENTS;
    if constexpr (PHASE_ROWS) {
      const Pixel pixel(walk, task.m);
      cb_tma_load_im2col<1>(shared.a(ring.stage), map, full, column, walk.out_left + pixel.column * walk.out_stride_w,
                            walk.out_top + pixel.row * walk.out_stride_h, pixel.n, 0, 0);
    } else {
      cb_tma_load_2d<1>(shared.a(ring.stage), map, full, column, task.m);
    }
    ring.advance();
  }
}

// Place of the row that this lane names, of 16 rows of 128 swizzled bytes, where the four matrices of 8 x 8 that lie
// there are those of sums 4 i to 4 i + 7 of a swapped tile: matrices 0 and 1 are 8 rows of this warp's 16 columns.
CB_DEVICE u32 swapped_place() {
  const u32 lane = (u32)cb_lane(), column = (u32)cb_warp() % 4 * 2 + lane / 8 % 2;  // of 8 elements
  return (lane / 16 * 8 + lane % 8) * SWIZZLE_ROW + (column ^ lane % 8) * 16;
}

// Column of a swapped tile whose sums 4 i + 2 half and the next a lane holds.
CB_DEVICE int swapped_column(int half) { return cb_warp() % 4 * 16 + cb_lane() / 4 + 8 * half; }

// Apply a stage to the sums of its columns: add it, or set to zero where it is not positive.  NaN lets a sum pass.
// `joins` counts how often this consumer's threads have waited for each other.
CB_DEVICE void apply_stage(bool is_mask, int number, int consumer, const Shared& shared, Ring& ring, u32& joins,
                           float (&sum)[STACKED][SUMS]) {
  const int lane = cb_lane(), pair = lane % 4 * 2;
  cb_barrier_wait(shared.full(ring.stage), ring.parity);
  const auto apply = [&](float& target, float value) {
    target = !is_mask ? target + value : value <= 0.0f ? 0.0f : target;
  };
  if constexpr (SWAPPED) {
    const unsigned char* tile = shared.a(ring.stage);
    CB_UNROLL
    for (int i = 0; i < TILE_M / 16; ++i) {  // 16 rows of this warp's 16 columns, transposed
      u32 words[4];
      cb_wgmma_hold(sum[0]);  // loads that move ahead of other rows' sums spill registers
      cb_load_matrices_transposed(words, tile + 16 * i * SWIZZLE_ROW + swapped_place());
      CB_UNROLL
      for (int j = 0; j < 4; ++j) {
        const Vec<CB_ELEMENT, 2> term = *reinterpret_cast<const Vec<CB_ELEMENT, 2>*>(&words[j]);
        CB_UNROLL
        for (int k = 0; k < 2; ++k) apply(sum[0][8 * i + 2 * j + k], to_float(term.v[k]));
      }
    }
  }
  CB_UNROLL
  for (int at = 0; at < (SWAPPED ? 0 : STACKED); ++at) {
    CB_UNROLL
    for (int i = 0; i < ROW_ELEMENTS / 4; ++i) {  // two neighbors in row lane / 4, and 8 further down
      const int row = (consumer * STACKED + at) * WGMMA_M + cb_warp() % 4 * WARP_ROWS + lane / 4 + i % 2 * 8;
      const u32 byte = (i / 2 * 8 + pair) * sizeof(CB_ELEMENT);
      const unsigned char* from = shared.a(ring.stage) + row * SWIZZLE_ROW + (byte / 16 ^ row % 8) * 16 + byte % 16;
      const Vec<CB_ELEMENT, 2> term = cb_read<CB_ELEMENT, 2>(reinterpret_cast<const CB_ELEMENT*>(from));
      CB_UNROLL
      for (int j = 0; j < 2; ++j) apply(sum[at][number * (ROW_ELEMENTS / 2) + i * 2 + j], to_float(term.v[j]));
    }
  }
  cb_proxy_fence();  // unlike products these reads are no copy engine's: the next copy must not overtake them
  cb_barrier_arrive(shared.joined(consumer));  // all have read before one of them signals it
  cb_barrier_wait(shared.joined(consumer), joins++ & 1);
  release(shared, ring.stage);
  ring.advance();
}

// Apply what comes through the ring; `finish` is called with the number of each 64 columns that are through.
template <class Finish>
CB_DEVICE void apply_terms(const Walk& walk, const Task& task, int consumer, const Shared& shared, Ring& ring,
                           u32& joins, float (&sum)[STACKED][SUMS], const Finish& finish) {
  CB_UNROLL
  for (int number = 0; number < TILE_N / ROW_ELEMENTS; ++number) {
    if (!has_columns(walk, task, number)) break;
    CB_NO_UNROLL
    for (int term = 0; term < (HAS_MASK ? 2 : 1); ++term) {  // one copy of the code for both, which needs fewer registers
      if (term ? walk.masks_tiles : walk.adds_tiles) apply_stage(term, number, consumer, shared, ring, joins, sum);
    }
    finish(number);
  }
}

// Multiply the sums of each column by its scale and add its shift, before anything else happens to them.
CB_DEVICE void scale_sums(const float* scale, const float* shift, const Walk& walk, const Task& task,
                          float (&sum)[STACKED][SUMS]) {
  if constexpr (SWAPPED) {
    float factor[2] = {}, term[2] = {};
    CB_UNROLL
    for (int half = 0; half < 2; ++half) {  // a lane has all rows of two columns
      const int column = task.n + swapped_column(half);
      if (column < walk.n) {
        factor[half] = cb_load<float, 1>(scale + column).v[0];
        term[half] = cb_load<float, 1>(shift + column).v[0];
      }
    }
    CB_UNROLL
    for (int i = 0; i < SUMS; ++i) sum[0][i] = fmaf(sum[0][i], factor[i / 2 % 2], term[i / 2 % 2]);
    return;
  }
  const int first = task.n + cb_lane() % 4 * 2;
  CB_UNROLL
  for (int group = 0; group < SUMS / 4; ++group) {  // of 8 columns, of which a lane has 2
    const int column = first + 8 * group;
    if (column >= walk.n) break;
    const Vec<float, 2> factor = cb_load<float, 2>(scale + column), term = cb_load<float, 2>(shift + column);
    CB_UNROLL
    for (int at = 0; at < STACKED; ++at) {
      CB_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& target = sum[at][4 * group + i];
        target = fmaf(target, factor.v[i % 2], term.v[i % 2]);
      }
    }
  }
}

// Wait until the other consumer is through with its tile; in the first round the first one does not wait.
CB_DEVICE void wait_turn(const Shared& shared, int consumer, int round) {
  cb_barrier_wait(shared.turn(consumer), (u32)((round + consumer + 1) & 1));
}

CB_DEVICE void consume(int count, int terms, int consumer, const Shared& shared, Ring& ring,
                       float (&sum)[STACKED][SUMS]) {
  CB_UNROLL
  for (int at = 0; at < STACKED; ++at) {
    CB_UNROLL
    for (int i = 0; i < SUMS; ++i) sum[at][i] = 0.0f;
    cb_wgmma_hold(sum[at]);
  }
  int before = 0;
  CB_NO_UNROLL
  for (int step = 0; step < count; ++step) {
    cb_barrier_wait(shared.full(ring.stage), ring.parity);
    const u64 b = describe_b(shared.b(ring.stage));
    cb_wgmma_fence();
    CB_UNROLL
    for (int k = 0; k < PRODUCTS; ++k) {
      CB_UNROLL
      for (int at = 0; at < STACKED; ++at) {
        const u64 a = describe_a(shared.a(ring.stage), SWAPPED ? 0 : consumer * STACKED + at);
        if constexpr (SWAPPED) {
          cb_wgmma<CB_ELEMENT, WGMMA_N, B_TURNED, A_TURNED>(sum[at], b + k * B_AHEAD, a + k * A_AHEAD);
        } else {
          cb_wgmma<CB_ELEMENT, WGMMA_N, A_TURNED, B_TURNED>(sum[at], a + k * A_AHEAD, b + k * B_AHEAD);
        }
      }
    }
    cb_wgmma_commit();
    cb_wgmma_wait<1>();
    if (step > 0) release(shared, before);
    before = ring.stage;
    ring.advance();
  }
  if constexpr (SWAPPED) {
    Ring ahead = ring;
    CB_NO_UNROLL
    for (int term = 0; term < terms; ++term, ahead.advance()) cb_barrier_wait(shared.full(ahead.stage), ahead.parity);
    cb_barrier_arrive(shared.turn(1 - consumer));
  }
  cb_wgmma_wait<0>();
  CB_UNROLL
  for (int at = 0; at < STACKED; ++at) cb_wgmma_hold(sum[at]);
  if (count > 0) release(shared, before);
}
