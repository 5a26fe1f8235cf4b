// SPDX-License-Identifier: MIT
// Complex numbers are left out of the simulation: CuPy's header is Thrust's and wants nvcc.
#pragma once
template <class T>
struct complex {
  T re, im;
  complex(T r = 0, T i = 0) : re(r), im(i) {}
};
namespace thrust {
using ::complex;
}
