// SPDX-License-Identifier: MIT
//
// Stream capture and graphs, by "CUDA Graphs" of the programming guide and the runtime API's "Stream Management".
//
// While a stream is captured, what is issued to it is kept and not done.  What the guide calls invalid is refused: waiting
// for the stream, or for the device; the legacy stream while a blocking stream is captured; and, but for the relaxed
// mode, calls that are potentially unsafe (memory taken or given back, pageable copies) from the capturing thread.  Each
// such call spoils the capture: all that follows in the stream fails too, and its end gives no graph.  A graph holds the
// arguments as they were captured; it runs as one piece of work of the stream that it is launched in.
#include <map>
#include <thread>

#include "sim.h"

namespace sim {
namespace {

using Nodes = std::vector<std::function<void()>>;

struct Capture {
  Nodes nodes;
  int mode = cudaStreamCaptureModeGlobal;
  bool spoilt = false;
  std::thread::id owner;
};

std::map<void*, Capture> captures;  // by stream

bool is_legacy(void* stream) { return !stream || stream == cudaStreamLegacy; }

int spoil(Capture& capture, int status, const char* what) {
  capture.spoilt = true;
  say("%s while a stream is captured: status %d", what, status);
  return status;
}

}  // namespace

int refused_by_capture(void* stream) {
  auto at = captures.find(stream);
  if (at != captures.end()) return at->second.spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  if (!is_legacy(stream)) return cudaSuccess;
  for (auto& one : captures)
    if (is_blocking(one.first)) return spoil(one.second, cudaErrorStreamCaptureImplicit, "the legacy stream is used");
  return cudaSuccess;
}

int unsafe_in_capture(const char* what) {
  for (auto& one : captures) {
    Capture& capture = one.second;
    const bool concerned = capture.mode == cudaStreamCaptureModeGlobal || capture.owner == std::this_thread::get_id();
    if (capture.mode != cudaStreamCaptureModeRelaxed && concerned)
      return spoil(capture, cudaErrorStreamCaptureUnsupported, what);
  }
  return cudaSuccess;
}

int wait_refused_by_capture(void* stream) {
  auto at = captures.find(stream);
  if (at != captures.end()) return spoil(at->second, cudaErrorStreamCaptureUnsupported, "the host waits for it");
  return refused_by_capture(stream);
}

int device_wait_refused_by_capture() {
  for (auto& one : captures) return spoil(one.second, cudaErrorStreamCaptureUnsupported, "the host waits for the device");
  return cudaSuccess;
}

bool is_captured(void* stream) { return captures.count(stream); }

bool capture(void* stream, std::function<void()>& work) {
  auto at = captures.find(stream);
  if (at == captures.end()) return false;
  at->second.nodes.push_back(std::move(work));
  return true;
}

}  // namespace sim

using namespace sim;

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Guard guard(lock);
  if (planted("graph", "begin")) return cudaErrorNotSupported;
  if (is_legacy(stream)) return cudaErrorStreamCaptureUnsupported;
  if (captures.count(stream)) return cudaErrorIllegalState;
  Capture& made = captures[stream];
  made.mode = mode;
  made.owner = std::this_thread::get_id();
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Guard guard(lock);
  *graph = nullptr;
  auto at = captures.find(stream);
  if (at == captures.end()) return cudaErrorIllegalState;
  Capture& found = at->second;
  if (found.mode != cudaStreamCaptureModeRelaxed && found.owner != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  const bool spoilt = found.spoilt;
  if (!spoilt) *graph = (cudaGraph_t) new Nodes(std::move(found.nodes));
  captures.erase(at);
  return spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Guard guard(lock);
  auto at = captures.find(stream);
  *status = at == captures.end()  ? cudaStreamCaptureStatusNone
            : at->second.spoilt   ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return (cudaError_t)(at == captures.end() ? refused_by_capture(stream) : cudaSuccess);
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  Guard guard(lock);
  if (planted("graph", "instantiate")) return cudaErrorMemoryAllocation;
  *made = (cudaGraphExec_t) new std::shared_ptr<Nodes>(std::make_shared<Nodes>(*(Nodes*)graph));
  return cudaSuccess;
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) { return (cudaError_t)refused_by_capture(stream); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  Guard guard(lock);
  if (broken(current_device())) return (cudaError_t)broken(current_device());
  if (planted("graph", "launch")) return cudaErrorLaunchFailure;
  if (int refused = refused_by_capture(stream)) return (cudaError_t)refused;
  std::shared_ptr<Nodes> nodes = *(std::shared_ptr<Nodes>*)graph;
  enqueue(stream, [nodes] {
    for (auto& node : *nodes) node();
  });
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Nodes*)graph;
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete (std::shared_ptr<Nodes>*)graph;
  return cudaSuccess;
}
