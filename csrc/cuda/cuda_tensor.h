// From a tensor as the C ABI describes it to one that a launch reads: which way its strides are followed. Host code,
// for the .cu files.
#pragma once

#include <cuda_runtime.h>

#include "numerics/coalesce_dims.h"
#include "cuda/cuda_scan.h"
#include "cuda/range_cuda.h"

namespace nanwatch {

// Below this a row of a strided tensor has no load for every lane of a warp.
constexpr int64_t kMinRowBytes = kWarpThreads * int64_t(sizeof(Vector));
// From here on each of a warp's loads is used in rows too; below, whole vectors are found one by one if they can be.
constexpr int64_t kLongRowBytes = 4 * kWarpBytes;

// The launch's own error only: an error that an earlier call of the user left pending is neither read nor cleared. The
// launch's error is cleared once it is read, because the caller gets it and the next check of another launch must not.
inline int checked(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return int(error);
}

// Launches a kernel of one dimension.
template <class... Given>
int enqueue(void (*kernel)(Given...), int64_t blocks, int threads, void* stream, Given... given) {
  void* arguments[] = {&given...};
  return checked(cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), arguments, 0,
                                  static_cast<cudaStream_t>(stream)));
}

inline int64_t width_of(const NanwatchTensor& tensor) {
  return int64_t(word_size(Format(tensor.format)));
}

inline bool aligned(const NanwatchTensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % uint64_t(width_of(tensor)) == 0;
}

// Fills a walk from what coalesce_dims() left. False if only the plain kernel can follow it.
template <int max_dims>
bool fill(Walk<max_dims>& walk, const NanwatchTensor& tensor, const CoalescedDims& shape, const Dim* dim) {
  const int64_t width = width_of(tensor), row_bytes = dim[0].size * width;
  walk.dims = int32_t(shape.dims);
  walk.repeats = shape.repeats;
  uint64_t odd = reinterpret_cast<uintptr_t>(tensor.data);  // its low bits rule out whole vectors
  bool sizes_fit = true;
  for (int64_t d = 0; d < shape.dims; ++d) {
    walk.size[d] = dim[d].size;
    walk.stride[d] = dim[d].stride * width;
    walk.order[d] = dim[d].order;
    odd |= uint64_t(d == 0 ? row_bytes : walk.stride[d]);
    const bool fits = d == 0 || dim[d].size <= INT32_MAX;
    walk.divider[d] = Divider::of(d == 0 || !fits ? 1 : uint32_t(dim[d].size));
    sizes_fit = sizes_fit && fits;
  }
  walk.reading = Reading::elements;
  if (!sizes_fit) return false;
  if (dim[0].stride == 1 && row_bytes >= (odd % 16 == 0 ? kLongRowBytes : kMinRowBytes)) {
    walk.reading = Reading::rows;
    return shape.numel / dim[0].size <= INT32_MAX;
  }
  if (dim[0].stride == 1 && odd % 16 == 0) walk.reading = Reading::vectors;
  const int64_t per_unit = walk.reading == Reading::vectors ? int64_t(sizeof(Vector)) / width : 1;
  // A thread looks up to four steps of the block ahead.
  if (shape.numel / per_unit > INT32_MAX - kInFlight * kThreads) return false;
  walk.row_units = uint32_t(dim[0].size / per_unit);
  walk.divider[0] = Divider::of(walk.row_units);
  return true;
}

}  // namespace nanwatch
