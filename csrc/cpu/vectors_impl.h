// Vectors of `n` bytes by the compiler's own operators, which become one instruction each. In an unnamed namespace, for
// the target of the including file, as in range_loop_impl.h.
#pragma once

#include <cstdint>

namespace nanwatch {
namespace {

// The words of `bits` bits, alone and as vectors of `n` bytes.
template <int n, int bits>
struct Words;
#define NANWATCH_WORDS(bits)                                         \
  template <int n>                                                   \
  struct Words<n, bits> {                                            \
    using Word = uint##bits##_t;                                     \
    typedef uint##bits##_t Unsigned __attribute__((vector_size(n))); \
    typedef int##bits##_t Signed __attribute__((vector_size(n)));    \
  };
NANWATCH_WORDS(8)
NANWATCH_WORDS(16)
NANWATCH_WORDS(32)
NANWATCH_WORDS(64)
#undef NANWATCH_WORDS

template <int n>
struct Vectors {
  static constexpr int bytes = n;
  using V = typename Words<n, 8>::Unsigned;
  template <int width>
  using U = typename Words<n, 8 * width>::Unsigned;
  template <int width>
  using I = typename Words<n, 8 * width>::Signed;

  static V load(const char* p) {
    V v;
    __builtin_memcpy(&v, p, bytes);
    return v;
  }
  static V load_partial(const char* p, int64_t count, V padding) {
    __builtin_memcpy(&padding, p, size_t(count));
    return padding;
  }
  template <int width>
  static V fill(typename Words<n, 8 * width>::Word word) {
    return V(U<width>{} + word);
  }
  static V bit_and(V a, V b) { return a & b; }
  static V select(V mask, V a, V b) { return (a & mask) | (b & ~mask); }
  // `a` where the bytes of x and y are equal, else `b`.
  static V if_equal8(V x, V y, V a, V b) { return x == y ? a : b; }
  template <int width>
  static V min(V a, V b) {
    return V(U<width>(a) < U<width>(b) ? U<width>(a) : U<width>(b));
  }
  template <int width>
  static V max(V a, V b) {
    return V(U<width>(a) > U<width>(b) ? U<width>(a) : U<width>(b));
  }
  static V min_signed64(V a, V b) { return V(I<8>(a) < I<8>(b) ? I<8>(a) : I<8>(b)); }
  static V max_signed64(V a, V b) { return V(I<8>(a) > I<8>(b) ? I<8>(a) : I<8>(b)); }
  template <int width>
  static V abs(V a) {
    const U<width> negative = U<width>(I<width>(a) < I<width>{});
    return V((U<width>(a) ^ negative) - negative);
  }
  template <int width>
  static V count_equal(V counts, V a, V b) {
    return V(U<width>(counts) - U<width>(U<width>(a) == U<width>(b)));
  }
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
}  // namespace nanwatch
