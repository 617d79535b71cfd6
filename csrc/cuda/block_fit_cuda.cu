// CUDA kernel of block formats. Alone with nvcc, no torch. Never run on a GPU, and nothing here is tuned.
//
// A thread takes four neighbours at a time. A block of 16, 32 or 128 elements in a row has a quarter as many threads,
// all of one warp, and is read once. A larger block has all threads of a CUDA block and is read twice: for its largest
// magnitude, then for its errors. Signs do not matter here, so the kernel works on magnitudes.
#include "cuda/block_fit_cuda.h"

#include <cuda_runtime.h>

#include "cuda/cuda_tensor.h"

namespace nanwatch {
namespace {

constexpr int kFitThreads = 256, kFitWarps = kFitThreads / kWarpThreads;
constexpr int kFour = 4;

// A kernel's parameter. Blocks of the format are numbered in C order: matrices, bands of `height` rows, `width`
// columns.
struct FitJob {
  const void* data;
  int64_t rows, columns;  // of one matrix
  int64_t height, width;
  uint32_t blocks, per_unit;
  uint32_t across, bands;  // blocks in a row, rows of blocks in a matrix
  Divider by_across, by_bands;
  BlockScale scale;
  RoundedElement element;
  const double* amax;
  double* out;
  bool is_aligned;  // every four of a row lie on a boundary of their size
};

// The part of the tensor that a block covers; no columns for a block that is not there.
struct FitPlace {
  int64_t row, last_row, column, last_column;

