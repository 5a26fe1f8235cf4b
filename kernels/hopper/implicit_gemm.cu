// SPDX-License-Identifier: MIT
//
// Matrix products and the three passes of a convolution, as one, on Hopper's tensor cores: tensor copies (TMA) feed
// wgmma, for sm_90a.
//
//   -DOPERATION_...   gemm_m             gemm_n            gemm_k                A                  B
//   GEMM_NN           m                  n                 k                     a[m, k]            b[k, n]
//   GEMM_NT           m                  n                 k                     a[m, k]            b[n, k]
//   GEMM_TN           m                  n                 k                     a[k, m]            b[k, n]
//   CONV2D_FPROP      output pixel       filter k          filter tap, c         x, im2col          w[k, tap, c]
//   CONV2D_DGRAD      input pixel of     channel c         taps of the phase, k  dy, im2col         w[k, tap, c]
//                     one phase
//   CONV2D_WGRAD      filter k           filter tap, c     output pixel          dy[pixel, k]       x, im2col
//
// A block owns an SM and computes one TILE_M x TILE_N tile of the output after another.  Of its three warpgroups one
// thread of the first moves data and the other two multiply, each half the rows (main_loop.cuh).  The picture is of
// 128x256x64, 16-bit elements; of 256x128x64, for outputs of 128 columns, a consumer has two products of 64 x 128, one
// below the other:
//
//                     TILE_N = 256              a stage of shared memory: A 16 KiB, B 32 KiB, each in swizzled rows of
//                   +-------------+             128 bytes = 64 elements along gemm_k (operands.cuh); 4 stages, 192 KiB
//          A        |      B      |
//        +----+     +-------------+
//        |    |     | consumer 0  |  64 rows    each consumer's 64 x 256 sums are 128 registers of its threads; the
//        +----+     +-------------+             producer's registers go to them (setmaxnreg)
//        |    |     | consumer 1  |  64 rows
//        +----+     +-------------+  --> store.cuh, through 4 KiB a warp --> common/epilogue.cuh
//
// SWAPPED, for outputs of 64 columns: those are wgmma's 64 rows, and 256 rows its columns, so that shared memory is
// read less than for 64 x 64.  Consumers take turns, a whole tile each:
//
//                     TILE_M = 256              a stage: A 32 KiB, B 8 KiB; 4 stages, 160 KiB
//                   +-------------+
//          B        |      A      |
//        +----+     +-------------+
//        |    |     |  consumer   |  64 columns --> store.cuh, which transposes them
//        +----+     +-------------+
//
// CLUSTER = 2: two blocks, neighbours along gemm_m, each load half of B for both.
//
//   grid      x: at most as many blocks as SMs, a multiple of CLUSTER; tiles are dealt out round robin
//   needs     rows of 16-byte multiples at 16-byte addresses; what tensor maps can say (cubatch/kernels/tensor_map.py);
//             gemm_m and the pixels below 2^31; no groups
//   phases    of a gradient, up to 4 in a launch, have a map of A and a walk each; one without taps writes what its
//             epilogue makes of zero, and is left out where that is added to what is there; -DPHASE_ROWS=1 finishes sums
//             in registers there too: a phase has maps of its own for the terms, and rows are stored one by one
//   slices    of a split gemm_k leave their sums in `partials`; simt/split_k_reduce.cu adds them up
//   norms     -DNORM_SUMS=1 also sums over the rows for a batch norm (sums.cuh); the copy engine stores the output then
//   curves    -DCURVE=... with it, an Activation: a gradient is multiplied by its slope at what else is the norm's input,
//             and sums over the rows are those of a bias
//   dtypes    half_t, bfloat16_t; float is multiplied as tf32, which wgmma reads along gemm_k alone: B of NN and DGRAD
//             has to come transposed, TN and WGRAD are not there
#ifndef CB_ELEMENT
#define CB_ELEMENT half_t
#endif
#ifndef TILE_M
#define TILE_M 128
#define TILE_N 256
#define TILE_K 64
#define NUM_STAGES 4
#define CLUSTER 1
#define DYNAMIC_SHARED_BYTES 230480
#endif
#ifndef SWAPPED
#define SWAPPED 0
#endif
#ifndef NORM_SUMS
#define NORM_SUMS 0
#endif
#ifndef PHASE_ROWS
#define PHASE_ROWS 0
#endif
#ifndef CURVE
#define CURVE 0
#endif

#include "common/epilogue.cuh"
#include "hopper/main_loop.cuh"
#include "hopper/store.cuh"
#if NORM_SUMS
#include "hopper/sums.cuh"
#endif

// Registers of a thread: 168 at entry, for 384 threads; then few for the producer, whose warpgroup gives back the rest.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <= 65536 / WARPGROUP, "an SM has 65536");

