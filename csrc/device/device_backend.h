// Interface between the recorder and a device: which tensors it has, to read them in stream order, and whether that is
// done. It is a table of functions, so that tests can substitute a device that runs only when told; cuda_backend.cpp is
// the one for CUDA.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cuda/range_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Every function that returns an int returns 0, one of the codes of range_cuda.h, or an error of the device.
typedef struct NanwatchBackend {
  // Not 0: memory that the host could read itself is this device's as well.
  int64_t takes_host_memory;
  // The device that holds a plain strided tensor (an at::Tensor, whose Python class is plain too); -1 for anything
  // else.
  int (*device_of)(const void* tensor);
  // The stream that is current there, and whether it is being captured into a graph (1 or 0).
  int (*stream)(int device, void** stream, int* capturing);
  // Host memory that every device writes at `*address`. For good.
  int (*allocate)(int device, size_t bytes, void** memory, void** address);
  // Calls nanwatch_cuda_observe: all of it is enqueued, or none.
  int (*observe)(const NanwatchTensor* tensors, int64_t count, NanwatchRow* rows, uint64_t first, int device,
                 void* stream);
  // An event behind all that was enqueued on the stream so far.
  int (*record)(int device, void* stream, void** event);
  int (*wait)(void* event);
  void (*release)(void* event);
  // Returns whether this backend can run nothing at all: then the tensors are read as they would be without it.
  int (*cannot_run)(int error);
  const char* (*error)(int code);
} NanwatchBackend;

#ifdef __cplusplus
}
#endif
