// The number formats nanwatch reads: for each, the word it is stored in, which bits are the sign, and the codes where
// "finite" ends and "normal" begins. Host and device, no torch.
//
// One fact carries the library: with the sign cleared, the bit pattern of an IEEE float grows with |x|. So the codes
// below are all that a reduction has to know; nothing is converted to a float until the three scalars are reported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define NANWATCH_HD __host__ __device__ __forceinline__
#else
#define NANWATCH_HD inline
#endif

namespace nanwatch {

// Passed through the C ABI as an int: append only.
enum class Format : int32_t {
  f64 = 0,
  f32 = 1,
  f16 = 2,
  bf16 = 3,
  f8_e4m3fn = 4,
  f8_e5m2 = 5,
  f8_e4m3fnuz = 6,
  f8_e5m2fnuz = 7,
  f8_e8m0fnu = 8,
  boolean = 9,
  u8 = 10,
  i8 = 11,
  u16 = 12,
  i16 = 13,
  u32 = 14,
  i32 = 15,
  u64 = 16,
  i64 = 17,
};

// How a word becomes a magnitude whose unsigned order is the order of |x|.
enum class Sign : int32_t {
  cleared,   // IEEE-like: drop the top bit
  none,      // unsigned integers, bool, e8m0: the word itself
  twos,      // signed integers: |x| as an unsigned number, so -128 gives 128
  fnuz_nan,  // fnuz: as cleared, but 0x80 is nan (there is no -0) and must stay above every number
};

namespace detail {

template <typename W, Sign S, int Exponent, int Mantissa, int Bias>
struct FloatCodes {
  using Word = W;
  static constexpr bool is_float = true;
  static constexpr Sign sign = S;
  static constexpr int exponent_bits = Exponent, mantissa_bits = Mantissa, bias = Bias;
  static constexpr bool has_zero = true;
  static constexpr Word min_normal = Word(Word(1) << Mantissa);
};

template <typename W, Sign S>
struct IntegerCodes {
  using Word = W;
  static constexpr bool is_float = false;
  static constexpr Sign sign = S;
  static constexpr bool has_inf = false, has_zero = true;
  static constexpr Word max_finite = Word(~Word(0));
  static constexpr Word min_normal = Word(0);
};

}  // namespace detail

// Codes<F>: Word, sign, has_inf (then inf is max_finite + 1 and nan is above it; otherwise all above is nan),
// max_finite, min_normal (the smallest code that is not subnormal), has_zero.
template <Format F>
struct Codes;

template <>
struct Codes<Format::f64> : detail::FloatCodes<uint64_t, Sign::cleared, 11, 52, 1023> {
  static constexpr bool has_inf = true;
  static constexpr Word max_finite = 0x7fefffffffffffffull;
};
template <>
struct Codes<Format::f32> : detail::FloatCodes<uint32_t, Sign::cleared, 8, 23, 127> {
  static constexpr bool has_inf = true;
  static constexpr Word max_finite = 0x7f7fffffu;
};
template <>
struct Codes<Format::f16> : detail::FloatCodes<uint16_t, Sign::cleared, 5, 10, 15> {
  static constexpr bool has_inf = true;
  static constexpr Word max_finite = 0x7bff;
};
template <>
struct Codes<Format::bf16> : detail::FloatCodes<uint16_t, Sign::cleared, 8, 7, 127> {
  static constexpr bool has_inf = true;
  static constexpr Word max_finite = 0x7f7f;
};
template <>
struct Codes<Format::f8_e4m3fn> : detail::FloatCodes<uint8_t, Sign::cleared, 4, 3, 7> {
  static constexpr bool has_inf = false;
  static constexpr Word max_finite = 0x7e;
};
template <>
struct Codes<Format::f8_e5m2> : detail::FloatCodes<uint8_t, Sign::cleared, 5, 2, 15> {
  static constexpr bool has_inf = true;
  static constexpr Word max_finite = 0x7b;
};
template <>
struct Codes<Format::f8_e4m3fnuz> : detail::FloatCodes<uint8_t, Sign::fnuz_nan, 4, 3, 8> {
  static constexpr bool has_inf = false;
  static constexpr Word max_finite = 0x7f;
};
template <>
struct Codes<Format::f8_e5m2fnuz> : detail::FloatCodes<uint8_t, Sign::fnuz_nan, 5, 2, 16> {
  static constexpr bool has_inf = false;
  static constexpr Word max_finite = 0x7f;
};
template <>
struct Codes<Format::f8_e8m0fnu> : detail::FloatCodes<uint8_t, Sign::none, 8, 0, 127> {
  // A power of two and nothing else: no sign, no zero, and code 0 is 2^-127, not a subnormal.
  static constexpr bool has_inf = false, has_zero = false;
  static constexpr Word max_finite = 0xfe;
  static constexpr Word min_normal = 0;
};
template <>
struct Codes<Format::boolean> : detail::IntegerCodes<uint8_t, Sign::none> {};
template <>
struct Codes<Format::u8> : detail::IntegerCodes<uint8_t, Sign::none> {};
template <>
struct Codes<Format::i8> : detail::IntegerCodes<uint8_t, Sign::twos> {};
template <>
struct Codes<Format::u16> : detail::IntegerCodes<uint16_t, Sign::none> {};
template <>
struct Codes<Format::i16> : detail::IntegerCodes<uint16_t, Sign::twos> {};
template <>
struct Codes<Format::u32> : detail::IntegerCodes<uint32_t, Sign::none> {};
template <>
struct Codes<Format::i32> : detail::IntegerCodes<uint32_t, Sign::twos> {};
template <>
struct Codes<Format::u64> : detail::IntegerCodes<uint64_t, Sign::none> {};
template <>
struct Codes<Format::i64> : detail::IntegerCodes<uint64_t, Sign::twos> {};

// Calls f(FormatTag<F>{}) for the run-time format: the one switch over formats; host only, kernels are
// instantiated per format.
template <Format F>
struct FormatTag {
  static constexpr Format format = F;
};

template <typename Fn>
auto with_format(Format format, Fn&& fn) {
  switch (format) {
    case Format::f64: return fn(FormatTag<Format::f64>{});
    case Format::f32: return fn(FormatTag<Format::f32>{});
    case Format::f16: return fn(FormatTag<Format::f16>{});
    case Format::bf16: return fn(FormatTag<Format::bf16>{});
    case Format::f8_e4m3fn: return fn(FormatTag<Format::f8_e4m3fn>{});
    case Format::f8_e5m2: return fn(FormatTag<Format::f8_e5m2>{});
    case Format::f8_e4m3fnuz: return fn(FormatTag<Format::f8_e4m3fnuz>{});
    case Format::f8_e5m2fnuz: return fn(FormatTag<Format::f8_e5m2fnuz>{});
    case Format::f8_e8m0fnu: return fn(FormatTag<Format::f8_e8m0fnu>{});
    case Format::boolean: return fn(FormatTag<Format::boolean>{});
    case Format::u8: return fn(FormatTag<Format::u8>{});
    case Format::i8: return fn(FormatTag<Format::i8>{});
    case Format::u16: return fn(FormatTag<Format::u16>{});
    case Format::i16: return fn(FormatTag<Format::i16>{});
    case Format::u32: return fn(FormatTag<Format::u32>{});
    case Format::i32: return fn(FormatTag<Format::i32>{});
    case Format::u64: return fn(FormatTag<Format::u64>{});
    case Format::i64: break;
  }
  return fn(FormatTag<Format::i64>{});
}

inline size_t word_size(Format format) {
  return with_format(format, [](auto tag) { return sizeof(typename Codes<decltype(tag)::format>::Word); });
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
