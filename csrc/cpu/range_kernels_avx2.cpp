// The kernels with 32-byte vectors. The whole file is compiled for AVX2 and FMA; only the dispatch may call into it.
#if defined(__x86_64__)
#include <immintrin.h>

// Outside the target region: what these define has external linkage and is shared with baseline code.
#include "cpu/range_cpu.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,popcnt")
#endif
#include "cpu/range_kernels_impl.h"

namespace nanwatch {
namespace {

struct Avx2 : Vectors<32> {
  static V load_halves(const char* a, const char* b) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    return V(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
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
