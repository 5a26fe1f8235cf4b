// SPDX-License-Identifier: MIT
// The two functions of the toolkit's header, which no package of headers has.
#pragma once
#include <cuda_runtime_api.h>
extern "C" cudaError_t cudaProfilerStart();
extern "C" cudaError_t cudaProfilerStop();
