// The number formats as lists of macros: X(...) is called for each. Written by csrc/make_headers.py from
// python/nanwatch/numerics/formats.py, which says what the columns mean; `make lint` checks that it is not stale.
// clang-format off
#pragma once

// enumerator, number, PyTorch's ScalarType, Word, sign, is_float, has_inf, has_zero, mantissa_bits, bias, max_finite,
// min_normal
#define NANWATCH_FORMATS(X) \
  X(f64, 0, Double, uint64_t, Sign::cleared, true, true, true, 52, 1023, 0x7fefffffffffffffu, 0x0010000000000000u) \
  X(f32, 1, Float, uint32_t, Sign::cleared, true, true, true, 23, 127, 0x7f7fffffu, 0x00800000u) \
  X(f16, 2, Half, uint16_t, Sign::cleared, true, true, true, 10, 15, 0x7bffu, 0x0400u) \
  X(bf16, 3, BFloat16, uint16_t, Sign::cleared, true, true, true, 7, 127, 0x7f7fu, 0x0080u) \
  X(f8_e4m3fn, 4, Float8_e4m3fn, uint8_t, Sign::cleared, true, false, true, 3, 7, 0x7eu, 0x08u) \
  X(f8_e5m2, 5, Float8_e5m2, uint8_t, Sign::cleared, true, true, true, 2, 15, 0x7bu, 0x04u) \
  X(f8_e4m3fnuz, 6, Float8_e4m3fnuz, uint8_t, Sign::fnuz_nan, true, false, true, 3, 8, 0x7fu, 0x08u) \
  X(f8_e5m2fnuz, 7, Float8_e5m2fnuz, uint8_t, Sign::fnuz_nan, true, false, true, 2, 16, 0x7fu, 0x04u) \
  X(f8_e8m0fnu, 8, Float8_e8m0fnu, uint8_t, Sign::none, true, false, false, 0, 127, 0xfeu, 0x00u) \
  X(boolean, 9, Bool, uint8_t, Sign::none, false, false, true, 0, 0, 0xffu, 0x00u) \
  X(u8, 10, Byte, uint8_t, Sign::none, false, false, true, 0, 0, 0xffu, 0x00u) \
  X(i8, 11, Char, uint8_t, Sign::twos, false, false, true, 0, 0, 0xffu, 0x00u) \
  X(u16, 12, UInt16, uint16_t, Sign::none, false, false, true, 0, 0, 0xffffu, 0x0000u) \
  X(i16, 13, Short, uint16_t, Sign::twos, false, false, true, 0, 0, 0xffffu, 0x0000u) \
  X(u32, 14, UInt32, uint32_t, Sign::none, false, false, true, 0, 0, 0xffffffffu, 0x00000000u) \
  X(i32, 15, Int, uint32_t, Sign::twos, false, false, true, 0, 0, 0xffffffffu, 0x00000000u) \
  X(u64, 16, UInt64, uint64_t, Sign::none, false, false, true, 0, 0, 0xffffffffffffffffu, 0x0000000000000000u) \
  X(i64, 17, Long, uint64_t, Sign::twos, false, false, true, 0, 0, 0xffffffffffffffffu, 0x0000000000000000u)
