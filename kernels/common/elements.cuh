// SPDX-License-Identifier: MIT
//
// Walking over elements with several independent loads under way: what all bandwidth-bound kernels share.
//
//   WIDE       elements of a 16-byte load: 4 of float, 8 of the 16-bit types
//   ELEMENTS     elements that a block of an elementwise kernel owns: LOADS vectors for each thread
//
// A block owns one run of elements and there are as many blocks as that takes, so a thread has LOADS loads
// of each operand under way and the hardware balances the blocks.
#pragma once

#include "common/held.cuh"

#ifndef CB_ELEMENT
#define CB_ELEMENT float
#endif
static_assert(sizeof(CB_ELEMENT) == 4 || sizeof(CB_ELEMENT) == 2, "vectors are of 16 bytes, and floats of at most 4");

typedef unsigned char u8;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int LOADS = 4;
constexpr int WIDE = 16 / sizeof(CB_ELEMENT);
constexpr int ELEMENTS = THREADS * LOADS * WIDE;

CB_DEVICE float infinity() { return to_float(bfloat16_t{0x7f80}); }

// Whether vectors of 16 bytes may be loaded from and stored to a pointer; null is never touched.
CB_DEVICE bool is_aligned(const void* pointer) { return reinterpret_cast<u64>(pointer) % 16 == 0; }

// use(row, load(row)) for row = first, first + step, ... before end, AT_ONCE loads at a time.  The last round is cut
// short by predicates, and what is loaded moves up to where one copy of the work's code uses it: unrolled, or with a
// loop of its own for the rest, that code would be most of the kernel's text, and of the time to compile it.
template <int AT_ONCE, class Load, class Use>
CB_DEVICE void walk(i64 first, i64 end, int step, Load load, Use use) {
  CB_NO_UNROLL
  for (i64 row = first; row < end;) {
    Held<decltype(load(row))> loaded[AT_ONCE] = {};
    CB_UNROLL
    for (int i = 0; i < AT_ONCE; ++i) {
      if (row + i * (i64)step < end) loaded[i].put(load(row + i * (i64)step));
    }
    CB_NO_UNROLL
    for (int i = 0; i < AT_ONCE && row < end; ++i, row += step) {
      use(row, loaded[0].get());
      CB_UNROLL
      for (int j = 1; j < AT_ONCE; ++j) loaded[j - 1] = loaded[j];
    }
  }
}

// work.use<V>(i, work.load<V>(i)) over this block's run of `count` elements, V at a time: vectors where all operands
// are aligned, single elements where not and at the very end.
template <int AT_ONCE, class Work>
CB_DEVICE void for_elements(i64 count, bool aligned, const Work& work) {
  const i64 begin = (i64)cb_block_x() * ELEMENTS;
  const i64 end = begin + ELEMENTS < count ? begin + ELEMENTS : count;
  i64 rest = begin;
  if (aligned) {
    rest = end / WIDE * WIDE;
    walk<AT_ONCE>(
        begin / WIDE + cb_thread(), end / WIDE, THREADS, [&](i64 i) { return work.template load<WIDE>(i * WIDE); },
        [&](i64 i, const decltype(work.template load<WIDE>(i))& loaded) { work.template use<WIDE>(i * WIDE, loaded); });
  }
  walk<1>(
      rest + cb_thread(), end, THREADS, [&](i64 i) { return work.template load<1>(i); },
      [&](i64 i, const decltype(work.template load<1>(i))& loaded) { work.template use<1>(i, loaded); });
}
