// The second kernel of nanwatch_cuda_observe: brings the rows of the first into host memory, and where a range alone
// does not say what a report needs, reads the tensor once more, for its health and for what tells an additive mask.
// Device code, for range_cuda.cu alone.
//
// Which tensors those are the host cannot know when it launches. So all come along, and of one that is finite no block
// does more than look at its range: three numbers that the first kernel left in device memory.
#pragma once

#include <cuda_runtime.h>

#include "range_cuda.h"
#include "range_cuda_kernels.h"

namespace nanwatch {
namespace {

// What is left of a sliced, permuted and expanded attention mask is four; two more for good measure.
constexpr int kExamineDims = 6;
// Blocks that read one tensor again. 64 of 512 threads are a quarter of an H200: a mask of 256 MiB takes milliseconds,
// and 16 tensors that are finite no more than two waves of blocks that only look.
constexpr uint32_t kExamineBlocks = 64;
constexpr int64_t kExaminePerBlock = 16 << 10;  // elements
// So many rows are told apart by the bits of a word; of more, each warp takes whole ones.
constexpr int64_t kFewRows = 64;

struct Examined {
  DeviceHealth health;
  Bits num_lowest, rows_without_zero, rows_with_zero;  // the last: bits, of few rows

  __device__ void merge_atomically(const Examined& other) {
    health.merge_atomically(other.health);
    atomicAdd(&num_lowest, other.num_lowest);
    atomicAdd(&rows_without_zero, other.rows_without_zero);
    atomicOr(&rows_with_zero, other.rows_with_zero);
  }
};

// Tensors of one launch, passed by value. Dimensions in C order, the last one that of the mask's rows.
template <int max_tensors>
struct Examination {
  static constexpr int capacity = max_tensors;
  const char* data[max_tensors];
  int64_t numel[max_tensors];
  int64_t size[max_tensors][kExamineDims], stride[max_tensors][kExamineDims];  // strides in bytes
  uint32_t end[max_tensors];  // blocks of this tensor and of those before it
  uint8_t dims[max_tensors], format[max_tensors];
  const double* ranges;  // of the first kernel
  void* cells;
  NanwatchTarget target;  // of the first of these tensors
  int32_t count;

  __device__ int tensor_of(uint32_t block) const {
    int tensor = 0;
    while (block >= end[tensor]) ++tensor;
    return tensor;
  }

  __device__ int64_t row_length(int tensor) const { return size[tensor][dims[tensor] - 1]; }

