// SPDX-License-Identifier: MIT
//
// The ring of NUM_STAGES buffers in shared memory that the main loops of simt/ and mma/ walk around.
//
//   NUM_STAGES = 2   the next tile waits in registers until the second buffer may take it
//   NUM_STAGES > 2   cp.async fills the buffers, NUM_STAGES - 1 tiles ahead (from sm_80 on)
//
// A family defines before it includes this: NUM_STAGES, and of its operands
//
//   fetch<WHOLE>(shared, byte, count)   sets a tile on its way to that byte of shared memory: a WHOLE one, or one of
//                                       which the first `count` places along gemm_k exist and the others are zeros
//   put(shared, byte)                   puts there what waits in registers
//   source                              where it comes from, see operand_sources.cuh
#pragma once

#include "common/product_run.cuh"

#ifndef NUM_STAGES
#error "a family defines NUM_STAGES: buffers of the ring"
#endif

CB_DEVICE void commit_copies() {
#if CB_ARCH >= 80
  if constexpr (NUM_STAGES > 2) cb_copy_commit();
#endif
}

// Wait for the tile that is read next: the copies of the NUM_STAGES - 2 tiles after it may be under way.
CB_DEVICE void wait_for_copies() {
#if CB_ARCH >= 80
  if constexpr (NUM_STAGES > 2) cb_copy_wait<NUM_STAGES - 2>();
#endif
}

// Set the next tiles of both operands on their way.
template <class A, class B, class Shared>
CB_DEVICE void fetch_next(A& a, B& b, Shared* shared, u32 a_target, u32 b_target) {
  a.template fetch<true>(shared, a_target, TILE_K);
  b.template fetch<true>(shared, b_target, TILE_K);
  a.source.advance();
  b.source.advance();
}

// Fill all buffers but one, STAGE bytes each, and wait for the first; the targets go on to the one that is left.
template <u32 STAGE, class A, class B, class Shared>
CB_DEVICE void fill_ring(A& a, B& b, const Run& run, Shared* shared, u32& a_target, u32& b_target) {
  a.source.seek(0, run.first);
  b.source.seek(0, run.first);
  a.template fetch<false>(shared, a_target, run.count);
  b.template fetch<false>(shared, b_target, run.count);
  a.source.seek(run.first, run.first + run.count);
  b.source.seek(run.first, run.first + run.count);
  CB_UNROLL
  for (int stage = 0; stage < NUM_STAGES - 1; ++stage) {
    if (stage > 0 && stage < run.tiles) fetch_next(a, b, shared, a_target, b_target);
    if (stage < run.tiles) {
      a.put(shared, a_target);
      b.put(shared, b_target);
    }
    commit_copies();
    a_target += STAGE;
    b_target += STAGE;
  }
  wait_for_copies();
  cb_sync();
}
