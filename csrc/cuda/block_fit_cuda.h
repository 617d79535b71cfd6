// The error that a block format makes on matrices in CUDA memory, behind the C ABI of range_cuda.h, whose rules and
// codes hold here too. cpu/block_fit.h has the same for host memory.
#pragma once

#include "cuda/range_cuda.h"
#include "numerics/block_format.h"

extern "C" {

// Writes `units` rows of kFitItems, device memory, which together are the numbers of the tensor. `x` is (batch, rows,
// columns) of float32, bfloat16 or float16, contiguous and aligned to its own element; its strides are not read.
// `amax`: the largest magnitude of the whole tensor, in device memory, for two_level; else it may be null. A row whose
// item `nonfinite` is not 0 has met what the kernel refuses: then plain torch has to make all the numbers.
int nanwatch_cuda_block_fit(const NanwatchTensor* x, const nanwatch::BlockFormat* format, const double* amax,
                            double* rows, int64_t units, int device, void* stream);
}
