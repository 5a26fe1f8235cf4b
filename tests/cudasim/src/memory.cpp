// SPDX-License-Identifier: MIT
//
// Device memory: pages of the host that the host may not touch.
//
// Every allocation ends at a page that cannot be accessed and is poisoned.  Small ones are closed to host code: a pointer
// that is dereferenced on the host faults, as it would with a GPU.  They open while a kernel or a copy runs; closing large
// ones each time would take longer than most kernels.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "sim.h"

namespace sim {
namespace {

constexpr uint64_t PAGE = 4096, MOST_POISONED = 64ull << 20, MOST_CLOSED = 256ull << 10;
constexpr uint64_t CONTEXT_BYTES = 512ull << 20;  // what a context takes, about

std::map<uintptr_t, Block> blocks;
std::map<uintptr_t, uint64_t> pinned;
std::map<int, uint64_t> taken;  // of each device that anything was taken of
uint64_t num_allocations = 0;
int opened = 0;

bool is_within(uintptr_t start, uint64_t size, const void* pointer, uint64_t bytes) {
  return (uintptr_t)pointer >= start && (uintptr_t)pointer + bytes <= start + size;
}

}  // namespace

uint64_t used_bytes(int device) { return CONTEXT_BYTES + (taken.count(device) ? taken[device] : 0); }

int allocate(void** address, uint64_t size) {
  Guard guard(lock);
  const int device = current_device();
  if (broken(device)) return broken(device);
  *address = nullptr;
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t mapped = (size + PAGE - 1) / PAGE * PAGE;
  if (++num_allocations == planted_number("oom", 0) || (used_bytes(device) + mapped > total_bytes(device) && !planted("spill", "")))
    return CUDA_ERROR_OUT_OF_MEMORY;
  char* found = (char*)mmap(nullptr, mapped + PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  madvise(found, mapped, MADV_HUGEPAGE);  // a first touch of a gibibyte takes seconds by small pages
  if (mapped <= MOST_POISONED) memset(found, 0xA5, mapped);  // more would take the host's memory too
  mprotect(found + mapped, PAGE, PROT_NONE);
  if (!opened && mapped <= MOST_CLOSED) mprotect(found, mapped, PROT_NONE);
  blocks[(uintptr_t)found] = {(uintptr_t)found, size, mapped, device};
  taken[device] += mapped;
  *address = found;
  return CUDA_SUCCESS;
}

int release(void* address) {
  if (!address) return CUDA_SUCCESS;
  Guard guard(lock);
  auto at = blocks.find((uintptr_t)address);
  if (at == blocks.end()) {
    say("%p is freed, which nobody allocated", address);
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int status = wait_device(at->second.device);  // a free waits for what may still use the memory
  taken[at->second.device] -= at->second.mapped;
  munmap(address, at->second.mapped + PAGE);
  blocks.erase(at);
  return status;
}

bool find(const void* pointer, Block* block) {
  Guard guard(lock);
  auto at = blocks.upper_bound((uintptr_t)pointer);
  if (at == blocks.begin()) return false;
  --at;
  if ((uintptr_t)pointer >= at->first + at->second.mapped) return false;
  if (block) *block = at->second;
  return true;
}

bool holds(const void* pointer, uint64_t bytes) {
  Block block;
  return find(pointer, &block) && is_within(block.address, block.mapped, pointer, bytes);
}

bool is_pinned(const void* pointer, uint64_t bytes) {
  Guard guard(lock);
  auto at = pinned.upper_bound((uintptr_t)pointer);
  if (at == pinned.begin()) return false;
  --at;
  return is_within(at->first, at->second, pointer, bytes);
}

// Lets the host's code at device memory, as long as it plays the device.
void open_to_kernels(bool open) {
  opened += open ? 1 : -1;
  if (opened > 1 || (opened == 1 && !open)) return;
  for (auto& one : blocks)
    if (one.second.mapped <= MOST_CLOSED)
      mprotect((void*)one.first, one.second.mapped, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// How a copy is meant to go, checked when it is asked for: cudaMemcpyKind.
static int check_copy(const void* to, const void* from, uint64_t bytes, int kind) {
  const bool to_device = find(to), from_device = find(from);
  const int meant = from_device ? (to_device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost)
                                : (to_device ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost);
  if (kind != cudaMemcpyDefault && kind != meant) {
    say("a copy of kind %d from %p to %p, which is of kind %d", kind, from, to, meant);
    return cudaErrorInvalidValue;
  }
  if ((to_device && !holds(to, bytes)) || (from_device && !holds(from, bytes))) {
    say("a copy of %lu bytes from %p to %p leaves its allocation", (unsigned long)bytes, from, to);
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

static void carry_out(void* to, const void* from, uint64_t bytes) {
  open_to_kernels(true);
  memmove(to, from, bytes);
  open_to_kernels(false);
}

// The host's side of a copy that is under way: pinned memory is read or written when the copy is carried out; what is
// not pinned is staged, so that the call comes back when the host's memory is done with (CUDA driver API, "API
// synchronization behavior").
static int copy(void* to, const void* from, uint64_t bytes, int kind, void* stream, bool waits) {
  if (!bytes) return cudaSuccess;
  Guard guard(lock);
  const int device = current_device();
  if (broken(device)) return broken(device);
  if (int refused = check_copy(to, from, bytes, kind)) return refused;
  const bool staged = !find(from) && !is_pinned(from, bytes);
  const bool lands_unpinned = !find(to) && !is_pinned(to, bytes);
  if (int refused = refused_by_capture(stream)) return refused;
  if (waits || staged || lands_unpinned)
    if (int refused = unsafe_in_capture("a copy that the host waits for")) return refused;
  if (staged) {
    auto kept = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    enqueue(stream, [=] { carry_out(to, kept->data(), bytes); });
  } else {
    enqueue(stream, [=] { carry_out(to, from, bytes); });
  }
  return waits || lands_unpinned ? wait_stream(stream) : cudaSuccess;
}

static int fill(void* to, int value, uint64_t bytes, void* stream) {
  if (!bytes) return cudaSuccess;
  Guard guard(lock);
  if (broken(current_device())) return broken(current_device());
  if (!holds(to, bytes)) return cudaErrorInvalidValue;
  if (int refused = refused_by_capture(stream)) return refused;
  enqueue(stream, [=] {
    open_to_kernels(true);
    memset(to, value, bytes);
    open_to_kernels(false);
  });
  return cudaSuccess;
}

}  // namespace sim

using namespace sim;

API cudaError_t cudaMalloc(void** address, size_t size) {
  Guard guard(lock);
  if (int refused = unsafe_in_capture("memory is taken")) return (cudaError_t)refused;
  return (cudaError_t)allocate(address, size);
}
API cudaError_t cudaMallocManaged(void**, size_t, unsigned) { return cudaErrorNotSupported; }
API cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t) { return (cudaError_t)allocate(address, size); }
API cudaError_t cudaFree(void* address) {
  Guard guard(lock);
  if (int refused = unsafe_in_capture("memory is given back")) return (cudaError_t)refused;
  return (cudaError_t)release(address);
}
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return (cudaError_t)release(address); }
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  Guard guard(lock);
  *address = malloc(size);
  pinned[(uintptr_t)*address] = size;
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* address) {
  Guard guard(lock);
  pinned.erase((uintptr_t)address);
  free(address);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  Guard guard(lock);
  const int device = current_device();
  if (broken(device)) return (cudaError_t)broken(device);
  *total = total_bytes(device);
  *available = *total - std::min<uint64_t>(*total, used_bytes(device));
  return cudaSuccess;
}
API CUresult cuMemGetInfo_v2(size_t* available, size_t* total) { return (CUresult)cudaMemGetInfo(available, total); }
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return (cudaError_t)copy(to, from, bytes, kind, nullptr, true);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return (cudaError_t)copy(to, from, bytes, kind, stream, false);
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) { return (cudaError_t)fill(to, value, bytes, nullptr); }
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return (cudaError_t)fill(to, value, bytes, stream);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* facts, const void* pointer) {
  memset(facts, 0, sizeof *facts);
  Block block;
  const bool on_device = find(pointer, &block);
  facts->type = on_device                ? cudaMemoryTypeDevice
                : is_pinned(pointer, 1) ? cudaMemoryTypeHost
                                        : cudaMemoryTypeUnregistered;
  facts->device = on_device ? block.device : current_device();
  facts->devicePointer = on_device ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static int only;
  *pool = (cudaMemPool_t)&only;
  return cudaSuccess;
}
// What the simulated NVML asks.
API uint64_t cudasim_used_bytes(int device) {
  Guard guard(lock);
  return used_bytes(device);
}
API bool cudasim_is_held(int device) {
  Guard guard(lock);
  return taken.count(device);
}
API uint64_t cudasim_total_bytes(int device) { return total_bytes(device); }
API bool cudasim_planted(const char* name, const char* of) { return planted(name, of); }
API int cudasim_num_devices() { return num_devices(); }
API const char* cudasim_slug(int device) { return gpu(device).slug; }
API const char* cudasim_name(int device) { return gpu(device).name; }
