// SPDX-License-Identifier: MIT
//
// What is said of a launch that fails, a part of runtime.cpp: the first problem, and where every thread waits.

namespace {

__attribute__((format(printf, 1, 2))) void describe(const char* format, ...) {
  if (failed) return;  // the first problem is the cause
  failed = true;
  const uint32_t* at = own_block().at;
  int used = snprintf(problem, sizeof(problem), "%s, block (%u, %u, %u): ", launch->entry->name, at[0], at[1], at[2]);
  va_list values;
  va_start(values, format);
  vsnprintf(problem + used, sizeof(problem) - used, format, values);
  va_end(values);
}

// Leave the block for good; its fibers are never resumed.
void give_up() { switch_to(host, true); }

const char* name(State state) {
  switch (state) {
    case State::BARRIER: return "cb_sync";
    case State::CLUSTER: return "cb_cluster_sync";
    case State::WARP_BARRIER: return "cb_sync_warp";
    case State::SHUFFLE: return "a shuffle";
    case State::PHASE: return "cb_barrier_wait";
    case State::WARPGROUP: return "a warpgroup's operation";
    case State::COLLECTIVE: return "a matrix operation";
    case State::DONE: return "its end";
    default: return "nothing";
  }
}

// "threads 0-15 wait in a shuffle at a.cu:35; threads 16-31 have returned"
void describe_waiting(const char* what) {
  std::string text;
  for (int begin = 0; begin < num_fibers;) {
    const Fiber& fiber = fibers[begin];
    int end = begin + 1;
    const bool done = fiber.state == State::DONE;
    while (end < num_fibers && fibers[end].block == fiber.block && fibers[end].state == fiber.state &&
           (done || same(fibers[end].place, fiber.place)))
      ++end;
    const bool one = end - begin == 1;
    text += (text.empty() ? "thread" : "; thread") + std::string(one ? " " : "s ") + std::to_string(fiber.thread);
    if (!one) text += "-" + std::to_string(fibers[end - 1].thread);
    if (num_blocks > 1) text += " of rank " + std::to_string(rank_of(fiber.block));
    if (done) {
      text += one ? " has returned" : " have returned";
    } else {
      text += std::string(one ? " waits in " : " wait in ") + name(fiber.state) + " at " + fiber.place;
    }
    begin = end;
  }
  describe("%s: %s", what, text.c_str());
}

}  // namespace
