// CUDA kernels of the range and the health. Alone with nvcc, no torch:
//   nvcc -std=c++17 -O3 -c csrc/cuda/range_cuda.cu -Xcompiler=-fPIC,-Wall,-Wextra -gencode=arch=compute_90,code=sm_90
//
// This file cuts tensors into launches. One kernel (range_cuda_kernels.h) reads, merges and writes the rows; from the
// inside out: cuda_lanes.h folds words, cuda_scan.h reads a block's share, cuda_walk.h says which share that is,
// range_cuda_accumulators.h merges threads and blocks, range_cuda_observe.h looks closer for the recorder.
#include "cuda/range_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/cuda_tensor.h"
#include "cuda/range_cuda_kernels.h"

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
// Batch for tensors that only the plain kernel reads.
using Any = Batch<1, 1, kNanwatchMaxWalkDims>;
static_assert(sizeof(Many) <= kMaxParameters, "the parameters of a launch are bounded");

// The recorder's have 106 bytes more a tensor: 4 KB for a frame.
using Frame = Observation<Batch<24, 4, kWalkDims>>;
static_assert(sizeof(Frame) <= 4096, "parameters beyond this are copied in a slower way");

// A workspace: a cell for each tensor of a launch.
constexpr size_t kWorkspace = std::max(
    {Many::capacity * sizeof(Cell<DeviceRange>), Frame::capacity * sizeof(Cell<Sighting>), sizeof(Cell<DeviceHealth>)});

// Where rows go: into an array, or to the recorder.
struct Destination {
  double* rows;
  const NanwatchTarget* target;
};

// The need for positions in C order. `wished`: unless another order is faster.
enum class Positions { none, needed, wished };

// The way in which a tensor is read.
struct Plan {
  CoalescedDims shape;
  bool ordered;  // whether it tells positions
  Dim dim[kNanwatchMaxDims];

  void make(const NanwatchTensor& tensor, Positions positions) {
    ordered = positions != Positions::none;
    shape = coalesce_dims(tensor.dims, tensor.sizes, tensor.strides, ordered, dim);
    if (positions != Positions::wished || shape.flat) return;
    Dim merged[kNanwatchMaxDims];
    const CoalescedDims other = coalesce_dims(tensor.dims, tensor.sizes, tensor.strides, false, merged);
    if (!other.flat && shape.dims <= kWalkDims) return;
    shape = other;
    std::copy(merged, merged + other.dims, dim);
    ordered = other.flat && ascends(tensor);
  }

 private:
  // Returns whether memory has C order, apart from dimensions of stride 0.
  static bool ascends(const NanwatchTensor& tensor) {
    int64_t stride = 0;
    for (int64_t d = tensor.dims - 1; d >= 0; --d) {
      if (tensor.sizes[d] == 1 || tensor.strides[d] == 0) continue;
      if (tensor.strides[d] < stride) return false;
      stride = tensor.strides[d];
    }
    return true;
  }
};

// The dimensions that matter, in C order, the last one for itself: a mask is judged by its rows. False if too many.
bool describe(const NanwatchTensor& tensor, int64_t* size, int64_t* stride, uint8_t* count) {
  const int64_t width = width_of(tensor), last = tensor.dims - 1;
  int dims = 0;
  for (int64_t d = 0; d <= last; ++d) {
    if (tensor.sizes[d] == 1 && d != last) continue;
    if (dims > 0 && d != last && stride[dims - 1] == tensor.strides[d] * width * tensor.sizes[d]) {
      size[dims - 1] *= tensor.sizes[d];
      stride[dims - 1] = tensor.strides[d] * width;
      continue;
    }
    if (dims == kObserveDims) return false;
    size[dims] = tensor.sizes[d];
    stride[dims++] = tensor.strides[d] * width;
  }
  if (dims == 0) size[dims] = 1, stride[dims++] = width;
  *count = uint8_t(dims);
  return true;
}

template <class AnyBatch>
class Launcher {
 public:
  Launcher(void (*kernel)(AnyBatch), const Destination& to, void* cells, void* stream)
      : kernel_(kernel), stream_(stream) {
    batch_.rows = to.rows;
    if constexpr (AnyBatch::observes) batch_.target = *to.target;
    batch_.cells = cells;
    batch_.count = 0;
  }

  bool has_room(bool flat) const {
    return batch_.count < AnyBatch::capacity && (flat || walks_ < AnyBatch::walk_capacity);
  }

