// CUDA kernels of the exponents and the edges. Alone with nvcc, no torch. Never run on a GPU, and nothing here is
// tuned.
//
// A block has a table of its own in shared memory, and adds it to the result at its end, so that blocks stay: each
// takes chunk after chunk. How a chunk is read is cuda_scan.h's matter; here is what becomes of a word.
#include "cuda/exponents_cuda.h"

#include <cuda_runtime.h>

#include "cuda/cuda_tensor.h"
#include "numerics/exponents.h"

namespace nanwatch {
namespace {

using Tensor = Batch<1, 1, kNanwatchMaxWalkDims>;
using Counts = unsigned long long;  // the type that CUDA's 64-bit atomics take

// Eight blocks for each of 132 SMs, of which two fit at a time.
constexpr int64_t kBlocks = 132 * 8;
constexpr uint32_t kFirstChunkBytes = 16 << 10, kLastChunkBytes = 256 << 10;

// Lanes of a warp whose elements have the same exponent, which is usual, would wait for each other at one counter: up
// to 16 copies of the table, side by side so that the lanes of a warp meet in different banks, in at most 24 KiB.
constexpr int copies_of(int columns) {
  int copies = 16;
  while (columns * copies * int(sizeof(uint32_t)) > 24 << 10) copies /= 2;
  return copies;
}

// ---- what becomes of a word -----------------------------------------------------------------------------------------

// 8-bit formats: all 256 patterns, whatever they mean.
struct PatternLanes {
  using Word = uint8_t;
  static constexpr int copies = copies_of(256);
  uint32_t* table;  // this thread's copy

  __device__ __forceinline__ void take_one(Word word) { atomicAdd(table + word * copies, 1u); }
};

template <Format F>
struct ExponentLanes {
  using Word = typename Codes<F>::Word;
  static constexpr int copies = copies_of(ExponentSpan<F>::columns);
  uint32_t* table;  // this thread's copy

  __device__ __forceinline__ void take_one(Word word) { atomicAdd(table + Exponents<F>::column(word) * copies, 1u); }
};

struct EdgeCodes {
  uint64_t code[kMaxEdges];
  int count;
};

template <Format F>
struct EdgeLanes {
  using Word = typename Codes<F>::Word;
  Word code[kMaxEdges];
  uint32_t count[kMaxEdges];

