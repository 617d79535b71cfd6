// The kernels with 64-byte vectors. The whole file is compiled for AVX-512 F, BW, DQ and VL; only the dispatch may call
// into it.
#if defined(__x86_64__)
#include <immintrin.h>

// Outside the target region: what these define has external linkage and is shared with baseline code.
#include "cpu/range_cpu.h"

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
#include "cpu/range_kernels_impl.h"

namespace nanwatch {
namespace {

struct Avx512 : Vectors<64> {
  static V load_partial(const char* p, int64_t count, V padding) {
    // Masked bytes are not touched.
    return V(_mm512_mask_loadu_epi8(__m512i(padding), (uint64_t(1) << count) - 1, p));
  }
  static V load_halves(const char* a, const char* b) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    return V(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
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
