// CUDA kernels of the range and the health. Alone with nvcc, no torch:
//   nvcc -std=c++17 -O3 -c csrc/range_cuda.cu -Xcompiler=-fPIC,-Wall,-Wextra -gencode=arch=compute_90,code=sm_90
//
// Three kernels: `flat_kernel` reads chunks of up to kMaxBatch tensors, `strided_kernel` gathers one tensor, and
// `finish_kernel` turns the accumulated bits into rows of doubles. What blocks accumulate starts as zeroed memory.
#include "range_cuda.h"

#include <cuda_runtime.h>

#include "collapse.h"
#include "range_cuda_accumulators.h"

namespace nanwatch {
namespace {

constexpr int kThreads = 256;

// A block's share of a flat tensor: 16 loads of 16 bytes a thread, so that the two atomics at its end are few.
constexpr int64_t kChunkBytes = 64 << 10;

// Elements a thread gathers before another block is worth having.
constexpr int64_t kGatherPerThread = 16;
// Grid-stride from here on: 4 blocks of 256 threads on each of 132 SMs fill a Hopper chip, and twice that evens out.
constexpr int64_t kMaxGatherBlocks = 1056;

// Kernel parameters may take 32,764 bytes since CUDA 12.1 and 4,096 before; a tensor takes 25 in `Batch`.
#if CUDART_VERSION >= 12010
constexpr int kMaxBatch = 1024;
#else
constexpr int kMaxBatch = 160;
#endif

// One per row of the result, in the workspace.
template <class Accumulator>
struct Entry {
  Accumulator bits;
  Bits format;
};

// Merges the threads of a block, then the block into the entry. Every thread of the block must come here.
template <class Accumulator>
__device__ void merge_block(Accumulator mine, Entry<Accumulator>* entry) {
  __shared__ Accumulator shared[kThreads];
  shared[threadIdx.x] = mine;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x].merge(shared[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) entry->bits.merge_atomically(shared[0]);
}

// ---- reading --------------------------------------------------------------------------------------------------------

// Calls fn(FormatTag<F>{}) for the run-time format. with_format is its host twin; the format is the same for a whole
// block, so nothing diverges.
template <int I = 0, class Fn>
__device__ __forceinline__ void with_device_format(int32_t format, const Fn& fn) {
  if (format == I) {
    fn(FormatTag<Format(I)>{});
  } else if constexpr (I < int(Format::i64)) {
    with_device_format<I + 1>(format, fn);
  }
}

template <Format F>
__device__ __forceinline__ void take(Range<F>& range, typename Codes<F>::Word word, int64_t) {
  range.update(word);
}

template <Format F>
__device__ __forceinline__ void take(Health<F>& health, typename Codes<F>::Word word, int64_t position) {
  health.update(word, position);
}

__device__ __forceinline__ int64_t misalignment(const char* p, int64_t boundary) {
  return int64_t(reinterpret_cast<uintptr_t>(p) % uintptr_t(boundary));
}

// A word at any address: memory from other libraries need not be aligned to its element, and a plain load would fault.
template <class Word>
__device__ __forceinline__ Word load_word(const char* p) {
  if (misalignment(p, sizeof(Word)) == 0) return *reinterpret_cast<const Word*>(p);
  Word word = 0;
#pragma unroll 1
  for (unsigned byte = 0; byte < sizeof(Word); ++byte)
    word = Word(word | Word(Word(static_cast<unsigned char>(p[byte])) << (8 * byte)));
  return word;
}

struct alignas(16) Vector {
  uint64_t half[2];
};

// Elements [begin, end) of a run of words, shared among a block: one by one up to a 16-byte boundary, then vectors,
// then one by one.
template <Format F, class Accumulator>
__device__ void scan(const char* data, int64_t begin, int64_t end, Accumulator& accumulator) {
  using Word = typename Codes<F>::Word;
  constexpr int64_t width = sizeof(Word), per_vector = 16 / width;
  const int64_t thread = threadIdx.x;
  const char* const first = data + begin * width;
  const int64_t count = end - begin;
  int64_t head = (16 - misalignment(first, 16)) % 16 / width;
  if (head > count || misalignment(first, width) != 0) head = count;
  const int64_t vectors = (count - head) / per_vector, tail = head + vectors * per_vector;
  for (int64_t i = thread; i < head; i += kThreads) take(accumulator, load_word<Word>(first + i * width), begin + i);
  const Vector* const body = reinterpret_cast<const Vector*>(first + head * width);
  for (int64_t v = thread; v < vectors; v += kThreads) {
    const Vector vector = body[v];
#pragma unroll
    for (int64_t k = 0; k < per_vector; ++k) {
      const Word word = Word(vector.half[k * width / 8] >> (k * width % 8 * 8));
      take(accumulator, word, begin + head + v * per_vector + k);
    }
  }
  for (int64_t i = tail + thread; i < count; i += kThreads)
    take(accumulator, load_word<Word>(first + i * width), begin + i);
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// Tensors that are one run in memory, cut into chunks; block b reads chunk b. At least one chunk each, also for an
// empty tensor: somebody has to note its format.
template <int capacity>
struct Batch {
  const char* data[capacity];
  int64_t numel[capacity];
  uint32_t end[capacity];  // chunks of this tensor and of those before it
  uint32_t row[capacity];
  uint8_t format[capacity];
  int32_t count;

  // The tensor that chunk belongs to: the first whose end is beyond it.
  __device__ int tensor_of(uint32_t chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (chunk < end[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

template <class Accumulator, int capacity>
__global__ void __launch_bounds__(kThreads)
    flat_kernel(const __grid_constant__ Batch<capacity> batch, Entry<Accumulator>* entries) {
  const int tensor = batch.tensor_of(blockIdx.x);
  const int64_t chunk = blockIdx.x - (tensor == 0 ? 0 : batch.end[tensor - 1]);
  Accumulator bits = {};
  with_device_format(batch.format[tensor], [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    constexpr int64_t per_chunk = kChunkBytes / int64_t(sizeof(typename Codes<F>::Word));
    const int64_t begin = chunk * per_chunk, rest = batch.numel[tensor] - begin;
    typename Accumulator::template Of<F> accumulator;
    scan<F>(batch.data[tensor], begin, begin + (rest < per_chunk ? rest : per_chunk), accumulator);
    bits = Accumulator::template from<F>(accumulator, 1);
  });
  Entry<Accumulator>* const entry = entries + batch.row[tensor];
  if (chunk == 0 && threadIdx.x == 0) entry->format = batch.format[tensor];
  merge_block(bits, entry);
}

struct Gather {
  const char* data;
  int64_t numel, repeats;
  int32_t format, dims;
  int64_t row;
  Dim dim[kNanwatchMaxWalkDims];
};

template <class Accumulator>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ Gather gather, Entry<Accumulator>* entries) {
  Accumulator bits = {};
  with_device_format(gather.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    using Word = typename Codes<F>::Word;
    typename Accumulator::template Of<F> accumulator;
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < gather.numel; i += step) {
      int64_t rest = i, offset = 0, position = 0;
      for (int d = 0; d < gather.dims; ++d) {
        const Dim& dim = gather.dim[d];
        const int64_t index = rest % dim.size;
        rest /= dim.size;
        offset += index * dim.stride;
        position += index * dim.order;
      }
      take(accumulator, load_word<Word>(gather.data + offset * int64_t(sizeof(Word))), position);
    }
    bits = Accumulator::template from<F>(accumulator, gather.repeats);
  });
  Entry<Accumulator>* const entry = entries + gather.row;
  if (blockIdx.x == 0 && threadIdx.x == 0) entry->format = Bits(gather.format);
  merge_block(bits, entry);
}

template <class Accumulator>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const Entry<Accumulator>* entries, int64_t count, double* rows) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  with_device_format(int32_t(entries[i].format), [&](auto tag) {
    entries[i].bits.template narrow<decltype(tag)::format>().write(rows + i * Accumulator::columns);
  });
}

// ---- launching ------------------------------------------------------------------------------------------------------

// The launch's own error, and only that: what an earlier call of the user's left pending is neither read nor cleared.
// Our error is cleared once it is in hand, because the caller is told of it and the next check of somebody else's
// launch must not be.
int checked(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return int(error);
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, void* stream, const Arguments&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return checked(
      cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(kThreads), pointers, 0, static_cast<cudaStream_t>(stream)));
}

int64_t divide_up(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

int64_t bytes_of(const Collapsed& shape, int32_t format) {
  return shape.numel * int64_t(word_size(Format(format)));
}

template <class Accumulator, int capacity>
class Batcher {
 public:
  Batcher(Entry<Accumulator>* entries, void* stream) : entries_(entries), stream_(stream) { batch_.count = 0; }

  int add(const NanwatchTensor& tensor, const Collapsed& shape, int64_t row) {
    const int64_t bytes = bytes_of(shape, tensor.format);
    const int64_t chunks = bytes <= kChunkBytes ? 1 : divide_up(bytes, kChunkBytes);
    if (batch_.count == capacity || chunks_ + chunks > INT32_MAX)
      if (const int error = flush()) return error;
    chunks_ += chunks;
    const int i = batch_.count++;
    batch_.data[i] = static_cast<const char*>(tensor.data);
    batch_.numel[i] = shape.numel;
    batch_.end[i] = uint32_t(chunks_);
    batch_.row[i] = uint32_t(row);
    batch_.format[i] = uint8_t(tensor.format);
    return 0;
  }

  int flush() {
    if (batch_.count == 0) return 0;
    const int error = launch(flat_kernel<Accumulator, capacity>, chunks_, stream_, batch_, entries_);
    batch_.count = 0;
    chunks_ = 0;
    return error;
  }

 private:
  Entry<Accumulator>* entries_;
  void* stream_;
  int64_t chunks_ = 0;
  Batch<capacity> batch_;
};

template <class Accumulator, int capacity>
int reduce(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device, void* stream) {
  if (count == 0) return 0;
  // This runtime is not the one torch uses: set the device here too, or a thread that has no context yet launches on 0.
  if (const int error = checked(cudaSetDevice(device))) return error;
  auto* const entries = static_cast<Entry<Accumulator>*>(workspace);
  const size_t bytes = size_t(count) * sizeof(Entry<Accumulator>);
  if (const int error = checked(cudaMemsetAsync(entries, 0, bytes, static_cast<cudaStream_t>(stream)))) return error;
  constexpr bool keep_positions = Accumulator::columns == kHealthColumns;
  Batcher<Accumulator, capacity> batcher(entries, stream);
  for (int64_t row = 0; row < count; ++row) {
    const NanwatchTensor& tensor = tensors[row];
    if (tensor.dims > kNanwatchMaxDims) return kNanwatchTooManyDims;
    Dim dim[kNanwatchMaxDims];
    const Collapsed shape = collapse(tensor.dims, tensor.sizes, tensor.strides, keep_positions, dim);
    int error;
    // A health of repeated elements has to multiply its counts, which only the gather does.
    if (shape.flat && (shape.repeats == 1 || !keep_positions)) {
      error = batcher.add(tensor, shape, row);
    } else if (shape.dims > kNanwatchMaxWalkDims) {
      return kNanwatchTooManyDims;
    } else {
      Gather gather = {static_cast<const char*>(tensor.data),
                       shape.numel,
                       shape.repeats,
                       tensor.format,
                       int32_t(shape.dims),
                       row,
                       {}};
      for (int64_t d = 0; d < shape.dims; ++d) gather.dim[d] = dim[d];
      const int64_t blocks = divide_up(shape.numel, kThreads * kGatherPerThread);
      error = launch(strided_kernel<Accumulator>, blocks < kMaxGatherBlocks ? blocks : kMaxGatherBlocks, stream, gather,
                     entries);
    }
    if (error != 0) return error;
  }
  if (const int error = batcher.flush()) return error;
  return launch(finish_kernel<Accumulator>, divide_up(count, kThreads), stream,
                static_cast<const Entry<Accumulator>*>(entries), count, rows);
}

}  // namespace
}  // namespace nanwatch

