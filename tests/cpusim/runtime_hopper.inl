// SPDX-License-Identifier: MIT
//
// The asynchronous half of the runtime, a part of runtime.cpp: barriers in shared memory, tensor copies, products.
//
// Late copies are carried out when no thread can go on, or at a wait for them; early ones at their issue.  Products are
// carried out at the wait for them.  Where the schedule is drawn, late copies may also happen at any asynchronous call,
// any such call may let others run first, and products may come at their issue; how often is drawn for each block.  So
// a stage that is handed on too early is overwritten, or one that is not full is read, in some schedule.
#include "runtime_fences.inl"
#include "runtime_cluster.inl"

namespace {

// A barrier's 64 bits.  Shared memory starts as all ones, which no barrier is: its top bit is zero.  Bytes may come before
// they are expected, from another block: below zero while arrivals are missing.
struct Barrier {
  uint64_t phase : 1, expected : 20, missing : 20;
  int64_t bytes : 22;
  uint64_t unused : 1;
};
static_assert(sizeof(Barrier) == 8);

struct Started {
  CpusimTensorCopy copy;
  Block *block, *from;  // whose shared memory it is at work on, and whose thread started it
  int owner;            // of a store, its thread and group
  uint32_t group;
  char* token;
};

struct Multiplied {
  CpusimProduct product;
  float* sums[128];
  uint32_t group;
  char* token;
};

// A list in fixed memory, where TSan sees nothing of how it is kept: an item stays in its slot.
template <class T, int MOST>
struct List {
  T slots[MOST];
  int order[MOST];  // of the slots: the first `count` are taken, oldest first
  int count;

