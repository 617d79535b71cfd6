// Reduction of the lanes of an x86 vector to one number, without a loop over them: 64 lanes of 8 bits one by one took
// 50 ns, a third of a whole call. In an unnamed namespace, for the target of the including file, as in
// range_kernels_impl.h.
#pragma once

#include <immintrin.h>

#include "cpu/vectors_impl.h"

namespace nanwatch {
namespace {

// Vectors of n bytes. S::part<i>(v) gives 16 bytes of one.
template <class S, int n>
struct Folded : Vectors<n> {
  using V = typename Vectors<n>::V;
  using Parts = std::make_index_sequence<n / 16>;

  template <int width>
  static uint64_t least(V v) {
    return least_of<width>(v, Parts());
  }
  template <int width>
  static uint64_t greatest(V v) {
    const uint64_t complement = ~least<width>(~v);
    return width == 8 ? complement : complement & ((uint64_t(1) << (8 * (width & 7))) - 1);
  }
  template <int width>
  static int64_t total(V v) {
    return total_of<width>(v, Parts());
  }

 private:
  template <int width, size_t... i>
  static uint64_t least_of(V v, std::index_sequence<i...>) {
    if constexpr (width == 8) {
      uint64_t least = ~uint64_t(0);
      ((least = min64(least, least64(S::template part<int(i)>(v)))), ...);
      return least;
    } else {
      __m128i m = S::template part<0>(v);
      ((m = min128<width>(m, S::template part<int(i)>(v))), ...);
      return least128<width>(m);
    }
  }
  template <int width, size_t... i>
  static int64_t total_of(V v, std::index_sequence<i...>) {
    return (total128<width>(S::template part<int(i)>(v)) + ...);
  }

  static uint64_t min64(uint64_t a, uint64_t b) { return a < b ? a : b; }
  static uint64_t least64(__m128i v) {
    return min64(uint64_t(_mm_cvtsi128_si64(v)), uint64_t(_mm_extract_epi64(v, 1)));
  }

  template <int width>
  static __m128i min128(__m128i a, __m128i b) {
    if constexpr (width == 1) return _mm_min_epu8(a, b);
    if constexpr (width == 2) return _mm_min_epu16(a, b);
    if constexpr (width == 4) return _mm_min_epu32(a, b);
  }

  template <int width>
  static uint64_t least128(__m128i v) {
    if constexpr (width == 4) {
      v = _mm_min_epu32(v, _mm_srli_si128(v, 8));
      return uint32_t(_mm_cvtsi128_si32(_mm_min_epu32(v, _mm_srli_si128(v, 4))));
    } else {
      if constexpr (width == 1) v = _mm_min_epu8(v, _mm_srli_epi16(v, 8));  // leaves a zero in each upper byte
      return uint16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(v)));
    }
  }

  // The sum of lanes that hold at most 32767 in 16 bits and 2^31 - 1 in all in 32.
  template <int width>
  static int64_t total128(__m128i v) {
    if constexpr (width == 8) return _mm_cvtsi128_si64(v) + _mm_extract_epi64(v, 1);
    if constexpr (width == 1) return total128<8>(_mm_sad_epu8(v, _mm_setzero_si128()));
    if constexpr (width == 2) v = _mm_madd_epi16(v, _mm_set1_epi16(1));
    v = _mm_add_epi32(v, _mm_srli_si128(v, 8));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_srli_si128(v, 4)));
  }
};

}  // namespace
}  // namespace nanwatch
