// All the elements of 32-bit words at once: what a CUDA thread keeps while it reads 16 bytes at a time. Host and
// device, so that every formula here is tested on the host over all patterns.
//
// For words w of a tensor the range is lo = min |w|, hi = max |w|, as unsigned integers. Elements of 8 and 16 bits are
// compared two at a time, as the 16-bit halves of a word: 32 instructions for 64 bytes of fp32, fp16 and bf16, 64 for
// fp8, a twelfth of what an H200 can issue while it reads them. Before sm_90 CUDA emulates the halves.
#pragma once

#include "numerics/range.h"

#ifdef __CUDA_ARCH__
#define NANWATCH_UNROLL _Pragma("unroll")
#else
#define NANWATCH_UNROLL
#endif

namespace nanwatch {

// The 16 bytes of one load.
struct alignas(16) Vector {
  uint32_t word[4];
};

NANWATCH_HD uint32_t min3(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t ab = a < b ? a : b;
  return ab < c ? ab : c;
}

NANWATCH_HD uint32_t max3(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t ab = a < b ? b : a;
  return ab < c ? c : ab;
}

// The same for two halves of 16 bits each.
NANWATCH_HD uint32_t min3_halves(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  return __vimin3_u16x2(a, b, c);
#else
  return min3(a >> 16, b >> 16, c >> 16) << 16 | min3(a & 0xffff, b & 0xffff, c & 0xffff);
#endif
}

NANWATCH_HD uint32_t max3_halves(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  return __vimax3_u16x2(a, b, c);
#else
  return max3(a >> 16, b >> 16, c >> 16) << 16 | max3(a & 0xffff, b & 0xffff, c & 0xffff);
#endif
}

// A lane's value in every lane of a word; lanes of 8, 16 or 32 bits.
template <int bits>
NANWATCH_HD constexpr uint32_t spread(uint32_t lane) {
  return bits == 8 ? lane * 0x01010101u : bits == 16 ? lane * 0x00010001u : lane;
}

// magnitude<F> in every lane of a word. No carry passes from a lane to the next in any of these.
template <Format F>
NANWATCH_HD uint32_t magnitudes(uint32_t word) {
  constexpr int bits = 8 * int(sizeof(typename Codes<F>::Word));
  constexpr uint32_t top = spread<bits>(1u << (bits - 1));
  if constexpr (Codes<F>::sign == Sign::cleared) {
    return word & ~top;
  } else if constexpr (Codes<F>::sign == Sign::fnuz_nan) {
    // The addition reaches the top bit unless the lane is 0 or nan: where it does, the sign is cleared.
    return word & ~(((word & ~top) + ~top) & top);
  } else if constexpr (Codes<F>::sign == Sign::twos && bits == 32) {
    return magnitude<F>(word);
  } else if constexpr (Codes<F>::sign == Sign::twos) {
    // A negative lane is inverted and incremented; inverted it is below the top bit, so the 1 stays inside.
    const uint32_t negative = word >> (bits - 1) & spread<bits>(1);
    return (word ^ negative * ((1u << bits) - 1)) + negative;
  } else {
    return word;
  }
}

// Range<F> of many words. Elements of 8 bits are folded twice: the word whole, whose upper byte decides each half, and
// again with that byte masked away for the lower one.
template <Format F, bool wide = sizeof(typename Codes<F>::Word) == 8>
struct RangeLanes {
  using Word = typename Codes<F>::Word;
  static constexpr int bits = 8 * int(sizeof(Word));
  static constexpr bool halves = bits < 32;
  static constexpr int streams = bits == 8 ? 2 : 1;
  uint32_t lo[streams], hi[streams];

  NANWATCH_HD RangeLanes() {
    for (int s = 0; s < streams; ++s) {
      lo[s] = ~0u;
      hi[s] = 0;
    }
  }

  NANWATCH_HD void take(const Vector& vector) {
    take_two(vector.word[0], vector.word[1]);
    take_two(vector.word[2], vector.word[3]);
  }

  NANWATCH_HD void take_one(Word word) { take_two(spread<bits>(word), spread<bits>(word)); }

  NANWATCH_HD Range<F> range() const {
    Range<F> range;
    for (int s = 0; s < streams; ++s) {
      for (int half = 0; half < (halves ? 2 : 1); ++half) {
        const int shift = halves ? 16 * half + 16 - bits * (s + 1) : 0;
        range.merge({Word(lo[s] >> shift), Word(hi[s] >> shift)});
      }
    }
    return range;
  }

 private:
  NANWATCH_HD void take_two(uint32_t a, uint32_t b) {
    a = magnitudes<F>(a);
    b = magnitudes<F>(b);
    NANWATCH_UNROLL
    for (int s = 0; s < streams; ++s) {
      const uint32_t mask = halves ? (0xffffu >> (bits * s)) * 0x00010001u : ~0u;
      lo[s] = halves ? min3_halves(lo[s], a & mask, b & mask) : min3(lo[s], a, b);
      hi[s] = halves ? max3_halves(hi[s], a & mask, b & mask) : max3(hi[s], a, b);
    }
  }
};

template <Format F>
struct RangeLanes<F, true> {
  Range<F> all;

  NANWATCH_HD void take(const Vector& vector) {
    all.update(uint64_t(vector.word[1]) << 32 | vector.word[0]);
    all.update(uint64_t(vector.word[3]) << 32 | vector.word[2]);
  }
  NANWATCH_HD void take_one(uint64_t word) { all.update(word); }
  NANWATCH_HD Range<F> range() const { return all; }
};

}  // namespace nanwatch
