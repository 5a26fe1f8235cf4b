// SPDX-License-Identifier: MIT
//
// Each name of common/device.cuh by itself, for test_twins.py.
#include "common/device.cuh"

CB_KERNEL(128, 1) round_trip(const float* x, half_t* halves, bfloat16_t* bfloats, float* floats, int count) {
  const int i = (int)cb_block_x() * cb_num_threads() + cb_thread();
  if (i < count) {
    halves[i] = from_float<half_t>(x[i]);
    bfloats[i] = from_float<bfloat16_t>(x[i]);
    floats[i] = from_float<float>(to_float(x[i]));
  }
}

CB_KERNEL(128, 1) widen(const half_t* halves, const bfloat16_t* bfloats, float* y, float* z, int count) {
  const int i = (int)cb_block_x() * cb_num_threads() + cb_thread();
  if (i < count) {
    y[i] = to_float(halves[i]);
    z[i] = to_float(bfloats[i]);
  }
}

CB_KERNEL(128, 1) products(const u32* a, const u32* b, u32* y) {
  y[cb_thread()] = cb_mul_high(a[cb_thread()], b[cb_thread()]);
}

// What kernels may use as it is.
CB_KERNEL(32, 1) mathematics(const float* x, float* y) {
  const float at = x[cb_thread()];
  float* to = y + 10 * cb_thread();
  to[0] = expf(at), to[1] = logf(at), to[2] = sqrtf(at), to[3] = rsqrtf(at), to[4] = fmaf(at, at, -at);
  to[5] = fmaxf(at, 1.0f), to[6] = fminf(at, 1.0f), to[7] = erff(at), to[8] = tanhf(at), to[9] = fabsf(-at);
}

CB_KERNEL(64, 1) places(int* y) {
  const i64 block = ((i64)cb_block_z() * cb_num_blocks_y() + cb_block_y()) * cb_num_blocks_x() + cb_block_x();
  int* at = y + (block * cb_num_threads() + cb_thread()) * 6;
  at[0] = (int)cb_block_x(), at[1] = (int)cb_block_y(), at[2] = (int)cb_block_z();
  at[3] = cb_thread(), at[4] = cb_lane(), at[5] = cb_warp();
}

// Which turn each block and, after a barrier, each of its threads had: counted in y[0] and thread_turns[0].
CB_KERNEL(128, 1) turns(int* y, int* thread_turns) {
  if (cb_thread() == 0) y[1 + cb_block_x()] = ++y[0];
  cb_sync();
  thread_turns[1 + cb_block_x() * 128 + (u32)cb_thread()] = ++thread_turns[0];
}

CB_KERNEL(64, 1) shuffles(const float* x, const double* wide, const int* numbers, float* y, double* z, int* i, int by) {
  y[cb_thread()] = cb_shuffle_xor(x[cb_thread()], by);
  z[cb_thread()] = cb_shuffle_down(wide[cb_thread()], by);
  i[cb_thread()] = cb_shuffle_down(cb_shuffle_xor(numbers[cb_thread()], by), by);
}

template <class T, int N>
CB_DEVICE void move_vectors(const T* x, T* y) {
  CB_SHARED(T, shared, N * 64);
  const int i = N * cb_thread();
  cb_write<T, N>(shared + i, cb_load<T, N>(x + i));
  cb_write<T, N>(y + i, cb_read<T, N>(shared + i));
}
CB_KERNEL(64, 1) vectors(const u16* narrow, u16* y, const float* wide, float* z) {
  move_vectors<u16, 1>(narrow, y);
  move_vectors<u16, 4>(narrow + 64, y + 64);
  move_vectors<u16, 8>(narrow + 320, y + 320);
  move_vectors<float, 1>(wide, z);
  move_vectors<float, 2>(wide + 64, z + 64);
  move_vectors<float, 4>(wide + 192, z + 192);
}

// What shared memory holds at the start of a block, static and dynamic.
CB_KERNEL(32, 1) untouched(u32* y, int count) {
  CB_SHARED(u32, fixed, 32);
  CB_DYNAMIC_SHARED(arena);
  const u32* dynamic = reinterpret_cast<const u32*>(arena);
  u32* at = y + (i64)cb_block_x() * (count + 33);
  at[cb_thread()] = fixed[cb_thread()];
  for (int i = cb_thread(); i < count; i += 32) at[32 + i] = dynamic[i];
  if (cb_thread() == 0) at[32 + count] = (u32)((u64)arena % 1024);
  cb_sync_warp();
  fixed[cb_thread()] = 0;
  for (int i = cb_thread(); i < count; i += 32) reinterpret_cast<u32*>(arena)[i] = 0;
}

#if CB_ARCH >= 80
// Thread t copies `valid` bytes, with so many of its groups left under way, then reads what it copied first.
CB_KERNEL(32, 1) copies(const unsigned char* x, unsigned char* y, int valid) {
  CB_SHARED(unsigned char, shared, 32 * 28);
  unsigned char* at = shared + 16 * cb_thread();
  cb_copy_async<16>(at, x + 16 * cb_thread(), valid);
  cb_copy_commit();
  cb_copy_async<8>(shared + 512 + 8 * cb_thread(), x + 512 + 8 * cb_thread(), valid < 8 ? valid : 8);
  cb_copy_async<4>(shared + 768 + 4 * cb_thread(), x + 768 + 4 * cb_thread(), valid < 4 ? valid : 4);
  cb_copy_commit();
  cb_copy_wait<1>();
  for (int i = 0; i < 16; ++i) y[16 * cb_thread() + i] = at[i];
  const unsigned char early = shared[512 + 8 * cb_thread()];  // whether the second group is there already
  y[896 + cb_thread()] = early;
  cb_copy_wait<0>();
  for (int i = 0; i < 8; ++i) y[512 + 8 * cb_thread() + i] = shared[512 + 8 * cb_thread() + i];
  for (int i = 0; i < 4; ++i) y[768 + 4 * cb_thread() + i] = shared[768 + 4 * cb_thread() + i];
}

// One misuse each, for what a GPU would do of it is undefined.
CB_KERNEL(32, 1) misuse(const float* x, float* y, int which) {
  CB_SHARED(float, shared, 128);
  const Vec<float, 4> vector = {};
  float* at = shared + 4 * cb_thread();
  if (which == 0) cb_write<float, 4>(y + 1, vector);
  if (which == 1) y[0] = cb_read<float, 2>(x + 1).v[0];
  if (which == 2) y[0] = cb_load<float, 1>(at).v[0];
  if (which == 3) cb_copy_async<16>(at + 1, x, 16);
  if (which == 4) cb_copy_async<16>(at, x + 2, 16);
  if (which == 5) cb_copy_async<4>(y, x, 4);
  if (which == 6) cb_copy_async<4>(at, x, 5);
  if (which == 7) cb_copy_async<4>(at, nullptr, 0);
  if (which == 8) y[0] = cb_shuffle_xor(1.0f, 32);
  if (which == 9) y[0] = cb_shuffle_down(1.0f, 32);
  if (which == 10) {
    for (int i = 0; i < 300; ++i) cb_copy_async<4>(at, x, 4);
  }
  cb_copy_wait<0>();
}
#endif
