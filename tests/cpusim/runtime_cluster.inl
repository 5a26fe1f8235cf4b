// SPDX-License-Identifier: MIT
//
// What the blocks of a cluster do to each other, a part of runtime.cpp: they run as one crowd of fibers, each block with
// shared memory of its own, and a barrier of one is reached from the others by its place in theirs.
//
// Nobody may reach a block that has returned, nor one that has not begun.  Whether that happens is up to the schedule;
// whether it can happen is not, and is what is checked: of a barrier, each phase in which another block had a part must
// have been waited for by a thread of its own block, or by all at a barrier of the cluster; and between its
// initialisation and another block's first part in it there must be a barrier of the cluster.
#include "runtime_hopper.h"

#include <map>

namespace {

// What is known of a barrier of a cluster's block.
struct Reached {
  unsigned initialised = 0;  // barriers of the cluster that came before
  int64_t ended = 0;         // phases
  int64_t waited = 0;        // those of them that a thread of its block knows of
  int64_t last = -1;         // phase in which another block had a part
  const char* place = "";    // of that part
};

std::map<const uint64_t*, Reached> reached;  // of clusters alone

void begin_cluster() { reached.clear(); }

void note_initialised(const uint64_t* barrier) {
  if (num_blocks > 1) reached[barrier] = Reached{cluster_generation};
}
void note_phase_ended(const uint64_t* barrier) {
  if (num_blocks > 1) ++reached[barrier].ended;
}
void note_phase_waited(const uint64_t* barrier) {
  if (num_blocks > 1) reached[barrier].waited = reached[barrier].ended;
}
// A block has a part in the phase that a barrier is in: its thread arrives, or what it copies.
void note_part(const uint64_t* barrier, const Block* block, const char* place) {
  if (num_blocks == 1 || block_of(barrier) == block) return;
  Reached& found = reached[barrier];
  found.last = found.ended;
  found.place = place;
}
void note_cluster_barrier() {
  for (auto& [barrier, found] : reached) found.last = -1;
}

// The same place of shared memory in the block of a rank.
template <class T>
T* place_in(T* own, uint32_t rank) {
  return reinterpret_cast<T*>(blocks[rank].arena + ((unsigned char*)own - current->block->arena));
}

// The barrier at the same place in the block of a rank, which must be there for others.
uint64_t* barrier_in(uint64_t* barrier, uint32_t rank, const char* place) {
  if (rank >= (uint32_t)num_blocks) fail_at(place, "no block of that rank is in the cluster");
  if (&blocks[rank] == current->block) return barrier;
  if (!cpusim_in_shared(barrier, 8)) fail_at(place, "a barrier is 8 bytes of shared memory");
  uint64_t* there = place_in(barrier, rank);
  const auto found = reached.find(there);
  if (found == reached.end() || found->second.initialised == cluster_generation) {
    fail_at(place, "a barrier of another block without a cb_cluster_sync since its initialisation");
  }
  if (has_returned(blocks[rank])) fail_at(place, "another block of the cluster is reached that has returned");
  return there;
}

// That all which others do to a block's shared memory is over when it returns.
void check_unreached(const Block& block) {
  for (const auto& [barrier, found] : reached) {
    if (block_of(barrier) != &block || found.last < found.waited) continue;
    describe("it returns without a wait for what another block of the cluster does to its shared memory at %s",
             found.place);
  }
}

}  // namespace

extern "C" {

uint32_t cpusim_cluster_rank() { return (uint32_t)rank_of(current->block); }

void cpusim_cluster_sync(const char* place) {
  char& token = cluster_tokens[cluster_generation & 1];  // two in turn, as in cpusim_sync
  tsan_release(token);
  current->state = State::CLUSTER;
  current->place = place;
  if (++num_at_cluster == num_fibers) {
    num_at_cluster = 0;
    ++cluster_generation;
    note_cluster_barrier();
    end_barrier(0, num_fibers);
  }
  wait();
  tsan_acquire(token);
}
}
