// The kernels with the compiler's own 16-byte vectors: SSE2 on any x86-64, NEON on any AArch64.
#include "cpu/range_kernels_impl.h"

namespace nanwatch {
namespace {

constexpr int kBytes = 16;

// The words of one width, alone and as vectors.
template <int width>
struct Words;
#define NANWATCH_WORDS(bits)                                              \
  template <>                                                             \
  struct Words<bits / 8> {                                                \
    using Word = uint##bits##_t;                                          \
    typedef uint##bits##_t Unsigned __attribute__((vector_size(kBytes))); \
    typedef int##bits##_t Signed __attribute__((vector_size(kBytes)));    \
  };
NANWATCH_WORDS(8)
NANWATCH_WORDS(16)
NANWATCH_WORDS(32)
NANWATCH_WORDS(64)
#undef NANWATCH_WORDS

struct Baseline {
  static constexpr int bytes = kBytes;
  using V = Words<1>::Unsigned;
  template <int width>
  using U = typename Words<width>::Unsigned;
  template <int width>
  using I = typename Words<width>::Signed;

  static V load(const char* p) {
    V v;
    __builtin_memcpy(&v, p, bytes);
    return v;
  }
  static V load_partial(const char* p, int64_t n, V padding) {
    __builtin_memcpy(&padding, p, size_t(n));
    return padding;
  }
  static void store(void* p, V v) { __builtin_memcpy(p, &v, bytes); }
  template <int width>
  static V fill(typename Words<width>::Word w) {
    return V(U<width>{} + w);
  }
  static V bit_and(V a, V b) { return a & b; }
  static V equal8(V a, V b) { return V(a == b); }
  static V select(V mask, V a, V b) { return (a & mask) | (b & ~mask); }
  template <int width>
  static V min(V a, V b) {
    return select(V(U<width>(a) < U<width>(b)), a, b);
  }
  template <int width>
  static V max(V a, V b) {
    return select(V(U<width>(a) > U<width>(b)), a, b);
  }
  template <int width>
  static V abs(V a) {
    const U<width> negative = U<width>(I<width>(a) < I<width>{});
    return V((U<width>(a) ^ negative) - negative);
  }
  template <int width>
  static V count_equal(V counts, V a, V b) {
    return V(U<width>(counts) - U<width>(U<width>(a) == U<width>(b)));
  }
  using LessCount = V;
  template <int width>
  static V count_less(V counts, V a, V b) {
    return V(U<width>(counts) - U<width>(U<width>(a) < U<width>(b)));
  }

  template <int width>
  static uint64_t least(V v) {
    return fold<width>(v, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
  }
  template <int width>
  static uint64_t greatest(V v) {
    return fold<width>(v, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }
  template <int width>
  static int64_t total(V v) {
    return int64_t(fold<width>(v, [](uint64_t a, uint64_t b) { return a + b; }));
  }
  template <int width, typename Op>
  static uint64_t fold(V v, const Op& op) {
    const U<width> words = U<width>(v);
    uint64_t result = words[0];
    for (int k = 1; k < bytes / width; ++k) result = op(result, words[k]);
    return result;
  }
};

}  // namespace

const KernelTable& baseline_kernels() {
  static constexpr KernelTable table = make_kernels<Baseline>("baseline");
  return table;
}

}  // namespace nanwatch
