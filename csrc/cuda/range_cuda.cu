// The CUDA kernel of the range. Alone with nvcc, no torch:
//   nvcc -std=c++17 -O3 -I csrc -c csrc/cuda/range_cuda.cu -Xcompiler=-fPIC,-Wall,-Wextra -arch=sm_90
//
// For each tensor of a launch, over the magnitudes |w| of its words:
//   lo = min |w|, hi = max |w|          (abs_min, abs_max; finite if hi <= the largest finite code)
// Blocks stride through a tensor together, one wave of them for the device. Each folds 16-byte loads into registers,
// then over its warps, then with two atomic maxima into the tensor's cell in device memory. The block that comes last
// decodes the cell and writes the row. For the recorder it reads a tensor that is not finite, or may be a mask, once
// more and counts: one multiprocessor for a whole tensor, 40 us for a mask of 2 MB.
#include "cuda/range_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "cuda/cuda_lanes.h"

namespace nanwatch {
namespace {

using Bits = unsigned long long;  // the type that CUDA's 64-bit atomics take

constexpr int kThreads = 512, kWarpThreads = 32, kWarps = kThreads / kWarpThreads;
constexpr unsigned kWholeWarp = 0xffffffffu;
// Loads of 16 bytes that a thread has on the way: an H200 moves 4.5 TB/s at some 700 ns, which is 24 KB for each of 132
// multiprocessors. Two blocks of 512 threads with eight loads have 128 KB on the way, so that short reads get there
// too.
constexpr int kInFlight = 8;
constexpr int kBlocksPerMultiprocessor = 2;
// Two loads a thread, so that 1 MiB still spreads over 64 multiprocessors.
constexpr int64_t kLeastBytesPerBlock = 16 << 10;

// Where the blocks of one tensor meet; zero between launches. A minimum is kept as the maximum of its complement, so
// that zeroed memory is the identity.
struct Cell {
  Bits hi, not_lo;
  unsigned arrived, unused;
};

// Tensors of one launch, passed by value: kernel parameters may take 32,764 bytes since CUDA 12.1 and 4,096 before.
template <int most>
struct Batch {
  static constexpr int capacity = most;
  const char* data[most];
  int64_t numel[most];
  uint32_t end[most];  // blocks of this tensor and of those before it
  uint8_t format[most];
  int32_t count;
  Cell* cells;
  double* rows;           // for operators: three numbers a row
  NanwatchRow* recorded;  // or for the recorder, with the stamp of the first row
  uint64_t first;

  // The tensor that a block belongs to: the first whose end is beyond it.
  __device__ int tensor_of(uint32_t block) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (block < end[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

// A frame's tensors, and the gradients of a step. A launch copies all its parameters: 11 KB are too many for a frame.
using Few = Batch<24>;
#if CUDART_VERSION >= 12010
using Many = Batch<512>;
#else
using Many = Batch<128>;
#endif

// ---- formats that are known only when the kernel runs ---------------------------------------------------------------

template <class Fn>
__device__ __forceinline__ void with_device_format(Format format, const Fn& fn) {
#define NANWATCH_CASE(name, ...) \
  if (format == Format::name) return fn(FormatTag<Format::name>{});
  NANWATCH_FORMATS(NANWATCH_CASE)
#undef NANWATCH_CASE
}

// ---- a block and its part of a tensor -------------------------------------------------------------------------------

// Past L1, where nobody comes back to it, but not first to leave L2: the next layer reads this tensor from there.
__device__ __forceinline__ Vector load_vector(const Vector* p) {
#ifdef __CUDA_ARCH__
  Vector v;
  asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(__cvta_generic_to_global(p)));
  return v;
#else
  return *p;
#endif
}

// Block `block` of `blocks`: vectors in turn with the other blocks, from the tensor's end to its start. The operation
// that reads the tensor next then finds its start in L2: the outputs of an 8B training step cost 1.1 % in place of 2.2.
// The first block also reads what lies before the first 16-byte boundary and behind the last.
template <class Word, class Lanes>
__device__ __forceinline__ void scan(Lanes& lanes, const char* data, int64_t numel, uint32_t block, uint32_t blocks) {
  constexpr int width = sizeof(Word), per_vector = 16 / width;
  const auto* const words = reinterpret_cast<const Word*>(data);
  const int64_t to_boundary = int64_t((16 - reinterpret_cast<uintptr_t>(data) % 16) % 16) / width;
  const int64_t head = to_boundary < numel ? to_boundary : numel, vectors = (numel - head) / per_vector;
  const int64_t tail = head + vectors * per_vector;
  if (block == 0) {
    if (int(threadIdx.x) < head) lanes.take_one(words[threadIdx.x]);
    if (int(threadIdx.x) < numel - tail) lanes.take_one(words[tail + threadIdx.x]);
  }
  const auto* p = reinterpret_cast<const Vector*>(words + head);
  const int64_t step = int64_t(blocks) * kThreads;
  int64_t v = vectors - 1 - (int64_t(block) * kThreads + threadIdx.x);
  Vector vector[kInFlight];
#pragma unroll 1
  for (; v >= (kInFlight - 1) * step; v -= kInFlight * step) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) vector[k] = load_vector(p + v - k * step);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) lanes.take(vector[k]);
  }
  // The rest is fewer than kInFlight vectors, on the way at the same time as well.
#pragma unroll
  for (int k = 0; k < kInFlight - 1; ++k)
    if (v >= k * step) vector[k] = load_vector(p + v - k * step);
#pragma unroll
  for (int k = 0; k < kInFlight - 1; ++k)
    if (v >= k * step) lanes.take(vector[k]);
}

__device__ __forceinline__ Bits larger(Bits a, Bits b) {
  return a < b ? b : a;
}

struct Ends {
  Bits hi, not_lo;
};

// `is_narrow`, the same for all threads of a block: the bits are below 2^32.
__device__ __forceinline__ Ends merge_warp(Ends ends, bool is_narrow) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if (is_narrow)
    return {__reduce_max_sync(kWholeWarp, unsigned(ends.hi)), __reduce_max_sync(kWholeWarp, unsigned(ends.not_lo))};
#endif
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    ends.hi = larger(ends.hi, __shfl_xor_sync(kWholeWarp, ends.hi, distance));
    ends.not_lo = larger(ends.not_lo, __shfl_xor_sync(kWholeWarp, ends.not_lo, distance));
  }
  return ends;
}