  __device__ FitPlace(const FitJob& job, uint32_t block, bool is_there) {
    const uint32_t band = job.by_across.divide(block), matrix = job.by_bands.divide(band);
    const int64_t inside = int64_t(band - matrix * job.bands) * job.height;
    row = matrix * job.rows + inside;
    last_row = row + (inside + job.height < job.rows ? job.height : job.rows - inside);
    column = int64_t(block - band * job.across) * job.width;
    last_column = !is_there ? 0 : column + job.width < job.columns ? column + job.width : job.columns;
  }
};

// |x| in float32, exactly; above the largest finite number for what is not finite.
template <Format F>
__device__ __forceinline__ float magnitude_of(typename Codes<F>::Word word) {
  const auto code = magnitude<F>(word);
  if constexpr (F == Format::f16) {
    const float value = rounded_product(with_bits(uint32_t(code) << 13), 0x1p112f);  // the biases' distance
    return is_finite<F>(code) ? value : with_bits(0x7f800000);
  } else {
    return with_bits(uint32_t(code) << (32 - 8 * sizeof code));
  }
}

// Four elements of a row from `column` on; zeros from `last` on.
template <Format F>
__device__ __forceinline__ void load_four(const FitJob& job, int64_t row, int64_t column, int64_t last, float* x) {
  using Word = typename Codes<F>::Word;
  struct alignas(kFour * sizeof(Word)) Words {
    Word word[kFour];
  };
  Words words = {};
  const Word* const p = static_cast<const Word*>(job.data) + row * job.columns + column;
  if (job.is_aligned && column + kFour <= last) {
    words = *reinterpret_cast<const Words*>(p);
  } else {
    for (int k = 0; k < kFour; ++k)
      if (column + k < last) words.word[k] = p[k];
  }
#pragma unroll
  for (int k = 0; k < kFour; ++k) x[k] = magnitude_of<F>(words.word[k]);
}

// Calls visit(x) for each four elements of this thread, one of `lanes` threads that share a block. `held`: its only
// four, where the block's threads are of one warp.
template <Format F, int lanes, class Visit>
__device__ __forceinline__ void each_four(const FitJob& job, const FitPlace& place, const float* held,
                                          const Visit& visit) {
  if constexpr (lanes <= kWarpThreads) return visit(held);
  const int across = job.height == 1 ? kFitThreads : kWarpThreads, lane = int(threadIdx.x) % across;
  for (int64_t row = place.row + int(threadIdx.x) / across; row < place.last_row; row += kFitThreads / across) {
    for (int64_t column = place.column + lane * kFour; column < place.last_column; column += across * kFour) {
      float x[kFour];
      load_four<F>(job, row, column, place.last_column, x);
      visit(x);
    }
  }
}

struct Total {
  template <class Number>
  __device__ Number operator()(Number a, Number b) const {
    return a + b;
  }
};

struct Largest {
  template <class Number>
  __device__ Number operator()(Number a, Number b) const {
    return a < b ? b : a;
  }
};

// Folds the numbers of `lanes` neighbouring threads, and returns the result in each of them.
template <int lanes, class Number, class Fold>
__device__ __forceinline__ Number folded(Number mine, const Fold& fold) {
#pragma unroll
  for (int other = 1; other < (lanes < kWarpThreads ? lanes : kWarpThreads); other *= 2)
    mine = fold(mine, __shfl_xor_sync(kWholeWarp, mine, other));
  if constexpr (lanes > kWarpThreads) {
    __shared__ Number warps[kFitWarps];
    if (threadIdx.x % kWarpThreads == 0) warps[threadIdx.x / kWarpThreads] = mine;
    __syncthreads();
    mine = warps[0];
    for (int warp = 1; warp < kFitWarps; ++warp) mine = fold(mine, warps[warp]);
    __syncthreads();  // nobody writes anew before all have read
  }
  return mine;
}

__device__ BlockFactor factor_of(const FitJob& job, uint32_t amax, float of_tensor) {
  const float largest = job.element.largest;
  if (job.scale == BlockScale::power) return power_factor(int32_t(amax), exponent_of(largest));
  if (job.scale != BlockScale::two_level) return float_factor(with_bits(amax), largest);
  const float scale = scale_of_tensor(of_tensor, largest);
  BlockFactor found = two_level_factor(with_bits(amax), largest, scale, 1 / scale);
  found.refused = !(of_tensor >= kLeastOfTensor && of_tensor <= kMostOfBlock);  // nan too
  return found;
}

template <Format F, int lanes>
__global__ void __launch_bounds__(kFitThreads, 4) block_fit_kernel(FitJob job) {
  __shared__ WorstBlocks worst[kFitWarps];
  const int lane = int(threadIdx.x) % kWarpThreads, warp = int(threadIdx.x) / kWarpThreads;
  if (lane == 0) worst[warp].clear();
  __syncwarp();
  const float of_tensor = job.amax == nullptr ? 0 : float(*job.amax), largest = job.element.largest;
  uint32_t elements = 0, saturated = 0, flushed = 0, refused = 0, flushed_blocks = 0;
  double all_signal = 0, all_noise = 0, likely = 0;
  float lowest = with_bits(0x7f800000), highest = -lowest;
  const bool divides = job.scale == BlockScale::divisor;
  const uint32_t begin = blockIdx.x * job.per_unit;
  const uint32_t end = begin + job.per_unit < job.blocks ? begin + job.per_unit : job.blocks;
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += kFitThreads / lanes) {
    const uint32_t block = first + threadIdx.x / lanes;
    const FitPlace place(job, block, block < end);
    uint32_t amax = 0;
    double signal = 0, noise = 0;
    float held[kFour];
    if constexpr (lanes <= kWarpThreads)
      load_four<F>(job, place.row, place.column + int(threadIdx.x) % lanes * kFour, place.last_column, held);
    each_four<F, lanes>(job, place, held, [&](const float* x) {
#pragma unroll
      for (int k = 0; k < kFour; ++k) {
        amax = Largest()(amax, bits_of(x[k]));
        signal += double(x[k]) * x[k];
      }
    });
    amax = folded<lanes>(amax, Largest());
    signal = folded<lanes>(signal, Total());
    const BlockFactor by = factor_of(job, amax, of_tensor);
    each_four<F, lanes>(job, place, held, [&](const float* x) {
#pragma unroll
      for (int k = 0; k < kFour; ++k) {
        const float rounded = job.element.nearest(rounded_product(x[k], by.factor));
        const float kept = rounded < largest ? rounded : largest;
        const float value = divides ? kept / by.factor : rounded_product(kept, by.value);
        const double error = x[k] - value;
        noise += error * error;
        elements += x[k] != 0;
        saturated += rounded > largest;
        flushed += x[k] != 0 && kept == 0;
      }
    });
    noise = folded<lanes>(noise, Total());
    const bool speaks = threadIdx.x % lanes == 0 && block < end;
    if (speaks) {
      all_signal += signal;
      all_noise += noise;
      refused |= by.refused != 0 || amax > kMostBits;
      if (amax != 0) {
        lowest = by.value < lowest ? by.value : lowest;
        highest = by.value > highest ? by.value : highest;
        flushed_blocks += job.element.nearest(rounded_product(with_bits(amax), by.factor)) == 0;
      }
    }
    unsigned noisy = __ballot_sync(kWholeWarp, speaks && noise > likely * signal);
    if (noisy == 0) continue;
    for (; noisy != 0; noisy &= noisy - 1) {
      if (lane == __ffs(int(noisy)) - 1) worst[warp].add(block, signal, noise);
      __syncwarp();
    }
    likely = worst[warp].likely;
    __syncwarp();
  }
  const double of_unit = threadIdx.x == 0 && begin < end ? end - begin : 0;
  // The items up to the worst blocks, in their order; of the scales the lowest with its sign turned.
  const double items[fit_item::worst] = {double(elements), double(saturated), double(flushed),        0,
                                         double(refused),  of_unit,           double(flushed_blocks), all_signal,
                                         all_noise,        -double(lowest),   double(highest)};
  double* const row = job.out + int64_t(blockIdx.x) * kFitItems;
#pragma unroll
  for (int i = 0; i < fit_item::worst; ++i) {
    const bool is_sum = i < fit_item::lowest_scale;
    const double total = is_sum ? folded<kFitThreads>(items[i], Total()) : folded<kFitThreads>(items[i], Largest());
    if (threadIdx.x == 0) row[i] = i == fit_item::lowest_scale ? -total : total;
  }
  if (threadIdx.x != 0) return;
  for (int i = 3 * kWorstBlocks; i < 3 * kWorstBlocks * kFitWarps; i += 3) {
    const double* const found = worst[i / (3 * kWorstBlocks)].found + i % (3 * kWorstBlocks);
    if (found[0] >= 0) worst[0].add(found[0], found[1], found[2]);
  }
  for (int i = 0; i < 3 * kWorstBlocks; ++i) row[fit_item::worst + i] = worst[0].found[i];
}

using FitKernel = void (*)(FitJob);

// The kernel for blocks of this size. A warp also takes a whole row that is short enough.
template <Format F>
FitKernel fit_kernel(int64_t height, int64_t width) {
  if (height != 1 || width > kFour * kWarpThreads) return block_fit_kernel<F, kFitThreads>;
  if (width > kFour * 8) return block_fit_kernel<F, kWarpThreads>;
  return width > kFour * 4 ? block_fit_kernel<F, 8> : block_fit_kernel<F, 4>;
}

}  // namespace
}  // namespace nanwatch

