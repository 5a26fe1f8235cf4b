// Put under a process by LD_PRELOAD: from read FAILING_FROM on, FAILING_FOR reads of a file *.sqlite3* fail with EIO.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(int file) {
  static long seen;
  char link[64], path[4096];
  const char *from = getenv("FAILING_FROM"), *count = getenv("FAILING_FOR");
  if (!from || !count) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  if (!strstr(path, ".sqlite3") || strstr(path, ".locks")) return 0;
  ++seen;
  if (seen < atol(from) || seen - atol(from) >= atol(count)) return 0;
  if (seen == atol(from)) {
    int log = open(getenv("FAILING_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(log, "EIO\n", 4) == 4) close(log);
  }
  return 1;
}

#define FAILING(name, declared, passed)                                    \
  ssize_t name declared {                                                  \
    static ssize_t(*real) declared;                                        \
    if (!real) real = (ssize_t(*) declared)dlsym(RTLD_NEXT, #name);        \
    if (fails(file)) {                                                     \
      errno = EIO;                                                         \
      return -1;                                                           \
    }                                                                      \
    return real passed;                                                    \
  }

FAILING(read, (int file, void *data, size_t size), (file, data, size))
FAILING(pread, (int file, void *data, size_t size, off_t place), (file, data, size, place))
FAILING(pread64, (int file, void *data, size_t size, off64_t place), (file, data, size, place))
