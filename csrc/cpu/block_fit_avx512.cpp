// The loops over blocks with 64-byte vectors; compiled and called as range_kernels_avx512.cpp is.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "cpu/block_fit.h"

// GCC 12 reports its own intrinsics, see range_kernels_avx512.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,popcnt")
#endif
#include "cpu/block_fit_loop_impl.h"

namespace nanwatch {
namespace {

struct BlocksAvx512 {
  using F = __m512;
  using I = __m512i;
  using D = __m512d;
  using Count = int64_t;
  static constexpr int lanes = 16;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  template <FloatWord word>
  static F load_as(const char* p, int64_t at) {
    if constexpr (word == FloatWord::float32) return load(reinterpret_cast<const float*>(p) + at);
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * at));
    if constexpr (word == FloatWord::float16) return _mm512_cvtph_ps(half);
    return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static I fill(uint32_t bits) { return _mm512_set1_epi32(int(bits)); }
  static D zero() { return _mm512_setzero_pd(); }
  static I bits(F x) { return _mm512_castps_si512(x); }
  static F floats(I x) { return _mm512_castsi512_ps(x); }
  static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  static I max(I a, I b) { return _mm512_max_epi32(a, b); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static D add(D a, D b) { return _mm512_add_pd(a, b); }
  static F subtract(F a, F b) { return _mm512_sub_ps(a, b); }
  static F divide(F a, F b) { return _mm512_div_ps(a, b); }
  static F multiply(F a, F b) {
    F product = _mm512_mul_ps(a, b);
    asm("" : "+v"(product));  // see BlocksAvx2
    return product;
  }
  static F plus_product(F a, F b, F c) { return _mm512_fmadd_ps(b, c, a); }
  static F minus_product(F a, F b, F c) { return _mm512_fnmadd_ps(b, c, a); }
  static void count_equal(Count* count, F a, F b) {
    *count += __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ));
  }
  static void count_unequal(Count* count, F a, F b) {
    *count += __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ));
  }
  static D widened(F x) {
    return _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  static void add_squares(F x, D* low, D* high) {
    const D a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    *low = _mm512_fmadd_pd(a, a, *low);
    *high = _mm512_fmadd_pd(b, b, *high);
  }
  static int64_t total(Count count) { return count; }
  static double total(D x) { return _mm512_reduce_add_pd(x); }
  static void totals(const D* sums, double* out) {
    for (int k = 0; k < 4; ++k) out[k] = total(sums[k]);
  }
  static void totals(const F* sums, double* out) {
    for (int k = 0; k < 4; ++k) out[k] = double(_mm512_reduce_add_ps(sums[k]));
  }
  static void greatest(const I* words, uint32_t* out) {
    for (int k = 0; k < 4; ++k) out[k] = uint32_t(_mm512_reduce_max_epi32(words[k]));
  }
};

}  // namespace

const BlockKernels& avx512_block_kernels() {
  static constexpr BlockKernels kernels = make_block_kernels<BlocksAvx512>();
  return kernels;
}

}  // namespace nanwatch
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
