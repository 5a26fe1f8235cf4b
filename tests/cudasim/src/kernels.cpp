// SPDX-License-Identifier: MIT
//
// Modules, functions and launches.
//
// Two kinds of images can be run.  A cubin of which $CUDASIM_HOME/units/CUBIN or CUBIN.ENTRY names the unit of
// tests/cpusim made of the same source; and an image that nvrtc.cpp made of CuPy's own sources, which names a shared
// object too.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>

#include "../../cpusim/runtime.h"
#include "sim.h"

namespace sim {
namespace {

const char JIT[] = "CUDASIM-JIT:";

struct Module {
  std::string path;  // of the file that names its unit, or with an entry behind it that entry's
  void* library = nullptr;
  bool jit = false;
};

struct Function {
  std::string name;
  std::string names = name;            // with those of cubatch's variants that it runs: faults are planted by them
  void* library = nullptr;
  const CpusimEntry* entry = nullptr;  // of a kernel of ours
  void (*call)(void**) = nullptr;      // of one of CuPy's
  const uint32_t* sizes = nullptr;     // of its parameters, up to a zero
  bool syncs = false;
  int dynamic_bytes = 48 * 1024, device = 0;
};

// ---- CuPy's kernels: a loop over threads, or a fiber for each where they wait for each other

thread_local uint32_t cell[12];  // threadIdx, blockIdx, blockDim, gridDim

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  enum { READY, WAITING, DONE } state;
};

ucontext_t home;
std::vector<Fiber> fibers;
int running;
const Function* fiber_function;
void** fiber_arguments;
uint32_t block_shape[3];

void place(int thread) {
  cell[0] = thread % block_shape[0];
  cell[1] = thread / block_shape[0] % block_shape[1];
  cell[2] = thread / block_shape[0] / block_shape[1];
}

void fiber_main() {
  fiber_function->call(fiber_arguments);
  fibers[running].state = Fiber::DONE;
  swapcontext(&fibers[running].context, &home);
}

void run_fibers(int count) {
  if ((int)fibers.size() < count) fibers.resize(count);
  for (int t = 0; t < count; ++t) {
    Fiber& one = fibers[t];
    if (one.stack.empty()) one.stack.resize(64 << 10);
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = one.stack.data();
    one.context.uc_stack.ss_size = one.stack.size();
    one.context.uc_link = &home;
    makecontext(&one.context, fiber_main, 0);
    one.state = Fiber::READY;
  }
  for (bool any = true; any;) {
    any = false;
    for (int t = 0; t < count; ++t) {
      if (fibers[t].state == Fiber::DONE) continue;
      running = t;
      place(t);
      swapcontext(&home, &fibers[t].context);
      any |= fibers[t].state != Fiber::DONE;
    }
  }
}

void run_jit(const Function& function, const uint32_t grid[3], const uint32_t shape[3], void** arguments) {
  memcpy(block_shape, shape, sizeof block_shape);
  memcpy(cell + 6, shape, sizeof block_shape);
  memcpy(cell + 9, grid, sizeof block_shape);
  fiber_function = &function, fiber_arguments = arguments;
  const int count = shape[0] * shape[1] * shape[2];
  for (cell[5] = 0; cell[5] < grid[2]; ++cell[5])
    for (cell[4] = 0; cell[4] < grid[1]; ++cell[4])
      for (cell[3] = 0; cell[3] < grid[0]; ++cell[3]) {
        if (function.syncs) {
          run_fibers(count);
          continue;
        }
        for (int t = 0; t < count; ++t) {
          place(t);
          function.call(arguments);
        }
      }
}

// ---- kernels of ours

void run_unit(const Function& function, const uint32_t grid[3], const uint32_t shape[3], uint32_t shared, void** arguments) {
  auto launch = (int (*)(const CpusimLaunch*, char*, uint64_t))dlsym(function.library, "cpusim_launch");
  auto bounds = (unsigned char**)dlsym(function.library, "cpusim_shared");
  const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
  const CpusimLaunch wanted{function.entry, arguments,  nullptr, blocks, bounds[0], bounds[1], shared, 0,
                            {grid[0], grid[1], grid[2]}, shape[0] * shape[1] * shape[2], 0, 0};
  char said[1 << 14] = {};
  if (launch(&wanted, said, sizeof said)) {
    say("%s: %s", function.name.c_str(), said);
    breaks(function.device, CUDA_ERROR_LAUNCH_FAILED);
  }
}

// Pointers that are no device memory would be an illegal address; a driver cannot see them before the kernel runs.
bool points_off_device(const Function& function, void** arguments) {
  for (uint64_t i = 0; i < function.entry->num_parameters; ++i) {
    const uint32_t kind = function.entry->parameters[i].kind;
    void* pointer = *(void**)arguments[i];
    if ((kind == 'p' || kind == 'c') && pointer && !find(pointer)) {
      say("%s: parameter %lu is %p, no device memory", function.name.c_str(), (unsigned long)i, pointer);
      return true;
    }
  }
  return false;
}

// Arguments are copied when a kernel is launched: the caller may reuse theirs at once.
struct Arguments {
  std::vector<std::vector<char>> values;
  std::vector<void*> pointers;