  __device__ __forceinline__ void take_one(Word word) {
    const Word m = order<F>(word);
#pragma unroll
    for (int e = 0; e < kMaxEdges; ++e) count[e] += m >= code[e];
  }
};

// A vector word by word; cuda_scan.h calls the members.
template <class Lanes>
struct Singly : Lanes {
  __device__ __forceinline__ void take(const Vector& vector) {
    constexpr int per_vector = int(sizeof(Vector) / sizeof(typename Lanes::Word));
    typename Lanes::Word word[per_vector];
    memcpy(word, &vector, sizeof vector);
#pragma unroll
    for (int i = 0; i < per_vector; ++i) this->take_one(word[i]);
  }
};

template <class Lanes>
__device__ __forceinline__ void update(Singly<Lanes>& lanes, typename Lanes::Word word, int64_t) {
  lanes.take_one(word);
}

// ---- what a block does ----------------------------------------------------------------------------------------------

// Input of the kernels. `plain`: one element at a time, for what the fast ways cannot follow.
struct Input {
  Tensor tensor;
  int64_t repeats;  // elements of the tensor that each one read stands for
  bool plain;
};

template <class Lanes>
__device__ __forceinline__ void read_chunks(Lanes& lanes, const Input& input) {
  using Word = typename Lanes::Word;
#pragma unroll 1
  for (uint32_t chunk = blockIdx.x; chunk < input.tensor.end[0]; chunk += gridDim.x) {
    const Share share = input.tensor.share(0, chunk, sizeof(Word));
    if (input.plain) {
      scan_plainly<Word>(lanes, input.tensor, share);
    } else {
      scan<Word>(lanes, input.tensor, share);
    }
  }
}

// Fills the block's table, then calls add(slot, count) for each of its `slots` that is not empty.
template <class Lanes, int slots, class Add>
__device__ __forceinline__ void tabulate(const Input& input, const Add& add) {
  constexpr int copies = Lanes::copies;
  __shared__ uint32_t table[slots * copies];
  for (int i = int(threadIdx.x); i < slots * copies; i += kThreads) table[i] = 0;
  __syncthreads();
  Singly<Lanes> lanes;
  lanes.table = table + threadIdx.x % copies;
  read_chunks(lanes, input);
  __syncthreads();
  for (int slot = int(threadIdx.x); slot < slots; slot += kThreads) {
    Counts sum = 0;
    for (int copy = 0; copy < copies; ++copy) sum += table[slot * copies + copy];
    if (sum != 0) add(slot, sum * Counts(input.repeats));
  }
}

// Calls fn(FormatTag<F>{}) for the run-time format of 8 bits.
template <int I = 0, class Fn>
__device__ __forceinline__ void with_byte_format(int format, const Fn& fn) {
  if constexpr (I <= int(Format::i64)) {
    if constexpr (sizeof(typename Codes<Format(I)>::Word) == 1) {
      if (format == I) return fn(FormatTag<Format(I)>{});
    }
    with_byte_format<I + 1>(format, fn);
  }
}

// ---- the kernels ----------------------------------------------------------------------------------------------------

template <Format F>
__global__ void __launch_bounds__(kThreads, 2) exponent_kernel(const __grid_constant__ Input input, Counts* counts) {
  tabulate<ExponentLanes<F>, ExponentSpan<F>::columns>(
      input, [&](int column, Counts sum) { atomicAdd(counts + column, sum); });
}

__global__ void __launch_bounds__(kThreads, 2)
    byte_exponent_kernel(const __grid_constant__ Input input, Counts* counts) {
  tabulate<PatternLanes, 256>(input, [&](int pattern, Counts sum) {
    with_byte_format(input.tensor.format[0], [&](auto tag) {
      atomicAdd(counts + Exponents<decltype(tag)::format>::column(uint8_t(pattern)), sum);
    });
  });
}

template <Format F>
__global__ void __launch_bounds__(kThreads, 2)
    edge_kernel(const __grid_constant__ Input input, Counts* counts, const __grid_constant__ EdgeCodes codes) {
  using Word = typename Codes<F>::Word;
  __shared__ Counts sum[kMaxEdges];
  if (threadIdx.x < kMaxEdges) sum[threadIdx.x] = 0;
  __syncthreads();
  Singly<EdgeLanes<F>> lanes;
#pragma unroll
  for (int e = 0; e < kMaxEdges; ++e) {
    lanes.code[e] = Word(codes.code[e]);
    lanes.count[e] = 0;
  }
  read_chunks(lanes, input);
#pragma unroll
  for (int e = 0; e < kMaxEdges; ++e) atomicAdd(sum + e, Counts(lanes.count[e]));
  __syncthreads();
  if (int(threadIdx.x) >= codes.count) return;
  const bool reachable = codes.code[threadIdx.x] <= uint64_t(Word(~Word(0)));
  if (reachable) atomicAdd(counts + threadIdx.x, sum[threadIdx.x] * Counts(input.repeats));
}

__global__ void __launch_bounds__(kThreads, 2)
    byte_edge_kernel(const __grid_constant__ Input input, Counts* counts, const __grid_constant__ EdgeCodes codes) {
  __shared__ Counts sum[kMaxEdges];
  if (threadIdx.x < kMaxEdges) sum[threadIdx.x] = 0;
  tabulate<PatternLanes, 256>(input, [&](int pattern, Counts num) {
    with_byte_format(input.tensor.format[0], [&](auto tag) {
      const uint64_t m = order<decltype(tag)::format>(uint8_t(pattern));
      for (int e = 0; e < codes.count; ++e)
        if (m >= codes.code[e]) atomicAdd(sum + e, num);
    });
  });
  __syncthreads();
  if (int(threadIdx.x) < codes.count) atomicAdd(counts + threadIdx.x, sum[threadIdx.x]);
}

// ---- the launch -----------------------------------------------------------------------------------------------------

struct Launch {
  Input input = {};
  uint32_t blocks = 0;  // 0: there is nothing to read
  int error = 0;