// The ends of all threads, in the threads of the first warp. Every thread of the block must come here.
__device__ __forceinline__ Ends merge_block(Ends ends, bool is_narrow) {
  static_assert(kWarps <= kWarpThreads, "one warp merges all warps");
  __shared__ Ends warps[kWarps];
  const unsigned warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  ends = merge_warp(ends, is_narrow);
  if (lane == 0) warps[warp] = ends;
  __syncthreads();
  if (warp != 0) return ends;
  return merge_warp(lane < kWarps ? warps[lane] : Ends{0, 0}, is_narrow);
}

// ---- the last block of a tensor -------------------------------------------------------------------------------------

// Adds a block's ends. True for the block that comes last, whose `ends` then are those of all, and the cell is empty
// again. Called by one thread of each block.
__device__ bool merge_into(Cell* cell, uint32_t blocks, Ends* ends) {
  if (blocks == 1) return true;
  atomicMax(&cell->hi, ends->hi);
  atomicMax(&cell->not_lo, ends->not_lo);
  __threadfence();  // our ends before our arrival
  if (atomicAdd(&cell->arrived, 1u) != blocks - 1) return false;
  __threadfence();                                     // their arrivals before their ends
  *ends = {__ldcg(&cell->hi), __ldcg(&cell->not_lo)};  // from L2, where the atomics were done
  *cell = {};
  return true;
}

template <Format F>
__device__ Range<F> range_of(const Ends& ends) {
  using Word = typename Codes<F>::Word;
  Range<F> range;
  range.hi = Word(ends.hi);
  range.lo = Word(~Word(ends.not_lo));
  return range;
}

// A mask that is made with a dtype's minimum in place of -inf. Not of 8 bits, where finite tensors are full of the
// largest number by saturation.
template <Format F>
constexpr bool kMasksWithLowest = Codes<F>::is_float && sizeof(typename Codes<F>::Word) > 1;

template <Format F>
__device__ bool needs_counts(const Range<F>& range) {
  if (!Codes<F>::is_float || range.empty()) return false;
  return !is_finite<F>(range.hi) || (kMasksWithLowest<F> && range.lo == 0 && range.hi == Codes<F>::max_finite);
}

// Reads a tensor whose ends are known once more. Called by all threads of the block. The first one writes the columns
// of Health::write, and whether the tensor may be a mask.
template <Format F>
__device__ void count(const Ends& ends, const char* data, int64_t numel, double* values) {
  using Word = typename Codes<F>::Word;
  constexpr Word lowest = Word(Word(Word(1) << (8 * sizeof(Word) - 1)) | Codes<F>::max_finite);
  constexpr int kSums = 6;
  __shared__ Bits sums[kSums], not_first;  // complement of the first non-finite position; 0: there is none
  if (threadIdx.x < kSums) sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) not_first = 0;
  __syncthreads();
  const auto* const words = reinterpret_cast<const Word*>(data);
  Health<F> health;
  int64_t num_lowest = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < numel; i += kThreads) {
    health.update(words[i], i);
    num_lowest += kMasksWithLowest<F> && words[i] == lowest;
  }
  const int64_t counts[kSums] = {health.num_nan,  health.num_posinf,    health.num_neginf,
                                 health.num_zero, health.num_subnormal, num_lowest};
