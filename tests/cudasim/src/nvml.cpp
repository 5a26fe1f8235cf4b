// SPDX-License-Identifier: MIT
//
// NVML with fixed answers, of the devices that the simulated driver shows; nvidia-ml-py sits on top.
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

extern "C" {  // the simulated driver's: kernels.cpp, memory.cpp
uint64_t cudasim_used_bytes(int device);
uint64_t cudasim_total_bytes(int device);
bool cudasim_is_held(int device);
bool cudasim_planted(const char* name, const char* of);
const char* cudasim_name(int device);
int cudasim_num_devices();
}

namespace {

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };

const unsigned CLOCK_MHZ = 1980, POWER_MW = 412500, LIMIT_MW = 700000, CELSIUS = 61;

typedef uintptr_t Handle;  // the device's number plus one

// Clocks, power and the like are the whole board's: a slice of it is not told them.
int state(bool boards = true) {
  if (cudasim_planted("nvml", "slow")) usleep(20000);
  if (cudasim_planted("nvml", "none")) return NOT_SUPPORTED;
  if (boards && cudasim_planted("mig", "")) return NOT_SUPPORTED;
  return cudasim_planted("nvml", "unknown") ? UNKNOWN : SUCCESS;
}

int device_of(Handle handle) { return (int)handle - 1; }

template <class T>
int answer(T* to, T value) {
  const int found = state();
  if (found == SUCCESS) *to = value;
  return found;
}

}  // namespace

API int nvmlInitWithFlags(unsigned) { return SUCCESS; }
API int nvmlInit_v2() { return SUCCESS; }
API int nvmlShutdown() { return SUCCESS; }
API const char* nvmlErrorString(int status) { return status == NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }
API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "580.95.05");
  return SUCCESS;
}
API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = cudasim_num_devices();
  return SUCCESS;
}
API int nvmlDeviceGetUUID(Handle handle, char* own, unsigned size) {
  int at = snprintf(own, size, cudasim_planted("mig", "") ? "MIG-" : "GPU-");
  for (int i = 0; i < 16; ++i)
    at += snprintf(own + at, size - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                   (unsigned char)(i + 1 + 16 * device_of(handle)));
  return SUCCESS;
}
API int nvmlDeviceGetName(Handle handle, char* text, unsigned size) {
  snprintf(text, size, "%s", cudasim_name(device_of(handle)));
  return SUCCESS;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* handle) {
  *handle = index + 1;
  return SUCCESS;
}
API int nvmlDeviceGetMaxMigDeviceCount(Handle, unsigned*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetHandleByUUID(const char* uuid, Handle* handle) {
  for (int device = 0; device < cudasim_num_devices(); ++device) {
    char own[64];
    nvmlDeviceGetUUID(device + 1, own, sizeof own);
    if (strcmp(uuid, own)) continue;
    *handle = device + 1;
    return SUCCESS;
  }
  return NOT_FOUND;
}
API int nvmlDeviceGetMemoryInfo(Handle handle, unsigned long long* memory) {
  const int device = device_of(handle);
  memory[0] = cudasim_total_bytes(device);
  memory[2] = cudasim_used_bytes(device);
  memory[1] = memory[0] > memory[2] ? memory[0] - memory[2] : 0;
  return state(false);
}
API int nvmlDeviceGetClockInfo(Handle, int, unsigned* mhz) { return answer(mhz, CLOCK_MHZ); }
API int nvmlDeviceGetMaxClockInfo(Handle, int, unsigned* mhz) { return answer(mhz, CLOCK_MHZ); }
API int nvmlDeviceGetCurrentClocksEventReasons(Handle, unsigned long long* reasons) { return answer(reasons, 0ull); }
API int nvmlDeviceGetCurrentClocksThrottleReasons(Handle, unsigned long long* reasons) { return answer(reasons, 0ull); }
API int nvmlDeviceGetPowerUsage(Handle, unsigned* milliwatts) { return answer(milliwatts, POWER_MW); }
API int nvmlDeviceGetEnforcedPowerLimit(Handle, unsigned* milliwatts) { return answer(milliwatts, LIMIT_MW); }
API int nvmlDeviceGetTotalEnergyConsumption(Handle, unsigned long long* millijoules) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const unsigned long long ms = now.tv_sec * 1000ull + now.tv_nsec / 1000000, every = 20;  // it steps, as a GPU's does
  return answer(millijoules, ms / every * every * (POWER_MW / 1000) / 1000);
}
API int nvmlDeviceGetTemperature(Handle, int, unsigned* celsius) { return answer(celsius, CELSIUS); }
API int nvmlDeviceGetUtilizationRates(Handle, unsigned* rates) {
  rates[0] = 97, rates[1] = 40;
  return state();
}
API int nvmlSystemGetProcessName(unsigned, char* text, unsigned size) {
  snprintf(text, size, "/usr/bin/python");
  return SUCCESS;
}
API int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle, unsigned* count, void*) {
  *count = 0;
  return state(false);
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned* count, void* to) {
  struct Process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
  };
  const unsigned room = *count;
  *count = cudasim_is_held(device_of(handle));  // by this process, from its first allocation on
  if (!*count) return state(false);
  if (!to || room < 1) return INSUFFICIENT_SIZE;
  *(Process*)to = {(unsigned)getpid(), cudasim_used_bytes(device_of(handle)), 0xffffffff, 0xffffffff};
  return state(false);
}