  void take(const void* from, size_t size) {
    values.emplace_back((const char*)from, (const char*)from + size);
  }
  void** get() {
    for (auto& value : values) pointers.push_back(value.data());
    return pointers.data();
  }
};

std::shared_ptr<Arguments> copy_arguments(const Function& function, void** given) {
  auto found = std::make_shared<Arguments>();
  if (function.entry) {
    for (uint64_t i = 0; i < function.entry->num_parameters; ++i) found->take(given[i], function.entry->parameters[i].size);
  } else {
    for (uint64_t i = 0; function.sizes[i]; ++i) found->take(given[i], function.sizes[i]);
  }
  return found;
}

void run(const Function& function, const uint32_t grid[3], const uint32_t shape[3], uint32_t shared, void** arguments) {
  if (broken(function.device)) return;
  if (planted_now("trap", function.names)) return breaks(function.device, CUDA_ERROR_ILLEGAL_ADDRESS);
  if (planted_now("hang", function.names))
    for (;;) pause();
  if (planted_now("die", function.names)) kill(getpid(), SIGKILL);
  if (function.entry && points_off_device(function, arguments)) return breaks(function.device, CUDA_ERROR_ILLEGAL_ADDRESS);
  open_to_kernels(true);
  if (function.entry)
    run_unit(function, grid, shape, shared, arguments);
  else
    run_jit(function, grid, shape, arguments);
  open_to_kernels(false);
}

void* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) say("%s", dlerror());
  return library;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The other lines are an entry and the name of a variant that it runs.
std::string variants_of(const std::string& path, const std::string& entry) {
  std::ifstream file(path);
  std::string line, found;
  while (std::getline(file, line))
    if (line.substr(0, line.find(' ')) == entry) found += line.substr(line.find(' '));
  return found;
}

const char* refusal(const Function& function, const uint32_t grid[3], const uint32_t shape[3], uint32_t shared) {
  const uint64_t threads = (uint64_t)shape[0] * shape[1] * shape[2];
  if (!threads || threads > 1024 || shape[2] > 64) return "threads of a block";
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535) return "the grid";
  if ((int)shared > function.dynamic_bytes) return "dynamic shared memory";
  return nullptr;
}

}  // namespace
}  // namespace sim

using namespace sim;

API uint32_t* cudasim_cell() { return cell; }
API void cudasim_syncthreads() {
  const int self = running;
  fibers[self].state = Fiber::WAITING;
  swapcontext(&fibers[self].context, &home);
  place(self);
}

