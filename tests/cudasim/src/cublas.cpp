// SPDX-License-Identifier: MIT
//
// cuBLAS by loops: what CuPy's matmul asks for.  Matrices are column-major, as everywhere in BLAS.
#include <vector>

#include "numbers.h"

#define API extern "C" __attribute__((visibility("default")))

extern "C" void cudasim_enqueue(void* stream, void (*run)(void*), void* data, void (*drop)(void*));

using namespace numbers;

namespace {

struct Handle {
  void* stream = nullptr;
};

struct Matrix {
  const char* data;
  int type, leading;
  bool transposed;
  long long stride;  // elements between matrices of a batch
};

struct Product {
  int m, n, k, count;
  double alpha, beta;
  Matrix a, b;
  char* c;
  int type, leading;
  long long stride;

  void run() const {
    std::vector<double> left((size_t)m * k), right((size_t)k * n);
    for (int one = 0; one < count; ++one) {
      const char* from_a = a.data + one * a.stride * (long long)bytes_of(a.type);
      const char* from_b = b.data + one * b.stride * (long long)bytes_of(b.type);
      char* to = c + one * stride * (long long)bytes_of(type);
      for (int i = 0; i < m; ++i)
        for (int l = 0; l < k; ++l)
          left[(size_t)i * k + l] = read(from_a, a.type, a.transposed ? l + (size_t)i * a.leading : i + (size_t)l * a.leading);
      for (int j = 0; j < n; ++j)
        for (int l = 0; l < k; ++l)
          right[(size_t)j * k + l] = read(from_b, b.type, b.transposed ? j + (size_t)l * b.leading : l + (size_t)j * b.leading);
      for (int j = 0; j < n; ++j)
        for (int i = 0; i < m; ++i) {
          double sum = 0;
          for (int l = 0; l < k; ++l) sum += left[(size_t)i * k + l] * right[(size_t)j * k + l];
          const size_t at = i + (size_t)j * leading;
          write(to, type, at, alpha * sum + (beta ? beta * read(to, type, at) : 0.0));
        }
    }
  }
};

int issue(void* handle, const Product& product) {
  cudasim_enqueue(
      ((Handle*)handle)->stream, [](void* data) { ((Product*)data)->run(); }, new Product(product),
      [](void* data) { delete (Product*)data; });
  return 0;
}

}  // namespace

API int cublasCreate_v2(void** handle) {
  *handle = new Handle;
  return 0;
}
API int cublasDestroy_v2(void* handle) {
  delete (Handle*)handle;
  return 0;
}
API int cublasGetVersion_v2(void*, int* version) {
  *version = 120900;
  return 0;
}
API int cublasSetStream_v2(void* handle, void* stream) {
  ((Handle*)handle)->stream = stream;
  return 0;
}
API int cublasGetStream_v2(void* handle, void** stream) {
  *stream = ((Handle*)handle)->stream;
  return 0;
}
API int cublasSetMathMode(void*, int) { return 0; }
API int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
API int cublasSetPointerMode_v2(void*, int) { return 0; }
API int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasGemmStridedBatchedEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
                                   int type_a, int lead_a, long long stride_a, const void* b, int type_b, int lead_b,
                                   long long stride_b, const void* beta, void* c, int type_c, int lead_c,
                                   long long stride_c, int count, int, int) {
  const int scalar = type_c == FLOAT64 ? FLOAT64 : FLOAT32;  // products of 16 bits are summed in 32
  return issue(handle, {m, n, k, count, read(alpha, scalar, 0), read(beta, scalar, 0),
                        {(const char*)a, type_a, lead_a, op_a != 0, stride_a},
                        {(const char*)b, type_b, lead_b, op_b != 0, stride_b},
                        (char*)c, type_c, lead_c, stride_c});
}
API int cublasGemmEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
                     int lead_a, const void* b, int type_b, int lead_b, const void* beta, void* c, int type_c, int lead_c,
                     int compute, int algorithm) {
  return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, type_a, lead_a, 0, b, type_b, lead_b, 0, beta, c,
                                    type_c, lead_c, 0, 1, compute, algorithm);
}
API int cublasSgemm_v2(void* handle, int op_a, int op_b, int m, int n, int k, const float* alpha, const float* a,
                       int lead_a, const float* b, int lead_b, const float* beta, float* c, int lead_c) {
  return cublasGemmEx(handle, op_a, op_b, m, n, k, alpha, a, FLOAT32, lead_a, b, FLOAT32, lead_b, beta, c, FLOAT32, lead_c, 0, 0);
}
API int cublasDgemm_v2(void* handle, int op_a, int op_b, int m, int n, int k, const double* alpha, const double* a,
                       int lead_a, const double* b, int lead_b, const double* beta, double* c, int lead_c) {
  return cublasGemmEx(handle, op_a, op_b, m, n, k, alpha, a, FLOAT64, lead_a, b, FLOAT64, lead_b, beta, c, FLOAT64, lead_c, 0, 0);
}
// Pointers to matrices lie on the device.
API int cublasSgemmBatched(void* handle, int op_a, int op_b, int m, int n, int k, const float* alpha,
                           const float* const* a, int lead_a, const float* const* b, int lead_b, const float* beta,
                           float* const* c, int lead_c, int count) {
  struct Batch {
    Product product;
    const float *const *a, *const *b;
    float* const* c;
    int count;
  };
  auto batch = new Batch{{m, n, k, 1, *alpha, *beta, {nullptr, FLOAT32, lead_a, op_a != 0, 0},
                          {nullptr, FLOAT32, lead_b, op_b != 0, 0}, nullptr, FLOAT32, lead_c, 0},
                         a, b, c, count};
  cudasim_enqueue(
      ((Handle*)handle)->stream,
      [](void* data) {
        Batch& batch = *(Batch*)data;
        for (int i = 0; i < batch.count; ++i) {
          batch.product.a.data = (const char*)batch.a[i];
          batch.product.b.data = (const char*)batch.b[i];
          batch.product.c = (char*)batch.c[i];
          batch.product.run();
        }
      },
      batch, [](void* data) { delete (Batch*)data; });
  return 0;
}
