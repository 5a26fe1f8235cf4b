// SPDX-License-Identifier: MIT
//
// What a kernel's unit calls of the fiber runtime (runtime.cpp), and how a unit describes its kernels to it.
// Plain C at the boundary: units and runtime are separate shared objects, and only units are instrumented by the
// sanitizers.
#pragma once

#include <cstddef>
// Bessel functions and their like, which no kernel calls, take a fifth of the time that a kernel takes to compile.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

extern "C" {

// A copy under way from global to shared memory; `bytes` is 0 once it has been carried out.
struct CpusimCopy {
  void* shared;
  const void* global;
  const char* file;
  int line;
  int bytes;
  int valid;
  uint32_t group;
};

// One parameter of a kernel. kind: 'p' pointer, 'c' pointer to const, 'i' 'u' 'f' scalars, 's' a record.
struct CpusimParameter {
  uint32_t kind;
  uint32_t size;
  uint32_t pointee;  // size of what is pointed to; 0 for void
};

// What a lane brings to a matrix operation of its warp, or takes from it.
struct CpusimWords {
  uint32_t word[16];
};

// Computes the results of all 32 lanes from their operands.
typedef void (*CpusimWork)(const CpusimWords* operands, CpusimWords* results);

struct CpusimEntry {
  const char* name;
  void (*call)(void** arguments);
  const CpusimParameter* parameters;
  uint64_t num_parameters;
  uint32_t cluster;  // blocks that run side by side
};

// One launch. Mirrored by simulator.py.
struct CpusimLaunch {
  const CpusimEntry* entry;
  void** arguments;
  const uint32_t* blocks;  // triples to run, of clusters their first; null runs the whole grid
  uint64_t num_blocks;
  unsigned char* shared_begin;
  unsigned char* shared_end;
  uint64_t dynamic_bytes;
  uint64_t seed;
  uint32_t grid[3];
  uint32_t threads;
  uint32_t schedule;  // 0 in_order, 1 reversed, 2 shuffled, 3 warps
  uint32_t early;     // copies are carried out at issue, not at the wait
};

// Called by Python. 0, or 1 with the reason in `message`.
int cpusim_launch(const CpusimLaunch* launch, char* message, uint64_t size);

// Called by kernels, through cpusim.h. A thread's own number never changes: `const` lets the compiler keep it.
__attribute__((const)) int cpusim_thread();
int cpusim_num_threads();
uint32_t cpusim_block(int axis);
uint32_t cpusim_num_blocks(int axis);
unsigned char* cpusim_dynamic_shared();
void cpusim_sync(const char* place);
void cpusim_sync_warp(const char* place);
// Gives the value of `source`'s lane, -1 for the lane itself; all lanes of the warp must come to the same place.
uint64_t cpusim_exchange(uint64_t value, int source, const char* place);
// Gives the lane its part of what `work` makes of all lanes' words; the last lane to come calls it for all.
void cpusim_collective(CpusimWords* words, CpusimWork work, const char* place);
bool cpusim_copies_early();
void cpusim_push_copy(const CpusimCopy* copy);
void cpusim_commit_copies();
// Takes the oldest copy that must be complete when `pending` groups may be under way; false when there is none.
bool cpusim_pop_copy(int pending, CpusimCopy* copy);
// A thread writes to memory, of which asynchronous units see what is shared after a fence only: runtime_hopper.inl.
void cpusim_note_write(const void* pointer, uint32_t bytes);
bool cpusim_in_shared(const void* pointer, uint64_t bytes);
// Ends the launch with an error. Does not return; not marked so, for ASan would then forget the fiber's stack.
void cpusim_fail(const char* file, int line, const char* what);
}

namespace cpusim {

template <class T>
constexpr CpusimParameter parameter() {
  if constexpr (std::is_pointer_v<T>) {
    using Pointee = std::remove_pointer_t<T>;
    uint32_t size = 0;
    if constexpr (!std::is_void_v<Pointee>) size = sizeof(Pointee);
    return {std::is_const_v<Pointee> ? 'c' : 'p', sizeof(T), size};
  } else if constexpr (std::is_floating_point_v<T>) {
    return {'f', sizeof(T), 0};
  } else if constexpr (std::is_integral_v<T>) {
    return {std::is_signed_v<T> ? 'i' : 'u', sizeof(T), 0};
  } else {
    static_assert(std::is_trivially_copyable_v<T>, "a kernel's parameter is passed by its bytes");
    return {'s', sizeof(T), 0};
  }
}

// A kernel as the runtime calls it: with pointers to its arguments, as cuLaunchKernel takes them.
template <auto KERNEL>
struct Entry;
template <class... A, void (*KERNEL)(A...)>
struct Entry<KERNEL> {
  static constexpr CpusimParameter parameters[sizeof...(A) + 1] = {parameter<A>()..., {}};
  static constexpr uint64_t num_parameters = sizeof...(A);
  template <size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    (void)arguments;
    KERNEL(*static_cast<A*>(arguments[I])...);
  }
  static void call(void** arguments) { call(arguments, std::index_sequence_for<A...>()); }
};

}  // namespace cpusim

// Blocks of a cluster; a source with a CB_CLUSTER_KERNEL says otherwise, and building.py looks for the nearest.
constexpr uint32_t cpusim_cluster = 1;
