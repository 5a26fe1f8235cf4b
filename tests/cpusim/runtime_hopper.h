// SPDX-License-Identifier: MIT
//
// What cpusim_hopper.h calls of the runtime: barriers that count bytes, and work behind the threads' backs.
#pragma once

#include "runtime.h"

extern "C" {

// A tensor copy under way. `run` moves its bytes; it is the unit's, so that sanitizers see what it touches.
struct CpusimTensorCopy {
  void (*run)(const CpusimTensorCopy* copy);
  uint64_t map[16];
  unsigned char* shared;
  uint64_t* barrier;  // null: a store
  uint32_t bytes;     // that are counted
  uint32_t blocks;    // of the cluster that a load goes to, a bit for each rank; 0: to its own
  int32_t at[4];
  int32_t offset[2];  // along w and h
  const char* place;
};

// The part of one warpgroup in a product: its threads must agree on all of it.
struct CpusimProduct {
  void (*run)(const CpusimProduct* product, float* const* sums);  // sums of the 128 threads
  void (*check)(const CpusimProduct* product);                    // whether it may read its tiles
  uint64_t a, b;
  uint32_t count;  // of a thread's sums
  const char* place;
};

// "file:line", kept for ever.
const char* cpusim_place(const char* file, int line);

void cpusim_barrier_init(uint64_t* barrier, uint32_t arrivals, const char* place);
// Arrive at the barrier of this place in the block of a rank.
void cpusim_barrier_arrive_remote(uint64_t* barrier, uint32_t rank, const char* place);
// Arrive, and expect so many bytes more.
void cpusim_barrier_arrive(uint64_t* barrier, uint32_t bytes, const char* place);
void cpusim_barrier_wait(uint64_t* barrier, uint32_t parity, const char* place);

// The block's place in its cluster, and the barrier of all threads of the cluster.
uint32_t cpusim_cluster_rank();
void cpusim_cluster_sync(const char* place);

void cpusim_start_copy(const CpusimTensorCopy* copy);
void cpusim_commit_stores();
void cpusim_wait_stores(int pending);

// What the copy engine and the tensor cores may see of dynamic shared memory: what they wrote themselves, and what a
// thread wrote by cb_write (cpusim_note_write of runtime.h) and fenced.
void cpusim_fence_writes();
void cpusim_fence_barriers();
void cpusim_check_seen(const void* shared, uint32_t bytes, const char* place);

void cpusim_fence_sums();
void cpusim_start_product(const CpusimProduct* product, float* sums);
void cpusim_commit_products(const char* place);
void cpusim_wait_products(int pending, const char* place);
// The four warps of a warpgroup meet, as before products.
void cpusim_meet_warpgroup(const char* place);
}
