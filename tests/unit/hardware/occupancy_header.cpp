// Reads launches, one a line, and writes what NVIDIA's cuda_occupancy.h says of each.
//   in:  index of the architecture below, threads, registers, static and dynamic shared bytes, carve-out in percent of
//        the largest (-1: no wish), barriers
//   out: blocks, limiting factors, then the limit by warps, registers, shared memory, blocks and barriers
// The limits of the architectures are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability", written down here once more so that a slip in cubatch's own table is seen; of 3.7, those of CUDA 11.8.
#include <cuda_occupancy.h>

#include <cstdio>

namespace {
struct Limits {
  int major, minor, threads, registers_per_block, shared_kib, opt_in_kib, reserved, registers = 65536;
};
const Limits kArchitectures[] = {
    {3, 7, 2048, 65536, 112, 48, 0, 131072},
    {5, 0, 2048, 65536, 64, 48, 0},       {5, 2, 2048, 65536, 96, 48, 0},       {5, 3, 2048, 32768, 64, 48, 0},
    {6, 0, 2048, 65536, 64, 48, 0},       {6, 1, 2048, 65536, 96, 48, 0},       {6, 2, 2048, 32768, 64, 48, 0},
    {7, 0, 2048, 65536, 96, 96, 0},       {7, 2, 2048, 65536, 96, 96, 0},       {7, 5, 1024, 65536, 64, 64, 0},       {8, 0, 2048, 65536, 164, 163, 1024},
    {8, 6, 1536, 65536, 100, 99, 1024},   {8, 7, 1536, 65536, 164, 163, 1024},  {8, 8, 1536, 65536, 100, 99, 1024},
    {8, 9, 1536, 65536, 100, 99, 1024},   {9, 0, 2048, 65536, 228, 227, 1024},  {10, 0, 2048, 65536, 228, 227, 1024},
    {10, 3, 2048, 65536, 228, 227, 1024}, {11, 0, 1536, 65536, 228, 227, 1024}, {12, 0, 1536, 65536, 100, 99, 1024},
    {12, 1, 1536, 65536, 100, 99, 1024},
};

cudaOccDeviceProp device_of(const Limits& sm) {
  cudaOccDeviceProp device;
  device.computeMajor = sm.major;
  device.computeMinor = sm.minor;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = sm.threads;
  device.regsPerBlock = sm.registers_per_block;
  device.regsPerMultiprocessor = sm.registers;
  device.warpSize = 32;
  device.sharedMemPerBlock = 48 * 1024;
  device.sharedMemPerMultiprocessor = 1024u * sm.shared_kib;
  device.numSms = 1;
  device.sharedMemPerBlockOptin = 1024u * sm.opt_in_kib;
  device.reservedSharedMemPerBlock = sm.reserved;
  return device;
}
}  // namespace

int main() {
  unsigned arch;
  int threads, registers, carveout, barriers;
  size_t fixed, dynamic;
  for (const Limits& sm : kArchitectures) std::printf("%d.%d ", sm.major, sm.minor);
  std::printf("\n");
  while (std::scanf("%u %d %d %zu %zu %d %d", &arch, &threads, &registers, &fixed, &dynamic, &carveout, &barriers) == 7) {
    const cudaOccDeviceProp device = device_of(kArchitectures[arch]);
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = fixed;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = dynamic;
    kernel.numBlockBarriers = barriers;
    cudaOccDeviceState state;
    state.carveoutConfig = carveout;
    // Kepler takes a preference for its L1 in place of a size: 80, 96 or 112 KiB are left for shared memory.
    const int wish = carveout < 0 ? 112 * 100 : carveout * 112;
    state.cacheConfig = wish <= 80 * 100 ? CACHE_PREFER_L1 : wish <= 96 * 100 ? CACHE_PREFER_EQUAL : CACHE_PREFER_SHARED;
    cudaOccResult found;
    const cudaOccError error =
        cudaOccMaxActiveBlocksPerMultiprocessor(&found, &device, &kernel, &state, threads, dynamic);
    if (error != CUDA_OCC_SUCCESS) return 1;
    std::printf("%d %u %d %d %d %d %d\n", found.activeBlocksPerMultiprocessor, found.limitingFactors,
                found.blockLimitWarps, found.blockLimitRegs, found.blockLimitSharedMem, found.blockLimitBlocks,
                found.blockLimitBarriers);
  }
}
