// The loops over blocks; as in range_loop_impl.h, in an unnamed namespace for each instruction set. `S` has vectors of
// float32 (F), of their bits (I) and of float64 (D).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/block_fit.h"

namespace nanwatch {
namespace {

constexpr int64_t kTogether = 4;  // blocks whose lanes are summed at once
// The lines that are needed next: the loops over one segment leave the memory idle while they run.
constexpr int64_t kAhead = 8 << 10;
// Where the largest magnitudes lie between, no sum of squares leaves float32, nor does one lose what its 24 bits hold.
constexpr uint32_t kLowestNarrow = (127 - 40) << 23, kHighestNarrow = (127 + 60) << 23;

// Sums of squares of a few numbers in each lane.
template <class S>
struct NarrowSquares {
  typename S::F sum;
  NarrowSquares() : sum(S::set(0)) {}
  void add(typename S::F x) { sum = S::plus_product(sum, x, x); }
  typename S::D wide() const { return S::widened(sum); }
};

template <class S>
struct WideSquares {
  typename S::D sum, more;
  WideSquares() : sum(S::zero()), more(S::zero()) {}
  void add(typename S::F x) { S::add_squares(x, &sum, &more); }
  typename S::D wide() const { return S::add(sum, more); }
};

// The sums of kTogether blocks.
template <class S>
void totals(const NarrowSquares<S>* squares, double* out) {
  const typename S::F sums[] = {squares[0].sum, squares[1].sum, squares[2].sum, squares[3].sum};
  S::totals(sums, out);
}

template <class S>
void totals(const WideSquares<S>* squares, double* out) {
  const typename S::D sums[] = {squares[0].wide(), squares[1].wide(), squares[2].wide(), squares[3].wide()};
  S::totals(sums, out);
}

template <class S, bool is_wide>
using Squares = std::conditional_t<is_wide, WideSquares<S>, NarrowSquares<S>>;

// RoundedElement::nearest in vectors.
template <class S>
struct Rounding {
  typename S::I lowest, magic, exponent;
  typename S::F largest, lowest_largest, zero;

  explicit Rounding(const RoundedElement& element)
      : lowest(S::fill(element.lowest_exponent)),
        magic(S::fill(element.magic)),
        exponent(S::fill(0x7f800000)),
        largest(S::set(element.largest)),
        lowest_largest(S::set(-element.largest)),
        zero(S::set(0)) {}

