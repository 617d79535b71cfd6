// Interface between the recorder and a device: which tensors it has, to read them in stream order, and to wait for
// that. It is a table of functions, so that tests can substitute a device that runs only when told; cuda_backend.cpp
// has the one for CUDA.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cuda/range_cuda.h"

namespace nanwatch {

// Every function that returns an int returns 0, one of the codes of range_cuda.h, or an error of the device.
struct NanwatchBackend {
  // Not 0: memory that the host could read itself is this device's as well.
  int64_t takes_host_memory;
  // The device that holds a plain strided tensor (an at::Tensor, whose Python class is plain too); -1 for anything
  // else.
  int (*device_of)(const void* tensor);
  // The stream that is current there, and whether it is being captured into a graph (1 or 0).
  int (*stream)(int device, void** stream, int* capturing);
  // Host memory that every device writes at `*address`. For good.
  int (*allocate)(int device, size_t bytes, void** memory, void** address);
  // Calls nanwatch_cuda_observe on a stream that is not being captured: all of it is enqueued, or none.
  int (*observe)(const NanwatchTensor* tensors, int64_t count, NanwatchRow* rows, uint64_t first, int device,
                 void* stream);
  // Waits for all that was enqueued on the stream so far; kNanwatchCapturing, without a wait, while it is captured.
  int (*wait)(int device, void* stream);
  // Returns whether this backend can run nothing at all: then the tensors are read as they would be without it.
  int (*cannot_run)(int error);
  const char* (*error)(int code);
};

// The backend for CUDA; null in a build without CUDA. Asking for it makes no CUDA call.
#ifdef NANWATCH_CUDA
const NanwatchBackend* cuda_backend();
#else
inline const NanwatchBackend* cuda_backend() {
  return nullptr;
}
#endif

}  // namespace nanwatch
