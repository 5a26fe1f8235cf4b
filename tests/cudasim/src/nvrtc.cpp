// SPDX-License-Identifier: MIT
//
// NVRTC as CuPy asks for it: its kernels are compiled by g++ and called by kernels.cpp.  cubatch goes on to compile its
// own with the real one.
//
// Of the environment: CUDASIM_HOME, the folder with lib/ and jit/; CUDASIM_SOURCES, that of this file.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <regex>
#include <sstream>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum { SUCCESS = 0, COMPILATION_FAILED = 6 };

struct Program {
  std::string source, image, log;
};

std::string home() { return getenv("CUDASIM_HOME"); }
std::string sources() { return getenv("CUDASIM_SOURCES"); }

// The unit: CuPy's text, and for each of its kernels what kernels.cpp looks for.
std::string unit_of(const std::string& text) {
  static const std::regex kernel(
      R"(extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\()");
  std::ostringstream unit;
  unit << "#include \"cupy_kernels.h\"\n" << text << "\n";
  for (std::sregex_iterator it(text.begin(), text.end(), kernel), end; it != end; ++it) {
    const std::string name = (*it)[1], caller = "CudasimCall<decltype(&" + name + ")>";
    unit << "extern \"C\" void cudasim_call_" << name << "(void** a) { " << caller << "::call(&" << name << ", a); }\n";
    unit << "extern \"C\" { extern const auto cudasim_sizes_" << name << " = " << caller << "::SIZES; }\n";
  }
  const bool syncs = text.find("syncthreads") != std::string::npos;
  unit << "extern \"C\" { extern const int cudasim_syncs; const int cudasim_syncs = " << syncs << "; }\n";
  return unit.str();
}

int build(Program* program, const std::string& unit, const std::string& flags) {
  char stem[32];
  snprintf(stem, sizeof stem, "/jit/%016zx", std::hash<std::string>()(unit + flags));
  const std::string place = home() + stem, made = place + ".so", own = place + "." + std::to_string(getpid());
  if (access(made.c_str(), F_OK)) {
    std::ofstream(own + ".cpp") << unit;
    const std::string command = "g++ -std=c++17 -O1 -w -fPIC -shared -fpermissive -I'" + sources() + "' -I'" + sources() +
                                "/cupy_headers'" + CUDASIM_INCLUDE + flags + " '" + own + ".cpp' -o '" + own +
                                ".so' -L'" + home() + "/lib' -l:libcuda.so.1 2> '" + own + ".log' && mv '" + own +
                                ".so' '" + made + "'";
    if (system(command.c_str())) {
      std::ifstream log(own + ".log");
      std::ostringstream said;
      said << log.rdbuf();
      program->log = "in " + own + ".cpp\n" + said.str().substr(0, 6000);
      return COMPILATION_FAILED;
    }
    unlink((own + ".cpp").c_str());
    unlink((own + ".log").c_str());
  }
  program->image = "CUDASIM-JIT:" + made + std::string(1, '\0');
  return SUCCESS;
}

}  // namespace

API const char* nvrtcGetErrorString(int status) { return status ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }
API int nvrtcVersion(int* major, int* minor) {
  *major = CUDASIM_TOOLKIT, *minor = CUDASIM_TOOLKIT == 12 ? 9 : 0;
  return SUCCESS;
}
static const int ARCHS[] = {61, 70, 75, 80, 90};
API int nvrtcGetNumSupportedArchs(int* count) {
  *count = sizeof ARCHS / sizeof *ARCHS;
  return SUCCESS;
}
API int nvrtcGetSupportedArchs(int* to) {
  memcpy(to, ARCHS, sizeof ARCHS);
  return SUCCESS;
}
API int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**, const char**) {
  *program = new Program{source};
  return SUCCESS;
}
API int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return SUCCESS;
}
API int nvrtcAddNameExpression(Program*, const char*) { return SUCCESS; }
API int nvrtcGetLoweredName(Program*, const char* name, const char** lowered) {
  *lowered = name;
  return SUCCESS;
}
API int nvrtcCompileProgram(Program* program, int count, const char** options) {
  std::string flags;
  for (int i = 0; i < count; ++i)
    if (!strncmp(options[i], "-I", 2) || !strncmp(options[i], "-D", 2)) flags += " '" + std::string(options[i]) + "'";
  return build(program, unit_of(program->source), flags);
}
static int size_of(const std::string& text, size_t* size) {
  *size = text.size();
  return SUCCESS;
}
static int copy_of(const std::string& text, char* to) {
  memcpy(to, text.data(), text.size());
  return SUCCESS;
}
API int nvrtcGetPTXSize(Program* program, size_t* size) { return size_of(program->image, size); }
API int nvrtcGetPTX(Program* program, char* to) { return copy_of(program->image, to); }
API int nvrtcGetCUBINSize(Program* program, size_t* size) { return size_of(program->image, size); }
API int nvrtcGetCUBIN(Program* program, char* to) { return copy_of(program->image, to); }
API int nvrtcGetLTOIRSize(Program*, size_t* size) { return size_of("", size); }
API int nvrtcGetLTOIR(Program*, char*) { return SUCCESS; }
API int nvrtcGetProgramLogSize(Program* program, size_t* size) { return size_of(program->log + '\0', size); }
API int nvrtcGetProgramLog(Program* program, char* to) { return copy_of(program->log + '\0', to); }
