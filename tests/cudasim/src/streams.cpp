// SPDX-License-Identifier: MIT
//
// Streams and events.  Without CUDASIM_LATE work is carried out when it is issued.  With it, work waits until somebody
// waits for it, and then only what must be done is: a host that reads before it waits, hands memory on too early, or
// issues work to another stream than what it depends on gets poison, old numbers or those of the next.
//
// The order of work is that of the programming guide, "Default Stream": streams are independent of each other, but work
// in the legacy default stream (0) waits for all blocking streams, and they wait for it.
#include <time.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <set>

#include "sim.h"

namespace sim {
namespace {

struct Work {
  std::function<void()> run;
  std::vector<uint64_t> after;  // tickets of other streams' work
};

struct Stream {
  bool blocking = true;
  int device = 0;
  std::deque<uint64_t> issued;  // tickets, oldest first
};

struct Event {
  bool timed = true, recorded = false;
  uint64_t ticket = 0;
  double at = 0;
};

const uintptr_t LEGACY = 0x1, PER_THREAD = 0x2;  // cudaStreamLegacy, cudaStreamPerThread

std::map<uint64_t, Work> pending;  // by ticket
std::map<Stream*, bool> streams;
std::map<int, std::unique_ptr<Stream>> defaults;  // the legacy stream of each device
uint64_t last_ticket = 0;
std::map<int, std::set<uint64_t>> unfinished;  // by device

Stream& stream_of(void* handle) {
  if (!handle || (uintptr_t)handle == LEGACY || (uintptr_t)handle == PER_THREAD) {
    auto& found = defaults[current_device()];
    if (!found) {
      found.reset(new Stream);
      found->device = current_device();
    }
    return *found;
  }
  return *(Stream*)handle;
}

bool is_default(const Stream& stream) { return defaults.count(stream.device) && defaults[stream.device].get() == &stream; }

void carry_out(uint64_t ticket) {
  auto at = pending.find(ticket);
  if (at == pending.end()) return;
  Work work = std::move(at->second);
  pending.erase(at);  // before its predecessors: nothing waits for itself
  for (uint64_t earlier : work.after) carry_out(earlier);
  work.run();
}

// The work that a new piece has to wait for: what is before it in its stream, and by the rules of the default stream.
std::vector<uint64_t> predecessors(Stream& stream) {
  std::vector<uint64_t> found;
  auto last = [&](Stream& other) {
    while (!other.issued.empty() && !pending.count(other.issued.front())) other.issued.pop_front();
    if (!other.issued.empty()) found.push_back(other.issued.back());
  };
  last(stream);
  if (is_default(stream)) {
    for (auto& other : streams)
      if (other.first->blocking && other.first->device == stream.device) last(*other.first);
  } else if (stream.blocking && defaults.count(stream.device)) {
    last(*defaults[stream.device]);
  }
  return found;
}

uint64_t issue(Stream& stream, std::function<void()> run, std::vector<uint64_t> after = {}) {
  const uint64_t ticket = ++last_ticket;
  std::vector<uint64_t> earlier = predecessors(stream);
  after.insert(after.end(), earlier.begin(), earlier.end());
  pending[ticket] = {std::move(run), std::move(after)};
  stream.issued.push_back(ticket);
  if (!is_late()) carry_out(ticket);
  return ticket;
}

int wait(Stream& stream) {
  for (uint64_t ticket : std::deque<uint64_t>(stream.issued)) carry_out(ticket);
  stream.issued.clear();
  return broken(stream.device);
}

double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

}  // namespace

bool is_late() {
  static const bool late = getenv("CUDASIM_LATE") && *getenv("CUDASIM_LATE");
  return late;
}

void enqueue(void* handle, std::function<void()> work) {
  if (!capture(handle, work)) issue(stream_of(handle), std::move(work));
}

bool is_blocking(void* handle) { return stream_of(handle).blocking; }

int wait_stream(void* handle) {
  Guard guard(lock);
  return wait(stream_of(handle));
}

int wait_device(int device) {
  Guard guard(lock);
  for (auto& one : streams)
    if (one.first->device == device) wait(*one.first);
  if (defaults.count(device)) wait(*defaults[device]);
  return broken(device);
}

}  // namespace sim

