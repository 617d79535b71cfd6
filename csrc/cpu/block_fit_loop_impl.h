// The loops over blocks; as in range_loop_impl.h, in an unnamed namespace for each instruction set. `S` has vectors of
// float32 (F), of their bits (I) and of float64 (D).
#pragma once

#include <cstring>

#include "cpu/block_fit.h"

namespace nanwatch {
namespace {

constexpr int64_t kTogether = 4;  // blocks whose lanes are summed at once
// The lines that are needed next: the loops over one segment leave the memory idle while they run.
constexpr int64_t kAhead = 8 << 10;

// Rounds to the nearest element, ties to even: 1.5 x 2^k has a unit in the last place as large as the element's, so
// adding and subtracting it rounds. Below the smallest normal number the unit stays.
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

// The noise of kTogether blocks.
template <class S, int width, bool is_exact>
inline void round_blocks(const float* x, const float* factor, const float* value, const Rounding<S>& rounding,
                         double* noise, typename S::Count* saturated, typename S::Count* zeros) {
  typename S::D sums[kTogether];
#pragma GCC unroll 4
  for (int block = 0; block < kTogether; ++block) {
    const typename S::F f = S::set(factor[block]), v = S::set(value[block]);
    typename S::D sum = S::zero(), more = S::zero();
#pragma GCC unroll 4
    for (int k = 0; k < width; k += S::lanes, x += S::lanes) {
      const typename S::F given = S::load(x);
      const typename S::F element = rounding(S::multiply(given, f));
      const typename S::F kept = S::min(S::max(element, rounding.lowest_largest), rounding.largest);
      S::count_unequal(saturated, element, kept);
      S::count_equal(zeros, kept, rounding.zero);
      const typename S::F error =
          is_exact ? S::minus_product(given, kept, v) : S::subtract(given, S::multiply(kept, v));
      S::add_squares(error, &sum, &more);
    }
    sums[block] = S::add(sum, more);
  }
  S::totals(sums, noise);
}

template <class S, int width, bool is_exact>
void narrow_blocks(const float* x, int64_t blocks, const float* factor, const float* value,
                   const RoundedElement& element, double* noise, RoundCounts* counts) {
  const Rounding<S> rounding(element);
  typename S::Count saturated{}, zeros{};
  int64_t block = 0;
  for (; block + kTogether <= blocks; block += kTogether)
    round_blocks<S, width, is_exact>(x + block * width, factor + block, value + block, rounding, noise + block,
                                     &saturated, &zeros);
  if (const int64_t rest = blocks - block; rest > 0) {
    float last[kTogether * width] = {}, factors[kTogether] = {}, values[kTogether] = {};
    double noises[kTogether];
    std::memcpy(last, x + block * width, size_t(rest * width) * sizeof(float));
    std::memcpy(factors, factor + block, size_t(rest) * sizeof(float));
    std::memcpy(values, value + block, size_t(rest) * sizeof(float));
    round_blocks<S, width, is_exact>(last, factors, values, rounding, noises, &saturated, &zeros);
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

template <class S, bool divides>
double wide_block(const float* x, int64_t n, float factor, float inverse, const RoundedElement& element,
                  int64_t* zeros) {
  const Rounding<S> rounding(element);
  const typename S::F f = S::set(factor), v = S::set(inverse);
  uint32_t fraction;
  std::memcpy(&fraction, &factor, sizeof(fraction));
  const bool is_corrected = (fraction & 0x7fffff) != 0x7fffff;
  typename S::Count none{};
  typename S::D sum = S::zero(), more = S::zero();
  for (int64_t i = 0; i < n; i += 16) {
#pragma GCC unroll 2
    for (int k = 0; k < 16; k += S::lanes) {
      const typename S::F given = S::load(x + i + k), kept = rounding(S::multiply(given, f));
      S::count_equal(&none, kept, rounding.zero);
      const typename S::F value = !divides       ? S::multiply(kept, v)
                                  : is_corrected ? divided<S>(kept, f, v)
                                                 : S::divide(kept, f);
      S::add_squares(S::subtract(given, value), &sum, &more);
    }
  }
  *zeros += S::total(none);
  return S::total(S::add(sum, more));
}

// The numbers of kTogether blocks of 16.
template <class S, FloatWord word, bool copies>
inline void prepare_blocks(const char* p, float* copy, typename S::I magnitude, typename S::F zero, uint32_t* amax,
                           double* signal, typename S::Count* zeros) {
  typename S::I largest[kTogether];
  typename S::D sums[kTogether];
#pragma GCC unroll 4
  for (int block = 0; block < kTogether; ++block) {
    largest[block] = S::fill(0);
    typename S::D sum = S::zero(), more = S::zero();
#pragma GCC unroll 2
    for (int k = 0; k < 16; k += S::lanes) {
      const int64_t at = block * 16 + k;
      const typename S::F x = S::template load_as<word>(p, at);
      if (copies) S::store(copy + at, x);
      largest[block] = S::max(largest[block], S::bit_and(S::bits(x), magnitude));
      S::count_equal(zeros, x, zero);
      S::add_squares(x, &sum, &more);
    }
    sums[block] = S::add(sum, more);
  }
  S::greatest(largest, amax);
  S::totals(sums, signal);
}

template <class S, FloatWord word, bool copies>
void prepare_words(const char* p, int64_t n, float* copy, uint32_t* amax, double* signal, int64_t* zeros) {
  constexpr int64_t step = 16 * kTogether, width = word == FloatWord::float32 ? 4 : 2;
  const typename S::I magnitude = S::fill(0x7fffffff);
  const typename S::F zero = S::set(0);
  typename S::Count count{};
  for (; n >= step; n -= step, p += step * width, amax += kTogether, signal += kTogether) {
    for (int64_t line = 0; line < step * width; line += 64) __builtin_prefetch(p + kAhead + line);
    prepare_blocks<S, word, copies>(p, copy, magnitude, zero, amax, signal, &count);
    if (copies) copy += step;
  }
  if (n > 0) {
    char last[step * width] = {};
    float copied[step];
    std::memcpy(last, p, size_t(n * width));
    uint32_t amaxes[kTogether];
    double signals[kTogether];
    prepare_blocks<S, word, true>(last, copied, magnitude, zero, amaxes, signals, &count);
    const size_t blocks = size_t(n + 31) / 32 * 2;
    if (copies) std::memcpy(copy, copied, blocks * 16 * sizeof(float));
    std::memcpy(amax, amaxes, blocks * sizeof(uint32_t));
    std::memcpy(signal, signals, blocks * sizeof(double));
    *zeros -= step - n;
  }
  *zeros += S::total(count);
}

template <class S>
void prepare(const void* data, FloatWord word, int64_t n, float* copy, uint32_t* amax, double* signal, int64_t* zeros) {
  const char* const p = static_cast<const char*>(data);
  if (word == FloatWord::bfloat16) return prepare_words<S, FloatWord::bfloat16, true>(p, n, copy, amax, signal, zeros);
  if (word == FloatWord::float16) return prepare_words<S, FloatWord::float16, true>(p, n, copy, amax, signal, zeros);
  if (copy != nullptr) return prepare_words<S, FloatWord::float32, true>(p, n, copy, amax, signal, zeros);
  prepare_words<S, FloatWord::float32, false>(p, n, copy, amax, signal, zeros);
}

template <class S>
constexpr BlockKernels make_block_kernels() {
  return {prepare<S>, narrow_blocks<S, 32, true>, narrow_blocks<S, 16, false>, wide_block<S, false>,
          wide_block<S, true>};
}

}  // namespace
}  // namespace nanwatch
