// The kernels: a batch of tensors in, their rows out, in one launch. Device code, for range_cuda.cu alone.
#pragma once

#include <cuda_runtime.h>

#include "cuda/range_cuda_formats.h"
#include "cuda/range_cuda_observe.h"

namespace nanwatch {
namespace {

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
    mine = DeviceHealth::from<F>(health, batch.repeats_of(share.tensor));
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
      *total = DeviceHealth::from<F>(block, batch.repeats_of(share.tensor));
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

// All threads of a block, after its share was read.
template <class Accumulator, class AnyBatch>
__device__ __forceinline__ void conclude(const AnyBatch& batch, const Share& share, Format format,
                                         const BlockBits& block) {
  Accumulator total;
  total_of_block(batch, share, format, block, &total);
  if (threadIdx.x == 0) deliver(batch, share, format, total);
}

// The same, where the share is still to be read: one element at a time. The minima are the health's, a range is a part
// of it.
template <class Accumulator, class AnyBatch>
__device__ void conclude_plainly(const AnyBatch& batch, const Share& share, Format format) {
  DeviceHealth health;
  health_of_share(batch, share, format, &health);
  if (threadIdx.x != 0) return;
  if constexpr (Accumulator::columns == kHealthColumns) {
    deliver(batch, share, format, health);
  } else {
    deliver(batch, share, format, health.range);
  }
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
  conclude<Accumulator>(batch, share, format, merge_block<counts>(bits, narrow));
}

// The plain kernel: any tensor.
template <class Accumulator, class AnyBatch>
__global__ void __launch_bounds__(kThreads, 2) plain_kernel(const __grid_constant__ AnyBatch batch) {
  const Format format = Format(batch.format[0]);
  Share share = {};
  with_device_format(format, [&](auto tag) {
    share = batch.share(0, blockIdx.x, sizeof(typename Codes<decltype(tag)::format>::Word));
  });
  conclude_plainly<Accumulator>(batch, share, format);
}

}  // namespace
}  // namespace nanwatch