  void clear() {
    count = 0;
    for (int i = 0; i < MOST; ++i) order[i] = i;
  }
  T& operator[](int index) { return slots[order[index]]; }
  T* add() { return count == MOST ? nullptr : &slots[order[count++]]; }
  void remove(int index) {
    const int slot = order[index];
    for (int i = index; i + 1 < count; ++i) order[i] = order[i + 1];
    order[--count] = slot;
  }
};

struct Warpgroup {
  int arrived = 0;
  char done;         // address that TSan ties the end of its products to
  Multiplied* next;  // that threads are about to start
  List<Multiplied, 64> products;
};

List<Started, 512> started;
Warpgroup warpgroups[MAX_THREADS / 128];
const uint64_t* waited_for[MAX_THREADS];
uint32_t product_group[MAX_THREADS], store_group[MAX_THREADS];
char async_tokens[1024], store_tokens[MAX_THREADS];
unsigned next_token;
uint64_t copy_odds, yield_odds;
bool are_odds_drawn, are_products_early;
[[maybe_unused]] void *copy_engine, *product_engine;

bool is_drawn() { return launch->schedule == SHUFFLED || launch->schedule == WARPS; }

void begin_async() {
  started.clear();
  for (Warpgroup& group : warpgroups) {
    group.arrived = 0;
    group.products.clear();
  }
  std::fill(product_group, product_group + MAX_THREADS, 0u);
  std::fill(store_group, store_group + MAX_THREADS, 0u);
  are_odds_drawn = false;
  begin_fences();
  begin_cluster();
}

// How often things happen in this block; drawn by what first asks, so that other kernels draw nothing.
void draw_odds() {
  if (are_odds_drawn) return;
  are_odds_drawn = true;
  copy_odds = 4u << 2 * draw(6);
  yield_odds = 4u << 2 * draw(4);
  are_products_early = !launch->early && draw(2) == 1;
}

char* new_token() { return &async_tokens[next_token++ % sizeof(async_tokens)]; }

// The copy engine and the tensor cores are threads of their own to TSan: ordered by tokens and barriers alone.
template <class Run>
void run_engine([[maybe_unused]] void*& engine, Block* block, [[maybe_unused]] char* token, Run run) {
#if defined(CPUSIM_THREAD)
  if (!engine) engine = __tsan_create_fiber(0);
  void* self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(engine, 1);
  tsan_acquire(*token);
#endif
  of_engine = block;
  run();
  of_engine = nullptr;
#if defined(CPUSIM_THREAD)
  tsan_release(*token);
  tsan_release(end_token);
  __tsan_switch_to_fiber(self, 1);
#endif
}

// Each phase has a token of its own, for the same reason as cpusim_sync.
char& phase_token(uint64_t* barrier, uint32_t parity) { return reinterpret_cast<char*>(barrier)[4 * (parity & 1)]; }

Barrier* known(uint64_t* barrier, const char* place) {
  const bool is_shared = block_of(barrier) != nullptr || cpusim_in_shared(barrier, 8);
  if (!is_shared || (uintptr_t)barrier % 8) fail_at(place, "a barrier is 8 bytes of shared memory");
  Barrier* found = reinterpret_cast<Barrier*>(barrier);
  if (found->unused) fail_at(place, "a barrier that was not initialised");
  return found;
}

void wake_waiters(const uint64_t* barrier) {
  int woken[MAX_THREADS], count = 0;
  for (int i = 0; i < num_fibers; ++i) {
    if (fibers[i].state == State::PHASE && waited_for[i] == barrier) woken[count++] = i;
  }
  if (launch->schedule == REVERSED) std::reverse(woken, woken + count);
  if (launch->schedule == SHUFFLED) shuffle(woken, (uint64_t)count);
  const int first = launch->schedule == WARPS && count ? (int)draw((uint64_t)count) : 0;
  for (int i = 0; i < count; ++i) {
    const int thread = woken[(first + i) % count];
    fibers[thread].state = State::READY;
    ready[(first_ready + num_ready++) % MAX_THREADS] = thread;
  }
}

void end_phase_if_complete(uint64_t* barrier, Barrier* found, const char* place) {
  if (found->missing) return;
  if (found->bytes < 0) {
    fail_at(place, "more bytes arrive than the barrier expects, " + std::to_string(-found->bytes) + ", the last");
  }
  if (found->bytes) return;
  found->phase ^= 1;
  found->missing = found->expected;
  note_phase_ended(barrier);
  wake_waiters(barrier);
}

void run_started(int index) {
  const Started& job = started[index];
  const CpusimTensorCopy& copy = job.copy;
  started.remove(index);  // its slot stays as it is until another copy is started
  run_engine(copy_engine, job.block, job.token, [&] {
    copy.run(&copy);
    if (copy.barrier == nullptr) {
      tsan_release(store_tokens[job.owner]);
      return;
    }
    Barrier* found = known(copy.barrier, copy.place);
    if (found->bytes - (int64_t)copy.bytes <= -(1 << 20)) {
      fail_at(copy.place, "more bytes arrive than a barrier can count, the last");
    }
    tsan_release(phase_token(copy.barrier, found->phase));
    note_part(copy.barrier, job.from, copy.place);
    note_words(copy.shared, copy.bytes, Word::COPY_ENGINE);
    found->bytes -= copy.bytes;
    end_phase_if_complete(copy.barrier, found, copy.place);
  });
}

// Carry out one copy that is under way; false where there is none.
bool run_one_copy() {
  if (started.count == 0) return false;
  const int last = started.count - 1;
  run_started(is_drawn() ? (int)draw((uint64_t)last + 1) : launch->schedule == REVERSED ? last : 0);
  return true;
}

// Any asynchronous call may find others further on.
void async_point() {
  if (!is_drawn()) return;
  draw_odds();
  if (draw(copy_odds) == 0) run_one_copy();
  if (draw(yield_odds) == 0) {
    ready[(first_ready + num_ready++) % MAX_THREADS] = number(current);
    wait();
  }
}

void run_products(Warpgroup& group, uint32_t before) {
  while (group.products.count && (int32_t)(group.products[0].group - before) < 0) {
    const Multiplied& job = group.products[0];
    group.products.remove(0);
    run_engine(product_engine, current->block, job.token, [&] {
      job.product.run(&job.product, job.sums);
      tsan_release(group.done);
    });
  }
}

Warpgroup& own_warpgroup() { return warpgroups[number(current) / 128]; }

// What a thread leaves behind.
void check_drained() {
  const int thread = number(current);
  if (own_warpgroup().arrived) {
    const char* place = "its end";
    for (int i = 0; i < num_fibers; ++i) {
      if (i / 128 == thread / 128 && fibers[i].state == State::WARPGROUP) place = fibers[i].place;
    }
    fail_at(place, "an operation of a warpgroup that has lost a thread");
  }
  if (own_warpgroup().products.count) {
    fail_at(own_warpgroup().products[0].product.place,
            "a product is still under way when a thread of its warpgroup returns; started");
  }
  for (int i = 0; i < started.count; ++i) {
    if (started[i].owner == thread) {
      fail_at(started[i].copy.place, "a store still reads shared memory when its thread returns; started");
    }
  }
}

// What a block leaves behind.
void check_block_drained() {
  for (int i = 0; i < started.count; ++i) {
    if (started[i].block != current->block) continue;
    describe("a copy is still under way when its block ends; started at %s", started[i].copy.place);
  }
  check_unreached(*current->block);
}

// Start a copy between global memory and the shared memory of a block of the cluster.
void start_copy(const CpusimTensorCopy& copy, uint32_t rank) {
  const int thread = number(current);
  const bool is_store = copy.barrier == nullptr;
  Started* job = started.add();
  if (job == nullptr) fail_at(copy.place, "more copies under way than cpusim keeps");
  job->copy = copy;
  job->block = &blocks[rank];
  job->from = current->block;
  job->owner = is_store ? thread : -1;
  job->group = store_group[thread];
  job->token = new_token();
  if (!is_store) {
    job->copy.shared = place_in(copy.shared, rank);
    job->copy.barrier = barrier_in(copy.barrier, rank, copy.place);
    known(job->copy.barrier, copy.place);
    check_initialised(job->copy.barrier, copy.place);
  }
  tsan_release(*job->token);
  if (launch->early) run_started(started.count - 1);
}

}  // namespace

