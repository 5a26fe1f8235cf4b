// SPDX-License-Identifier: MIT
// In the place of CuPy's: cupy_kernels.h has what is used.
#pragma once