using namespace sim;

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  Guard guard(lock);
  Stream* made = new Stream;
  made->blocking = !(flags & cudaStreamNonBlocking);
  made->device = current_device();
  streams[made] = true;
  *stream = (cudaStream_t)made;
  return (cudaError_t)broken(made->device);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Guard guard(lock);
  wait(*(Stream*)stream);
  streams.erase((Stream*)stream);
  delete (Stream*)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Guard guard(lock);
  if (int refused = wait_refused_by_capture(stream)) return (cudaError_t)refused;
  return (cudaError_t)wait_stream(stream);
}
// A host that asks whether work is done gives it time: one piece is carried out at each question.
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Guard guard(lock);
  if (int refused = wait_refused_by_capture(handle)) return (cudaError_t)refused;
  Stream& stream = stream_of(handle);
  while (!stream.issued.empty() && !pending.count(stream.issued.front())) stream.issued.pop_front();
  if (stream.issued.empty()) return (cudaError_t)broken(stream.device);
  carry_out(stream.issued.front());
  return cudaErrorNotReady;
}
API CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return cuCtxGetCurrent(context); }
API cudaError_t cudaDeviceSynchronize() {
  Guard guard(lock);
  if (int refused = device_wait_refused_by_capture()) return (cudaError_t)refused;
  return (cudaError_t)wait_device(current_device());
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Event* made = new Event;
  made->timed = !(flags & cudaEventDisableTiming);
  *event = (cudaEvent_t)made;
  return (cudaError_t)broken(current_device());
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Guard guard(lock);
  carry_out(((Event*)handle)->ticket);
  delete (Event*)handle;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  Guard guard(lock);
  Event* event = (Event*)handle;
  if (int refused = refused_by_capture(stream)) return (cudaError_t)refused;
  event->recorded = !is_captured(stream);  // a captured event tells nothing of the device
  if (!event->recorded) return cudaSuccess;
  event->ticket = issue(stream_of(stream), [event] { event->at = milliseconds(); });
  return (cudaError_t)broken(current_device());
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Guard guard(lock);
  carry_out(((Event*)handle)->ticket);
  return (cudaError_t)broken(current_device());
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Guard guard(lock);
  if (pending.count(((Event*)handle)->ticket)) {
    carry_out(((Event*)handle)->ticket);
    return cudaErrorNotReady;
  }
  return (cudaError_t)broken(current_device());
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  Guard guard(lock);
  Event *from = (Event*)first, *to = (Event*)second;
  if (!from->recorded || !to->recorded || !from->timed || !to->timed) return cudaErrorInvalidResourceHandle;
  if (pending.count(from->ticket) || pending.count(to->ticket)) return cudaErrorNotReady;
  const float resolution = 0.0005f;  // milliseconds, by the runtime API's documentation
  *ms = std::max((float)(to->at - from->at), resolution);
  return (cudaError_t)broken(current_device());
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  Guard guard(lock);
  Event* event = (Event*)handle;
  if (is_captured(stream)) return cudaErrorStreamCaptureIsolation;  // no work outside the capture can be waited for
  if (event->recorded && pending.count(event->ticket)) issue(stream_of(stream), [] {}, {event->ticket});
  return cudaSuccess;
}
// What libraries that stand in for NVIDIA's issue: cuBLAS, cuRAND.
API void cudasim_enqueue(void* stream, void (*run)(void*), void* data, void (*drop)(void*)) {
  Guard guard(lock);
  enqueue(stream, [=] {
    open_to_kernels(true);
    run(data);
    open_to_kernels(false);
    drop(data);
  });
}
