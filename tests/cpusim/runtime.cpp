// SPDX-License-Identifier: MIT
//
// Fibers that stand in for CUDA threads: one per thread of a block, blocks one after another, those of a cluster at once.
//
// A fiber runs until it waits at a barrier or warp operation, and then switches to the next that is ready; the last
// to arrive wakes the others in the order of the schedule.  This file is built without instrumentation, for what the
// scheduler reads and writes is no business of the kernel's: it only tells the sanitizers of switches
// (CPUSIM_ADDRESS) and of barriers (CPUSIM_THREAD).
#include "runtime.h"
#include "runtime_switch.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/mman.h>

namespace {

constexpr int MAX_THREADS = 1024, MAX_BLOCKS = 8, WARP = 32, MAX_WARPS = MAX_THREADS / WARP, MAX_COPIES = 256;
constexpr size_t GUARD = 4096;
#if defined(CPUSIM_ADDRESS) || defined(CPUSIM_THREAD)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif

enum Schedule : uint32_t { IN_ORDER, REVERSED, SHUFFLED, WARPS };
enum class State { READY, BARRIER, WARP_BARRIER, SHUFFLE, COLLECTIVE, PHASE, WARPGROUP, CLUSTER, DONE };

// A block that runs: the only one, or one of a cluster's.
struct Block {
  uint32_t at[3];
  unsigned char* arena;  // its dynamic shared memory
  int num_waiting, num_done;
  unsigned generation;
  char tokens[2];  // addresses that TSan ties its barriers to
};

struct Fiber {
  void* sp = nullptr;
  Block* block = nullptr;
  int thread = -1;  // of its block
  State state = State::DONE;
  const char* place = "";
  const void* bottom = nullptr;  // of the stack, for ASan
  size_t size = 0;
  void* fake_stack = nullptr;
  void* tsan = nullptr;
  uint32_t group = 0;  // copies: the group that is open, and a ring of what is under way
  uint32_t first_copy = 0, num_copies = 0;
};

struct Warp {
  int arrived = 0;
  unsigned phase = 0;
  uint64_t slots[2][WARP];
  CpusimWords operands[2][WARP], results[2][WARP];
  char tokens[2];  // addresses that TSan ties the warp's barriers to
};

Block blocks[MAX_BLOCKS];
Fiber host, fibers[MAX_THREADS];  // those of the first block, of the second, ...
Warp warps[MAX_WARPS];
CpusimCopy copies[MAX_THREADS][MAX_COPIES];
int ready[MAX_THREADS];  // ring: every thread is in it at most once
int num_blocks, num_threads, num_fibers;  // of the cluster, of a block, of all its blocks
int first_ready, num_ready, num_built, num_done, num_at_cluster;
unsigned cluster_generation;
bool failed, run_ahead;
Fiber *current, *previous;
Block* of_engine;  // whose shared memory an asynchronous unit is at work on
const CpusimLaunch* launch;
uint64_t random_state;
size_t arena_bytes;
char problem[1 << 14];
[[maybe_unused]] char start_token, end_token, cluster_tokens[2];

// TSan knows of an order only what is said here. A shuffle says nothing: it orders no memory.
void tsan_release([[maybe_unused]] char& token) {
#if defined(CPUSIM_THREAD)
  __tsan_release(&token);
#endif
}
void tsan_acquire([[maybe_unused]] char& token) {
#if defined(CPUSIM_THREAD)
  __tsan_acquire(&token);
#endif
}

uint64_t draw(uint64_t below) {  // splitmix64
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % below;
}
template <class T>
void shuffle(T* items, uint64_t count) {
  for (uint64_t i = count; i > 1; --i) std::swap(items[i - 1], items[draw(i)]);
}

bool same(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }

int number(const Fiber* fiber) { return (int)(fiber - fibers); }
int rank_of(const Block* block) { return (int)(block - blocks); }
Block& own_block() { return of_engine ? *of_engine : *current->block; }
bool has_returned(const Block& block) { return block.num_done == num_threads; }

// Make threads first, first + 1, ... ready in the schedule's order. A warp that was woken is the next to run where
// warps run ahead, or else the last: both happen on a GPU, and each hides bugs that the other shows.
void wake(int first, int count) {
  int order[MAX_THREADS];
  for (int i = 0; i < count; ++i) order[i] = first + i;
  if (launch->schedule == REVERSED) {
    std::reverse(order, order + count);
  } else if (launch->schedule == SHUFFLED) {
    shuffle(order, count);
  } else if (launch->schedule == WARPS) {
    int warp_order[MAX_WARPS];
    for (int w = 0; w < count / WARP; ++w) warp_order[w] = w;
    shuffle(warp_order, count / WARP);
    for (int i = 0; i < count; ++i) order[i] = first + warp_order[i / WARP] * WARP + i % WARP;
  }
  for (int i = 0; i < count; ++i) fibers[order[i]].state = State::READY;
  if (run_ahead) first_ready = (first_ready + MAX_THREADS - count) % MAX_THREADS;
  const int begin = run_ahead ? first_ready : first_ready + num_ready;
  for (int i = 0; i < count; ++i) ready[(begin + i) % MAX_THREADS] = order[i];
  num_ready += count;
}

// Wake a whole block or all: at their start, and when all are at a barrier.
void wake_all(int first, int count) {
  run_ahead = launch->schedule == IN_ORDER || (launch->schedule != REVERSED && draw(2) == 1);
  wake(first, count);
}

void switch_to(Fiber& to, [[maybe_unused]] bool for_ever = false) {
  Fiber& from = *current;
  previous = &from;
  current = &to;
#if defined(CPUSIM_ADDRESS)
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &from.fake_stack, to.bottom, to.size);
#elif defined(CPUSIM_THREAD)
  __tsan_switch_to_fiber(to.tsan, 1);  // 1: the switch itself orders nothing
#endif
  cpusim_switch(&from.sp, to.sp);
#if defined(CPUSIM_ADDRESS)
  __sanitizer_finish_switch_fiber(from.fake_stack, &previous->bottom, &previous->size);
#endif
}

}  // namespace

