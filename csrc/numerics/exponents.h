// Two questions about a tensor that its range cannot answer: how many elements lie in each power of two, and how many
// lie at or above a magnitude. Both go by sign-cleared words, and both only add. Host and device, no torch.
#pragma once

#include "numerics/formats.h"

namespace nanwatch {

// Columns of the operator's result. Those from kZeroColumn + 1 on are the exponents that the format has, upwards from
// that of its smallest number above zero: a subnormal has a column of its own power of two.
enum ExponentColumn { kNanColumn, kPosInfColumn, kNegInfColumn, kZeroColumn };

// Bits up to the highest that is set; 0 for 0.
NANWATCH_HD int bit_width(uint64_t m) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(int64_t(m));
#else
  return m == 0 ? 0 : 64 - __builtin_clzll(m);
#endif
}

// |x| as an unsigned number with the order of |x|, as magnitude(); a bool, of which any byte but 0 is true, is 0 or 1.
template <Format F>
NANWATCH_HD typename Codes<F>::Word order(typename Codes<F>::Word word) {
  if constexpr (F == Format::boolean) return word != 0;
  return magnitude<F>(word);
}

// The exponents that a format has: e of 2^e <= |x| < 2^(e+1), for the smallest number above zero and the largest.
template <Format F>
struct ExponentSpan {
  using C = Codes<F>;
  static constexpr int first_of() {
    if constexpr (!C::is_float)
      return 0;
    else
      return C::min_normal == 0 ? -C::bias : 1 - C::bias - C::mantissa_bits;
  }
  static constexpr int last_of() {
    if constexpr (F == Format::boolean)
      return 0;
    else if constexpr (!C::is_float)
      return int(8 * sizeof(typename C::Word)) - 1;
    else
      return int(C::max_finite >> C::mantissa_bits) - C::bias;
  }
  static constexpr int first = first_of(), last = last_of(), columns = kZeroColumn + 1 + last - first + 1;
};

// Counts per column. The default-constructed value is the identity of merge.
template <Format F>
struct Exponents {
  using C = Codes<F>;
  using Word = typename C::Word;
  static constexpr int columns = ExponentSpan<F>::columns;
  int64_t count[columns] = {};

  static NANWATCH_HD int column(Word word) {
    const Word m = order<F>(word);
    if constexpr (!C::is_float) {
      return kZeroColumn + bit_width(m);
    } else {
      if (!is_finite<F>(m)) return is_nan<F>(m) ? kNanColumn : is_negative<F>(word) ? kNegInfColumn : kPosInfColumn;
      if constexpr (C::min_normal == 0) return kZeroColumn + 1 + int(m);
      // Where the subnormals end, at a width of mantissa_bits, the exponent field goes on from 1.
      else
        return kZeroColumn + (m < C::min_normal ? bit_width(m) : C::mantissa_bits + int(m >> C::mantissa_bits));
    }
  }

  NANWATCH_HD void update(Word word, int64_t times = 1) { count[column(word)] += times; }

  NANWATCH_HD void merge(const Exponents& other) {
    for (int i = 0; i < columns; ++i) count[i] += other.count[i];
  }
};

inline int64_t exponent_columns(Format format) {
  return with_format(format, [](auto tag) { return int64_t(ExponentSpan<decltype(tag)::format>::columns); });
}

// Codes that one pass compares with: what a format does to a number changes at five magnitudes
// (python/nanwatch/numerics/fit.py).
constexpr int kMaxEdges = 5;

// How many elements have a magnitude word of at least each code; nan is above inf, inf above every number.
struct Edges {
  int64_t count[kMaxEdges] = {};

  void merge(const Edges& other) {
    for (int i = 0; i < kMaxEdges; ++i) count[i] += other.count[i];
  }
};

}  // namespace nanwatch
