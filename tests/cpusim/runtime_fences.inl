// SPDX-License-Identifier: MIT
//
// What must be fenced on Hopper, a part of runtime.cpp.  Fences order nothing here, where memory is one; what needs one
// is known instead.  Of each word of dynamic shared memory: who wrote it last, and how many fences that thread had
// behind it.  Of each thread: whether it fenced its sums, which products under way keep until it has waited for them.
#include "runtime_hopper.h"

#include <vector>

namespace {

// Who wrote a word of shared memory, and how many of its fences came before.
struct Word {
  enum : uint32_t { NOBODY, COPY_ENGINE, THREAD, INITIALISER = THREAD + MAX_THREADS };
  uint32_t writer, fences;
};

// Sums of a thread: from the first product on them until the wait for the last they are here, its registers NaN.
struct Sums {
  static constexpr uint32_t AWAY = 0xffffffff;  // what the registers hold meanwhile

  float* registers;
  uint32_t count, group;  // group: of the last product
  bool are_held;
  float held[128];

  bool are_untouched() const {
    uint32_t word = AWAY;
    for (uint32_t i = 0; i < count && word == AWAY; ++i) memcpy(&word, registers + i, sizeof(word));
    return word == AWAY;
  }
};

// All that a thread has under way: one set of sums, or two whose products take turns.
struct OwnSums {
  bool are_fenced;
  Sums sets[2];
};

std::vector<Word> words[MAX_BLOCKS];  // empty until a block writes the first
uint32_t fences[Word::INITIALISER + MAX_THREADS];
OwnSums sums[MAX_THREADS];

void begin_fences() {
  for (std::vector<Word>& of_block : words) of_block.clear();
  for (OwnSums& own : sums) own.are_fenced = own.sets[0].are_held = own.sets[1].are_held = false;
}

void fail_at(const char* place, const std::string& what) {
  describe("thread %d: %s at %s", current->thread, what.c_str(), place);
  give_up();
}

// Whose dynamic shared memory it points to; null where it is nobody's.
Block* block_of(const void* pointer) {
  const unsigned char* byte = (const unsigned char*)pointer;
  for (int rank = 0; rank < num_blocks; ++rank) {
    if (byte >= blocks[rank].arena && byte < blocks[rank].arena + arena_bytes) return &blocks[rank];
  }
  return nullptr;
}

void note_words(const void* pointer, uint64_t bytes, uint32_t writer) {
  const Block* block = block_of(pointer);
  if (block == nullptr) return;
  const uint64_t first = (uint64_t)((const unsigned char*)pointer - block->arena);
  if (first + bytes > arena_bytes) return;
  std::vector<Word>& of_block = words[rank_of(block)];
  if (of_block.empty()) of_block.resize(arena_bytes / 4 + 1);
  for (uint64_t i = first / 4; i <= (first + bytes - 1) / 4; ++i) of_block[i] = {writer, fences[writer]};
}

Word word_at(const void* pointer) {
  const Block* block = block_of(pointer);
  if (block == nullptr || words[rank_of(block)].empty()) return Word{};
  return words[rank_of(block)][(uint64_t)((const unsigned char*)pointer - block->arena) / 4];
}

void check_initialised(const uint64_t* barrier, const char* place) {
  const Word word = word_at(barrier);
  if (word.writer >= Word::INITIALISER && word.fences == fences[word.writer]) {
    fail_at(place, "a copy counts on a barrier without a cb_barrier_init_fence after its initialisation");
  }
}

// Take the sums of the thread for a product of a group.
float* hold_sums(const CpusimProduct& product, float* registers, uint32_t group) {
  OwnSums& own = sums[number(current)];
  Sums *found = nullptr, *free = nullptr;
  for (Sums& set : own.sets) {
    if (!set.are_held) {
      free = &set;
    } else if (set.registers == registers && set.count == product.count) {
      found = &set;
    } else if (registers < set.registers + set.count && set.registers < registers + product.count) {
      fail_at(product.place, "a product on a part of the sums of products under way");
    }
  }
  if (found == nullptr) {
    if (!own.are_fenced) {
      fail_at(product.place, "a product on sums without a cb_wgmma_fence since they were waited for");
    }
    if (free == nullptr) fail_at(product.place, "products on more sets of sums under way than cpusim keeps");
    found = free;
    found->registers = registers;
    found->count = product.count;
    found->are_held = true;
    memcpy(found->held, registers, found->count * sizeof(float));
    memset((void*)registers, 0xff, found->count * sizeof(float));
  } else if (!found->are_untouched()) {
    fail_at(product.place, "sums that were written while a product was under way");
  }
  found->group = group;
  return found->held;
}

// Give them back, when products of groups before `before` are done.
void give_sums_back(uint32_t before, const char* place) {
  OwnSums& own = sums[number(current)];
  for (Sums& set : own.sets) {
    if (!set.are_held || (int32_t)(set.group - before) >= 0) continue;
    if (!set.are_untouched()) fail_at(place, "sums that were written while a product was under way");
    memcpy((void*)set.registers, set.held, set.count * sizeof(float));
    set.are_held = own.are_fenced = false;
  }
}

}  // namespace

extern "C" {

void cpusim_note_write(const void* pointer, uint32_t bytes) {
  note_words(pointer, bytes, Word::THREAD + (uint32_t)number(current));
}
void cpusim_fence_writes() { ++fences[Word::THREAD + number(current)]; }
void cpusim_fence_barriers() { ++fences[Word::INITIALISER + number(current)]; }
void cpusim_fence_sums() { sums[number(current)].are_fenced = true; }

void cpusim_check_seen(const void* shared, uint32_t bytes, const char* place) {
  if (!cpusim_in_shared(shared, bytes)) fail_at(place, "a tile outside of shared memory");
  for (uint32_t i = 0; i < bytes; i += 4) {
    const Word word = word_at((const unsigned char*)shared + i);
    if (word.writer == Word::NOBODY) fail_at(place, "a tile that no copy and no cb_write has written is read");
    if (word.writer >= Word::THREAD && word.fences == fences[word.writer]) {
      fail_at(place, "what thread " + std::to_string(fibers[word.writer - Word::THREAD].thread) +
                         " wrote without a cb_proxy_fence after it is read");
    }
  }
}
}
