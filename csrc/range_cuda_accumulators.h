// What a block of CUDA threads merges and adds to a table in device memory. For range_cuda.cu alone: device code.
#pragma once

#include <cuda_runtime.h>

#include "range.h"

namespace nanwatch {

using Bits = unsigned long long;  // the type that CUDA's 64-bit atomics take

__device__ __forceinline__ Bits larger(Bits a, Bits b) {
  return a < b ? b : a;
}

// Accumulators of every format, magnitudes widened. Minima are kept as the maximum of the complement: the identity is
// zero in every field, and one memset initialises a table.
struct DeviceRange {
  template <Format F>
  using Of = Range<F>;
  static constexpr int columns = kRangeColumns;
  Bits hi, not_lo;

  template <Format F>
  static __device__ DeviceRange from(const Range<F>& range, int64_t) {
    return {range.hi, typename Codes<F>::Word(~range.lo)};
  }

  __device__ void merge(const DeviceRange& other) {
    hi = larger(hi, other.hi);
    not_lo = larger(not_lo, other.not_lo);
  }

  __device__ void merge_atomically(const DeviceRange& other) {
    atomicMax(&hi, other.hi);
    atomicMax(&not_lo, other.not_lo);
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
  template <Format F>
  using Of = Health<F>;
  static constexpr int columns = kHealthColumns;
  DeviceRange range, finite;
  Bits num_nan, num_posinf, num_neginf, num_zero, num_subnormal;
  Bits not_first;  // complement of the position; 0: none

  template <Format F>
  static __device__ DeviceHealth from(const Health<F>& health, int64_t repeats) {
    const bool any = health.first_nonfinite != Health<F>::kNone;
    return {DeviceRange::from<F>(health.range, 1), DeviceRange::from<F>(health.finite, 1),
            Bits(health.num_nan * repeats),        Bits(health.num_posinf * repeats),
            Bits(health.num_neginf * repeats),     Bits(health.num_zero * repeats),
            Bits(health.num_subnormal * repeats),  any ? ~Bits(health.first_nonfinite) : 0};
  }

  __device__ void merge(const DeviceHealth& other) {
    range.merge(other.range);
    finite.merge(other.finite);
    num_nan += other.num_nan;
    num_posinf += other.num_posinf;
    num_neginf += other.num_neginf;
    num_zero += other.num_zero;
    num_subnormal += other.num_subnormal;
    not_first = larger(not_first, other.not_first);
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

  template <Format F>
  __device__ Health<F> narrow() const {
    Health<F> health;
    health.range = range.narrow<F>();
    health.finite = finite.narrow<F>();
    health.num_nan = int64_t(num_nan);
    health.num_posinf = int64_t(num_posinf);
    health.num_neginf = int64_t(num_neginf);
    health.num_zero = int64_t(num_zero);
    health.num_subnormal = int64_t(num_subnormal);
    if (not_first != 0) health.first_nonfinite = int64_t(~not_first);
    return health;
  }
};

}  // namespace nanwatch