  // False if the kernel cannot read the tensor, and then it is not in the batch.
  bool add(const NanwatchTensor& tensor, const Plan& plan, bool flat, int64_t row) {
    const int i = batch_.count;
    const CoalescedDims& shape = plan.shape;
    if constexpr (AnyBatch::observes) {
      if (!describe(tensor, batch_.size[i], batch_.stride[i], &batch_.dims[i])) return false;
      batch_.repeats[i] = shape.repeats;
      batch_.ordered[i] = plan.ordered;
    }
    batch_.data[i] = static_cast<const char*>(tensor.data);
    batch_.numel[i] = shape.numel;
    batch_.row[i] = uint32_t(row);
    batch_.format[i] = uint8_t(tensor.format);
    batch_.walk[i] = kFlat;
    if (!flat) {
      const bool fast = fill(batch_.walks[walks_], tensor, shape, plan.dim);
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

template <class Accumulator, class AnyBatch, class Alone>
int reduce(const NanwatchTensor* tensors, int64_t count, const Destination& to, void* workspace, int device,
           void* stream) {
  if (count == 0) return 0;
  // This runtime is not the one torch uses: set the device here too, or a thread that has no context yet launches on 0.
  if (const int error = checked(cudaSetDevice(device))) return error;
  constexpr bool counts = Accumulator::columns == kHealthColumns;
  constexpr Positions positions = AnyBatch::observes ? Positions::wished : counts ? Positions::needed : Positions::none;
  Launcher<AnyBatch> together(fast_kernel<Accumulator, AnyBatch>, to, workspace, stream);
  Plan plan;
  for (int64_t row = 0; row < count; ++row) {
    const NanwatchTensor& tensor = tensors[row];
    if (tensor.dims > kNanwatchMaxDims) return kNanwatchTooManyDims;
    plan.make(tensor, positions);
    // A health of repeated elements has to multiply its counts, which a walk knows of, and an observation.
    const bool flat = plan.shape.flat && aligned(tensor) && (plan.shape.repeats == 1 || positions != Positions::needed);
    if (!together.has_room(flat))
      if (const int error = together.flush()) return error;
    if (aligned(tensor) && plan.shape.dims <= kWalkDims && together.add(tensor, plan, flat, row)) continue;
    if (!plan.ordered && positions != Positions::none) plan.make(tensor, Positions::needed);
    if (plan.shape.dims > kNanwatchMaxWalkDims) return kNanwatchTooManyDims;
    Launcher<Alone> alone(plain_kernel<Accumulator, Alone>, to, workspace, stream);
    alone.add(tensor, plan, false, row);
    if (const int error = alone.flush()) return error;
  }
  return together.flush();
}

// Returns whether the recorder's kernels can walk the tensor. If they cannot walk
// one of several, nothing is enqueued.
bool can_observe(const NanwatchTensor& tensor) {
  if (tensor.dims <= kObserveDims) return true;
  if (tensor.dims > kNanwatchMaxDims) return false;
  int64_t size[kObserveDims], stride[kObserveDims];
  uint8_t dims;
  Plan plan;
  plan.make(tensor, Positions::needed);
  return plan.shape.dims <= kNanwatchMaxWalkDims && describe(tensor, size, stride, &dims);
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
  return nanwatch::kWorkspace;
}

int nanwatch_cuda_clear(void* workspace, int device, void* stream) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  return nanwatch::checked(cudaMemsetAsync(workspace, 0, nanwatch_cuda_workspace(), static_cast<cudaStream_t>(stream)));
}

int nanwatch_cuda_ranges(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device,
                         void* stream) {
  using namespace nanwatch;
  const auto reduction = count <= Few::capacity ? reduce<DeviceRange, Few, Any> : reduce<DeviceRange, Many, Any>;
  return reduction(tensors, count, {rows, nullptr}, workspace, device, stream);
}

int nanwatch_cuda_health(const NanwatchTensor* tensor, double* row, void* workspace, int device, void* stream) {
  using namespace nanwatch;
  return reduce<DeviceHealth, Few, Any>(tensor, 1, {row, nullptr}, workspace, device, stream);
}

int nanwatch_cuda_observe(const NanwatchTensor* tensors, int64_t count, const NanwatchTarget* target, void* workspace,
                          int device, void* stream) {
  using namespace nanwatch;
  for (int64_t i = 0; i < count; ++i)
    if (!can_observe(tensors[i])) return kNanwatchTooManyDims;
  return reduce<Sighting, Frame, Observation<Any>>(tensors, count, {nullptr, target}, workspace, device, stream);
}

int nanwatch_cuda_stream(int device, void* stream, uint64_t* id, uint64_t* capture) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long of_capture = 0;
  if (const int error =
          nanwatch::checked(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &of_capture)))
    return error;
  *capture = status == cudaStreamCaptureStatusNone ? 0 : of_capture + 1;  // nothing says that none has the number 0
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

int nanwatch_cuda_event(int device, void** event) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  const nanwatch::Uncaptured uncaptured;
  return nanwatch::checked(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}

int nanwatch_cuda_record(void* event, int device, void* stream) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const int error = nanwatch::checked(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status)))
    return error;
  if (status != cudaStreamCaptureStatusNone) return kNanwatchCapturing;
  return nanwatch::checked(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}

int nanwatch_cuda_await(void* event, int device) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  const nanwatch::Uncaptured uncaptured;
  return nanwatch::checked(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}

const char* nanwatch_cuda_error(int code) {
  if (code == kNanwatchRefused) return "PyTorch refused the device, its stream or its memory";
  if (code == kNanwatchCapturing) return "the stream is being captured into a CUDA graph";
  if (code == kNanwatchNoWorkspace) return "there is no workspace left for another stream";
  if (code == kNanwatchTooManyDims) return "the tensor has more dimensions than the kernels walk";
  if (code == kNanwatchTooManyChunks) return "the tensor has more elements than one launch reads";
  return cudaGetErrorString(cudaError_t(code));
}

}  // extern "C"