#pragma unroll
  for (int k = 0; k < kSums; ++k) atomicAdd(sums + k, Bits(counts[k]));
  if (health.first_nonfinite != Health<F>::kNone) atomicMax(&not_first, ~Bits(health.first_nonfinite));
  const Ends finite = merge_block({health.finite.hi, Word(~health.finite.lo)}, sizeof(Word) < 8);
  if (threadIdx.x != 0) return;
  health.range = range_of<F>(ends);
  health.finite = range_of<F>(finite);
  static_cast<HealthCounts&>(health) = {int64_t(sums[0]), int64_t(sums[1]), int64_t(sums[2]), int64_t(sums[3]),
                                        int64_t(sums[4])};
  health.first_nonfinite = not_first == 0 ? Health<F>::kNone : int64_t(~not_first);
  health.write(values);
  const Bits masked = health.num_neginf != 0 ? Bits(health.num_neginf) : sums[5];
  values[column::is_mask] = masked != 0 && health.num_zero != 0 && Bits(health.num_zero) + masked == Bits(numel);
}

// Writes the recorder's row into host memory, the stamp when all else is there. Not inlined: the loops before it keep
// their registers, whatever is needed here.
template <Format F>
__device__ __noinline__ void record(const Ends& ends, const char* data, int64_t numel, NanwatchRow* row,
                                    uint64_t stamp) {
  const Range<F> range = range_of<F>(ends);
  const bool examined = needs_counts<F>(range);
  if (examined) count<F>(ends, data, numel, row->values);
  if (threadIdx.x != 0) return;
  range.row().write(row->values);
  row->examined = examined ? 1.0 : 0.0;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&row->stamp) = stamp;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <bool records, class AnyBatch>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    range_kernel(const __grid_constant__ AnyBatch batch) {
  __shared__ Ends total;
  __shared__ bool is_last;
  const int tensor = batch.tensor_of(blockIdx.x);
  const uint32_t before = tensor == 0 ? 0 : batch.end[tensor - 1], blocks = batch.end[tensor] - before;
  const Format format = Format(batch.format[tensor]);
  Ends ends = {0, 0};
  bool is_narrow = true;
  with_device_format(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    using Word = typename Codes<F>::Word;
    RangeLanes<F> lanes;
    scan<Word>(lanes, batch.data[tensor], batch.numel[tensor], blockIdx.x - before, blocks);
    const Range<F> range = lanes.range();
    ends = {range.hi, Word(~range.lo)};
    is_narrow = sizeof(Word) < 8;
  });
  ends = merge_block(ends, is_narrow);
  if constexpr (records) {
    if (threadIdx.x == 0) {
      is_last = merge_into(batch.cells + tensor, blocks, &ends);
      total = ends;
    }
    __syncthreads();
    if (!is_last) return;
    with_device_format(format, [&](auto tag) {
      record<decltype(tag)::format>(total, batch.data[tensor], batch.numel[tensor], batch.recorded + tensor,
                                    batch.first + uint64_t(tensor));
    });
  } else {
    if (threadIdx.x != 0 || !merge_into(batch.cells + tensor, blocks, &ends)) return;
    with_device_format(format,
                       [&](auto tag) { range_of<decltype(tag)::format>(ends).row().write(batch.rows + 3 * tensor); });
  }
}

// ---- the host's side ------------------------------------------------------------------------------------------------

// The launch's own error only: an error that an earlier call of the user left pending is neither read nor cleared. The
// launch's error is cleared once it is read, because the caller gets it and the next check of another launch must not.
int checked(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return int(error);
}

int blocks_in_a_wave(int device) {
  static std::atomic<int> counts[16];  // asking takes a microsecond
  int multiprocessors = device < 16 ? counts[device].load(std::memory_order_relaxed) : 0;
  if (multiprocessors == 0) {
    (void)cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (device < 16) counts[device].store(multiprocessors, std::memory_order_relaxed);
  }
  return kBlocksPerMultiprocessor * std::max(multiprocessors, 1);
}

