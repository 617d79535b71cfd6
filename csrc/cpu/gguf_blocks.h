// Blocks of GGUF whose 32 numbers are a scale in float16 times a code: https://github.com/ggml-org/ggml (gguf-py).
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/range_cpu.h"

namespace nanwatch {

// Counters of 16 places, which the compiler has as one vector of any instruction set.
typedef uint8_t Counters __attribute__((vector_size(16)));

inline Counters load_codes(const char* p) {
  Counters codes;
  std::memcpy(&codes, p, sizeof codes);
  return codes;
}

inline uint16_t scale_of(const char* block) {
  uint16_t scale;
  std::memcpy(&scale, block, sizeof scale);
  return scale;
}

// Whether the magnitude of a scale is above zero and at most this.
inline bool passes(const char* block, unsigned passed) {
  return unsigned(magnitude<Format::f16>(scale_of(block))) - 1u < passed;
}

struct Q8_0 {
  static constexpr int64_t bytes = 34;
  static constexpr int largest_code = 128;  // its magnitude

  static int code(const char* codes, int i) { return int8_t(codes[i]); }
  // Adds at most two at each place. A comparison that holds is -1.
  static Counters count_zeros(Counters counts, const char* codes) {
    return counts - Counters(load_codes(codes) == 0) - Counters(load_codes(codes + 16) == 0);
  }
  static int64_t pass_pairs(const char**, const char*, unsigned) { return 0; }
};

struct Q4_0 {
  static constexpr int64_t bytes = 18;
  static constexpr int largest_code = 8;

  static int code(const char* codes, int i) {
    const int pair = uint8_t(codes[i % 16]);
    return (i < 16 ? pair & 15 : pair >> 4) - 8;
  }
  static Counters count_zeros(Counters counts, const char* codes) {
    const Counters pairs = load_codes(codes);
    return counts - Counters((pairs & 0x0f) == 0x08) - Counters((pairs & 0xf0) == 0x80);
  }

  // Two blocks at a time, as long as both pass: 1.8 times as fast as one. Returns their zeros.
  static int64_t pass_pairs(const char** p, const char* end, unsigned passed) {
#if defined(__x86_64__)
    if (&current_kernels() != &baseline_kernels()) return pass_pairs_avx2(p, end, passed);
#endif
    return 0;
  }

#if defined(__x86_64__)
  __attribute__((target("avx2"))) static int64_t pass_pairs_avx2(const char** p, const char* end, unsigned passed) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i low = _mm256_set1_epi8(0x0f), high = _mm256_set1_epi8(char(0xf0));
    const __m256i low_zero = _mm256_set1_epi8(0x08), high_zero = _mm256_set1_epi8(char(0x80));
    __m256i total = none;
    const char* at = *p;
    const auto is_pair = [&] { return at + 2 * bytes <= end && passes(at, passed) && passes(at + bytes, passed); };
    while (is_pair()) {
      __m256i counts = none;
      for (const char* const stop = at + 127 * 2 * bytes; at < stop && is_pair(); at += 2 * bytes) {
        const auto* const codes = reinterpret_cast<const __m128i*>(at + 2);
        const auto* const others = reinterpret_cast<const __m128i*>(at + bytes + 2);
        const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128(codes));
        const __m256i pairs = _mm256_inserti128_si256(first, _mm_loadu_si128(others), 1);
        counts = _mm256_sub_epi8(counts, _mm256_cmpeq_epi8(_mm256_and_si256(pairs, low), low_zero));
        counts = _mm256_sub_epi8(counts, _mm256_cmpeq_epi8(_mm256_and_si256(pairs, high), high_zero));
      }
      total = _mm256_add_epi64(total, _mm256_sad_epu8(counts, none));
    }
    *p = at;
    int64_t sums[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), total);
    return sums[0] + sums[1] + sums[2] + sums[3];
  }
#endif
};

// Health of the numbers of blocks. Once a zero was seen, a block can only add zeros or a greater magnitude. Its scale
// tells whether its magnitudes can be greater: those of nearly all blocks cannot, and only their zeros are counted. All
// other blocks are decoded. No number is subnormal in float32: the least is 2^-24.
template <class Code>
struct Blocks {
  static constexpr int64_t elements = 32, bytes = Code::bytes;
  static constexpr Format format = Format::f32;

  // The products are exact: 11 bits of a scale, 8 of a code.
  static void decode(const char* block, float* values) {
    const uint16_t word = scale_of(block), least = magnitude<Format::f16>(word);
    const float scale = float(nanwatch::decode<Format::f16>(least)) * (word == least ? 1.0f : -1.0f);
    for (int i = 0; i < elements; ++i) values[i] = scale * float(Code::code(block + 2, i));
  }

  // The greatest scale whose products with all codes are at most this float32, by its bits.
  static uint16_t scale_within(uint64_t bits) {
    const double most = nanwatch::decode<format>(uint32_t(bits)) / Code::largest_code;
    uint16_t scale = 0;
    for (int bit = 1 << 14; bit > 0; bit /= 2)
      if (nanwatch::decode<Format::f16>(uint16_t(scale + bit)) <= most) scale = uint16_t(scale + bit);
    return scale;
  }

  static void take(const char* p, int64_t n, HealthBits* bits) {
    constexpr int64_t turn = 127 * bytes;  // after which a counter may be full
    const auto health = current_kernels().health[int(format)];
    const char* const end = p + n / elements * bytes;
    while (p < end) {
      const unsigned passed = bits->finite.lo == 0 ? scale_within(bits->finite.hi) : 0;
      while (p < end && passes(p, passed)) {
        bits->num_zero += Code::pass_pairs(&p, end, passed);
        Counters counts{};
        const char* const stop = p + std::min<int64_t>(end - p, turn);
        for (; p < stop && passes(p, passed); p += bytes) counts = Code::count_zeros(counts, p + 2);
        for (int i = 0; i < 16; ++i) bits->num_zero += counts[i];
      }
      if (p == end) return;
      float values[elements];
      decode(p, values);
      health({reinterpret_cast<const char*>(values), elements, 1, 1, 0}, bits);
      p += bytes;
    }
  }

  // One of `n` numbers is not finite.
  static int64_t first_nonfinite(const char* p, int64_t n, const HealthBits&) {
    float values[elements];
    for (int64_t at = 0; at < n; at += elements, p += bytes) {
      decode(p, values);
      for (int i = 0; i < elements; ++i)
        if (!std::isfinite(values[i])) return at + i;
    }
    return n;
  }

  static bool is_dead(const char* row, int64_t width) {
    for (const char* const end = row + width / elements * bytes; row < end; row += bytes) {
      const uint16_t scale = magnitude<Format::f16>(scale_of(row));
      for (int i = 0; i < elements && scale != 0; ++i)
        if (Code::code(row + 2, i) != 0 || !is_finite<Format::f16>(scale)) return false;
    }
    return true;
  }
};

}  // namespace nanwatch