extern "C" {

size_t nanwatch_cuda_ranges_workspace(int64_t count) {
  return size_t(count) * sizeof(nanwatch::Entry<nanwatch::DeviceRange>);
}

size_t nanwatch_cuda_health_workspace(void) {
  return sizeof(nanwatch::Entry<nanwatch::DeviceHealth>);
}

int nanwatch_cuda_ranges(const NanwatchTensor* tensors, int64_t count, double* rows, void* workspace, int device,
                         void* stream) {
  using nanwatch::DeviceRange;
  // A launch copies its parameters: 40 bytes for one tensor, 25 KiB for many.
  const auto reduce =
      count == 1 ? nanwatch::reduce<DeviceRange, 1> : nanwatch::reduce<DeviceRange, nanwatch::kMaxBatch>;
  return reduce(tensors, count, rows, workspace, device, stream);
}

int nanwatch_cuda_health(const NanwatchTensor* tensor, double* row, void* workspace, int device, void* stream) {
  return nanwatch::reduce<nanwatch::DeviceHealth, 1>(tensor, 1, row, workspace, device, stream);
}

const char* nanwatch_cuda_error(int code) {
  if (code == kNanwatchTooManyDims) return "the tensor has more dimensions than the kernels walk";
  return cudaGetErrorString(cudaError_t(code));
}

}  // extern "C"
