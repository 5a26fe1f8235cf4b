// SPDX-License-Identifier: MIT
//
// What is made to go wrong, by CUDASIM_FAULTS: names with a detail after a colon, separated by commas.
//
//     trap:TEXT     a kernel whose name contains TEXT faults: the launch succeeds, everything after it fails; names are
//                   that in its source and those of cubatch's variants
//     hang:TEXT     a kernel whose name contains TEXT never ends
//     die:TEXT      the process is killed where a kernel whose name contains TEXT runs
//     trap:TEXT@N   and likewise: the N-th launch of such kernels in a process, and all after it
//     oom:N         the N-th allocation from now fails, and no other
//     memory:BYTES  all devices have so much memory
//     spill         memory beyond that is given all the same, as by a driver that lets it spill into the host's
//     graph:CALL    the driver refuses graphs: CALL is begin (the capture), instantiate or launch
//     tensor-map    every tensor map is refused; tensor-map:im2col only those of convolutions
//     dead          the device does not answer any more
//     attribute:N   the driver refuses to tell the device's attribute N
//     mig           the device is a slice of a GPU, of which NVML tells memory and processes only
//     nvml:none, nvml:unknown, nvml:slow   NVML does not support a query, fails, takes 20 ms for each
#include <cstdarg>
#include <cstdlib>
#include <map>
#include <sstream>

#include "sim.h"

namespace sim {

void say(const char* format, ...) {
  va_list values;
  va_start(values, format);
  fputs("cudasim: ", stderr);
  vfprintf(stderr, format, values);
  fputc('\n', stderr);
  va_end(values);
}

static bool detail(const char* name, std::string* found) {
  const char* given = getenv("CUDASIM_FAULTS");  // read anew each time: a test may plant one in the middle
  std::istringstream faults(given ? given : "");
  for (std::string fault; std::getline(faults, fault, ',');) {
    size_t colon = fault.find(':');
    if (fault.substr(0, colon) != name) continue;
    *found = colon == std::string::npos ? "" : fault.substr(colon + 1);
    return true;
  }
  return false;
}

bool planted(const char* name, const std::string& of) {
  std::string found;
  return detail(name, &found) && of.find(found) != std::string::npos;
}

bool planted_now(const char* name, const std::string& of) {
  static std::map<std::string, uint64_t> launches;
  std::string found;
  if (!detail(name, &found)) return false;
  const size_t at = found.find('@');
  if (of.find(found.substr(0, at)) == std::string::npos) return false;
  return at == std::string::npos || ++launches[name] >= strtoull(found.c_str() + at + 1, nullptr, 10);
}

uint64_t planted_number(const char* name, uint64_t none) {
  std::string found;
  return detail(name, &found) ? strtoull(found.c_str(), nullptr, 10) : none;
}

}  // namespace sim
