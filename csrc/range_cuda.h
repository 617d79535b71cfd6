// The range and health of tensors in CUDA memory, behind a C ABI: raw pointers, a device number and a stream. Neither
// torch nor CUDA is needed to include this.
//
// Every function returns 0 or a cudaError_t as an int, or kNanwatchTooManyDims. Work is enqueued on `stream` (a
// cudaStream_t, null for the legacy default stream) and nothing waits for it; nothing is allocated; all of it may be
// captured in a CUDA graph. The calling thread's current device becomes `device`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Dimensions that may remain after those that continue each other in memory were merged, and before.
enum { kNanwatchMaxWalkDims = 25, kNanwatchMaxDims = 64 };

enum { kNanwatchTooManyDims = -1 };

// The arrays and this struct itself may be freed as soon as the call returns.
typedef struct NanwatchTensor {
  const void* data;        // device memory, any alignment
  const int64_t* sizes;    // dims of them, host memory
  const int64_t* strides;  // in elements, not negative
  int64_t dims;
  int32_t format;  // nanwatch::Format
} NanwatchTensor;

// Bytes of device memory, aligned to 8 and with any contents, for `count` ranges or for one health. It may be given
// back to a stream-ordered allocator as soon as the call returns.
size_t nanwatch_cuda_ranges_workspace(int64_t count);
size_t nanwatch_cuda_health_workspace(void);

// rows[i][0..2] = abs_min, abs_max, isfinite of tensors[i]. Tensors that are one run in memory share a launch, whatever
// their formats; a strided one has a launch of its own.
int nanwatch_cuda_ranges(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device,
                         void* stream);

// row[0..10] = the columns of nanwatch::Health::write.
int nanwatch_cuda_health(const NanwatchTensor* tensor, double* row, void* workspace, int device, void* stream);

// A code of the functions above in words; never null.
const char* nanwatch_cuda_error(int code);

#ifdef __cplusplus
}
#endif
