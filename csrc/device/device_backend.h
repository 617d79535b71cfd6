// What the recorder asks of a device: whose tensor is it, read these tensors in stream order, has it been done. A table
// of functions, so that the tests can put a device in its place that runs only when told; cuda_backend.cpp is the one
// for CUDA.
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
  // The stream that is current there, and the number of the capture into a graph that it is in (0: none).
  int (*stream)(int device, void** stream, uint64_t* capture);
  // Host memory that every device writes at `*address`. For good.
  int (*allocate)(int device, size_t bytes, void** memory, void** address);
  // As nanwatch_cuda_observe: all of it is enqueued, or none. While the stream is being captured, into the graph.
  int (*observe)(const NanwatchTensor* tensors, int64_t count, const NanwatchTarget* target, int device, void* stream);
  // As nanwatch_cuda_step.
  int (*step)(uint64_t* step, uint64_t* done, int device, void* stream);
  // An event behind all that was enqueued on the stream so far.
  int (*record)(int device, void* stream, void** event);
  // kNanwatchNotReady until the device has come to the event.
  int (*query)(void* event);
  int (*wait)(void* event);
  void (*release)(void* event);
  // Whether this backend can run nothing at all: then the tensors are read as they would be without it.
  int (*cannot_run)(int error);
  const char* (*error)(int code);
} NanwatchBackend;

#ifdef __cplusplus
}
#endif
