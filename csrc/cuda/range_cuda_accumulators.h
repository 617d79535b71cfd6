// Values that CUDA threads, blocks and launches merge: the bits of a range or a health, and the cell in device memory
// where the blocks of a tensor meet. For range_cuda.cu alone: device code.
//
// Minima are kept as the maximum of the complement, so zero is the identity of every field: zeroed memory is an empty
// cell, and the block that comes last leaves it so.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cuda_scan.h"
#include "numerics/range.h"

namespace nanwatch {

using Bits = unsigned long long;  // the type that CUDA's 64-bit atomics take

__device__ __forceinline__ Bits larger(Bits a, Bits b) {
  return a < b ? b : a;
}

// Findings of one block in finite elements. Counts fit: a chunk has at most 2^18 elements.
struct BlockBits {
  Bits hi, not_lo;
  uint32_t zeros, smalls;
};

struct DeviceRange {
  static constexpr int columns = kRangeColumns;
  Bits hi, not_lo;

  __device__ void merge_atomically(const DeviceRange& other) {
    atomicMax(&hi, other.hi);
    atomicMax(&not_lo, other.not_lo);
  }

  // Magnitudes are widened with zeros on the left, both of them.
  template <Format F>
  static __device__ DeviceRange from(const Range<F>& range) {
    return {range.hi, typename Codes<F>::Word(~range.lo)};
  }

  __device__ void merge(const DeviceRange& other) {
    hi = larger(hi, other.hi);
    not_lo = larger(not_lo, other.not_lo);
  }

  template <Format F>
  __device__ Range<F> narrow() const {
    using Word = typename Codes<F>::Word;
    Range<F> range;
    range.hi = Word(hi);
    range.lo = Word(~Word(not_lo));
    return range;
  }
};

struct DeviceHealth {
  static constexpr int columns = kHealthColumns;
  DeviceRange range, finite;
  Bits num_nan, num_posinf, num_neginf, num_zero, num_subnormal;
  Bits not_first;  // complement of the position; 0: none

  template <Format F>
  static __device__ DeviceHealth from(const Health<F>& health, int64_t repeats) {
    const bool any = health.first_nonfinite != Health<F>::kNone;
    return {DeviceRange::from<F>(health.range),   DeviceRange::from<F>(health.finite),
            Bits(health.num_nan * repeats),       Bits(health.num_posinf * repeats),
            Bits(health.num_neginf * repeats),    Bits(health.num_zero * repeats),
            Bits(health.num_subnormal * repeats), any ? ~Bits(health.first_nonfinite) : 0};
  }

  // The health of a block whose elements are all finite.
  template <Format F>
  static __device__ DeviceHealth from(const BlockBits& block, int64_t repeats) {
    const DeviceRange ends = {block.hi, block.not_lo};
    const Bits zeros = Codes<F>::has_zero ? Bits(block.zeros) * Bits(repeats) : 0;
    const Bits smalls = Codes<F>::min_normal != 0 ? Bits(block.smalls) * Bits(repeats) - zeros : 0;
    return {ends, ends, 0, 0, 0, zeros, smalls, 0};
  }

  __device__ void merge_atomically(const DeviceHealth& other) {
    range.merge_atomically(other.range);
    finite.merge_atomically(other.finite);
    atomicAdd(&num_nan, other.num_nan);
    atomicAdd(&num_posinf, other.num_posinf);
    atomicAdd(&num_neginf, other.num_neginf);
    atomicAdd(&num_zero, other.num_zero);
    atomicAdd(&num_subnormal, other.num_subnormal);
    atomicMax(&not_first, other.not_first);
  }
};

// ---- threads to a block ---------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if NANWATCH_CUDA_ARCH >= 800
  return __reduce_max_sync(kWholeWarp, value);
#else
  for (int other = kWarpThreads / 2; other > 0; other /= 2) {
    const uint32_t theirs = __shfl_xor_sync(kWholeWarp, value, other);
    value = theirs > value ? theirs : value;
  }
  return value;
#endif
}

__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
#if NANWATCH_CUDA_ARCH >= 800
  return __reduce_add_sync(kWholeWarp, value);
#else
  for (int other = kWarpThreads / 2; other > 0; other /= 2) value += __shfl_xor_sync(kWholeWarp, value, other);
  return value;
#endif
}

// `narrow`, the same for all threads of a block: the bits are below 2^32.
template <bool counts>
__device__ BlockBits merge_warp(BlockBits mine, bool narrow) {
  if (narrow) {
    mine.hi = warp_max(uint32_t(mine.hi));
    mine.not_lo = warp_max(uint32_t(mine.not_lo));
  } else {
    for (int other = kWarpThreads / 2; other > 0; other /= 2) {
      mine.hi = larger(mine.hi, __shfl_xor_sync(kWholeWarp, mine.hi, other));
      mine.not_lo = larger(mine.not_lo, __shfl_xor_sync(kWholeWarp, mine.not_lo, other));
    }
  }
  if constexpr (counts) {
    mine.zeros = warp_sum(mine.zeros);
    mine.smalls = warp_sum(mine.smalls);
  }
  return mine;
}

// The bits of all threads, in the threads of the first warp. Every thread of the block must come here.
template <bool counts>
__device__ BlockBits merge_block(BlockBits mine, bool narrow) {
  static_assert(kWarps <= kWarpThreads, "one warp merges all warps");
  __shared__ BlockBits warps[kWarps];
  const unsigned warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  mine = merge_warp<counts>(mine, narrow);
  if (lane == 0) warps[warp] = mine;
  __syncthreads();
  if (warp != 0) return mine;
  return merge_warp<counts>(lane < kWarps ? warps[lane] : BlockBits{}, narrow);
}

// ---- blocks to a tensor ---------------------------------------------------------------------------------------------

// Where the blocks of one tensor meet; empty between launches.
template <class Accumulator>
struct Cell {
  Accumulator bits;
  unsigned arrived, unused;
};

// Adds a block's bits. True for the block that comes last, whose `bits` then are those of all, and the cell is empty
// again. Called by one thread of each block.
template <class Accumulator>
__device__ bool meet(Cell<Accumulator>* cell, uint32_t blocks, Accumulator& bits) {
  if (blocks == 1) return true;
  cell->bits.merge_atomically(bits);
  __threadfence();  // our bits before our arrival
  if (atomicAdd(&cell->arrived, 1u) != blocks - 1) return false;
  __threadfence();  // their arrivals before their bits
  // Word by word and from L2, where the atomics were done.
  static_assert(sizeof(Accumulator) % sizeof(Bits) == 0, "fields are words");
  auto* const from = reinterpret_cast<Bits*>(&cell->bits);
  auto* const to = reinterpret_cast<Bits*>(&bits);
#pragma unroll
  for (unsigned i = 0; i < sizeof(Accumulator) / sizeof(Bits); ++i) {
    to[i] = __ldcg(from + i);
    from[i] = 0;
  }
  cell->arrived = 0;
  return true;
}

}  // namespace nanwatch
