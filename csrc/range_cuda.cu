// CUDA kernels of the range and the health. Alone with nvcc, no torch:
//   nvcc -std=c++17 -O3 -c csrc/range_cuda.cu -Xcompiler=-fPIC,-Wall,-Wextra -gencode=arch=compute_90,code=sm_90
//
// This file cuts tensors into launches. One kernel (range_cuda_kernels.h) reads, merges and writes the rows; from the
// inside out: cuda_lanes.h folds words, cuda_scan.h reads a block's share, cuda_walk.h says which share that is,
// range_cuda_accumulators.h merges threads and blocks.
#include "range_cuda.h"

#include <cuda_runtime.h>

#include "cuda_tensor.h"
#include "range_cuda_examine.h"
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

// Tensors that one launch of the second kernel takes: 2.5 KiB of parameters, or 10 KiB where so much is allowed.
#if CUDART_VERSION >= 12010
using ExamineMany = Examination<64>;
#else
using ExamineMany = Examination<24>;
#endif
using ExamineFew = Examination<16>;
static_assert(sizeof(ExamineMany) <= kMaxParameters, "the parameters of a launch are bounded");

// A workspace: the cells of the ranges or the health, those of the second kernel, and the ranges between the two.
constexpr size_t kRangeCells = Many::capacity * sizeof(Cell<DeviceRange>);
constexpr size_t kExamineCells = ExamineMany::capacity * sizeof(Cell<Examined>);
constexpr size_t kBetween = ExamineMany::capacity * kRangeColumns * sizeof(double);
static_assert(kRangeCells >= sizeof(Cell<DeviceHealth>), "one cell for a health");

// The dimensions that matter, in C order, the last one for itself: a mask is judged by its rows. False if too many.
template <class AnyExamination>
bool add(AnyExamination* all, const NanwatchTensor& tensor) {
  const int i = all->count;
  int64_t* const size = all->size[i];
  int64_t* const stride = all->stride[i];
  const int64_t width = width_of(tensor), last = tensor.dims - 1;
  int dims = 0;
  int64_t numel = 1;
  for (int64_t d = 0; d <= last; ++d) {
    numel *= tensor.sizes[d];
    if (tensor.sizes[d] == 1 && d != last) continue;
    if (dims > 0 && d != last && stride[dims - 1] == tensor.strides[d] * width * tensor.sizes[d]) {
      size[dims - 1] *= tensor.sizes[d];
      stride[dims - 1] = tensor.strides[d] * width;
      continue;
    }
    if (dims == kExamineDims) return false;
    size[dims] = tensor.sizes[d];
    stride[dims++] = tensor.strides[d] * width;
  }
  if (dims == 0) size[dims] = 1, stride[dims++] = width;
  const int64_t blocks = (numel + kExaminePerBlock - 1) / kExaminePerBlock;
  const int64_t used = blocks < 1 ? 1 : blocks > int64_t(kExamineBlocks) ? int64_t(kExamineBlocks) : blocks;
  all->data[i] = static_cast<const char*>(tensor.data);
  all->numel[i] = numel;
  all->dims[i] = uint8_t(dims);
  all->format[i] = uint8_t(tensor.format);
  all->end[i] = (i == 0 ? 0 : all->end[i - 1]) + uint32_t(used);
  ++all->count;
  return true;
}

template <class AnyExamination>
int observe(const NanwatchTensor* tensors, int64_t count, const NanwatchTarget& target, void* workspace, int device,
            void* stream) {
  char* const memory = static_cast<char*>(workspace);
  auto* const between = reinterpret_cast<double*>(memory + kRangeCells + kExamineCells);
  AnyExamination all;
  all.count = 0;
  all.ranges = between;
  all.cells = memory + kRangeCells;
  all.target = target;
  for (int64_t i = 0; i < count; ++i)
    if (!add(&all, tensors[i])) return kNanwatchTooManyDims;
  if (const int error = nanwatch_cuda_ranges(tensors, count, between, workspace, device, stream)) return error;
  void* arguments[] = {&all};
  return checked(cudaLaunchKernel(examine_kernel<AnyExamination>, dim3(all.end[count - 1]), dim3(kThreads), arguments,
                                  0, static_cast<cudaStream_t>(stream)));
}

// Whether the kernels can walk the tensor, so that nothing is enqueued where one of several cannot be.
bool can_observe(const NanwatchTensor& tensor) {
  if (tensor.dims > kNanwatchMaxDims) return false;
  Dim dim[kNanwatchMaxDims];
  ExamineFew one;
  one.count = 0;
  return collapse(tensor.dims, tensor.sizes, tensor.strides, false, dim).dims <= kNanwatchMaxWalkDims &&
         add(&one, tensor);
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
  return kRangeCells + kExamineCells + kBetween;
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

int nanwatch_cuda_observe(const NanwatchTensor* tensors, int64_t count, const NanwatchTarget* target, void* workspace,
                          int device, void* stream) {
  using namespace nanwatch;
  for (int64_t i = 0; i < count; ++i)
    if (!can_observe(tensors[i])) return kNanwatchTooManyDims;
  for (int64_t done = 0; done < count;) {
    const bool few = count - done <= ExamineFew::capacity;
    const int64_t most = few ? ExamineFew::capacity : ExamineMany::capacity;
    const int64_t now = count - done < most ? count - done : most;
    NanwatchTarget rest = *target;
    rest.rows += done * target->spacing;
    rest.first += uint64_t(done);
    const auto enqueue = few ? observe<ExamineFew> : observe<ExamineMany>;
    if (const int error = enqueue(tensors + done, now, rest, workspace, device, stream)) return error;
    done += now;
  }
  return 0;
}

int nanwatch_cuda_step(uint64_t* step, uint64_t* done, int device, void* stream) {
  using namespace nanwatch;
  if (const int error = checked(cudaSetDevice(device))) return error;
  volatile uint64_t *counter = step, *end = done;
  void* arguments[] = {&counter, &end};
  return checked(cudaLaunchKernel(step_kernel, dim3(1), dim3(1), arguments, 0, static_cast<cudaStream_t>(stream)));
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

int nanwatch_cuda_wait(int device, void* stream) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  return nanwatch::checked(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
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

int nanwatch_cuda_query(void* event, int device) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  const nanwatch::Uncaptured uncaptured;
  const int error = nanwatch::checked(cudaEventQuery(static_cast<cudaEvent_t>(event)));
  return error == int(cudaErrorNotReady) ? int(kNanwatchNotReady) : error;
}

int nanwatch_cuda_await(void* event, int device) {
  if (const int error = nanwatch::checked(cudaSetDevice(device))) return error;
  const nanwatch::Uncaptured uncaptured;
  return nanwatch::checked(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}

const char* nanwatch_cuda_error(int code) {
  if (code == kNanwatchRefused) return "PyTorch refused the device, its stream or its memory";
  if (code == kNanwatchOverwritten) return "a later replay of the graph has written over it";
  if (code == kNanwatchCapturing) return "the stream is being captured into a CUDA graph";
  if (code == kNanwatchNoWorkspace) return "there is no workspace left for another stream";
  if (code == kNanwatchTooManyDims) return "the tensor has more dimensions than the kernels walk";
  if (code == kNanwatchTooManyChunks) return "the tensor has more elements than one launch reads";
  return cudaGetErrorString(cudaError_t(code));
}

}  // extern "C"