#include "runtime_errors.inl"

namespace {

// runtime_hopper.inl
bool run_one_copy();
void begin_async();
void check_drained();
void check_block_drained();

// Nobody can run: either a copy under way lets somebody go on, or nobody ever will.
void resolve() {
  while (num_ready == 0 && run_one_copy()) {
  }
  if (num_ready != 0) return;
  bool returned = num_at_cluster != 0 && num_at_cluster + num_done == num_fibers;
  for (const Block& block : blocks) {
    returned |= block.num_waiting != 0 && block.num_waiting + block.num_done == num_threads;
  }
  describe_waiting(returned ? "divergent barrier: a thread returned before it" : "deadlock");
}

// Run whoever is next; return when that is this fiber again.
void wait() {
  if (num_ready == 0) resolve();
  if (failed) return give_up();
  Fiber& next = fibers[ready[first_ready]];
  first_ready = (first_ready + 1) % MAX_THREADS;
  --num_ready;
  if (&next != current) switch_to(next);
}

// All of these are at a barrier: at the same one?
void end_barrier(int first, int count) {
  for (int i = first + 1; i < first + count; ++i) {
    if (!same(fibers[i].place, fibers[first].place)) {
      describe_waiting("divergent barrier");
      return give_up();
    }
  }
  wake_all(first, count);
}

// Wait for the other lanes; the last wakes all. Gives the phase that they met in.
unsigned meet(State state, const char* place) {
  Fiber& self = *current;
  const int first = number(&self) / WARP * WARP;
  Warp& warp = warps[first / WARP];
  const unsigned phase = warp.phase;
  self.state = state;
  self.place = place;
  ++warp.arrived;
  for (int lane = first; lane < first + WARP; ++lane) {
    const Fiber& other = fibers[lane];
    if (other.state == State::DONE) {
      describe("thread %d in %s at %s, but thread %d of its warp has returned", self.thread, name(state), place,
               other.thread);
      give_up();
    }
    const bool waits =
        other.state == State::WARP_BARRIER || other.state == State::SHUFFLE || other.state == State::COLLECTIVE;
    if (waits && (other.state != state || !same(other.place, place))) {
      describe("divergent warp operation: thread %d in %s at %s, thread %d in %s at %s", self.thread, name(state), place,
               other.thread, name(other.state), other.place);
      give_up();
    }
  }
  if (warp.arrived == WARP) {
    warp.arrived = 0;
    warp.phase ^= 1;
    wake(first, WARP);
  }
  wait();
  return phase;
}

#if defined(CPUSIM_ADDRESS)
void on_report(const char* report) {
  if (launch != nullptr) describe("%s", report);  // else it is not about a kernel
}
#endif

// Give every fiber a stack that starts in cpusim_boot. Stacks and TSan's fibers outlive the launch.
void build_fibers(int count) {
  static char* stacks = nullptr;
  if (stacks == nullptr) {
    stacks = (char*)mmap(nullptr, MAX_THREADS * (STACK + GUARD), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                         -1, 0);
    if (stacks == MAP_FAILED) abort();
#if defined(CPUSIM_ADDRESS)
    __asan_set_error_report_callback(on_report);
#endif
  }
  for (int i = 0; i < count; ++i) {
    fibers[i].block = &blocks[i / num_threads];
    fibers[i].thread = i % num_threads;
  }
  for (; num_built < count; ++num_built) {
    Fiber& fiber = fibers[num_built];
    char* bottom = stacks + num_built * (STACK + GUARD) + GUARD;
    mprotect(bottom, STACK, PROT_READ | PROT_WRITE);
    fiber.bottom = bottom;
    fiber.size = STACK;
    fiber.fake_stack = nullptr;
    void** top = (void**)(bottom + STACK - num_built % 64 * 64);  // tops spread over the sets of the cache
    top -= 9;                                                     // 6 registers, the return, two words of alignment
    for (int i = 0; i < 9; ++i) top[i] = nullptr;
    top[6] = (void*)cpusim_boot;
    fiber.sp = top;
#if defined(CPUSIM_ADDRESS)
    __asan_unpoison_memory_region(bottom, STACK);
#elif defined(CPUSIM_THREAD)
    if (fiber.tsan) __tsan_destroy_fiber(fiber.tsan);
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
}

void fill(unsigned char* begin, unsigned char* end) {
  for (; begin < end; ++begin) *begin = 0xff;
}

// Why blocks cannot run as a cluster; null if they can.
const char* no_cluster() {
  if (num_blocks == 1) return nullptr;
  if (launch->grid[0] % (uint32_t)num_blocks) return "a grid that is no multiple of its clusters";
  if (launch->shared_begin != launch->shared_end) return "a cluster's blocks have dynamic shared memory alone here";
  if (num_blocks > MAX_BLOCKS || num_fibers > MAX_THREADS) return "more than cpusim has fibers for";
  return num_threads % 128 ? "a cluster's blocks are whole warpgroups here" : nullptr;
}

// Give every block dynamic shared memory of the exact size, so that ASan sees its end.
void build_arenas() {
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    unsigned char*& arena = blocks[i].arena;
    if (arena_bytes != launch->dynamic_bytes) {
      free(arena);
      arena = nullptr;
    }
    if (i >= num_blocks || arena || !launch->dynamic_bytes) continue;
    if (posix_memalign((void**)&arena, 1024, launch->dynamic_bytes)) abort();
  }
  arena_bytes = launch->dynamic_bytes;
}

// Run the blocks of a cluster, or a block by itself.
void run_together() {
  fill(launch->shared_begin, launch->shared_end);
  for (int i = 0; i < num_blocks; ++i) fill(blocks[i].arena, blocks[i].arena + arena_bytes);
  for (Block& block : blocks) block.num_waiting = block.num_done = 0;
  first_ready = num_ready = num_done = num_at_cluster = 0;
  of_engine = nullptr;
  for (Warp& warp : warps) warp.arrived = 0;
  begin_async();
  wake_all(0, num_fibers);
  tsan_release(start_token);
  const int first = ready[first_ready];
  first_ready = (first_ready + 1) % MAX_THREADS;
  --num_ready;
  switch_to(fibers[first]);
  tsan_acquire(end_token);
  if (failed) num_built = 0;  // their stacks hold what was given up
}

void run_blocks() {
  const uint64_t count = launch->blocks ? launch->num_blocks : launch->num_blocks / (uint64_t)num_blocks;
  uint64_t* order = (uint64_t*)malloc(count * sizeof(uint64_t));
  for (uint64_t i = 0; i < count; ++i) order[i] = launch->schedule == REVERSED ? count - 1 - i : i;
  if (launch->schedule == SHUFFLED || launch->schedule == WARPS) shuffle(order, count);
  for (uint64_t i = 0; i < count && !failed; ++i) {
    const uint64_t x = order[i] * (uint64_t)num_blocks, y = x / launch->grid[0];
    const uint32_t drawn[3] = {(uint32_t)(x % launch->grid[0]), (uint32_t)(y % launch->grid[1]),
                               (uint32_t)(y / launch->grid[1])};
    const uint32_t* first = launch->blocks ? launch->blocks + 3 * order[i] : drawn;
    for (int rank = 0; rank < num_blocks; ++rank) {
      std::copy(first, first + 3, blocks[rank].at);
      blocks[rank].at[0] += (uint32_t)rank;
    }
    run_together();
  }
  free(order);
}

}  // namespace