  typename S::F operator()(typename S::F scaled) const {
    const typename S::I power = S::max(S::bit_and(S::bits(scaled), exponent), lowest);
    const typename S::F shift = S::floats(S::add(power, magic));
    return S::subtract(S::add(scaled, shift), shift);
  }
};

// The noise of kTogether blocks. Under a power of two the error of the scaled numbers is the same, and is always
// narrow.
template <class S, int width, bool is_power, bool is_wide>
inline void round_blocks(const float* x, const float* factor, const float* value, const Rounding<S>& rounding,
                         double* noise, typename S::Count* saturated, typename S::Count* zeros) {
  Squares<S, is_wide> sums[kTogether];
#pragma GCC unroll 4
  for (int block = 0; block < kTogether; ++block) {
    const typename S::F f = S::set(factor[block]), v = S::set(value[block]);
#pragma GCC unroll 4
    for (int k = 0; k < width; k += S::lanes, x += S::lanes) {
      const typename S::F given = S::load(x), scaled = S::multiply(given, f);
      const typename S::F element = rounding(scaled);
      const typename S::F kept = S::min(S::max(element, rounding.lowest_largest), rounding.largest);
      S::count_unequal(saturated, element, kept);
      S::count_equal(zeros, kept, rounding.zero);
      sums[block].add(is_power ? S::subtract(scaled, kept) : S::subtract(given, S::multiply(kept, v)));
    }
  }
  totals(sums, noise);
  if (!is_power) return;
  for (int block = 0; block < kTogether; ++block) noise[block] *= double(value[block]) * value[block];
}

template <class S, int width, bool is_power, bool is_wide>
void narrow_blocks(const float* x, int64_t blocks, const float* factor, const float* value,
                   const RoundedElement& element, double* noise, RoundCounts* counts) {
  const Rounding<S> rounding(element);
  typename S::Count saturated{}, zeros{};
  int64_t block = 0;
  for (; block + kTogether <= blocks; block += kTogether)
    round_blocks<S, width, is_power, is_wide>(x + block * width, factor + block, value + block, rounding, noise + block,
                                              &saturated, &zeros);
  if (const int64_t rest = blocks - block; rest > 0) {
    float last[kTogether * width] = {}, factors[kTogether] = {}, values[kTogether] = {};
    double noises[kTogether];
    std::memcpy(last, x + block * width, size_t(rest * width) * sizeof(float));
    std::memcpy(factors, factor + block, size_t(rest) * sizeof(float));
    std::memcpy(values, value + block, size_t(rest) * sizeof(float));
    round_blocks<S, width, is_power, is_wide>(last, factors, values, rounding, noises, &saturated, &zeros);
    std::memcpy(noise + block, noises, size_t(rest) * sizeof(double));
    counts->zeros -= (kTogether - rest) * width;
  }
  counts->saturated += S::total(saturated);
  counts->zeros += S::total(zeros);
}

// `element / factor` as division rounds it: Markstein's correction of the product with the inverse, which was rounded
// by division. It holds unless all bits of the factor's fraction are ones.
template <class S>
inline typename S::F divided(typename S::F element, typename S::F factor, typename S::F inverse) {
  const typename S::F near = S::multiply(element, inverse);
  return S::plus_product(near, S::minus_product(element, near, factor), inverse);
}

template <class S, bool divides, bool is_wide>
double wide_block(const float* x, int64_t n, float factor, float inverse, const RoundedElement& element,
                  int64_t* zeros) {
  const Rounding<S> rounding(element);
  const typename S::F f = S::set(factor), v = S::set(inverse);
  uint32_t fraction;
  std::memcpy(&fraction, &factor, sizeof(fraction));
  const bool is_corrected = (fraction & 0x7fffff) != 0x7fffff;
  typename S::Count none{};
  typename S::D sum = S::zero();
  for (const float* const end = x + n; x < end;) {
    Squares<S, is_wide> squares;
    for (const float* const last = std::min(end, x + 64); x < last; x += 16) {
#pragma GCC unroll 2
      for (int k = 0; k < 16; k += S::lanes) {
        const typename S::F given = S::load(x + k), kept = rounding(S::multiply(given, f));
        S::count_equal(&none, kept, rounding.zero);
        const typename S::F value = !divides       ? S::multiply(kept, v)
                                    : is_corrected ? divided<S>(kept, f, v)
                                                   : S::divide(kept, f);
        squares.add(S::subtract(given, value));
      }
    }
    sum = S::add(sum, squares.wide());
  }
  *zeros += S::total(none);
  return S::total(sum);
}

// The numbers of kTogether blocks of 16.
template <class S, FloatWord word, bool copies, bool is_wide>
inline void prepare_blocks(const char* p, float* copy, typename S::I magnitude, typename S::F zero, uint32_t* amax,
                           double* signal, typename S::Count* zeros) {
  typename S::I largest[kTogether];
  Squares<S, is_wide> sums[kTogether];
#pragma GCC unroll 4
  for (int block = 0; block < kTogether; ++block) {
    largest[block] = S::fill(0);
#pragma GCC unroll 2
    for (int k = 0; k < 16; k += S::lanes) {
      const int64_t at = block * 16 + k;
      const typename S::F x = S::template load_as<word>(p, at);
      if (copies) S::store(copy + at, x);
      largest[block] = S::max(largest[block], S::bit_and(S::bits(x), magnitude));
      S::count_equal(zeros, x, zero);
      sums[block].add(x);
    }
  }
  S::greatest(largest, amax);
  totals(sums, signal);
}

template <class S, FloatWord word, bool copies, bool is_wide>
int64_t prepare_words(const char* p, int64_t n, float* copy, uint32_t* amax, double* signal) {
  constexpr int64_t step = 16 * kTogether, width = word == FloatWord::float32 ? 4 : 2;
  const typename S::I magnitude = S::fill(0x7fffffff);
  const typename S::F zero = S::set(0);
  typename S::Count count{};
  int64_t added = 0;
  for (; n >= step; n -= step, p += step * width, amax += kTogether, signal += kTogether) {
    for (int64_t line = 0; line < step * width; line += 64) __builtin_prefetch(p + kAhead + line);
    prepare_blocks<S, word, copies, is_wide>(p, copy, magnitude, zero, amax, signal, &count);
    if (copies) copy += step;
  }
  if (n > 0) {
    char last[step * width] = {};
    float copied[step];
    std::memcpy(last, p, size_t(n * width));
    uint32_t amaxes[kTogether];
    double signals[kTogether];
    prepare_blocks<S, word, true, is_wide>(last, copied, magnitude, zero, amaxes, signals, &count);
    const size_t blocks = size_t(n + 31) / 32 * 2;
    if (copies) std::memcpy(copy, copied, blocks * 16 * sizeof(float));
    std::memcpy(amax, amaxes, blocks * sizeof(uint32_t));
    std::memcpy(signal, signals, blocks * sizeof(double));
    added = step - n;
  }
  return S::total(count) - added;
}

template <class S, FloatWord word, bool copies>
bool prepare_as(const char* p, int64_t n, float* copy, uint32_t* amax, double* signal, int64_t* zeros) {
  *zeros = prepare_words<S, word, copies, false>(p, n, copy, amax, signal);
  uint32_t lowest = ~uint32_t{0}, highest = 0;
  for (int64_t i = 0; i < (n + 15) / 16; ++i) {
    lowest = std::min(lowest, amax[i] - 1);  // 0 becomes the largest
    highest = std::max(highest, amax[i]);
  }
  const bool is_wide = lowest < kLowestNarrow - 1 || highest > kHighestNarrow;
  if (is_wide) prepare_words<S, word, copies, true>(p, n, copy, amax, signal);
  return is_wide;
}

template <class S>
bool prepare(const void* data, FloatWord word, int64_t n, float* copy, uint32_t* amax, double* signal, int64_t* zeros) {
  const char* const p = static_cast<const char*>(data);
  if (word == FloatWord::bfloat16) return prepare_as<S, FloatWord::bfloat16, true>(p, n, copy, amax, signal, zeros);
  if (word == FloatWord::float16) return prepare_as<S, FloatWord::float16, true>(p, n, copy, amax, signal, zeros);
  if (copy != nullptr) return prepare_as<S, FloatWord::float32, true>(p, n, copy, amax, signal, zeros);
  return prepare_as<S, FloatWord::float32, false>(p, n, copy, amax, signal, zeros);
}

// What follows is for compilers to make vectors of: integers in place of floats that are not negative, no branches.
inline bool powers(const Granules& granules, int64_t blocks, float largest, const BlockArrays& out) {
  const int32_t emax = exponent_of(largest);
  int32_t refused = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const int32_t first = int32_t(granules.amax[2 * i]), second = int32_t(granules.amax[2 * i + 1]);
    const BlockFactor block = power_factor(first > second ? first : second, emax);
    refused |= block.refused;
    out.factor[i] = block.factor;
    out.value[i] = block.value;
  }
  for (int64_t i = 0; i < blocks; ++i) out.signal[i] = granules.signal[2 * i] + granules.signal[2 * i + 1];
  return refused == 0;
}

inline int64_t levels(const Granules& granules, int64_t blocks, float largest, float of_tensor,
                      const BlockArrays& out) {
  const float reciprocal = 1 / of_tensor;
  int32_t flushed = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const float amax = with_bits(granules.amax[i]);
    const BlockFactor block = two_level_factor(amax, largest, of_tensor, reciprocal);
    out.factor[i] = block.factor;
    out.value[i] = block.value;
    out.signal[i] = granules.signal[i];
    flushed += int32_t(granules.amax[i] != 0) & int32_t(amax * block.factor <= 0.25f);
  }
  return flushed;
}

