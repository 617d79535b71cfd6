// The number formats nanwatch reads: for each, the word it is stored in, which bits are the sign, and the codes where
// "finite" ends and "normal" begins. Host and device, no torch.
//
// One fact carries the library: with the sign cleared, the bit pattern of an IEEE float grows with |x|. So the codes
// below are all that a reduction has to know; nothing is converted to a float until the three scalars are reported.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numerics/format_table.h"

#ifdef __CUDACC__
#define NANWATCH_HD __host__ __device__ __forceinline__
#else
#define NANWATCH_HD inline
#endif

namespace nanwatch {

// Passed through the C ABI as an int: a number is never used twice.
enum class Format : int32_t {
#define NANWATCH_FORMAT(name, number, ...) name = number,
  NANWATCH_FORMATS(NANWATCH_FORMAT)
#undef NANWATCH_FORMAT
};

// How a word becomes a magnitude whose unsigned order is the order of |x|.
enum class Sign : int32_t {
  cleared,   // IEEE-like: drop the top bit
  none,      // unsigned integers, bool, e8m0: the word itself
  twos,      // signed integers: |x| as an unsigned number, so -128 gives 128
  fnuz_nan,  // fnuz: as cleared, but 0x80 is nan (there is no -0) and must stay above every number
};

template <typename W, Sign S, bool Float, bool Inf, bool Zero, int Mantissa, int Bias, W Finite, W Normal>
struct FormatCodes {
  using Word = W;
  static constexpr Sign sign = S;
  static constexpr bool is_float = Float, has_inf = Inf, has_zero = Zero;
  static constexpr int mantissa_bits = Mantissa, bias = Bias;
  static constexpr Word max_finite = Finite, min_normal = Normal;
};

// Codes<F>: Word, sign, has_inf (then inf is max_finite + 1 and nan is above it; otherwise all above is nan),
// max_finite, min_normal (the smallest code that is not subnormal), has_zero.
template <Format F>
struct Codes;

#define NANWATCH_CODES(name, number, scalar_type, ...) \
  template <>                                          \
  struct Codes<Format::name> : FormatCodes<__VA_ARGS__> {};
NANWATCH_FORMATS(NANWATCH_CODES)
#undef NANWATCH_CODES

// One more than the highest number: the length of a table that a format is the index of.
#define NANWATCH_NUMBER(name, number, ...) , number
constexpr int kNumFormats = std::max({0 NANWATCH_FORMATS(NANWATCH_NUMBER)}) + 1;
#undef NANWATCH_NUMBER

// Calls f(FormatTag<F>{}) for the run-time format: the one switch over formats; host only, kernels are
// instantiated per format.
template <Format F>
struct FormatTag {
  static constexpr Format format = F;
};

template <typename Fn>
auto with_format(Format format, Fn&& fn) {
  switch (format) {
#define NANWATCH_CASE(name, ...) \
  case Format::name: return fn(FormatTag<Format::name>{});
    NANWATCH_FORMATS(NANWATCH_CASE)
#undef NANWATCH_CASE
  }
  __builtin_unreachable();
}

// A table, as a switch is a jump that the CPU must guess.
inline size_t word_size(Format format) {
#define NANWATCH_SIZE(name, ...) sizes[int(Format::name)] = sizeof(Codes<Format::name>::Word);
  static constexpr auto table = [] {
    std::array<uint8_t, kNumFormats> sizes{};
    NANWATCH_FORMATS(NANWATCH_SIZE)
    return sizes;
  }();
#undef NANWATCH_SIZE
  return table[size_t(format)];
}

// |x| as an unsigned number with the order of |x|; nan lies above inf, inf above every finite value.
template <Format F>
NANWATCH_HD typename Codes<F>::Word magnitude(typename Codes<F>::Word word) {
  using Word = typename Codes<F>::Word;
  constexpr Word sign_bit = Word(Word(1) << (8 * sizeof(Word) - 1));
  if constexpr (Codes<F>::sign == Sign::cleared) {
    return Word(word & Word(~sign_bit));
  } else if constexpr (Codes<F>::sign == Sign::fnuz_nan) {
    return word == sign_bit ? word : Word(word & Word(~sign_bit));
  } else if constexpr (Codes<F>::sign == Sign::twos) {
    return (word & sign_bit) ? Word(Word(0) - word) : word;
  } else {
    return word;
  }
}

template <Format F>
NANWATCH_HD bool is_negative(typename Codes<F>::Word word) {
  if constexpr (Codes<F>::sign == Sign::none) {
    return false;
  } else {
    return (word >> (8 * sizeof(word) - 1)) != 0;
  }
}

template <Format F>
NANWATCH_HD bool is_finite(typename Codes<F>::Word magnitude) {
  return magnitude <= Codes<F>::max_finite;
}

template <Format F>
NANWATCH_HD bool is_inf(typename Codes<F>::Word magnitude) {
  return Codes<F>::has_inf && magnitude == typename Codes<F>::Word(Codes<F>::max_finite + 1);
}

template <Format F>
NANWATCH_HD bool is_nan(typename Codes<F>::Word magnitude) {
  return !is_finite<F>(magnitude) && !is_inf<F>(magnitude);
}

template <Format F>
NANWATCH_HD bool is_zero(typename Codes<F>::Word magnitude) {
  return Codes<F>::has_zero && magnitude == 0;
}

template <Format F>
NANWATCH_HD bool is_subnormal(typename Codes<F>::Word magnitude) {
  if constexpr (Codes<F>::min_normal == 0) {
    return false;
  } else {
    return magnitude != 0 && magnitude < Codes<F>::min_normal;
  }
}

NANWATCH_HD double double_from_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The magnitude as a double, exactly (64-bit integers are rounded to nearest). Integer arithmetic throughout: a cast
// from float would flush subnormals to zero on a thread that runs with denormals-are-zero.
template <Format F>
NANWATCH_HD double decode(typename Codes<F>::Word magnitude) {
  using C = Codes<F>;
  constexpr uint64_t inf_bits = 0x7ff0000000000000ull, nan_bits = 0x7ff8000000000000ull;
  if constexpr (F == Format::boolean) {
    return magnitude != 0 ? 1.0 : 0.0;
  } else if constexpr (!C::is_float) {
    return double(magnitude);
  } else if constexpr (F == Format::f64) {
    return double_from_bits(magnitude);
  } else {
    if (!is_finite<F>(magnitude)) return double_from_bits(is_inf<F>(magnitude) ? inf_bits : nan_bits);
    const uint64_t mantissa = magnitude & ((uint64_t(1) << C::mantissa_bits) - 1);
    const uint64_t exponent = uint64_t(magnitude) >> C::mantissa_bits;
    if (exponent == 0 && C::min_normal != 0) {
      const double unit = double_from_bits(uint64_t(1023 + 1 - C::bias - C::mantissa_bits) << 52);
      return double(mantissa) * unit;
    }
    return double_from_bits(((exponent + 1023 - C::bias) << 52) | (mantissa << (52 - C::mantissa_bits)));
  }
}

// The largest finite number of a floating-point format; -1 for integers.
inline double largest_finite(Format format) {
  return with_format(format, [](auto tag) {
    constexpr Format F = decltype(tag)::format;
    return Codes<F>::is_float ? decode<F>(Codes<F>::max_finite) : -1.0;
  });
}

}  // namespace nanwatch
