// The kernels with 64-byte vectors. The whole file is compiled for AVX-512 F, BW, DQ and VL; only the dispatch may call
// into it.
#if defined(__x86_64__)
#include <immintrin.h>

// Outside the target region: what these define has external linkage and is shared with baseline code.
#include "range_kernels.h"

// GCC 12 reports the undefined pass-through operand of its own AVX-512 intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt")
#endif
#include "range_kernels_impl.h"

namespace nanwatch {
namespace {

struct Avx512 {
  static constexpr int bytes = 64;
  using V = __m512i;

  static V load(const char* p) { return _mm512_loadu_si512(p); }
  static V load_partial(const char* p, int64_t n, V padding) {
    return _mm512_mask_loadu_epi8(padding, (uint64_t(1) << n) - 1, p);  // masked bytes are not touched
  }
  static void store(void* p, V v) { _mm512_storeu_si512(p, v); }

  template <int width>
  static V fill(uint64_t w) {
    if constexpr (width == 1) return _mm512_set1_epi8(char(w));
    if constexpr (width == 2) return _mm512_set1_epi16(short(w));
    if constexpr (width == 4) return _mm512_set1_epi32(int(w));
    if constexpr (width == 8) return _mm512_set1_epi64(int64_t(w));
  }
  static V bit_and(V a, V b) { return _mm512_and_si512(a, b); }
  static V select(V mask, V a, V b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

  template <int width>
  static V min(V a, V b) {
    if constexpr (width == 1) return _mm512_min_epu8(a, b);
    if constexpr (width == 2) return _mm512_min_epu16(a, b);
    if constexpr (width == 4) return _mm512_min_epu32(a, b);
    if constexpr (width == 8) return _mm512_min_epu64(a, b);
  }
  template <int width>
  static V max(V a, V b) {
    if constexpr (width == 1) return _mm512_max_epu8(a, b);
    if constexpr (width == 2) return _mm512_max_epu16(a, b);
    if constexpr (width == 4) return _mm512_max_epu32(a, b);
    if constexpr (width == 8) return _mm512_max_epu64(a, b);
  }
  template <int width>
  static V abs(V a) {
    if constexpr (width == 1) return _mm512_abs_epi8(a);
    if constexpr (width == 2) return _mm512_abs_epi16(a);
    if constexpr (width == 4) return _mm512_abs_epi32(a);
    if constexpr (width == 8) return _mm512_abs_epi64(a);
  }
  template <int width>
  static V select_equal(V a, V b, V then, V otherwise) {
    static_assert(width == 1, "only the 8-bit fnuz formats need this");
    return _mm512_mask_blend_epi8(_mm512_cmpeq_epi8_mask(a, b), otherwise, then);
  }
  template <int width>
  static V count_equal(V counts, V a, V b) {
    const V minus_one = _mm512_set1_epi32(-1);
    if constexpr (width == 1) return _mm512_mask_sub_epi8(counts, _mm512_cmpeq_epi8_mask(a, b), counts, minus_one);
    if constexpr (width == 2) return _mm512_mask_sub_epi16(counts, _mm512_cmpeq_epi16_mask(a, b), counts, minus_one);
    if constexpr (width == 4) return _mm512_mask_sub_epi32(counts, _mm512_cmpeq_epi32_mask(a, b), counts, minus_one);
    if constexpr (width == 8) return _mm512_mask_sub_epi64(counts, _mm512_cmpeq_epi64_mask(a, b), counts, minus_one);
  }
  template <int width>
  static V count_less(V counts, V a, V b) {
    const V minus_one = _mm512_set1_epi32(-1);
    if constexpr (width == 1) return _mm512_mask_sub_epi8(counts, _mm512_cmplt_epu8_mask(a, b), counts, minus_one);
    if constexpr (width == 2) return _mm512_mask_sub_epi16(counts, _mm512_cmplt_epu16_mask(a, b), counts, minus_one);
    if constexpr (width == 4) return _mm512_mask_sub_epi32(counts, _mm512_cmplt_epu32_mask(a, b), counts, minus_one);
    if constexpr (width == 8) return _mm512_mask_sub_epi64(counts, _mm512_cmplt_epu64_mask(a, b), counts, minus_one);
  }
};

}  // namespace

const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = make_kernels<Avx512>("avx512");
  return table;
}

}  // namespace nanwatch
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
