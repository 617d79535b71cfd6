// The kernels: a batch of tensors in, their rows out, in one launch. Device code, for range_cuda.cu alone.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "range_cuda_accumulators.h"

namespace nanwatch {
namespace {

// ---- formats on the device ------------------------------------------------------------------------------------------

// Calls fn(FormatTag<F>{}) for the run-time format. with_format is its host twin; the format is the same for a whole
// block, so nothing diverges.
template <int I = 0, class Fn>
__device__ __forceinline__ void with_device_format(Format format, const Fn& fn) {
  if (format == Format(I)) {
    fn(FormatTag<Format(I)>{});
  } else if constexpr (I < int(Format::i64)) {
    with_device_format<I + 1>(format, fn);
  }
}

// The formats that are read by the same code as F, those with its width and sign, as a set of bits.
template <Format F, int... I>
constexpr uint32_t alike(std::integer_sequence<int, I...>) {
  return ((uint32_t(sizeof(typename Codes<F>::Word) == sizeof(typename Codes<Format(I)>::Word) &&
                    Codes<F>::sign == Codes<Format(I)>::sign)
           << I) |
          ...);
}
template <Format F>
constexpr uint32_t kAlike = alike<F>(std::make_integer_sequence<int, int(Format::i64) + 1>());

// The same for the first format of those that are read alike: 13 loops in place of 18.
template <int I = 0, class Fn>
__device__ __forceinline__ void with_device_layout(Format format, const Fn& fn) {
  constexpr uint32_t formats = kAlike<Format(I)>;
  if constexpr ((formats & ((1u << I) - 1)) == 0) {
    if (formats >> int(format) & 1) return fn(FormatTag<Format(I)>{});
  }
  if constexpr (I < int(Format::i64)) with_device_layout<I + 1>(format, fn);
}

// ---- the row --------------------------------------------------------------------------------------------------------

// Range<F>::write for the run-time format. Not inlined: 18 decodings, for one thread of a launch.
__device__ __noinline__ void write_row(const DeviceRange& range, Format format, double* row) {
  with_device_format(format, [&](auto tag) { range.narrow<decltype(tag)::format>().write(row); });
}

// The columns of Health::write.
__device__ void write_row(const DeviceHealth& health, Format format, double* row) {
  write_row(health.range, format, row);
  write_row(health.finite, format, row + 3);  // and isfinite into the next column, which is written after it
  row[5] = double(health.num_nan);
  row[6] = double(health.num_posinf);
  row[7] = double(health.num_neginf);
  row[8] = double(health.num_zero);
  row[9] = double(health.num_subnormal);
  row[10] = health.not_first == 0 ? -1.0 : double(~health.not_first);
}

// ---- the kernels ----------------------------------------------------------------------------------------------------

// The number of elements that one position of the walk stands for.
template <class AnyBatch>
__device__ int64_t repeats_of(const AnyBatch& batch, const Share& share) {
  const int number = batch.walk[share.tensor];
  return number == kFlat ? 1 : batch.walks[number].repeats;
}

template <class AnyBatch>
__device__ __forceinline__ void health_of_share(const AnyBatch& batch, const Share& share, Format format,
                                                DeviceHealth* total) {
  __shared__ DeviceHealth merged;
  if (threadIdx.x == 0) merged = {};
  __syncthreads();
  DeviceHealth mine = {};
  with_device_format(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    Health<F> health;
    scan_plainly<typename Codes<F>::Word>(health, batch, share);
    mine = DeviceHealth::from<F>(health, repeats_of(batch, share));
  });
  merged.merge_atomically(mine);
  __syncthreads();
  *total = merged;
}

template <class AnyBatch>
__device__ __forceinline__ void total_of_block(const AnyBatch&, const Share&, Format, const BlockBits& block,
                                               DeviceRange* total) {
  *total = {block.hi, block.not_lo};
}

// Where something is not finite the block reads its share once more: rare, and then thorough.
template <class AnyBatch>
__device__ __forceinline__ void total_of_block(const AnyBatch& batch, const Share& share, Format format,
                                               const BlockBits& block, DeviceHealth* total) {
  __shared__ bool again;
  if (threadIdx.x == 0) {
    with_device_format(format, [&](auto tag) {
      constexpr Format F = decltype(tag)::format;
      again = !is_finite<F>(typename Codes<F>::Word(block.hi));
      *total = DeviceHealth::from<F>(block, repeats_of(batch, share));
    });
  }
  __syncthreads();
  if (again) health_of_share(batch, share, format, total);
}

// One thread of each block: adds what the block found; the last of the tensor writes the row.
template <class Accumulator, class AnyBatch>
__device__ __forceinline__ void deliver(const AnyBatch& batch, const Share& share, Format format, Accumulator& total) {
  if (meet(static_cast<Cell<Accumulator>*>(batch.cells) + share.tensor, share.chunks, total))
    write_row(total, format, batch.rows + int64_t(batch.row[share.tensor]) * Accumulator::columns);
}

template <class Accumulator, class AnyBatch>
__global__ void __launch_bounds__(kThreads, 2) fast_kernel(const __grid_constant__ AnyBatch batch) {
  constexpr bool counts = Accumulator::columns == kHealthColumns;
  const int tensor = batch.tensor_of(blockIdx.x);
  const Format format = Format(batch.format[tensor]);
  Share share = {};
  BlockBits bits = {};
  bool narrow = true;
  with_device_layout(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    using Word = typename Codes<F>::Word;
    share = batch.share(tensor, blockIdx.x, sizeof(Word));
    narrow = sizeof(Word) < 8;
    if constexpr (counts) {
      uint64_t min_normal = 0;
      with_device_format(format, [&](auto exactly) { min_normal = Codes<decltype(exactly)::format>::min_normal; });
      HealthLanes<F, kPairs> lanes(min_normal);
      scan<Word>(lanes, batch, share);
      const DeviceRange ends = DeviceRange::from<F>(lanes.ends.range());
      bits = {ends.hi, ends.not_lo, lanes.num_zero(), lanes.num_small()};
    } else {
      RangeLanes<F, kPairs> lanes;
      scan<Word>(lanes, batch, share);
      const DeviceRange ends = DeviceRange::from<F>(lanes.range());
      bits = {ends.hi, ends.not_lo, 0, 0};
    }
  });
  bits = merge_block<counts>(bits, narrow);
  Accumulator total;
  total_of_block(batch, share, format, bits, &total);
  if (threadIdx.x == 0) deliver(batch, share, format, total);
}

// The plain kernel: any tensor, one element at a time. Its minima are the health's, its row a part of it.
template <class Accumulator, class AnyBatch>
__global__ void __launch_bounds__(kThreads, 2) plain_kernel(const __grid_constant__ AnyBatch batch) {
  const Format format = Format(batch.format[0]);
  Share share = {};
  with_device_format(format, [&](auto tag) {
    share = batch.share(0, blockIdx.x, sizeof(typename Codes<decltype(tag)::format>::Word));
  });
  DeviceHealth health;
  health_of_share(batch, share, format, &health);
  if (threadIdx.x != 0) return;
  if constexpr (Accumulator::columns == kHealthColumns) {
    deliver(batch, share, format, health);
  } else {
    deliver(batch, share, format, health.range);
  }
}

}  // namespace
}  // namespace nanwatch
