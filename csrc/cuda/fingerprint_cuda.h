// Fingerprint of CUDA memory, behind the C ABI of range_cuda.h, whose rules and codes hold here too.
#pragma once

#include "cuda/range_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Writes to *number, device memory that holds 0, what nanwatch::sealed_fingerprint gives for the blocks of these bytes
// and the seal. `data` lies on a 16-byte boundary.
int nanwatch_cuda_fingerprint(const void* data, int64_t bytes, uint64_t seal, int64_t* number, int device,
                              void* stream);

#ifdef __cplusplus
}
#endif