API CUresult cuModuleLoad(CUmodule* module, const char* path) {
  Guard guard(lock);
  if (broken(current_device())) return (CUresult)broken(current_device());
  std::ifstream file(path, std::ios::binary);
  char head[4] = {};
  if (!file.read(head, sizeof head)) return CUDA_ERROR_FILE_NOT_FOUND;
  if (memcmp(head, "\177ELF", sizeof head)) return CUDA_ERROR_INVALID_IMAGE;
  const std::string name(path);
  Module* made = new Module{std::string(getenv("CUDASIM_HOME")) + "/units/" + name.substr(name.rfind('/') + 1)};
  const std::string unit = first_line(made->path);
  if (!unit.empty() && !(made->library = open_library(unit))) return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  Guard guard(lock);
  if (strncmp((const char*)image, JIT, strlen(JIT))) return CUDA_ERROR_INVALID_IMAGE;
  Module* made = new Module{(const char*)image + strlen(JIT)};
  made->jit = true;
  made->library = open_library(made->path);
  *module = (CUmodule)made;
  return made->library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  Guard guard(lock);
  Module* module = (Module*)handle;
  Function made{name};
  made.library = module->library;
  made.device = current_device();
  if (module->jit) {
    made.call = (void (*)(void**))dlsym(module->library, (std::string("cudasim_call_") + name).c_str());
    made.sizes = (const uint32_t*)dlsym(module->library, (std::string("cudasim_sizes_") + name).c_str());
    const int* syncs = (const int*)dlsym(module->library, "cudasim_syncs");
    made.syncs = syncs && *syncs;
    if (!made.call || !made.sizes) return CUDA_ERROR_NOT_FOUND;
  } else {
    made.names += variants_of(module->path, name);
    if (!made.library) made.library = open_library(first_line(module->path + "." + name));
    if (!made.library) return CUDA_ERROR_NOT_FOUND;
    for (auto entry = (const CpusimEntry*)dlsym(made.library, "cpusim_entries"); entry && entry->name; ++entry)
      if (made.name == entry->name) made.entry = entry;
    if (!made.entry) return CUDA_ERROR_NOT_FOUND;
  }
  *function = (CUfunction) new Function(made);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** given, void**) {
  Guard guard(lock);
  const Function* function = (const Function*)handle;
  if (broken(function->device)) return (CUresult)broken(function->device);
  if (int refused = refused_by_capture(stream)) return (CUresult)refused;
  struct Shape {
    uint32_t of[3];
  };
  const Shape grid{{grid_x, grid_y, grid_z}}, block{{block_x, block_y, block_z}};
  if (const char* what = refusal(*function, grid.of, block.of, shared)) {
    say("%s is refused for %s: grid %u %u %u, %u %u %u threads, %u bytes", function->name.c_str(), what, grid_x, grid_y,
        grid_z, block_x, block_y, block_z, shared);
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto arguments = copy_arguments(*function, given);
  enqueue(stream, [=] { run(*function, grid.of, block.of, shared, arguments->get()); });
  return CUDA_SUCCESS;
}
// Launches follow each other here, whatever overlap is allowed.
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** given, void** extra) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) return CUDA_ERROR_NOT_SUPPORTED;
    const int allowed = attribute.value.programmaticStreamSerializationAllowed;
    if (allowed != 0 && allowed != 1) return CUDA_ERROR_INVALID_VALUE;
    if (allowed && gpu(((const Function*)handle)->device).major < 9) return CUDA_ERROR_INVALID_VALUE;
  }
  return cuLaunchKernel(handle, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, given, extra);
}
API CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       CUstream, void**) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
// Registers and occupancy are made up: what is compiled here is not what a GPU would run.
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction handle) {
  switch (number) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = ((Function*)handle)->dynamic_bytes; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute number, int value) {
  Function* function = (Function*)handle;
  if (number != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value < 0 || value > gpu(function->device).shared_optin) return CUDA_ERROR_INVALID_VALUE;
  function->dynamic_bytes = value;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 1;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction handle, CUoccupancyB2DSize, size_t, int) {
  *grid = gpu(((Function*)handle)->device).sms;
  *block = 256;
  return CUDA_SUCCESS;
}
