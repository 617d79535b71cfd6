// The range of tensors in CUDA memory, behind a C ABI: raw pointers, a device number and a stream. Neither torch nor
// CUDA is needed to include this.
//
// Every function that returns an int returns 0, a cudaError_t, or one of the negative codes below. Work is enqueued on
// `stream` (a cudaStream_t, null for the legacy default stream), waits for nothing and allocates nothing; the
// exceptions say so. All act on the calling thread's current device, which nanwatch_cuda_select sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

enum { kNanwatchNotReady = -3, kNanwatchCapturing = -4, kNanwatchNoWorkspace = -5, kNanwatchRefused = -7 };

// Elements without gaps, in any order. The array may be freed as soon as the call returns.
typedef struct NanwatchTensor {
  const void* data;  // device memory, aligned to an element
  int64_t numel;
  int32_t format;  // nanwatch::Format
} NanwatchTensor;

// The columns of nanwatch::Health::write, with the position in memory of the first non-finite element; and whether (1
// or 0) the tensor may be an additive mask: zeros and -inf, or zeros and, in a format of 16 bits or more, minus the
// largest number; nothing else.
enum { kNanwatchRowValues = 12 };

// A row as a device delivers it, into host memory.
typedef struct NanwatchRow {
  double values[kNanwatchRowValues];
  double examined;       // not 0: all the values are filled; else the first three
  uint64_t reserved[2];  // 128 bytes, so that no two rows share a cache line
  uint64_t stamp;        // written last, when the rest can be read
} NanwatchRow;

// The thread's current device, -1 where there is none; and sets it. This runtime is not the one that torch uses, and
// both look at the driver's current context. To set a device that is set already takes microseconds.
int nanwatch_cuda_current(void);
int nanwatch_cuda_select(int device);

// Bytes of device memory, aligned to 8, where the blocks of a launch meet. It must be zero when work begins and is left
// zero, so that one serves all calls on one stream, one after the other; two streams must not share one.
size_t nanwatch_cuda_workspace(void);

// Makes a workspace zero, in stream order.
int nanwatch_cuda_clear(void* workspace, void* stream);

// rows[i][0..2] = abs_min, abs_max, isfinite of tensors[i]; device memory or mapped host memory. One launch for up to
// 512 tensors, whatever their formats. May be captured in a CUDA graph.
int nanwatch_cuda_ranges(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device,
                         void* stream);

// The same for the recorder: row i is rows[i] in mapped host memory, its stamp `first` + i. All the columns of a tensor
// that is not finite or may be a mask: one block reads it again, in the same launch.
int nanwatch_cuda_observe(const NanwatchTensor* tensors, int64_t count, NanwatchRow* rows, uint64_t first,
                          void* workspace, int device, void* stream);

// Whether the stream is being captured into a graph, 1 or 0.
int nanwatch_cuda_stream(void* stream, int* capturing);

// Device memory, and host memory that kernels of every device write at `*address`. For good: there is no way to give
// it back. May wait for the device; disturbs no capture, not even another thread's.
int nanwatch_cuda_allocate(size_t bytes, void** memory);
int nanwatch_cuda_allocate_mapped(size_t bytes, void** memory, void** address);

// Waits for all that was enqueued on a stream so far. Does not wait where the stream is being captured
// (kNanwatchCapturing), and disturbs no capture elsewhere.
int nanwatch_cuda_await(void* stream);

// A code of the functions above in words; never null.
const char* nanwatch_cuda_error(int code);

}  // extern "C"
