// All the elements of 32-bit words at once: what a CUDA thread keeps while it reads 16 bytes at a time. Host and
// device, so that every formula here is tested on the host over all patterns.
//
// Two paths. sm_90 and later take minima of two 16-bit halves in one instruction and fold three operands (on sm_90 and
// sm_100; sm_120 takes two such instructions): 32 instructions per 64 bytes of fp32, fp16 and bf16, 64 for fp8. Older
// architectures emulate that operation: there masks keep the lanes apart, and each takes a 32-bit minimum: 96 and 192.
#pragma once

#include "numerics/range.h"

// The architecture that the code at hand is for. A test on the host sets it to see both paths.
#ifdef __CUDA_ARCH__
#define NANWATCH_CUDA_ARCH __CUDA_ARCH__
#elif !defined(NANWATCH_CUDA_ARCH)
#define NANWATCH_CUDA_ARCH 0
#endif

#ifdef __CUDA_ARCH__
#define NANWATCH_UNROLL _Pragma("unroll")
#define NANWATCH_NO_UNROLL _Pragma("unroll 1")
#else
#define NANWATCH_UNROLL
#define NANWATCH_NO_UNROLL
#endif

namespace nanwatch {

// PTX has min.u16x2 since the toolkit 12.0.
#if NANWATCH_CUDA_ARCH >= 900 && CUDART_VERSION >= 12000
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// The 16 bytes of one load.
struct alignas(16) Vector {
  uint32_t word[4];
};

// ---- instructions ---------------------------------------------------------------------------------------------------

template <bool pairs>
NANWATCH_HD uint32_t min3(uint32_t a, uint32_t b, uint32_t c) {
  if constexpr (pairs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return __vimin3_u16x2(a, b, c);
#else
    const uint32_t high = min3<false>(a >> 16, b >> 16, c >> 16);
    return high << 16 | min3<false>(a & 0xffff, b & 0xffff, c & 0xffff);
#endif
  } else {
    const uint32_t ab = a < b ? a : b;
    return ab < c ? ab : c;
  }
}

template <bool pairs>
NANWATCH_HD uint32_t max3(uint32_t a, uint32_t b, uint32_t c) {
  if constexpr (pairs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return __vimax3_u16x2(a, b, c);
#else
    const uint32_t high = max3<false>(a >> 16, b >> 16, c >> 16);
    return high << 16 | max3<false>(a & 0xffff, b & 0xffff, c & 0xffff);
#endif
  } else {
    const uint32_t ab = a < b ? b : a;
    return ab < c ? c : ab;
  }
}

// sum + the four bytes of a word: one instruction (IDP.4A) that also spreads over two 16-bit lanes.
NANWATCH_HD uint32_t add_bytes(uint32_t word, uint32_t sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(word, 0x01010101u, sum);
#else
  return sum + (word & 0xff) + (word >> 8 & 0xff) + (word >> 16 & 0xff) + (word >> 24);
#endif
}

// ---- words of lanes -------------------------------------------------------------------------------------------------

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

// The top bit of every lane whose value without the top bit is below `limit`, 1 to the top bit.
template <int bits>
NANWATCH_HD uint32_t below(uint32_t word, uint32_t limit) {
  constexpr uint32_t top = spread<bits>(1u << (bits - 1));
  return ~((word & ~top) + (top - spread<bits>(limit))) & top;
}

// ---- range ----------------------------------------------------------------------------------------------------------

// Range<F> of many words. A word is folded whole for its top lane, which decides the comparison, and again with that
// lane masked away for the next: two lanes a stream with `pairs`, one without.
template <Format F, bool pairs, bool wide = sizeof(typename Codes<F>::Word) == 8>
struct RangeLanes {
  using Word = typename Codes<F>::Word;
  static constexpr int bits = 8 * int(sizeof(Word));
  static constexpr int carrier = pairs && bits < 32 ? 16 : 32;  // bits that one minimum compares
  static constexpr bool halves = carrier == 16;
  static constexpr int streams = carrier / bits;
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
        const int shift = 16 * half + carrier - bits * (s + 1);
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
      const uint32_t mask = halves ? (0xffffu >> (bits * s)) * 0x00010001u : ~0u >> (bits * s);
      lo[s] = min3<halves>(lo[s], a & mask, b & mask);
      hi[s] = max3<halves>(hi[s], a & mask, b & mask);
    }
  }
};

template <Format F, bool pairs>
struct RangeLanes<F, pairs, true> {
  Range<F> all;

  NANWATCH_HD void take(const Vector& vector) {
    all.update(uint64_t(vector.word[1]) << 32 | vector.word[0]);
    all.update(uint64_t(vector.word[3]) << 32 | vector.word[2]);
  }
  NANWATCH_HD void take_one(uint64_t word) { all.update(word); }
  NANWATCH_HD Range<F> range() const { return all; }
};

// ---- health ---------------------------------------------------------------------------------------------------------

// The range, and how many elements are zero and how many lie below the smallest normal (zeros too). Right while all
// elements are finite: a chunk whose range says otherwise is read again, one element at a time.
template <Format F, bool pairs>
struct HealthLanes {
  using Word = typename Codes<F>::Word;
  static constexpr int bits = 8 * int(sizeof(Word));
  static constexpr bool has_sign_bit = Codes<F>::sign == Sign::cleared || Codes<F>::sign == Sign::fnuz_nan;
  // A flag is the top bit of a lane, and its byte is added: the count times 128. 2^25 elements fit, a thread reads at
  // most 2^18.
  static constexpr int scale = bits <= 16 ? 7 : 0;
  RangeLanes<F, pairs> ends;
  Word min_normal;
  uint32_t zeros = 0, smalls = 0;

  // `least` is Codes::min_normal of the very format: F stands for all formats that share its bits.
  NANWATCH_HD explicit HealthLanes(uint64_t least) : min_normal(Word(least)) {}

  NANWATCH_HD void take(const Vector& vector) {
    ends.take(vector);
    NANWATCH_UNROLL
    for (int i = 0; i < 4; i += bits == 64 ? 2 : 1) {
      if constexpr (bits == 64) {
        count(uint64_t(vector.word[i + 1]) << 32 | vector.word[i]);
      } else if constexpr (bits == 32) {
        count(vector.word[i]);
      } else {
        const uint32_t word = vector.word[i];
        uint32_t zero = below<bits>(word, 1);
        if constexpr (has_sign_bit) {
          smalls = add_bytes(below<bits>(word, min_normal), smalls);
        } else {
          zero &= ~word;
        }
        zeros = add_bytes(zero, zeros);
      }
    }
  }

  NANWATCH_HD void take_one(Word word) {
    ends.take_one(word);
    count(word);
  }

  NANWATCH_HD uint32_t num_zero() const { return zeros >> scale; }
  NANWATCH_HD uint32_t num_small() const { return smalls >> scale; }

 private:
  NANWATCH_HD void count(Word word) {
    const Word m = magnitude<F>(word);
    zeros += uint32_t(m == 0) << scale;
    if constexpr (has_sign_bit) smalls += uint32_t(m < min_normal) << scale;
  }
};

}  // namespace nanwatch
