// SPDX-License-Identifier: MIT
//
// What the parts of the simulated driver share: devices, memory, streams, errors, planted faults.
#pragma once

#define __CUDA_API_VERSION_INTERNAL  // the names with their versions, as a library exports them
#include <cuda.h>
#undef __CUDA_API_VERSION_INTERNAL
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace sim {

// One lock for everything: a driver that runs one thing at a time has no races of its own.
extern std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;

// Says on stderr what a GPU would have left to chance, and why a call was refused.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- devices (devices.cpp)

struct Gpu {
  const char* slug;
  const char* name;
  int major, minor, sms;
  uint64_t memory_mib;
  int clock_khz, memory_clock_khz, bus_bits, l2_bytes;
  int shared_per_sm, shared_optin, shared_reserved, blocks_per_sm, threads_per_sm;
};

int num_devices();
const Gpu& gpu(int device);
int attribute(int device, int number);
int current_device();
uint64_t total_bytes(int device);

// ---- errors: a device that has failed stays broken for this process

int broken(int device);
void breaks(int device, int status);

// ---- planted faults (faults.cpp)

// Whether CUDASIM_FAULTS holds `name`, or `name:detail` for a detail that is part of `of`.
bool planted(const char* name, const std::string& of = "");
// The same for a kernel that is about to run: `name:detail@N` holds from its N-th launch on.
bool planted_now(const char* name, const std::string& of);
// The number N of `name:N`; `none` without it.
uint64_t planted_number(const char* name, uint64_t none);

// ---- memory (memory.cpp)

struct Block {
  uintptr_t address;
  uint64_t size;    // as it was asked for
  uint64_t mapped;  // in whole pages, before the guard page
  int device;
};

int allocate(void** address, uint64_t size);
int release(void* address);
bool find(const void* pointer, Block* block = nullptr);
bool holds(const void* pointer, uint64_t bytes);
bool is_pinned(const void* pointer, uint64_t bytes);
uint64_t used_bytes(int device);
void open_to_kernels(bool open);

// ---- streams (streams.cpp)

// Work in a stream is carried out at once, or, with CUDASIM_LATE, not before somebody waits for it.
bool is_late();
void enqueue(void* stream, std::function<void()> work);
int wait_stream(void* stream);
int wait_device(int device);
bool is_blocking(void* stream);

// ---- stream capture (graphs.cpp): each gives the status that refuses a call, or cudaSuccess

int refused_by_capture(void* stream);          // work is issued to it
int wait_refused_by_capture(void* stream);     // the host waits for it
int device_wait_refused_by_capture();          // the host waits for the device
int unsafe_in_capture(const char* what);       // a call that is potentially unsafe
bool is_captured(void* stream);
bool capture(void* stream, std::function<void()>& work);  // keeps work that is issued to a captured stream

}  // namespace sim
