// The inner loops of the CPU reduction, one table per instruction set. No torch here: pointers in, bits out.
#pragma once

#include "numerics/range.h"

namespace nanwatch {

// Range accumulator of every format: magnitudes widened to 64 bits. The default is the identity.
struct RangeBits {
  uint64_t lo = ~uint64_t(0);
  uint64_t hi = 0;

  void merge(const RangeBits& other) {
    lo = other.lo < lo ? other.lo : lo;
    hi = other.hi > hi ? other.hi : hi;
  }

  // Narrowed to the format's own word. An untouched accumulator stays empty.
  template <Format F>
  Range<F> narrow() const {
    using Word = typename Codes<F>::Word;
    return lo > hi ? Range<F>{} : Range<F>{Word(lo), Word(hi)};
  }
};

// Health accumulator of every format, order-free: where the first non-finite element stands is looked for afterwards,
// only when there is one.
struct HealthBits : HealthCounts {
  RangeBits range, finite;

  void merge(const HealthBits& other) {
    range.merge(other.range);
    finite.merge(other.finite);
    HealthCounts::merge(other);
  }

  int64_t num_nonfinite() const { return num_nan + num_posinf + num_neginf; }
};

// `rows` rows of `columns` elements, at least one of each; strides in elements. Merged into the accumulator.
struct Plane {
  const char* data;
  int64_t columns, column_stride, rows, row_stride;
};

struct KernelTable {
  const char* name;
  void (*range[kNumFormats])(const Plane&, RangeBits*);
  void (*health[kNumFormats])(const Plane&, HealthBits*);
};

const KernelTable& baseline_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif

}  // namespace nanwatch
