// The loops over blocks with 32-byte vectors; compiled and called as range_kernels_avx2.cpp is.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "cpu/block_fit.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "cpu/block_fit_loop_impl.h"

namespace nanwatch {
namespace {

struct BlocksAvx2 {
  using F = __m256;
  using I = __m256i;
  using D = __m256d;
  using Count = __m256i;
  static constexpr int lanes = 8;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  template <FloatWord word>
  static F load_as(const char* p, int64_t at) {
    if constexpr (word == FloatWord::float32) return load(reinterpret_cast<const float*>(p) + at);
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * at));
    if constexpr (word == FloatWord::float16) return _mm256_cvtph_ps(half);
    return floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static I fill(uint32_t bits) { return _mm256_set1_epi32(int(bits)); }
  static D zero() { return _mm256_setzero_pd(); }
  static I bits(F x) { return _mm256_castps_si256(x); }
  static F floats(I x) { return _mm256_castsi256_ps(x); }
  static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  static I max(I a, I b) { return _mm256_max_epi32(a, b); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static D add(D a, D b) { return _mm256_add_pd(a, b); }
  static F subtract(F a, F b) { return _mm256_sub_ps(a, b); }
  static F divide(F a, F b) { return _mm256_div_ps(a, b); }
  // Rounded by itself: else the compiler may make one operation of it and of the next sum.
  static F multiply(F a, F b) {
    F product = _mm256_mul_ps(a, b);
    asm("" : "+x"(product));
    return product;
  }
  static F plus_product(F a, F b, F c) { return _mm256_fmadd_ps(b, c, a); }
  static F minus_product(F a, F b, F c) { return _mm256_fnmadd_ps(b, c, a); }
  static void count_equal(Count* count, F a, F b) {
    *count = _mm256_sub_epi32(*count, bits(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  }
  static void count_unequal(Count* count, F a, F b) {
    *count = _mm256_sub_epi32(*count, bits(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)));
  }
  static D widened(F x) {
    return _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  static void add_squares(F x, D* low, D* high) {
    const D a = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    *low = _mm256_fmadd_pd(a, a, *low);
    *high = _mm256_fmadd_pd(b, b, *high);
  }
  static int64_t total(Count count) {
    uint32_t words[lanes];
    std::memcpy(words, &count, sizeof(words));
    int64_t sum = 0;
    for (const uint32_t word : words) sum += word;
    return sum;
  }
  static double total(D x) {
    double numbers[4];
    std::memcpy(numbers, &x, sizeof(numbers));
    return (numbers[0] + numbers[1]) + (numbers[2] + numbers[3]);
  }
  static void totals(const D* sums, double* out) {
    const D low = _mm256_hadd_pd(sums[0], sums[1]), high = _mm256_hadd_pd(sums[2], sums[3]);
    const D swapped = _mm256_permute2f128_pd(low, high, 0x21);
    _mm256_storeu_pd(out, _mm256_add_pd(swapped, _mm256_blend_pd(low, high, 0xc)));
  }
  static void totals(const F* sums, double* out) {
    const F pairs = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    _mm256_storeu_pd(out, widened(pairs));
  }
  static void greatest(const I* words, uint32_t* out) {
    const I low = max(_mm256_unpacklo_epi32(words[0], words[1]), _mm256_unpackhi_epi32(words[0], words[1]));
    const I high = max(_mm256_unpacklo_epi32(words[2], words[3]), _mm256_unpackhi_epi32(words[2], words[3]));
    const I both = max(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
  }
};

}  // namespace

const BlockKernels& avx2_block_kernels() {
  static constexpr BlockKernels kernels = make_block_kernels<BlocksAvx2>();
  return kernels;
}

}  // namespace nanwatch
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