#include "runtime_hopper.inl"

extern "C" {

void cpusim_fiber_main() {
#if defined(CPUSIM_ADDRESS)
  __sanitizer_finish_switch_fiber(nullptr, &previous->bottom, &previous->size);
#endif
  Fiber& self = *current;
  for (;;) {
    tsan_acquire(start_token);
    self.group = self.first_copy = self.num_copies = 0;
    launch->entry->call(launch->arguments);
    if (self.num_copies != 0) {
      const CpusimCopy& copy = copies[number(&self)][self.first_copy];
      cpusim_fail(copy.file, copy.line, "a copy is still under way when its thread returns");
    }
    check_drained();
    tsan_release(end_token);
    self.state = State::DONE;
    ++num_done;
    if (++self.block->num_done == num_threads) check_block_drained();
    if (num_done == num_fibers || failed) {
      switch_to(host, failed);
    } else {
      wait();
    }
  }
}

int cpusim_launch(const CpusimLaunch* wanted, char* message, uint64_t size) {
  launch = wanted;
  num_blocks = (int)launch->entry->cluster;
  num_threads = (int)launch->threads;
  num_fibers = num_blocks * num_threads;
  random_state = launch->seed;
  failed = false;
  current = &host;
  host.block = blocks;
  of_engine = nullptr;
#if defined(CPUSIM_THREAD)
  host.tsan = __tsan_get_current_fiber();
#endif
  if (const char* reason = no_cluster()) {
    describe("%d blocks of %d threads: %s", num_blocks, num_threads, reason);
  } else {
    build_arenas();
    build_fibers(num_fibers);
    run_blocks();
  }
  launch = nullptr;
  if (failed) snprintf(message, size, "%s", problem);
  return failed;
}

int cpusim_thread() { return current->thread; }
int cpusim_num_threads() { return num_threads; }
uint32_t cpusim_block(int axis) { return current->block->at[axis]; }
uint32_t cpusim_num_blocks(int axis) { return launch->grid[axis]; }
unsigned char* cpusim_dynamic_shared() { return own_block().arena; }
bool cpusim_copies_early() { return launch->early != 0; }

void cpusim_sync(const char* place) {
  // Two tokens in turn: with one, a thread that wakes late would also learn of what the next barrier orders.
  Block& block = *current->block;
  char& token = block.tokens[block.generation & 1];
  tsan_release(token);
  current->state = State::BARRIER;
  current->place = place;
  if (++block.num_waiting == num_threads) {
    block.num_waiting = 0;
    ++block.generation;
    end_barrier(rank_of(&block) * num_threads, num_threads);
  }
  wait();
  tsan_acquire(token);
}

void cpusim_sync_warp(const char* place) {
  Warp& warp = warps[number(current) / WARP];
  tsan_release(warp.tokens[warp.phase]);
  const unsigned phase = meet(State::WARP_BARRIER, place);
  tsan_acquire(warp.tokens[phase]);
}

uint64_t cpusim_exchange(uint64_t value, int source, const char* place) {
  const int thread = number(current);
  Warp& warp = warps[thread / WARP];
  warp.slots[warp.phase][thread % WARP] = value;
  return warp.slots[meet(State::SHUFFLE, place)][source];
}

void cpusim_collective(CpusimWords* words, CpusimWork work, const char* place) {
  const int thread = number(current), lane = thread % WARP;
  Warp& warp = warps[thread / WARP];
  warp.operands[warp.phase][lane] = *words;
  if (warp.arrived == WARP - 1) work(warp.operands[warp.phase], warp.results[warp.phase]);
  *words = warp.results[meet(State::COLLECTIVE, place)][lane];
}

void cpusim_push_copy(const CpusimCopy* copy) {
  Fiber& self = *current;
  if (self.num_copies == MAX_COPIES) cpusim_fail(copy->file, copy->line, "more copies under way than cpusim keeps");
  CpusimCopy& kept = copies[number(&self)][(self.first_copy + self.num_copies++) % MAX_COPIES];
  kept = *copy;
  kept.group = self.group;
}

void cpusim_commit_copies() { ++current->group; }

bool cpusim_pop_copy(int pending, CpusimCopy* copy) {
  Fiber& self = *current;
  if (self.num_copies == 0) return false;
  *copy = copies[number(&self)][self.first_copy];
  if ((int64_t)copy->group + pending >= (int64_t)self.group) return false;
  self.first_copy = (self.first_copy + 1) % MAX_COPIES;
  --self.num_copies;
  return true;
}

bool cpusim_in_shared(const void* pointer, uint64_t bytes) {
  const unsigned char *begin = (const unsigned char*)pointer, *arena = own_block().arena;
  return (begin >= launch->shared_begin && begin + bytes <= launch->shared_end) ||
         (begin >= arena && begin + bytes <= arena + arena_bytes);
}

void cpusim_fail(const char* file, int line, const char* what) {
  describe("thread %d: %s at %s:%d", current->thread, what, file, line);
  give_up();
}
}
