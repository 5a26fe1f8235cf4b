// SPDX-License-Identifier: MIT
//
// NCCL's sums over the ranks of one machine: rank 0 adds up what the others send it, in their order, and sends it back.
//
// As with NCCL a sum is work in a stream.  It is carried out when the stream is, and waits for all ranks.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <vector>

#include "numbers.h"

#define API extern "C" __attribute__((visibility("default")))

extern "C" void cudasim_enqueue(void* stream, void (*run)(void*), void* data, void (*drop)(void*));

using namespace numbers;

namespace {

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };

struct Identifier {
  char name[128];  // of an abstract socket
};

struct Communicator {
  int size = 1, rank = 0;
  std::vector<int> lines;  // rank 0: to each other rank; else: to rank 0
};

int type_of(int nccl) {  // ncclDataType_t
  switch (nccl) {
    case 6: return FLOAT16;
    case 7: return FLOAT32;
    case 8: return FLOAT64;
    case 9: return BFLOAT16;
    default: return -1;
  }
}

bool all(int line, char* data, size_t bytes, bool sends) {
  while (bytes) {
    const ssize_t done = sends ? send(line, data, bytes, MSG_NOSIGNAL) : recv(line, data, bytes, 0);
    if (done <= 0) return false;
    data += done, bytes -= (size_t)done;
  }
  return true;
}

sockaddr_un address_of(const Identifier& id, socklen_t* length) {
  sockaddr_un found{};
  found.sun_family = AF_UNIX;
  strncpy(found.sun_path + 1, id.name, sizeof found.sun_path - 2);  // after a zero: no file
  *length = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + strlen(found.sun_path + 1));
  return found;
}

int meet(Communicator* one, const Identifier& id) {
  socklen_t length;
  const sockaddr_un address = address_of(id, &length);
  if (one->rank) {
    for (int attempt = 0; attempt < 3000; ++attempt) {
      const int line = socket(AF_UNIX, SOCK_STREAM, 0);
      if (!connect(line, (const sockaddr*)&address, length)) {
        one->lines = {line};
        return all(line, (char*)&one->rank, sizeof one->rank, true) ? SUCCESS : SYSTEM_ERROR;
      }
      close(line);
      usleep(10000);
    }
    return SYSTEM_ERROR;
  }
  one->lines.assign((size_t)one->size - 1, -1);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(listener, (const sockaddr*)&address, length) || listen(listener, one->size)) return SYSTEM_ERROR;
  for (int count = 1; count < one->size; ++count) {
    int rank = 0;
    const int line = accept(listener, nullptr, nullptr);
    if (!all(line, (char*)&rank, sizeof rank, false) || rank < 1 || rank >= one->size) return SYSTEM_ERROR;
    one->lines[(size_t)rank - 1] = line;
  }
  close(listener);
  return SUCCESS;
}

struct Sum {
  const Communicator* of;
  char* data;
  size_t count;
  int type;

  void run() const {
    const size_t bytes = count * bytes_of(type);
    bool is_well = true;
    if (of->rank) {
      is_well = all(of->lines[0], data, bytes, true) && all(of->lines[0], data, bytes, false);
    } else {
      std::vector<char> other(bytes);
      for (int line : of->lines) {
        is_well = is_well && all(line, other.data(), bytes, false);
        for (size_t at = 0; at < count && is_well; ++at)
          write(data, type, at, read(data, type, at) + read(other.data(), type, at));
      }
      for (int line : of->lines) is_well = is_well && all(line, data, bytes, true);
    }
    if (!is_well) {  // as with NCCL: a rank that is gone is waited for
      fprintf(stderr, "cudasim: a rank of NCCL is gone\n");
      for (;;) pause();
    }
  }
};

int begin(void** to, int size, const Identifier& id, int rank) {
  if (!to || size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  auto* one = new Communicator;
  one->size = size, one->rank = rank;
  *to = one;
  return meet(one, id);
}

}  // namespace

API int ncclGetVersion(int* version) {
  *version = 22304;
  return SUCCESS;
}

API const char* ncclGetErrorString(int status) { return status ? "a simulated error" : "no error"; }

API int ncclGetUniqueId(Identifier* id) {
  static int count = 0;
  memset(id, 0, sizeof *id);
  snprintf(id->name, sizeof id->name, "cudasim-nccl-%d-%d", (int)getpid(), ++count);
  return SUCCESS;
}

API int ncclCommInitRank(void** to, int size, Identifier id, int rank) { return begin(to, size, id, rank); }
API int ncclCommInitRankConfig(void** to, int size, Identifier id, int rank, void*) { return begin(to, size, id, rank); }

API int ncclCommDestroy(void* handle) {
  auto* one = (Communicator*)handle;
  for (int line : one->lines) close(line);
  delete one;
  return SUCCESS;
}

API int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* handle, void* stream) {
  if (from != to || op != 0 || type_of(type) < 0) return INVALID_ARGUMENT;  // sums in place: all that is asked here
  auto* sum = new Sum{(const Communicator*)handle, (char*)to, count, type_of(type)};
  cudasim_enqueue(stream, [](void* data) { ((Sum*)data)->run(); }, sum, [](void* data) { delete (Sum*)data; });
  return SUCCESS;
}
