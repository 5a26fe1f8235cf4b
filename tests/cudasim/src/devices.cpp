// SPDX-License-Identifier: MIT
//
// The GPUs that the simulated driver shows: facts of NVIDIA's data sheets and of the CUDA C++ programming guide's table
// of technical specifications, written out here once more, so that what cubatch reads of them is compared with something.
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "sim.h"

namespace sim {
namespace {

constexpr int KIB = 1024;

const Gpu GPUS[] = {
    {"titan-x", "NVIDIA TITAN X (Pascal)", 6, 1, 28, 12288, 1531000, 5005000, 384, 3072 * KIB, 96 * KIB, 48 * KIB, 0, 32,
     2048},
    {"v100", "Tesla V100-SXM2-16GB", 7, 0, 80, 16384, 1530000, 877000, 4096, 6144 * KIB, 96 * KIB, 96 * KIB, 0, 32, 2048},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 81920, 1410000, 1593000, 5120, 40960 * KIB, 164 * KIB, 163 * KIB, KIB,
     32, 2048},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 81920, 1980000, 2619000, 5120, 51200 * KIB, 228 * KIB, 227 * KIB, KIB,
     32, 2048},
};

std::vector<const Gpu*> chosen() {
  const char* wanted = getenv("CUDASIM_DEVICES");
  std::istringstream slugs(wanted ? wanted : "h100");
  std::vector<const Gpu*> found;
  for (std::string slug; std::getline(slugs, slug, ',');) {
    const Gpu* match = nullptr;
    for (const Gpu& one : GPUS)
      if (slug == one.slug) match = &one;
    if (!match) {
      fprintf(stderr, "cudasim: CUDASIM_DEVICES names %s; there are titan-x, v100, a100 and h100\n", slug.c_str());
      abort();
    }
    found.push_back(match);
  }
  return found;
}

const std::vector<const Gpu*>& all() {
  static const std::vector<const Gpu*> found = chosen();
  return found;
}

std::vector<int>& failures() {
  static std::vector<int> found(all().size(), 0);
  return found;
}

thread_local int current = 0;
int contexts[16];

}  // namespace

std::recursive_mutex lock;

int num_devices() { return (int)all().size(); }
const Gpu& gpu(int device) { return *all()[device]; }
int current_device() { return current; }
int broken(int device) {
  if (planted("dead")) return CUDA_ERROR_SYSTEM_NOT_READY;
  return failures()[device];
}
void breaks(int device, int status) { failures()[device] = status; }

uint64_t total_bytes(int device) { return planted_number("memory", gpu(device).memory_mib << 20); }

int attribute(int device, int number) {
  const Gpu& one = gpu(device);
  switch (number) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 * KIB;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return one.clock_khz;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return one.sms;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return one.memory_clock_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return one.bus_bits;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return one.l2_bytes;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return one.threads_per_sm;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return one.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return one.minor;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return one.shared_per_sm;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return one.shared_optin;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return one.blocks_per_sm;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return one.shared_reserved;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
    default: return 0;
  }
}

}  // namespace sim

using namespace sim;

static CUresult known(int device) { return device >= 0 && device < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
  *count = num_devices();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return known(index);
}
API CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  if (known(device)) return known(device);
  snprintf(name, size, "%s%s", gpu(device).name, planted("mig") ? " MIG 1g.10gb" : "");
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  if (known(device)) return known(device);
  *bytes = total_bytes(device);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = (char)(i + 1 + 16 * device);
  return known(device);
}
API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice device) {
  if (known(device)) return known(device);
  if (planted_number("attribute", 0) == (uint64_t)number) return CUDA_ERROR_INVALID_VALUE;
  *value = attribute(device, number);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)&contexts[current];
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current = (int)((int*)context - contexts);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSynchronize() { return (CUresult)wait_device(current); }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)&contexts[device];
  return known(device);
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return known(device); }
API CUresult cuGetErrorName(CUresult status, const char** text) {
  switch (status) {
    case CUDA_ERROR_INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case CUDA_ERROR_LAUNCH_FAILED: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case CUDA_ERROR_SYSTEM_NOT_READY: *text = "CUDA_ERROR_SYSTEM_NOT_READY"; break;
    default: *text = "CUDA_ERROR_UNKNOWN"; break;
  }
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult status, const char** text) { return cuGetErrorName(status, text); }
// Undocumented tables that a static libcudart and NVRTC ask for and can do without.
API CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (known(device)) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int device) {
  if (known(device)) return cudaErrorInvalidDevice;
  *value = attribute(device, (int)number);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* facts, int device) {
  if (known(device)) return cudaErrorInvalidDevice;
  const Gpu& one = gpu(device);
  memset(facts, 0, sizeof *facts);
  snprintf(facts->name, sizeof facts->name, "%s", one.name);
  facts->totalGlobalMem = total_bytes(device);
  facts->major = one.major, facts->minor = one.minor, facts->multiProcessorCount = one.sms;
  facts->warpSize = 32, facts->maxThreadsPerBlock = 1024, facts->l2CacheSize = one.l2_bytes;
  facts->sharedMemPerBlock = 48 * KIB, facts->sharedMemPerBlockOptin = one.shared_optin;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
API const char* cudaGetErrorName(cudaError_t status) {
  switch ((int)status) {
    case 2: return "cudaErrorMemoryAllocation";
    case 700: return "cudaErrorIllegalAddress";
    case 719: return "cudaErrorLaunchFailure";
    case 801: return "cudaErrorNotSupported";
    case 900: return "cudaErrorStreamCaptureUnsupported";
    case 901: return "cudaErrorStreamCaptureInvalidated";
    case 906: return "cudaErrorStreamCaptureImplicit";
    default: return "cudaErrorUnknown";
  }
}
API const char* cudaGetErrorString(cudaError_t status) { return cudaGetErrorName(status); }
API cudaError_t cudaGetLastError() { return cudaSuccess; }