inline BlockSums sum_blocks(const BlockArrays& blocks, int64_t count) {
  double signal[4] = {}, noise[4] = {};
  uint32_t lowest = ~uint32_t{0}, highest = 0;
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int k = 0; k < 4; ++k) {
      signal[k] += blocks.signal[i + k];
      noise[k] += blocks.noise[i + k];
    }
  for (; i < count; ++i) {
    signal[0] += blocks.signal[i];
    noise[0] += blocks.noise[i];
  }
  for (i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(blocks.value[i]), is_shown = -uint32_t(blocks.signal[i] != 0);
    lowest = std::min(lowest, bits | ~is_shown);
    highest = std::max(highest, bits & is_shown);
  }
  return {(signal[0] + signal[1]) + (signal[2] + signal[3]), (noise[0] + noise[1]) + (noise[2] + noise[3]), lowest,
          highest};
}

inline int64_t next_noisy(const BlockArrays& blocks, int64_t i, int64_t count, double ratio) {
  for (; i + 4 <= count; i += 4) {
    bool is_noisy = false;
    for (int k = 0; k < 4; ++k) is_noisy |= blocks.noise[i + k] > ratio * blocks.signal[i + k];
    if (is_noisy) break;
  }
  while (i < count && !(blocks.noise[i] > ratio * blocks.signal[i])) ++i;
  return i;
}

template <class S>
constexpr BlockKernels make_block_kernels() {
  return {prepare<S>,
          narrow_blocks<S, 32, true, false>,
          {narrow_blocks<S, 16, false, false>, narrow_blocks<S, 16, false, true>},
          {wide_block<S, false, false>, wide_block<S, false, true>},
          {wide_block<S, true, false>, wide_block<S, true, true>},
          powers,
          levels,
          sum_blocks,
          next_noisy};
}

}  // namespace
}  // namespace nanwatch
