// CUDA kernels of the range and the health. Alone with nvcc, no torch:
//   nvcc -std=c++17 -O3 -c csrc/range_cuda.cu -Xcompiler=-fPIC,-Wall,-Wextra -gencode=arch=compute_90,code=sm_90
//
// This file cuts tensors into launches. One kernel (range_cuda_kernels.h) reads, merges and writes the rows; from the
// inside out: cuda_lanes.h folds words, cuda_scan.h reads a block's share, cuda_walk.h says which share that is,
// range_cuda_accumulators.h merges threads and blocks.
#include "range_cuda.h"

#include <cuda_runtime.h>

#include "cuda_tensor.h"
#include "range_cuda_kernels.h"

namespace nanwatch {
namespace {

// A tensor is cut so that a launch has some 2048 blocks, eight for each place that two blocks on each of 132 SMs make:
// enough to even out, and each long enough for its end (a merge and three atomics) not to matter. Not tuned on a GPU.
constexpr int64_t kWantedChunks = 2048;
// At least two loads a thread, so that 1 MiB still spreads over 64 SMs.
constexpr int64_t kMinChunkBytes = 16 << 10;
constexpr int64_t kMaxChunkBytes = 256 << 10;

// Dimensions of a strided tensor that shares a launch: what is left of a sliced, permuted attention tensor is three.
constexpr int kWalkDims = 4;

// Kernel parameters may take 32,764 bytes since CUDA 12.1 and 4,096 before. A tensor takes 26 and its walk 152.
#if CUDART_VERSION >= 12010
constexpr size_t kMaxParameters = 32764;
using Many = Batch<1024, 32, kWalkDims>;
#else
constexpr size_t kMaxParameters = 4096;
using Many = Batch<96, 8, kWalkDims>;
#endif
// A launch copies all its parameters: 31 KiB are too many for one linear layer's four tensors.
using Few = Batch<16, 4, kWalkDims>;
// What only the plain kernel reads.
using Any = Batch<1, 1, kNanwatchMaxWalkDims>;
static_assert(sizeof(Many) <= kMaxParameters, "the parameters of a launch are bounded");

template <class AnyBatch>
class Launcher {
 public:
  Launcher(void (*kernel)(AnyBatch), double* rows, void* cells, void* stream) : kernel_(kernel), stream_(stream) {
    batch_.rows = rows;
    batch_.cells = cells;
    batch_.count = 0;
  }

  bool has_room(bool flat) const {
    return batch_.count < AnyBatch::capacity && (flat || walks_ < AnyBatch::walk_capacity);
  }

  // False if the kernel cannot read the tensor, and then it is not in the batch.
  bool add(const NanwatchTensor& tensor, const Collapsed& shape, const Dim* dim, bool flat, int64_t row) {
    const int i = batch_.count;
    batch_.data[i] = static_cast<const char*>(tensor.data);
    batch_.numel[i] = shape.numel;
    batch_.row[i] = uint32_t(row);
    batch_.format[i] = uint8_t(tensor.format);
    batch_.walk[i] = kFlat;
    if (!flat) {
      const bool fast = fill(batch_.walks[walks_], tensor, shape, dim);
      if (!fast && AnyBatch::dim_capacity < kNanwatchMaxWalkDims) return false;
      batch_.walk[i] = uint8_t(walks_++);
    }
    ++batch_.count;
    bytes_ += double(shape.numel) * double(width_of(tensor));
    return true;
  }

  int flush() {
    if (batch_.count == 0) return 0;
    const double wanted = bytes_ / kWantedChunks;  // a double, because an overlapping view may pass 2^63 bytes
    batch_.chunk_bytes = uint32_t(kMinChunkBytes);
    while (batch_.chunk_bytes < kMaxChunkBytes && batch_.chunk_bytes < wanted) batch_.chunk_bytes *= 2;
    if (bytes_ / batch_.chunk_bytes + batch_.count > INT32_MAX) return kNanwatchTooManyChunks;
    uint32_t chunks = 0;
    for (int i = 0; i < batch_.count; ++i)
      batch_.end[i] = chunks += batch_.chunks_of(i, int(word_size(Format(batch_.format[i]))));
    void* arguments[] = {&batch_};
    const cudaError_t error =
        cudaLaunchKernel(kernel_, dim3(chunks), dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream_));
    batch_.count = walks_ = 0;
    bytes_ = 0;
    return checked(error);
  }