  explicit Launch(const NanwatchTensor& given) {
    if (given.dims > kNanwatchMaxDims) {
      error = kNanwatchTooManyDims;
      return;
    }
    Dim dim[kNanwatchMaxDims];
    const CoalescedDims shape = coalesce_dims(given.dims, given.sizes, given.strides, false, dim);
    if (shape.numel == 0) return;
    if (shape.dims > kNanwatchMaxWalkDims) {
      error = kNanwatchTooManyDims;
      return;
    }
    const int64_t width = width_of(given);
    Tensor& tensor = input.tensor;
    tensor.count = 1;
    tensor.data[0] = static_cast<const char*>(given.data);
    tensor.numel[0] = shape.numel;
    tensor.format[0] = uint8_t(given.format);
    tensor.walk[0] = kFlat;
    input.repeats = shape.repeats;
    if (!shape.flat || !aligned(given)) {
      tensor.walk[0] = 0;
      const bool fast = fill(tensor.walks[0], given, shape, dim);
      input.plain = !fast || !aligned(given);
    }
    const double bytes = double(shape.numel) * double(width);  // an overlapping view may pass 2^63
    tensor.chunk_bytes = kFirstChunkBytes;
    while (tensor.chunk_bytes < kLastChunkBytes && bytes / tensor.chunk_bytes > kBlocks) tensor.chunk_bytes *= 2;
    // A block's counters have 32 bits, and a step beyond the last chunk must have a number too.
    constexpr double most_elements = double(uint32_t(1) << 31);
    if (bytes / tensor.chunk_bytes > INT32_MAX - kBlocks || double(shape.numel) / kBlocks > most_elements) {
      error = kNanwatchTooManyChunks;
      return;
    }
    tensor.end[0] = tensor.chunks_of(0, int(width));
    blocks = tensor.end[0] < uint32_t(kBlocks) ? tensor.end[0] : uint32_t(kBlocks);
  }

  template <class... More>
  int enqueue(void (*kernel)(Input, Counts*, More...), int64_t* counts, int device, void* stream, More... more) {
    if (error != 0 || blocks == 0) return error;
    if (const int failed = checked(cudaSetDevice(device))) return failed;
    auto* result = reinterpret_cast<Counts*>(counts);
    void* arguments[] = {&input, &result, &more...};
    return checked(
        cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
  }
};

}  // namespace
}  // namespace nanwatch

extern "C" {

int nanwatch_cuda_exponents(const NanwatchTensor* tensor, int64_t* counts, int device, void* stream) {
  using namespace nanwatch;
  Launch launch(*tensor);
  return with_format(Format(tensor->format), [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    if constexpr (sizeof(typename Codes<F>::Word) == 1) {
      return launch.enqueue(byte_exponent_kernel, counts, device, stream);
    } else {
      return launch.enqueue(exponent_kernel<F>, counts, device, stream);
    }
  });
}

int nanwatch_cuda_edges(const NanwatchTensor* tensor, const uint64_t* codes, int64_t num_codes, int64_t* counts,
                        int device, void* stream) {
  using namespace nanwatch;
  Launch launch(*tensor);
  EdgeCodes given = {};
  given.count = int(num_codes);
  for (int64_t e = 0; e < num_codes; ++e) given.code[e] = codes[e];
  return with_format(Format(tensor->format), [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    if constexpr (sizeof(typename Codes<F>::Word) == 1) {
      return launch.enqueue(byte_edge_kernel, counts, device, stream, given);
    } else if constexpr (F == Format::bf16) {
      return launch.enqueue(edge_kernel<Format::f16>, counts, device, stream, given);  // the same words
    } else {
      return launch.enqueue(edge_kernel<F>, counts, device, stream, given);
    }
  });
}

}  // extern "C"
