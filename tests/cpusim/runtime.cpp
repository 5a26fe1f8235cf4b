// SPDX-License-Identifier: MIT
//
// Fibers that stand in for CUDA threads: one per thread of a block, blocks one after another.
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

constexpr int MAX_THREADS = 1024, WARP = 32, MAX_WARPS = MAX_THREADS / WARP, MAX_COPIES = 256;
constexpr size_t GUARD = 4096;
#if defined(CPUSIM_ADDRESS) || defined(CPUSIM_THREAD)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif

enum Schedule : uint32_t { IN_ORDER, REVERSED, SHUFFLED, WARPS };
enum class State { READY, BARRIER, WARP_BARRIER, SHUFFLE, COLLECTIVE, PHASE, WARPGROUP, DONE };

struct Fiber {
  void* sp = nullptr;
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

Fiber host, fibers[MAX_THREADS];
Warp warps[MAX_WARPS];
CpusimCopy copies[MAX_THREADS][MAX_COPIES];
int ready[MAX_THREADS];  // ring: every thread is in it at most once
int first_ready, num_ready, num_threads, num_built, num_waiting, num_done;
unsigned generation;
bool failed, run_ahead;
Fiber *current, *previous;
const CpusimLaunch* launch;
uint32_t block[3];
uint64_t random_state;
unsigned char* arena;
size_t arena_bytes;
char problem[1 << 14];
[[maybe_unused]] char start_token, end_token, barrier_tokens[2];

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

// Wake the whole block: at its start, and when all are at a barrier.
void wake_all() {
  run_ahead = launch->schedule == IN_ORDER || (launch->schedule != REVERSED && draw(2) == 1);
  wake(0, num_threads);
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

__attribute__((format(printf, 1, 2))) void describe(const char* format, ...) {
  if (failed) return;  // the first problem is the cause
  failed = true;
  int used = snprintf(problem, sizeof(problem), "%s, block (%u, %u, %u): ", launch->entry->name, block[0], block[1],
                      block[2]);
  va_list values;
  va_start(values, format);
  vsnprintf(problem + used, sizeof(problem) - used, format, values);
  va_end(values);
}

// Leave the block for good; its fibers are never resumed.
void give_up() { switch_to(host, true); }

const char* name(State state) {
  switch (state) {
    case State::BARRIER: return "cb_sync";
    case State::WARP_BARRIER: return "cb_sync_warp";
    case State::SHUFFLE: return "a shuffle";
    case State::PHASE: return "cb_barrier_wait";
    case State::WARPGROUP: return "a warpgroup's operation";
    case State::COLLECTIVE: return "a matrix operation";
    case State::DONE: return "its end";
    default: return "nothing";
  }
}

// "threads 0-15 wait in a shuffle at a.cu:35; threads 16-31 have returned"
void describe_waiting(const char* what) {
  std::string text;
  for (int begin = 0; begin < num_threads;) {
    const Fiber& fiber = fibers[begin];
    int end = begin + 1;
    const bool done = fiber.state == State::DONE;
    while (end < num_threads && fibers[end].state == fiber.state && (done || same(fibers[end].place, fiber.place)))
      ++end;
    const bool one = end - begin == 1;
    text += (text.empty() ? "thread" : "; thread") + std::string(one ? " " : "s ") + std::to_string(begin);
    if (!one) text += "-" + std::to_string(end - 1);
    if (done) {
      text += one ? " has returned" : " have returned";
    } else {
      text += std::string(one ? " waits in " : " wait in ") + name(fiber.state) + " at " + fiber.place;
    }
    begin = end;
  }
  describe("%s: %s", what, text.c_str());
}

// runtime_hopper.inl
bool run_one_copy();
void begin_async();
void check_drained();
void check_block_drained();

// Nobody can run: either a copy under way lets somebody go on, or everybody is at the barrier, or nobody ever will be.
void resolve() {
  while (num_ready == 0 && run_one_copy()) {
  }
  if (num_ready != 0) return;
  if (num_waiting == num_threads) {
    for (int i = 1; i < num_threads; ++i) {
      if (!same(fibers[i].place, fibers[0].place)) {
        describe_waiting("divergent barrier");
        return;
      }
    }
    num_waiting = 0;
    ++generation;
    wake_all();
  } else if (num_waiting != 0 && num_waiting + num_done == num_threads) {
    describe_waiting("divergent barrier: a thread returned before it");
  } else {
    describe_waiting("deadlock");
  }
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
      describe("thread %d in %s at %s, but thread %d of its warp has returned", number(&self), name(state), place, lane);
      give_up();
    }
    const bool waits =
        other.state == State::WARP_BARRIER || other.state == State::SHUFFLE || other.state == State::COLLECTIVE;
    if (waits && (other.state != state || !same(other.place, place))) {
      describe("divergent warp operation: thread %d in %s at %s, thread %d in %s at %s", number(&self), name(state),
               place, lane, name(other.state), other.place);
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

void run_block() {
  fill(launch->shared_begin, launch->shared_end);
  fill(arena, arena + launch->dynamic_bytes);
  first_ready = num_ready = num_waiting = num_done = 0;
  for (Warp& warp : warps) warp.arrived = 0;
  begin_async();
  wake_all();
  tsan_release(start_token);
  const int first = ready[first_ready];
  first_ready = (first_ready + 1) % MAX_THREADS;
  --num_ready;
  switch_to(fibers[first]);
  tsan_acquire(end_token);
  if (!failed) check_block_drained();
  if (failed) num_built = 0;  // their stacks hold what was given up
}

void run_blocks() {
  const uint64_t count = launch->num_blocks;
  uint64_t* order = (uint64_t*)malloc(count * sizeof(uint64_t));
  for (uint64_t i = 0; i < count; ++i) order[i] = launch->schedule == REVERSED ? count - 1 - i : i;
  if (launch->schedule == SHUFFLED || launch->schedule == WARPS) shuffle(order, count);
  for (uint64_t i = 0; i < count && !failed; ++i) {
    uint64_t index = order[i];
    for (int axis = 0; axis < 3; ++axis) {
      block[axis] = launch->blocks ? launch->blocks[3 * index + axis] : (uint32_t)(index % launch->grid[axis]);
      if (!launch->blocks) index /= launch->grid[axis];
    }
    run_block();
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
    if (++num_done == num_threads || failed) {
      switch_to(host, failed);
    } else {
      wait();
    }
  }
}

int cpusim_launch(const CpusimLaunch* wanted, char* message, uint64_t size) {
  launch = wanted;
  num_threads = (int)launch->threads;
  random_state = launch->seed;
  failed = false;
  current = &host;
  if (arena_bytes != launch->dynamic_bytes) {  // of the exact size, so that ASan sees its end
    free(arena);
    arena = nullptr;
    if (launch->dynamic_bytes && posix_memalign((void**)&arena, 1024, launch->dynamic_bytes)) abort();
    arena_bytes = launch->dynamic_bytes;
  }
#if defined(CPUSIM_THREAD)
  host.tsan = __tsan_get_current_fiber();
#endif
  build_fibers(num_threads);
  run_blocks();
  launch = nullptr;
  if (failed) snprintf(message, size, "%s", problem);
  return failed;
}

int cpusim_thread() { return number(current); }
int cpusim_num_threads() { return num_threads; }
uint32_t cpusim_block(int axis) { return block[axis]; }
uint32_t cpusim_num_blocks(int axis) { return launch->grid[axis]; }
unsigned char* cpusim_dynamic_shared() { return arena; }
bool cpusim_copies_early() { return launch->early != 0; }

void cpusim_sync(const char* place) {
  // Two tokens in turn: with one, a thread that wakes late would also learn of what the next barrier orders.
  char& token = barrier_tokens[generation & 1];
  tsan_release(token);
  current->state = State::BARRIER;
  current->place = place;
  ++num_waiting;
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
  const unsigned char* begin = (const unsigned char*)pointer;
  return (begin >= launch->shared_begin && begin + bytes <= launch->shared_end) ||
         (begin >= arena && begin + bytes <= arena + arena_bytes);
}

void cpusim_fail(const char* file, int line, const char* what) {
  describe("thread %d: %s at %s:%d", number(current), what, file, line);
  give_up();
}
}
