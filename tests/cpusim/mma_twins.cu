// SPDX-License-Identifier: MIT
//
// Each name of common/device_mma.cuh by itself, for test_mma_twins.py: a lane's registers in, a lane's registers out.
#include "common/device_mma.cuh"

// registers[lane][4] of A and B each, sums[lane][8]; 32 lanes.
#define LANES(a, b, c)                       \
  const int lane = cb_lane();                \
  const u32* const a = a_words + 4 * lane;   \
  const u32* const b = b_words + 4 * lane;   \
  float* const c = sums + 8 * lane

#if CB_ARCH >= 75
// rows[64][16 bytes] in any order: lane i names row order[i] of shared memory.
CB_KERNEL(32, 1) load_matrices(const u32* rows, const int* order, u32* plain, u32* transposed) {
  CB_SHARED(u32, shared, 64 * 4);
  for (int i = cb_lane(); i < 64 * 4; i += 32) shared[i] = rows[i];
  cb_sync_warp();
  u32 value[4];
  cb_load_matrices(value, shared + 4 * order[cb_lane()]);
  for (int i = 0; i < 4; ++i) plain[4 * cb_lane() + i] = value[i];
  cb_load_matrices_transposed(value, shared + 4 * order[cb_lane()]);
  for (int i = 0; i < 4; ++i) transposed[4 * cb_lane() + i] = value[i];
}

// A row that is not aligned, or not in shared memory.
CB_KERNEL(32, 1) misuse(const u32* rows, int which) {
  CB_SHARED(u32, shared, 64);
  u32 value[4];
  const u32* row = which == 0 ? shared + 1 : rows;
  cb_load_matrices(value, row);
}

CB_KERNEL(32, 1) m16n8k8_f16(const u32* a_words, const u32* b_words, float* sums) {
  LANES(a, b, c);
  cb_mma_m16n8k8_f16(c, a[0], a[1], b[0]);
}
#else
template <bool A_COLUMNS, bool B_ROWS>
CB_DEVICE void m8n8k4(const u32* a_words, const u32* b_words, float* sums) {
  LANES(a, b, c);
  cb_mma_m8n8k4_f16<A_COLUMNS, B_ROWS>(c, a[0], a[1], b[0], b[1]);
}
CB_KERNEL(32, 1) m8n8k4_row_col(const u32* a, const u32* b, float* sums) { m8n8k4<false, false>(a, b, sums); }
CB_KERNEL(32, 1) m8n8k4_row_row(const u32* a, const u32* b, float* sums) { m8n8k4<false, true>(a, b, sums); }
CB_KERNEL(32, 1) m8n8k4_col_col(const u32* a, const u32* b, float* sums) { m8n8k4<true, false>(a, b, sums); }
CB_KERNEL(32, 1) m8n8k4_col_row(const u32* a, const u32* b, float* sums) { m8n8k4<true, true>(a, b, sums); }
#endif

#if CB_ARCH >= 80
CB_KERNEL(32, 1) m16n8k16_f16(const u32* a_words, const u32* b_words, float* sums) {
  LANES(a, b, c);
  cb_mma_m16n8k16_f16(c, a[0], a[1], a[2], a[3], b[0], b[1]);
}
CB_KERNEL(32, 1) m16n8k16_bf16(const u32* a_words, const u32* b_words, float* sums) {
  LANES(a, b, c);
  cb_mma_m16n8k16_bf16(c, a[0], a[1], a[2], a[3], b[0], b[1]);
}
CB_KERNEL(32, 1) m16n8k8_tf32(const u32* a_words, const u32* b_words, float* sums) {
  LANES(a, b, c);
  cb_mma_m16n8k8_tf32(c, a[0], a[1], a[2], a[3], b[0], b[1]);
}
CB_KERNEL(128, 1) round_to_tf32(const u32* x, u32* y, int count) {
  const int i = (int)cb_block_x() * cb_num_threads() + cb_thread();
  if (i < count) y[i] = cb_tf32(x[i]);
}
#endif

// Where an atom's sums lie: y[lane][8][row, column].
CB_KERNEL(32, 1) atom_places(int* y) {
  for (int i = 0; i < 8; ++i) {
    y[16 * cb_lane() + 2 * i] = Atom<half_t>::row(cb_lane(), i);
    y[16 * cb_lane() + 2 * i + 1] = Atom<half_t>::column(cb_lane(), i);
  }
}