// A launch for `count` tensors, at most the batch's capacity. Each has a share of one wave of blocks, by its bytes.
template <bool records, class AnyBatch>
int launch(const NanwatchTensor* tensors, int count, AnyBatch& batch, int device, void* stream) {
  const auto bytes_of = [](const NanwatchTensor& x) { return double(x.numel) * double(word_size(Format(x.format))); };
  double bytes = 1;
  for (int i = 0; i < count; ++i) bytes += bytes_of(tensors[i]);
  // Rounded up for each tensor they are still one wave: a block of a second one would take as long as the first.
  const int wave = blocks_in_a_wave(device), shared = std::max(wave - count, wave / 2);
  const double per_block = std::max(double(kLeastBytesPerBlock), bytes / shared);
  uint32_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    batch.data[i] = static_cast<const char*>(tensors[i].data);
    batch.numel[i] = tensors[i].numel;
    batch.format[i] = uint8_t(tensors[i].format);
    batch.end[i] = blocks += uint32_t(bytes_of(tensors[i]) / per_block) + 1;
  }
  batch.count = count;
  void* arguments[] = {&batch};
  return checked(cudaLaunchKernel(range_kernel<records, AnyBatch>, dim3(blocks), dim3(kThreads), arguments, 0,
                                  static_cast<cudaStream_t>(stream)));
}

template <bool records, class AnyBatch>
int launch_all(const NanwatchTensor* tensors, int64_t count, AnyBatch& batch, int device, void* stream) {
  for (int64_t done = 0; done < count; done += AnyBatch::capacity) {
    const int many = int(std::min<int64_t>(count - done, AnyBatch::capacity));
    if (const int error = launch<records>(tensors + done, many, batch, device, stream)) return error;
    if constexpr (records) {
      batch.recorded += many;
      batch.first += uint64_t(many);
    } else {
      batch.rows += 3 * many;
    }
  }
  return 0;
}

// While one lives an allocation on this thread is no error, and no end, of a capture elsewhere.
class Uncaptured {
 public:
  Uncaptured() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Uncaptured() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  Uncaptured& operator=(Uncaptured&&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace
}  // namespace nanwatch

extern "C" {

size_t nanwatch_cuda_workspace(void) {
  return nanwatch::Many::capacity * sizeof(nanwatch::Cell);
}

int nanwatch_cuda_current(void) {
  int device = -1;
  return nanwatch::checked(cudaGetDevice(&device)) == 0 ? device : -1;
}

int nanwatch_cuda_select(int device) {
  return nanwatch_cuda_current() == device ? 0 : nanwatch::checked(cudaSetDevice(device));
}

int nanwatch_cuda_clear(void* workspace, void* stream) {
  return nanwatch::checked(cudaMemsetAsync(workspace, 0, nanwatch_cuda_workspace(), static_cast<cudaStream_t>(stream)));
}

int nanwatch_cuda_ranges(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device,
                         void* stream) {
  using namespace nanwatch;
  const auto send = [&](auto batch) {
    batch.cells = static_cast<Cell*>(workspace);
    batch.rows = rows;
    return launch_all<false>(tensors, count, batch, device, stream);
  };
  return count <= Few::capacity ? send(Few{}) : send(Many{});
}

int nanwatch_cuda_observe(const NanwatchTensor* tensors, int64_t count, NanwatchRow* rows, uint64_t first,
                          void* workspace, int device, void* stream) {
  nanwatch::Few batch;
  batch.cells = static_cast<nanwatch::Cell*>(workspace);
  batch.recorded = rows;
  batch.first = first;
  return nanwatch::launch_all<true>(tensors, count, batch, device, stream);
}

int nanwatch_cuda_stream(void* stream, int* capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const int error = nanwatch::checked(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  *capturing = status == cudaStreamCaptureStatusNone ? 0 : 1;
  return error;
}

int nanwatch_cuda_allocate(size_t bytes, void** memory) {
  const nanwatch::Uncaptured uncaptured;
  return nanwatch::checked(cudaMalloc(memory, bytes));
}

int nanwatch_cuda_allocate_mapped(size_t bytes, void** memory, void** address) {
  const nanwatch::Uncaptured uncaptured;
  if (const int error = nanwatch::checked(cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped)))
    return error;
  return nanwatch::checked(cudaHostGetDevicePointer(address, *memory, 0));
}

int nanwatch_cuda_await(void* stream) {
  int capturing = 0;
  if (const int error = nanwatch_cuda_stream(stream, &capturing)) return error;
  if (capturing != 0) return kNanwatchCapturing;
  const nanwatch::Uncaptured uncaptured;
  return nanwatch::checked(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

const char* nanwatch_cuda_error(int code) {
  if (code == kNanwatchCapturing) return "the stream is being captured into a CUDA graph";
  if (code == kNanwatchNoWorkspace) return "there is no workspace left for another stream";
  if (code == kNanwatchRefused) return "PyTorch refused the device, its stream or its memory";
  return cudaGetErrorString(cudaError_t(code));
}

}  // extern "C"