  // Bytes to the first element of a row.
  __device__ int64_t row_offset(int tensor, int64_t row) const {
    int64_t offset = 0;
    for (int d = dims[tensor] - 2; d >= 0; --d) {
      const int64_t next = row / size[tensor][d];
      offset += (row - next * size[tensor][d]) * stride[tensor][d];
      row = next;
    }
    return offset;
  }
};

// Calls fn(FormatTag<F>{}) for a floating-point format: the others are finite.
template <int I = 0, class Fn>
__device__ __forceinline__ void with_device_float(Format format, const Fn& fn) {
  if (format == Format(I)) {
    fn(FormatTag<Format(I)>{});
  } else if constexpr (I < int(Format::f8_e8m0fnu)) {
    with_device_float<I + 1>(format, fn);
  }
}

// Not finite, or zeros and the largest number there is: perhaps a mask made with the dtype's minimum.
__device__ __forceinline__ bool is_doubtful(const double* range, Format format) {
  if (range[2] == 0) return true;
  if (range[0] != 0) return false;
  double largest = -1;
  with_device_float(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    largest = decode<F>(Codes<F>::max_finite);
  });
  return range[1] == largest;
}

template <Format F>
__device__ constexpr typename Codes<F>::Word lowest_word() {
  using Word = typename Codes<F>::Word;
  return Word(Word(Word(1) << (8 * sizeof(Word) - 1)) | Codes<F>::max_finite);
}

// This block's part of a tensor.
template <Format F, class AnyExamination>
__device__ void examine_part(const AnyExamination& all, int tensor, uint32_t block, uint32_t blocks, Examined* mine) {
  using Word = typename Codes<F>::Word;
  constexpr bool has_lowest = Codes<F>::sign != Sign::none;
  const int64_t length = all.row_length(tensor), rows = all.numel[tensor] / length;
  const int64_t step = all.stride[tensor][all.dims[tensor] - 1];
  Health<F> health;
  const auto look = [&](int64_t row, int64_t offset, int64_t column) {
    const Word word = load_word<Word>(all.data[tensor] + offset + column * step);
    health.update(word, row * length + column);
    if (has_lowest && word == lowest_word<F>()) ++mine->num_lowest;
    return is_zero<F>(magnitude<F>(word));
  };
  if (rows <= kFewRows) {
    const int64_t stride = int64_t(blocks) * kThreads;
#pragma unroll 1
    for (int64_t i = int64_t(block) * kThreads + int(threadIdx.x); i < all.numel[tensor]; i += stride) {
      const int64_t row = i / length;
      if (look(row, all.row_offset(tensor, row), i - row * length)) mine->rows_with_zero |= Bits(1) << row;
    }
  } else {
    const int warp = int(threadIdx.x) / kWarpThreads, lane = int(threadIdx.x) % kWarpThreads;
#pragma unroll 1
    for (int64_t row = int64_t(block) * kWarps + warp; row < rows; row += int64_t(blocks) * kWarps) {
      const int64_t offset = all.row_offset(tensor, row);
      bool zero = false;
#pragma unroll 4
      for (int64_t column = lane; column < length; column += kWarpThreads) zero |= look(row, offset, column);
      zero = __any_sync(kWholeWarp, zero);
      if (lane == 0 && !zero) ++mine->rows_without_zero;
    }
  }
  mine->health = DeviceHealth::from<F>(health, 1);
}

// Into host memory, the stamp when all else is there. What a replayed graph writes over may be being read: the stamp
// goes first then.
__device__ void publish(const NanwatchTarget& target, int tensor, const double* values, int count, bool examined) {
  const uint64_t step = target.step != nullptr ? *target.step : 0;
  const int64_t replay = target.step != nullptr ? int64_t(step % uint64_t(target.spacing)) : 0;
  volatile NanwatchRow* const row = target.rows + int64_t(tensor) * target.spacing + replay;
  if (target.step != nullptr) {
    row->stamp = 0;
    __threadfence_system();
  }
  for (int i = 0; i < count; ++i) row->values[i] = values[i];
  row->examined = examined ? 1.0 : 0.0;
  __threadfence_system();
  row->stamp = target.step != nullptr ? step : target.first + uint64_t(tensor);
}

// For one thread: counts the replays of a graph, and says when one has ended.
__global__ void step_kernel(volatile uint64_t* step, volatile uint64_t* done) {
  if (done == nullptr) {
    *step = *step + 1;
  } else {
    *done = *step;
  }
  __threadfence_system();
}

// Two blocks on a multiprocessor, for the tensors that are finite: for the others that is too few registers (of the 64
// some 100 go through local memory), and they are rare.
template <class AnyExamination>
__global__ void __launch_bounds__(kThreads, 2) examine_kernel(const __grid_constant__ AnyExamination all) {
  const int tensor = all.tensor_of(blockIdx.x);
  const uint32_t first = tensor == 0 ? 0 : all.end[tensor - 1];
  const uint32_t block = blockIdx.x - first, blocks = all.end[tensor] - first;
  const Format format = Format(all.format[tensor]);
  const double* const range = all.ranges + int64_t(tensor) * kRangeColumns;
  if (!is_doubtful(range, format)) {
    if (block == 0 && threadIdx.x == 0) publish(all.target, tensor, range, kRangeColumns, false);
    return;
  }
  __shared__ Examined merged;
  if (threadIdx.x == 0) merged = {};
  __syncthreads();
  Examined mine = {};
  with_device_float(format, [&](auto tag) { examine_part<decltype(tag)::format>(all, tensor, block, blocks, &mine); });
  merged.merge_atomically(mine);
  __syncthreads();
  if (threadIdx.x != 0) return;
  Examined total = merged;
  if (!meet(static_cast<Cell<Examined>*>(all.cells) + tensor, blocks, total)) return;
  double values[kNanwatchRowValues];
  write_row(total.health, format, values);
  const int64_t rows = all.numel[tensor] / all.row_length(tensor);
  if (rows <= kFewRows) {
    total.rows_without_zero = Bits(rows);
    for (Bits left = total.rows_with_zero; left != 0; left &= left - 1) --total.rows_without_zero;
  }
  values[kHealthColumns] = double(total.num_lowest);
  values[kHealthColumns + 1] = double(total.rows_without_zero);
  publish(all.target, tensor, values, kNanwatchRowValues, true);
}

}  // namespace
}  // namespace nanwatch