 private:
  void (*kernel_)(AnyBatch);
  void* stream_;
  int walks_ = 0;
  double bytes_ = 0;
  AnyBatch batch_;
};

template <class Accumulator, class AnyBatch>
int reduce(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device, void* stream) {
  if (count == 0) return 0;
  // This runtime is not the one torch uses: set the device here too, or a thread that has no context yet launches on 0.
  if (const int error = checked(cudaSetDevice(device))) return error;
  constexpr bool keep_positions = Accumulator::columns == kHealthColumns;
  Launcher<AnyBatch> together(fast_kernel<Accumulator, AnyBatch>, rows, workspace, stream);
  for (int64_t row = 0; row < count; ++row) {
    const NanwatchTensor& tensor = tensors[row];
    if (tensor.dims > kNanwatchMaxDims) return kNanwatchTooManyDims;
    Dim dim[kNanwatchMaxDims];
    const Collapsed shape = collapse(tensor.dims, tensor.sizes, tensor.strides, keep_positions, dim);
    // A health of repeated elements has to multiply its counts, which a walk knows of.
    const bool flat = shape.flat && aligned(tensor) && (shape.repeats == 1 || !keep_positions);
    if (!together.has_room(flat))
      if (const int error = together.flush()) return error;
    if (aligned(tensor) && shape.dims <= kWalkDims && together.add(tensor, shape, dim, flat, row)) continue;
    if (shape.dims > kNanwatchMaxWalkDims) return kNanwatchTooManyDims;
    Launcher<Any> alone(plain_kernel<Accumulator, Any>, rows, workspace, stream);
    alone.add(tensor, shape, dim, false, row);
    if (const int error = alone.flush()) return error;
  }
  return together.flush();
}

// While one lives an allocation on this thread is no error, and no end, of a capture elsewhere.
class Uncaptured {
 public:
  Uncaptured() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Uncaptured() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace
}  // namespace nanwatch

extern "C" {

size_t nanwatch_cuda_workspace(void) {
  using namespace nanwatch;
  constexpr size_t ranges = Many::capacity * sizeof(Cell<DeviceRange>), health = sizeof(Cell<DeviceHealth>);
  return ranges > health ? ranges : health;
}

int nanwatch_cuda_clear(void* workspace, int device, void* stream) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  return nanwatch::checked(cudaMemsetAsync(workspace, 0, nanwatch_cuda_workspace(), static_cast<cudaStream_t>(stream)));
}

int nanwatch_cuda_ranges(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device,
                         void* stream) {
  using namespace nanwatch;
  const auto reduction = count <= Few::capacity ? reduce<DeviceRange, Few> : reduce<DeviceRange, Many>;
  return reduction(tensors, count, rows, workspace, device, stream);
}

int nanwatch_cuda_health(const NanwatchTensor* tensor, double* row, void* workspace, int device, void* stream) {
  return nanwatch::reduce<nanwatch::DeviceHealth, nanwatch::Few>(tensor, 1, row, workspace, device, stream);
}

int nanwatch_cuda_stream(int device, void* stream, uint64_t* id, int* capturing) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const int error = nanwatch::checked(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status)))
    return error;
  *capturing = status != cudaStreamCaptureStatusNone;
  *id = 0;
#if CUDART_VERSION >= 12000
  unsigned long long number = 0;
  if (const int error = nanwatch::checked(cudaStreamGetId(static_cast<cudaStream_t>(stream), &number))) return error;
  *id = number;
#endif
  return 0;
}

int nanwatch_cuda_allocate(int device, size_t bytes, void** memory) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  const nanwatch::Uncaptured uncaptured;
  return nanwatch::checked(cudaMalloc(memory, bytes));
}

int nanwatch_cuda_allocate_mapped(int device, size_t bytes, void** memory, void** address) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  const nanwatch::Uncaptured uncaptured;
  if (const int error = nanwatch::checked(cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped)))
    return error;
  return nanwatch::checked(cudaHostGetDevicePointer(address, *memory, 0));
}

int nanwatch_cuda_wait(int device, void* stream) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  return nanwatch::checked(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

const char* nanwatch_cuda_error(int code) {
  if (code == kNanwatchTooManyDims) return "the tensor has more dimensions than the kernels walk";
  if (code == kNanwatchTooManyChunks) return "the tensor has more elements than one launch reads";
  return cudaGetErrorString(cudaError_t(code));
}

}  // extern "C"