#if CLUSTER > 1
CB_CLUSTER_KERNEL(NUM_THREADS, CLUSTER)
#else
CB_KERNEL(NUM_THREADS, 1)
#endif
ENTRY(CB_TENSOR_MAP a_map,
#if defined(OPERATION_CONV2D_DGRAD)
      CB_TENSOR_MAP a_map_1, CB_TENSOR_MAP a_map_2, CB_TENSOR_MAP a_map_3,
#endif
      CB_TENSOR_MAP b_map, CB_TENSOR_MAP out_map, CB_TENSOR_MAP added_map, CB_TENSOR_MAP mask_map, CB_ELEMENT* out,
      const CB_ELEMENT* bias, const float* scale, const float* shift, const CB_ELEMENT* residual,
      const CB_ELEMENT* mask, float* partials,
#if PHASE_ROWS
      CB_TENSOR_MAP added_map_1, CB_TENSOR_MAP added_map_2, CB_TENSOR_MAP added_map_3, CB_TENSOR_MAP mask_map_1,
      CB_TENSOR_MAP mask_map_2, CB_TENSOR_MAP mask_map_3,
#endif
#if NORM_SUMS
      CB_TENSOR_MAP norm_map, float* norm_sums, const float* mean, const float* inv_std, const CB_ELEMENT* gamma,
      const CB_ELEMENT* beta,
#endif
      CB_GRID_CONSTANT Walks walks, const Output whole) {
  CB_DYNAMIC_SHARED(arena);
  const Shared shared{arena};
  const u32 rank = CLUSTER > 1 ? cb_cluster_rank() : 0;
  const u32 tiles = num_tiles(walks, whole.slices);
#if defined(OPERATION_CONV2D_DGRAD)
  const auto map_of = [&](int phase) {
    return phase == 0 ? &a_map : phase == 1 ? &a_map_1 : phase == 2 ? &a_map_2 : &a_map_3;
  };
#else
  const auto map_of = [&](int) { return &a_map; };
#endif
#if PHASE_ROWS
  const auto added_of = [&](int phase) {
    return phase == 0 ? &added_map : phase == 1 ? &added_map_1 : phase == 2 ? &added_map_2 : &added_map_3;
  };
  const auto mask_of = [&](int phase) {
    return phase == 0 ? &mask_map : phase == 1 ? &mask_map_1 : phase == 2 ? &mask_map_2 : &mask_map_3;
  };
#else
  const auto added_of = [&](int) { return &added_map; };
  const auto mask_of = [&](int) { return &mask_map; };
#endif
#if NORM_SUMS
  const TensorMap* normed = &norm_map;
#else
  const TensorMap* normed = nullptr;
#endif
  if (cb_thread() == 0) {
    for (int stage = 0; stage < NUM_STAGES; ++stage) {
      cb_barrier_init(shared.full(stage), 1);
      cb_barrier_init(shared.empty(stage), READERS * CLUSTER);
    }
    for (int consumer = 0; consumer < NUM_CONSUMERS; ++consumer) {
      cb_barrier_init(shared.joined(consumer), WARPGROUP);
      if constexpr (SWAPPED) cb_barrier_init(shared.turn(consumer), WARPGROUP);
    }
    cb_barrier_init_fence();
    for (int phase = 0; phase < PHASES; ++phase) cb_tma_prefetch(map_of(phase));
    cb_tma_prefetch(&b_map);
  }
  if constexpr (CLUSTER > 1) {
    cb_cluster_sync();
  } else {
    cb_sync();
  }
  cb_dependent_launch();

  Ring ring;
  if (cb_thread() < WARPGROUP) {
    cb_registers_release<PRODUCER_REGISTERS>();
    if (cb_thread() == 0) {
      CB_NO_UNROLL
      for (u32 number = cb_block_x() / CLUSTER; number < tiles; number += cb_num_blocks_x() / CLUSTER) {
        u32 of_phase = number;
        const int phase = take_phase(walks, whole.slices, of_phase);
        const Walk& walk = walks.of[phase];
        const Task task(walk, whole.slices, of_phase, rank);
        produce(Loader(map_of(phase), &b_map, walk, task, rank), task.count, shared, ring);
        if constexpr (ADDS_TILES) {
          produce_terms(added_of(phase), mask_of(phase), normed, walk, task, shared, ring);
        }
      }
      // No block leaves while another of its cluster may still arrive at its barriers.
      for (int stage = 0; CLUSTER > 1 && stage < NUM_STAGES; ++stage, ring.advance()) wait_empty(shared, ring);
    }
  } else {
    cb_registers_request<CONSUMER_REGISTERS>();
    const Epilogue epilogue{whole, out, bias, scale, shift, residual, mask, nullptr, partials};
    const int warp = cb_warp() - 4, consumer = warp / 4;
    int tile = 0;  // of the block
    float sum[STACKED][SUMS];
    u32 turn = 0, joins = 0;  // strips stored by the copy engine; waits for the other threads of this consumer
    CB_NO_UNROLL
    for (u32 number = cb_block_x() / CLUSTER; number < tiles; number += cb_num_blocks_x() / CLUSTER) {
      u32 of_phase = number;
      const Walk& walk = walks.of[take_phase(walks, whole.slices, of_phase)];
      const Task task(walk, whole.slices, of_phase, rank);
      if constexpr (SWAPPED) {
        const int round = tile / NUM_CONSUMERS;
        if (tile++ % NUM_CONSUMERS != consumer) {
          ring.skip(task.count + num_terms(walk));
          continue;
        }
        wait_turn(shared, consumer, round);
      }
      consume(task.count, num_terms(walk), consumer, shared, ring, sum);
      if (HAS_FORWARD_TERMS && walk.stores_tiles && scale) scale_sums(scale, shift, walk, task, sum);
#if NORM_SUMS
      const Norm norm{norm_sums, bias, mean, inv_std, gamma, beta};
      apply_terms(walk, task, consumer, shared, ring, joins, sum, [&](int number) {
        if constexpr (!SWAPPED) sum_columns(norm, walk, task, number, consumer, shared, ring, joins, sum);
      });
      if constexpr (SWAPPED) {
        sum_swapped(norm, walk, task, consumer, shared, ring, joins, sum);
      } else {
        add_warps(norm, walk, task, consumer, shared, joins);
      }
#else
      if constexpr (ADDS_TILES) apply_terms(walk, task, consumer, shared, ring, joins, sum, [](int) {});
#endif
      store(epilogue, &out_map, walk, task, shared, warp, turn, joins, sum);
    }
    if (cb_lane() == 0) cb_tma_store_wait_read<0>();  // shared memory goes with the block
  }
}
