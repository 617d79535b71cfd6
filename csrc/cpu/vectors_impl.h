// Vectors of `n` bytes by the compiler's own operators, which become one instruction each. In an unnamed namespace, for
// the target of the including file, as in range_loop_impl.h.
#pragma once

#include <cstdint>
#include <type_traits>

namespace nanwatch {
namespace {

template <int width>
using Unsigned =
    std::conditional_t<width == 1, uint8_t,
                       std::conditional_t<width == 2, uint16_t, std::conditional_t<width == 4, uint32_t, uint64_t>>>;

template <typename Word, int n>
struct Vector {
  typedef Word type __attribute__((vector_size(n)));
};

template <int n>
struct Vectors {
  static constexpr int bytes = n;
  template <int width>
  using U = typename Vector<Unsigned<width>, n>::type;
  template <int width>
  using I = typename Vector<std::make_signed_t<Unsigned<width>>, n>::type;
  using V = U<1>;
  using Half = Vectors<n / 2>;

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
  static V fill(Unsigned<width> word) {
    return V(U<width>{} + word);
  }
  static V select(V mask, V a, V b) { return (a & mask) | (b & ~mask); }
  // Where no word has its top bit set, they may be compared as signed.
  template <int width, bool as_signed = false>
  static V min(V a, V b) {
    using Words = std::conditional_t<as_signed, I<width>, U<width>>;
    return V(Words(a) < Words(b) ? Words(a) : Words(b));
  }
  template <int width, bool as_signed = false>
  static V max(V a, V b) {
    using Words = std::conditional_t<as_signed, I<width>, U<width>>;
    return V(Words(a) > Words(b) ? Words(a) : Words(b));
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
  template <int width>
  static V count_less(V counts, V a, V b) {
    return V(U<width>(counts) - U<width>(U<width>(a) < U<width>(b)));
  }

  // The least of all words. Reduces the halves of a vector until 16 bytes are left, then neighbours until they have 32
  // bits: 64 words of 8 bits one by one took 50 ns, a third of a whole call.
  template <int width>
  static Unsigned<width> least(V v) {
    if constexpr (bytes > 16) {
      typename Half::V halves[2];
      __builtin_memcpy(halves, &v, bytes);
      return Half::template least<width>(Half::template min<width>(halves[0], halves[1]));
    } else if constexpr (width < 4) {
      return Unsigned<width>(least<2 * width>(min<2 * width>(even<width>(v), odd<width>(v))));
    } else {
      const U<width> words = U<width>(v);
      Unsigned<width> result = words[0];
      for (int k = 1; k < bytes / width; ++k) result = words[k] < result ? words[k] : result;
      return result;
    }
  }
  template <int width>
  static Unsigned<width> greatest(V v) {
    return Unsigned<width>(~least<width>(~v));
  }
  template <int width>
  static int64_t total(V v) {
    if constexpr (width < 8) {
      return total<2 * width>(V(U<2 * width>(even<width>(v)) + U<2 * width>(odd<width>(v))));
    } else {
      const U<8> words = U<8>(v);
      uint64_t sum = 0;
      for (int k = 0; k < bytes / width; ++k) sum += words[k];
      return int64_t(sum);
    }
  }

 private:
  // Every second word, widened to twice its bits.
  template <int width>
  static V even(V v) {
    return V(U<2 * width>(v) << (8 * width) >> (8 * width));
  }
  template <int width>
  static V odd(V v) {
    return V(U<2 * width>(v) >> (8 * width));
  }
};

}  // namespace
}  // namespace nanwatch