int nanwatch_cuda_block_fit(const NanwatchTensor* x, const nanwatch::BlockFormat* format, const double* amax,
                            double* rows, int64_t units, int device, void* stream) {
  using namespace nanwatch;
  if (const int failed = checked(cudaSetDevice(device))) return failed;
  FitJob job = {};
  job.data = x->data;
  job.rows = x->sizes[1];
  job.columns = x->sizes[2];
  job.height = format->rows;
  job.width = format->columns == 0 ? job.columns : format->columns;
  const int64_t across = (job.columns + job.width - 1) / job.width, bands = (job.rows + job.height - 1) / job.height;
  const int64_t blocks = x->sizes[0] * bands * across;
  if (blocks > INT32_MAX - kFitThreads) return kNanwatchTooManyChunks;
  job.blocks = uint32_t(blocks);
  job.per_unit = uint32_t((blocks + units - 1) / units);
  job.across = uint32_t(across);
  job.bands = uint32_t(bands);
  job.by_across = Divider::of(job.across);
  job.by_bands = Divider::of(job.bands);
  job.scale = format->scale;
  job.element = RoundedElement::of(*format);
  job.amax = amax;
  job.out = rows;
  const int64_t four = kFour * width_of(*x);
  job.is_aligned =
      job.columns % kFour == 0 && job.width % kFour == 0 && reinterpret_cast<uintptr_t>(x->data) % uintptr_t(four) == 0;
  const Format word = Format(x->format);
  const auto kernel = word == Format::f32   ? fit_kernel<Format::f32>
                      : word == Format::f16 ? fit_kernel<Format::f16>
                                            : fit_kernel<Format::bf16>;
  return enqueue(kernel(job.height, job.width), units, kFitThreads, stream, job);
}
