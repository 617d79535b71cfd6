// The kernels with 64-byte vectors. The whole file is compiled for AVX-512 F, BW, DQ and VL; only the dispatch may call
// into it.
#if defined(__x86_64__)
#include <immintrin.h>

// Outside the target region: what these define has external linkage and is shared with baseline code.
#include "cpu/range_kernels.h"

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
#include "cpu/range_kernels_fold.h"
#include "cpu/range_kernels_impl.h"

namespace nanwatch {
namespace {

struct Avx512 {
  static constexpr int bytes = 64;
  using V = __m512i;

  static V load(const char* p) { return _mm512_loadu_si512(p); }
  static V load_partial(const char* p, int64_t n, V padding) {
    return _mm512_mask_loadu_epi8(padding, (uint64_t(1) << n) - 1, p);  // masked bytes are not touched
  }
  static V load_halves(const char* a, const char* b) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
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
  static V equal8(V a, V b) { return _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(a, b)); }
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
  static V count_equal(V counts, V a, V b) {
    const V minus_one = _mm512_set1_epi32(-1);
    if constexpr (width == 1) return _mm512_mask_sub_epi8(counts, _mm512_cmpeq_epi8_mask(a, b), counts, minus_one);
    if constexpr (width == 2) return _mm512_mask_sub_epi16(counts, _mm512_cmpeq_epi16_mask(a, b), counts, minus_one);
    if constexpr (width == 4) return _mm512_mask_sub_epi32(counts, _mm512_cmpeq_epi32_mask(a, b), counts, minus_one);
    if constexpr (width == 8) return _mm512_mask_sub_epi64(counts, _mm512_cmpeq_epi64_mask(a, b), counts, minus_one);
  }
  template <int width>
  static int64_t total(V v) {
    if constexpr (width == 1) return _mm512_reduce_add_epi64(_mm512_sad_epu8(v, _mm512_setzero_si512()));
    if constexpr (width == 2) return _mm512_reduce_add_epi32(_mm512_madd_epi16(v, _mm512_set1_epi16(1)));
    if constexpr (width == 4) return _mm512_reduce_add_epi32(v);
    if constexpr (width == 8) return _mm512_reduce_add_epi64(v);
  }
  // Not in lanes as well: counting the bits of one mask leaves the vector units to the rest. With two masks, moving
  // them out of their registers is the bottleneck.
  using LessCount = int64_t;
  template <int width>
  static LessCount count_less(LessCount count, V a, V b) {
    if constexpr (width == 1) return count + _mm_popcnt_u64(_mm512_cmplt_epu8_mask(a, b));
    if constexpr (width == 2) return count + _mm_popcnt_u32(_mm512_cmplt_epu16_mask(a, b));
    if constexpr (width == 4) return count + _mm_popcnt_u32(_mm512_cmplt_epu32_mask(a, b));
    if constexpr (width == 8) return count + _mm_popcnt_u32(_mm512_cmplt_epu64_mask(a, b));
  }
  template <int width>
  static int64_t total(LessCount count) {
    return count;
  }

  template <int width>
  static uint64_t least(V v) {
    if constexpr (width == 8) return _mm512_reduce_min_epu64(v);
    const __m256i low = _mm512_castsi512_si256(v), high = _mm512_extracti64x4_epi64(v, 1);
    if constexpr (width == 1) return least256<1>(_mm256_min_epu8(low, high));
    if constexpr (width == 2) return least256<2>(_mm256_min_epu16(low, high));
    if constexpr (width == 4) return least256<4>(_mm256_min_epu32(low, high));
  }
  template <int width>
  static uint64_t least256(__m256i v) {
    return least128<width>(min128<width>(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
  template <int width>
  static uint64_t greatest(V v) {
    return fits<width>(~least<width>(_mm512_xor_si512(v, _mm512_set1_epi32(-1))));
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
