// The kernels with 32-byte vectors. The whole file is compiled for AVX2 and FMA; only the dispatch may call into it.
#if defined(__x86_64__)
#include <immintrin.h>

// Outside the target region: what these define has external linkage and is shared with baseline code.
#include "cpu/range_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,popcnt")
#endif
#include "cpu/range_kernels_fold.h"
#include "cpu/range_kernels_impl.h"

namespace nanwatch {
namespace {

struct Avx2 {
  static constexpr int bytes = 32;
  using V = __m256i;

  static V load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const V*>(p)); }
  static V load_partial(const char* p, int64_t n, V padding) {
    alignas(32) char buffer[bytes];
    store(buffer, padding);
    __builtin_memcpy(buffer, p, size_t(n));
    return load(buffer);
  }
  static V load_halves(const char* a, const char* b) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  static void store(void* p, V v) { _mm256_storeu_si256(reinterpret_cast<V*>(p), v); }

  template <int width>
  static V fill(uint64_t w) {
    if constexpr (width == 1) return _mm256_set1_epi8(char(w));
    if constexpr (width == 2) return _mm256_set1_epi16(short(w));
    if constexpr (width == 4) return _mm256_set1_epi32(int(w));
    if constexpr (width == 8) return _mm256_set1_epi64x(int64_t(w));
  }
  static V bit_and(V a, V b) { return _mm256_and_si256(a, b); }
  static V equal8(V a, V b) { return _mm256_cmpeq_epi8(a, b); }
  static V select(V mask, V a, V b) { return _mm256_blendv_epi8(b, a, mask); }

  // There is no unsigned 64-bit comparison: flip the top bits and compare as signed.
  static V less64(V a, V b) {
    const V top = _mm256_set1_epi64x(INT64_MIN);
    return _mm256_cmpgt_epi64(_mm256_xor_si256(b, top), _mm256_xor_si256(a, top));
  }
  static V min_signed64(V a, V b) { return select(_mm256_cmpgt_epi64(b, a), a, b); }
  static V max_signed64(V a, V b) { return select(_mm256_cmpgt_epi64(a, b), a, b); }
  template <int width>
  static V min(V a, V b) {
    if constexpr (width == 1) return _mm256_min_epu8(a, b);
    if constexpr (width == 2) return _mm256_min_epu16(a, b);
    if constexpr (width == 4) return _mm256_min_epu32(a, b);
    if constexpr (width == 8) return select(less64(a, b), a, b);
  }
  template <int width>
  static V max(V a, V b) {
    if constexpr (width == 1) return _mm256_max_epu8(a, b);
    if constexpr (width == 2) return _mm256_max_epu16(a, b);
    if constexpr (width == 4) return _mm256_max_epu32(a, b);
    if constexpr (width == 8) return select(less64(b, a), a, b);
  }
  template <int width>
  static V abs(V a) {
    if constexpr (width == 1) return _mm256_abs_epi8(a);
    if constexpr (width == 2) return _mm256_abs_epi16(a);
    if constexpr (width == 4) return _mm256_abs_epi32(a);
    if constexpr (width == 8) {
      const V negative = _mm256_cmpgt_epi64(_mm256_setzero_si256(), a);
      return _mm256_sub_epi64(_mm256_xor_si256(a, negative), negative);
    }
  }
  template <int width>
  static V equal(V a, V b) {
    if constexpr (width == 1) return _mm256_cmpeq_epi8(a, b);
    if constexpr (width == 2) return _mm256_cmpeq_epi16(a, b);
    if constexpr (width == 4) return _mm256_cmpeq_epi32(a, b);
    if constexpr (width == 8) return _mm256_cmpeq_epi64(a, b);
  }
  // Only for magnitudes below the top bit (b is the smallest normal number), so a signed comparison serves.
  template <int width>
  static V less(V a, V b) {
    if constexpr (width == 1) return _mm256_andnot_si256(equal<1>(_mm256_max_epu8(a, b), a), _mm256_set1_epi8(-1));
    if constexpr (width == 2) return _mm256_cmpgt_epi16(b, a);
    if constexpr (width == 4) return _mm256_cmpgt_epi32(b, a);
    if constexpr (width == 8) return _mm256_cmpgt_epi64(b, a);
  }
  template <int width>
  static V subtract(V a, V b) {
    if constexpr (width == 1) return _mm256_sub_epi8(a, b);
    if constexpr (width == 2) return _mm256_sub_epi16(a, b);
    if constexpr (width == 4) return _mm256_sub_epi32(a, b);
    if constexpr (width == 8) return _mm256_sub_epi64(a, b);
  }
  template <int width>
  static V count_equal(V counts, V a, V b) {
    return subtract<width>(counts, equal<width>(a, b));
  }
  using LessCount = V;
  template <int width>
  static V count_less(V counts, V a, V b) {
    return subtract<width>(counts, less<width>(a, b));
  }

  static __m128i half(V v, int which) {
    return which == 0 ? _mm256_castsi256_si128(v) : _mm256_extracti128_si256(v, 1);
  }
  template <int width>
  static uint64_t least(V v) {
    if constexpr (width == 8) return min64(least64(half(v, 0)), least64(half(v, 1)));
    if constexpr (width != 8) return least128<width>(min128<width>(half(v, 0), half(v, 1)));
  }
  template <int width>
  static uint64_t greatest(V v) {
    return fits<width>(~least<width>(_mm256_xor_si256(v, _mm256_set1_epi32(-1))));
  }
  template <int width>
  static int64_t total(V v) {
    return total128<width>(half(v, 0)) + total128<width>(half(v, 1));
  }
};

}  // namespace

const KernelTable& avx2_kernels() {
  static constexpr KernelTable table = make_kernels<Avx2>("avx2");
  return table;
}

}  // namespace nanwatch
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