extern "C" {

const char* cpusim_place(const char* file, int line) {
  static std::map<std::pair<const char*, int>, std::string> places;
  std::string& place = places[{file, line}];
  if (place.empty()) place = std::string(file) + ":" + std::to_string(line);
  return place.c_str();
}

void cpusim_barrier_init(uint64_t* barrier, uint32_t arrivals, const char* place) {
  async_point();
  if (!cpusim_in_shared(barrier, 8) || (uintptr_t)barrier % 8) fail_at(place, "a barrier is 8 bytes of shared memory");
  if (arrivals == 0 || arrivals >= 1u << 20) fail_at(place, "a barrier for no arrivals, or too many");
  *reinterpret_cast<Barrier*>(barrier) = Barrier{0, arrivals, arrivals, 0, 0};
  note_initialised(barrier);
  note_words(barrier, sizeof(Barrier), Word::INITIALISER + (uint32_t)number(current));
}

void cpusim_barrier_arrive(uint64_t* barrier, uint32_t bytes, const char* place) {
  async_point();
  Barrier* found = known(barrier, place);
  if (found->missing == 0) fail_at(place, "more arrivals at a barrier than it expects");
  if (found->bytes + (int64_t)bytes >= 1 << 20) fail_at(place, "more bytes under way than a barrier can count");
  tsan_release(phase_token(barrier, found->phase));
  found->missing -= 1;
  found->bytes += bytes;
  note_part(barrier, current->block, place);
  end_phase_if_complete(barrier, found, place);
  async_point();
}

void cpusim_barrier_arrive_remote(uint64_t* barrier, uint32_t rank, const char* place) {
  cpusim_barrier_arrive(barrier_in(barrier, rank, place), 0, place);
}

void cpusim_barrier_wait(uint64_t* barrier, uint32_t parity, const char* place) {
  async_point();
  if (parity > 1) fail_at(place, "a parity that is not 0 or 1");
  while (known(barrier, place)->phase == parity) {
    current->state = State::PHASE;
    current->place = place;
    waited_for[number(current)] = barrier;
    wait();
  }
  note_phase_waited(barrier);
  tsan_acquire(phase_token(barrier, parity));
}

void cpusim_start_copy(const CpusimTensorCopy* copy) {
  async_point();
  if (copy->barrier == nullptr) cpusim_check_seen(copy->shared, copy->bytes, copy->place);
  if (copy->blocks >> num_blocks) fail_at(copy->place, "a copy to a block that is not in the cluster");
  for (uint32_t rank = 0; rank < (uint32_t)num_blocks; ++rank) {
    const bool is_own = &blocks[rank] == current->block;
    if (copy->blocks ? copy->blocks >> rank & 1 : is_own) start_copy(*copy, rank);
  }
  async_point();
}

void cpusim_commit_stores() { ++store_group[number(current)]; }

void cpusim_wait_stores(int pending) {
  async_point();
  const int thread = number(current);
  for (int i = 0; i < started.count;) {
    const Started& job = started[i];
    if (job.owner == thread && (int64_t)job.group + pending < (int64_t)store_group[thread]) {
      run_started(i);
    } else {
      ++i;
    }
  }
  tsan_acquire(store_tokens[thread]);
}

void cpusim_meet_warpgroup(const char* place) {
  const int first = number(current) / 128 * 128;
  Warpgroup& group = own_warpgroup();
  current->state = State::WARPGROUP;
  current->place = place;
  for (int i = first; i < first + 128; ++i) {
    if (i >= num_fibers || fibers[i].state == State::DONE) {
      fail_at(place, "an operation of a warpgroup that has lost a thread");
    }
    if (fibers[i].state == State::WARPGROUP && !same(fibers[i].place, place)) {
      fail_at(place, std::string("divergent operation of a warpgroup, others are at ") + fibers[i].place);
    }
  }
  if (++group.arrived == 128) {
    group.arrived = 0;
    run_ahead = false;
    wake(first, 128);
  }
  wait();
}

void cpusim_start_product(const CpusimProduct* product, float* registers) {
  async_point();
  const int thread = number(current);
  float* held = hold_sums(*product, registers, product_group[thread]);
  Warpgroup& group = own_warpgroup();
  if (group.arrived == 0) {
    group.next = group.products.add();
    if (group.next == nullptr) fail_at(product->place, "more products under way than cpusim keeps");
    group.next->product = *product;
    group.next->group = product_group[thread];
    group.next->token = new_token();
  }
  const CpusimProduct& other = group.next->product;
  if (other.run != product->run || other.a != product->a || other.b != product->b) {
    fail_at(product->place, "threads of a warpgroup disagree on a product");
  }
  if (group.next->group != product_group[thread]) {
    fail_at(product->place, "threads of a warpgroup disagree on a product's group");
  }
  group.next->sums[thread % 128] = held;
  tsan_release(*group.next->token);
  if (group.arrived == 127) product->check(product);
  // Not before all have come: its group is not closed by any of them yet.
  if (group.arrived == 127 && is_drawn() && are_products_early) run_products(group, group.next->group + 1);
  cpusim_meet_warpgroup(product->place);
}

void cpusim_commit_products(const char*) {
  async_point();
  ++product_group[number(current)];
}

void cpusim_wait_products(int pending, const char* place) {
  async_point();
  Warpgroup& group = own_warpgroup();
  const uint32_t before = product_group[number(current)] - (uint32_t)pending;
  run_products(group, before);
  tsan_acquire(group.done);
  give_sums_back(before, place);
}
}
