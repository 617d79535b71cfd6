// Exponents and edges of a tensor in CUDA memory, behind the C ABI of range_cuda.h, whose rules and codes hold here
// too.
#pragma once

#include "cuda/range_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Adds to counts[0 .. columns of nanwatch::ExponentSpan - 1], device memory: zeroed memory is the empty histogram.
int nanwatch_cuda_exponents(const NanwatchTensor* tensor, int64_t* counts, int device, void* stream);

// Adds to counts[i] the elements whose magnitude word is at least codes[i]; `codes` is host memory, at most
// nanwatch::kMaxEdges of them.
int nanwatch_cuda_edges(const NanwatchTensor* tensor, const uint64_t* codes, int64_t num_codes, int64_t* counts,
                        int device, void* stream);

#ifdef __cplusplus
}
#endif
